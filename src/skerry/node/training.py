"""The training half of a learner: what happens in the trainer's own thread, at step boundaries.

    while training.must_stand: training.stand()
    while training.is_running: step; training.boundary(1, ...); while training.must_stand: training.stand()
    training.close()
    while not training.left: training.stand()

A boundary reads the mailbox, has changes made and snapshots taken, and writes the mailbox. It waits for nobody, holds
no lock and decides nothing: what is to be done, and what it means, is for the node (`node/learner.py`). Changes come
before snapshots, so a snapshot is relative to the newest version that the live parameters stand on. But one that was
ordered before a change that overwrites its fragment comes before that change: behind it there would be nothing to take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from skerry import config as configs
from skerry.algo.fragments import Fragment, Layout, decode_fragments
from skerry.core.events import Leave
from skerry.node.algebra import Array
from skerry.node.cells import Cell, Cells, Lay
from skerry.node.mailbox import (
    NO_CELL,
    Begun,
    Change,
    Closed,
    Freed,
    Gave,
    Left,
    Mailbox,
    News,
    Passed,
    Record,
    Took,
    Waive,
    Want,
)

BUFFERS_EVERY = 1000  # steps; to read them waits for the device, for about a step


class Carrier(Protocol):
    """Carries fragments between the live parameters and cells; each marks its cell when it needs it no more.

    Nothing here waits for a device. What is read is θ as it stands; what is added or written is there before the next
    step is. `prepare` comes before the others at a boundary, and raises where they must not be done.
    """

    def prepare(self, fragments: Sequence[Fragment]) -> None: ...
    def read(self, fragment: Fragment, cell: Cell, mark: int) -> None: ...
    def add(self, fragment: Fragment, cell: Cell, mark: int) -> None: ...
    def write(self, fragment: Fragment, cell: Cell, mark: int) -> None: ...
    def blend(self, fragment: Fragment, cell: Cell, alpha: float, mark: int) -> None: ...
    def reset_optimizer(self) -> None: ...


class Parameters(Protocol):
    """Live parameters of which a fragment is one flat array."""

    def read(self, fragment: Fragment) -> Array: ...  # a copy
    def add(self, fragment: Fragment, increment: Array) -> None: ...
    def write(self, fragment: Fragment, values: Array) -> None: ...
    def blend(self, fragment: Fragment, towards: Array, alpha: float) -> None: ...  # θ ← towards + alpha (θ − towards)
    def reset_optimizer(self) -> None: ...


class ByHand:
    """Carries them on the spot."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.reset_optimizer = parameters.reset_optimizer

    def prepare(self, fragments: Sequence[Fragment]) -> None:
        """They are nobody else's."""

    def read(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        cell.store(self.parameters.read(fragment))
        cell.mark(mark)

    def add(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        self.parameters.add(fragment, cell.load(fragment.size))
        cell.mark(mark)

    def write(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        self.parameters.write(fragment, cell.load(fragment.size))
        cell.mark(mark)

    def blend(self, fragment: Fragment, cell: Cell, alpha: float, mark: int) -> None:
        self.parameters.blend(fragment, cell.load(fragment.size), alpha)
        cell.mark(mark)


class TrainingHalf:
    """A learner as its training loop has it; everything it knows of the run came as records."""

    def __init__(self, layout: Layout, carrier: Carrier, mailbox: Mailbox, lay: Lay) -> None:
        self._layout, self._carrier, self._mailbox, self._lay = layout, carrier, mailbox, lay
        # only a model that has some gives them
        self._carrier_buffers: Callable[[], bytes] | None = getattr(carrier, "read_buffers", None)
        # only a device wants to know cells beforehand
        self._carrier_meets: Callable[[Cells], None] = getattr(carrier, "meet", lambda cells: None)
        self.config: configs.Config | None = None
        self.index = 0  # this learner's number in the run
        self.prior_steps = 0  # of its earlier lives
        self.fragments: tuple[Fragment, ...] = ()
        self.applied: dict[int, Change] = {}  # fragment -> what brought it to the version that it stands on
        self.step_count = 0
        self.is_closing = False
        self.left: Leave | None = None  # why nothing is left to do
        self._news = News()
        self.has_heard = False  # anything from the node
        self._cells = Cells((), ())
        self._free: list[int] = []  # cells for snapshots
        self._changes: list[Change] = []  # to be made at the next boundary
        self._wanted: dict[int, Want] = {}  # by fragment
        self._first: set[int] = set()  # fragments to be overwritten, of which a snapshot was ordered before
        self._taken: list[int] = []  # by fragment, how many snapshots there were,
        self._taken_at: list[int] = []  # and after which step the last was taken
        self._marks = 0
        self.is_forwarding = False  # some fragments are written, and others are not
        self._joined_late = False  # the run was under way
        self._wants_buffers, self._gave_at = False, 0  # after which step they were last given

    # ------------------------------------------------------------------------------------------ where it stands

    @property
    def must_stand(self) -> bool:
        """No step may be taken: a fragment has no base yet, or a fast-forward is half done, and the run goes on."""
        self._look()
        is_whole = self.is_adopted and not self.is_forwarding
        return not is_whole and not self._news.is_done and self.left is None

    @property
    def is_adopted(self) -> bool:
        """Every fragment's base is in the live parameters: the first step may be taken."""
        return bool(self.fragments) and len(self.applied) == len(self.fragments)

    @property
    def is_linked(self) -> bool:
        """A syncer has welcomed it and is there."""
        return self._news.is_linked

    @property
    def has_come(self) -> str:
        """How much of the model is here, for a person; empty where no syncer is."""
        if not self.is_linked:
            return ""
        is_held_back = self.config is not None and self.config.run.gather_s > 0
        if is_held_back and len(self.applied) == len(self.fragments) - 1:
            return "the last fragment comes when the run begins, which waits for more learners"
        return f"{len(self.applied)} of {len(self.fragments)} fragments have come"

    @property
    def trouble(self) -> str:
        """Why no syncer has this learner at present."""
        return self._news.trouble

    @property
    def steps_merged(self) -> int:
        """Of this life, that are known to be in the run."""
        return self._news.steps_merged

    @property
    def alone_steps(self) -> int:
        """Taken since the link was lost, as far as the node has heard; 0 while there is one."""
        return self._news.alone_steps

    @property
    def is_stop_asked(self) -> bool:
        """The run is to be closed."""
        return self._news.is_stop_asked

    @property
    def is_running(self) -> bool:
        """The run wants further steps."""
        self._look()
        return self.wants_steps

    @property
    def wants_steps(self) -> bool:
        """The same, as of the last look into the mailbox."""
        is_over = self._news.is_stop_asked or self._news.is_done
        return bool(self.fragments) and not is_over and self.left is None

    @property
    def progress(self) -> float:
        self._look()
        return self._news.progress

    @property
    def ramp(self) -> float:
        """Factor for the inner rate: rises to 1 over `join_warmup` steps after joining a run under way."""
        if self.config is None or not self._joined_late or not self.config.learner.join_warmup:
            return 1.0
        return min(1.0, (self.step_count + 1) / self.config.learner.join_warmup)

    # ------------------------------------------------------------------------------------------ boundaries

    def boundary(self, steps: int, tokens: int, step_s: float, loss: float = 0.0, grad_norm: float = 0.0) -> None:
        """Pass a step boundary: make the changes that have come, take the snapshots that are due, go on.

        A carrier that refuses to does so before anything is done or told, so the step is nowhere counted.
        """
        self._look()
        due = self._due(self.step_count + steps)
        if touched := {change.fragment for change in self._changes} | {want.fragment for want in due}:
            self._carrier.prepare([self.fragments[p] for p in sorted(touched)])
        self.step_count += steps
        changes, self._changes = self._changes, []
        returned = [change for change in changes if not self.is_current(change)]
        applied = [change for change in changes if self.is_current(change)]
        taken = [self._take(want) for want in due if want.fragment in self._first]
        for change in returned:
            self._return(change)
        for change in applied:
            self._make(change)
        taken += [self._take(want) for want in due if want.fragment not in self._first]
        self._first.clear()
        done = (_numbers(applied), _numbers(returned), tuple(taken))
        self._mailbox.send(Passed(steps, tokens, step_s, loss, *done, grad_norm))
        if self.step_count - self._gave_at >= BUFFERS_EVERY:
            self._give_buffers()

    def stand(self) -> bool:
        """The loop stands still: pass a boundary without a step if there is work for one; whether there was."""
        self._look()
        has_work = bool(self._changes or self._due(self.step_count))
        if has_work:
            self.boundary(0, 0, 0.0)
        return has_work

    def close(self, limit_s: float | None = None) -> None:
        """Take no further step; the loop stands from now on until `left` is set."""
        self.is_closing = True
        self._give_buffers()
        self._mailbox.send(Closed(limit_s))

    def _give_buffers(self) -> None:
        """What training changes in a model besides its parameters goes by value, now and then and at the end."""
        if self._wants_buffers and self._carrier_buffers is not None and self.step_count > self._gave_at:
            self._gave_at = self.step_count
            if data := self._carrier_buffers():
                self._mailbox.send(Gave(data))

    def is_current(self, change: Change) -> bool:
        """A blend of a fragment of which the node knows every snapshot; what is no blend always is."""
        return change.towards == NO_CELL or change.seen == self._taken[change.fragment]

    def _return(self, change: Change) -> None:
        for cell in (change.cell, change.towards):
            self._cells.down[cell].mark(change.number)

    def _make(self, change: Change) -> None:
        fragment, cell = self.fragments[change.fragment], self._cells.down[change.cell]
        if change.is_write:
            self._carrier.write(fragment, cell, change.number)
        else:
            self._carrier.add(fragment, cell, change.number)
        if change.towards != NO_CELL:
            assert self.config is not None
            towards = self._cells.down[change.towards]
            self._carrier.blend(fragment, towards, self.config.learner.adopt_alpha, change.number)
        if change.resets_optimizer:
            self._carrier.reset_optimizer()
        self.applied[change.fragment] = change
        self.is_forwarding = change.further > 0

    def _due(self, step_count: int) -> list[Want]:
        """The snapshots to take after so many steps; what there is no cell for stays due.

        Where cells are few, fragments of which none was taken for longest come first: each has its turn, also where
        versions that overwrite make all of them due at every boundary.
        """
        due = [want.fragment for want in self._wanted.values() if want.step <= step_count]
        if len(due) > len(self._free):
            due = sorted(due, key=lambda p: (self._taken_at[p], p))[: len(self._free)]
        return [self._wanted[p] for p in sorted(due)]

    def _take(self, want: Want) -> Took:
        p, cell = want.fragment, self._free.pop()
        del self._wanted[p]
        self._marks += 1
        self._taken[p] += 1
        self._taken_at[p] = self.step_count
        self._carrier.read(self.fragments[p], self._cells.up[cell], self._marks)
        return Took(p, self.applied[p].version, want.order, cell, self._marks)

    # ------------------------------------------------------------------------------------------ the mailbox

    def _look(self) -> None:
        for record in self._mailbox.receive():
            self.has_heard = True
            self._hear(record)

    def _hear(self, record: Record) -> None:
        match record:
            case Begun():
                self._begin(record)
            case News():
                self._news = record
            case Want():
                self._wanted[record.fragment] = record
            case Waive():
                self._wanted.pop(record.fragment, None)
                self._first.discard(record.fragment)
            case Change():
                self._changes.append(record)
                if record.is_write and record.fragment in self._wanted:
                    self._first.add(record.fragment)
            case Freed():
                self._free.append(record.cell)
            case Left():
                self.left = record.leave
                self._news = msgspec.structs.replace(self._news, steps_merged=record.steps_merged)

    def _begin(self, begun: Begun) -> None:
        self.config = configs.decode(begun.config)
        self.index, self.prior_steps = begun.index, begun.prior_steps
        self._joined_late = begun.progress > 0
        self._wants_buffers = begun.wants_buffers
        self._cells = self._lay(begun.cell_size, begun.up_count, begun.down_count)
        self._carrier_meets(self._cells)
        self._free = list(range(begun.up_count))
        self.fragments = decode_fragments(begun.fragments, self._layout)
        self._taken, self._taken_at = [0] * len(self.fragments), [0] * len(self.fragments)


def _numbers(changes: list[Change]) -> tuple[int, ...]:
    return tuple(change.number for change in changes)
