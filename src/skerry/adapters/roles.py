"""What each rank of an island does: the speaker, which has the learner, and the followers.

Rank 0 of the island is its *speaker*: it has the learner, with the node beside it. At each boundary the others, the
*followers*, report what their step was, and then do what the speaker says until it ends the boundary
(`adapters/ranks.py`). What is ordered of the speaker's carrier every rank does to its own part of the model.

All of it is in the training thread, and waits for nobody but the other ranks, as a step does anyway. What a loop asks
of its learner has the same answer on every rank until the next boundary, so that all of them leave at the same one.
"""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch

from skerry import config as configs
from skerry.adapters.island import Island
from skerry.adapters.ranks import Arrived, Do, Ended, Line, Look, Report, Reset, Table, meet
from skerry.algo.fragments import (
    Fragment,
    Layout,
    decode_fragments,
    decode_layout,
    encode_fragments,
    encode_layout,
    first_difference,
)
from skerry.core.messages import Frozen
from skerry.core.vocabulary import Dismissal
from skerry.errors import IslandError, JoinTimeout, ModelError, RefusedError
from skerry.node.cells import Box, Cell, Cells
from skerry.node.training import Carrier
from skerry.shell.home import Home
from skerry.shell.learner import Handover, LearnerShell, Standing

AFTER_ERROR_S = 10.0  # in which the other ranks must close too, if this one closes because of an error

log = logging.getLogger("skerry.learner")


class SpeakersCarrier:
    """Has every rank do to its part of the model what this one does."""

    def __init__(
        self, own: Carrier, lines: Sequence[Line], is_sharded: bool, table: Callable[[], tuple[Fragment, ...]]
    ) -> None:
        self._own, self._lines, self._is_sharded, self._table = own, lines, is_sharded, table
        self._told: tuple[Fragment, ...] = ()
        self.frozen: Frozen = getattr(own, "frozen", None)
        self.read_buffers: Callable[[], bytes] | None = getattr(own, "read_buffers", None)  # of this rank
        self.meet: Callable[[Cells], None] = getattr(own, "meet", lambda cells: None)

    def prepare(self, fragments: Sequence[Fragment]) -> None:
        if (table := self._table()) is not self._told:
            self._say(Table(encode_fragments(table)))
            self._told = table
        self._say(Look(tuple(fragment.index for fragment in fragments)))
        self._own.prepare(fragments)

    def read(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        if self._is_sharded:
            self._say(Do("read", fragment.index))
        self._own.read(fragment, cell, mark)

    def add(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        self._say(Do("add", fragment.index))
        self._own.add(fragment, cell, mark)

    def write(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        self._say(Do("write", fragment.index))
        self._own.write(fragment, cell, mark)

    def blend(self, fragment: Fragment, cell: Cell, alpha: float, mark: int) -> None:
        self._say(Do("blend", fragment.index, alpha))
        self._own.blend(fragment, cell, alpha, mark)

    def reset_optimizer(self) -> None:
        self._say(Reset())
        self._own.reset_optimizer()

    def _say(self, said: Any) -> None:
        for line in self._lines:
            line.say(said)


# ---------------------------------------------------------------------------------------------- the two kinds of ranks


def rank_of(
    island: Island,
    layout: Layout,
    own: Carrier,
    device: torch.device,
    wants_to_leave: Callable[[], bool],
    shell_of: Callable[[Carrier], LearnerShell],
) -> Rank:
    """What this process is in its island; every rank makes its own at the same time, for they meet here."""
    if island.is_speaker:
        return Speaker(island, layout, own, device, wants_to_leave, shell_of)
    return Follower(island, layout, own, device, wants_to_leave)


class Rank(ABC):
    """One rank of an island, as its loop has it; what it says of the learner is what was last agreed on."""

    home: Home | None = None
    speaks = leaves_alone = is_called_away = False

    def __init__(self, lines: Sequence[Line], wants_to_leave: Callable[[], bool]) -> None:
        self._lines, self._wants_to_leave = lines, wants_to_leave
        self._ended = Ended()
        self._config: configs.Config | None = None
        self._owner = os.getpid()
        self._is_closed = False
        self._is_together = False  # the ranks have joined, and none is gone: they can agree on how to leave

    def start(self, join_timeout_s: float) -> None:
        with self._together():
            self._start(join_timeout_s)
            self._is_together = True

    def step(self, tokens: int, loss: float, grad_norm: float) -> bool:
        """Pass a boundary with all ranks; False on each of them once the run, or one of them, wants no more steps."""
        if os.getpid() != self._owner:
            raise RuntimeError(f"step() in process {os.getpid()}: this learner is of process {self._owner}")
        if self._is_closed:
            return False
        with self._together():
            self._step(Report(tokens, loss, self._wants_to_leave(), grad_norm=grad_norm))
        return self.is_running

    def close(self, timeout_s: float | None = None) -> Handover:
        """Leave, with all ranks; where one is gone, without handing over what is left."""
        if not self._is_closed and os.getpid() == self._owner:
            self._is_closed = True
            self._leave(timeout_s)
        return self._ended.handover or _unfinished(self.standing)

    def _leave(self, timeout_s: float | None) -> None:
        try:
            if self._is_together:
                with self._together():
                    self._close(timeout_s, AFTER_ERROR_S if sys.exc_info()[0] is not None else None)
        except IslandError as error:
            log.warning("left without handing over what is left: %s", error)
        finally:
            self._end_of_it()

    @property
    def is_running(self) -> bool:
        return self._ended.is_running

    @property
    def standing(self) -> Standing:
        return replace(self._ended.where, config=self._config)

    @property
    def node_pid(self) -> int | None:
        return None

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A model is refused on every rank, which can leave in order then; by any other error the island ends."""
        try:
            yield
        except BaseException as error:
            self._is_together &= isinstance(error, ModelError)
            raise

    def _note(self, ended: Ended) -> None:
        if ended.config:
            self._config = configs.decode(ended.config)
        self._ended = ended

    def _end_of_it(self) -> None:
        for line in self._lines:
            line.close()

    @abstractmethod
    def _start(self, join_timeout_s: float) -> None: ...
    @abstractmethod
    def _step(self, own: Report) -> None: ...
    @abstractmethod
    def _close(self, timeout_s: float | None, patience_s: float | None) -> None: ...


class Speaker(Rank):
    """Rank 0: a learner whose carrier has all ranks do what it does."""

    speaks = True

    def __init__(
        self,
        island: Island,
        layout: Layout,
        own: Carrier,
        device: torch.device,
        wants_to_leave: Callable[[], bool],
        shell_of: Callable[[Carrier], LearnerShell],
    ) -> None:
        super().__init__(meet(island.group, device), wants_to_leave)
        self._layout, self._shell_of = layout, shell_of
        self._shell: LearnerShell | None = None
        self._carrier = SpeakersCarrier(own, self._lines, island.is_sharded, self._fragments)

    def _fragments(self) -> tuple[Fragment, ...]:
        assert self._shell is not None
        return self._shell.training.fragments

    @property
    def node_pid(self) -> int | None:
        return self._shell.node_pid if self._shell is not None else None

    def _start(self, join_timeout_s: float) -> None:
        with self._telling():
            self._check_arrived()
            self._shell = self._shell_of(self._carrier)
            self.home = self._shell.home
            self._shell.start(join_timeout_s)
            self._end(self._shell.is_running)

    def _check_arrived(self) -> None:
        for line in self._lines:
            arrived = line.hear()
            if difference := first_difference(decode_layout(arrived.layout), self._layout):
                raise ModelError(
                    f"the model of rank {line.rank} (here) is not that of rank 0 (there), of the same learner: "
                    f"{difference}; each rank must have every parameter, or a shard of it"
                )
            if name := _first_frozen_otherwise(arrived.frozen, self._carrier.frozen):
                raise ModelError(
                    f"the frozen parameter {name} of rank {line.rank} is not that of rank 0, of the same learner: load "
                    'the same base on every rank, or give frozen="any" on all of them'
                )

    def _step(self, own: Report) -> None:
        assert self._shell is not None
        with self._telling():
            reports = [own, *(line.hear() for line in self._lines)]
            self._check_models(reports)
            self.is_called_away |= any(report.wants_to_leave for report in reports)
            stepped = [report for report in reports if not report.is_closing]
            mean = sum(report.loss for report in stepped) / len(stepped)
            norm = max(report.grad_norm for report in stepped)  # the same on each, where they share gradients
            is_running = self._shell.step(sum(report.tokens for report in stepped), mean, norm)
            self._end(is_running and not any(report.wants_to_leave or report.is_closing for report in reports))

    def _check_models(self, reports: Sequence[Report]) -> None:
        for rank, report in enumerate(reports):
            if report.refusal:
                raise ModelError(f"rank {rank}: {report.refusal}")

    def _close(self, timeout_s: float | None, patience_s: float | None) -> None:
        """Once every rank does: one that is at a step is told to take no further one."""
        assert self._shell is not None
        with self._telling():
            while not all([line.hear(patience_s).is_closing for line in self._lines]):
                self._end(False)
            self._end(False, self._shell.close(timeout_s))

    def _end(self, is_running: bool, handover: Handover | None = None) -> None:
        assert self._shell is not None
        where = self._shell.standing
        config = configs.encode(where.config) if where.config is not None and where.config != self._config else b""
        self._note(Ended(is_running, replace(where, is_running=is_running, config=None), config, handover))
        for line in self._lines:
            line.say(self._ended)

    def _end_of_it(self) -> None:
        super()._end_of_it()
        if self._shell is not None:
            self._shell.abandon()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What ends the boundary here ends it on every rank that is still there."""
        try:
            yield
        except BaseException as error:
            why = error.why if isinstance(error, RefusedError) else ""
            ended = Ended(False, error=type(error).__name__, text=str(error), why=why)
            for line in self._lines:
                with suppress(IslandError):
                    line.say(ended)
            raise


class Follower(Rank):
    """Any other rank: obeys the speaker from its report until the boundary's end."""

    def __init__(
        self,
        island: Island,
        layout: Layout,
        own: Carrier,
        device: torch.device,
        wants_to_leave: Callable[[], bool],
    ) -> None:
        super().__init__(meet(island.group, device), wants_to_leave)
        (self._speaker,) = self._lines
        self._layout, self._own = layout, own
        self._fragments: tuple[Fragment, ...] = ()
        self._refusal = ""  # of its model, to be told

    def _start(self, join_timeout_s: float) -> None:
        self._speaker.say(Arrived(encode_layout(self._layout), getattr(self._own, "frozen", None)))
        self._obey()

    def _step(self, own: Report) -> None:
        self._speaker.say(msgspec.structs.replace(own, refusal=self._refusal))
        self._obey()

    def _close(self, timeout_s: float | None, patience_s: float | None) -> None:
        while self._ended.handover is None:
            self._speaker.say(Report(is_closing=True))
            self._obey(patience_s)

    def _obey(self, patience_s: float | None = None) -> None:
        while not isinstance(said := self._speaker.hear(patience_s), Ended):
            match said:
                case Table():
                    self._fragments = decode_fragments(said.fragments, self._layout)
                case Look():
                    self._look([self._fragments[p] for p in said.fragments])
                case Do():
                    self._do(said)
                case Reset():
                    self._own.reset_optimizer()
        if said.error:
            raise _error(said)
        self._note(said)

    def _look(self, fragments: Sequence[Fragment]) -> None:
        try:
            self._own.prepare(fragments)
        except ModelError as error:
            self._refusal = self._refusal or str(error)

    def _do(self, said: Do) -> None:
        fragment, cell = self._fragments[said.fragment], Box()  # a follower's way has no cells
        match said.what:
            case "read":
                self._own.read(fragment, cell, 0)
            case "add":
                self._own.add(fragment, cell, 0)
            case "write":
                self._own.write(fragment, cell, 0)
            case "blend":
                self._own.blend(fragment, cell, said.alpha, 0)


def _first_frozen_otherwise(there: Frozen, here: Frozen) -> str:
    """The first name, of what is not trained, on which two ranks differ; empty if they agree, or need not."""
    if not isinstance(there, dict) or not isinstance(here, dict):
        return ""
    return min((name for name in there.keys() | here.keys() if there.get(name) != here.get(name)), default="")


def _unfinished(where: Standing) -> Handover:
    """Of an island that cannot leave in order."""
    reason = "the island ended before it could hand over what was left"
    return Handover(where.steps_merged, where.steps - where.steps_merged, reason)


def _error(ended: Ended) -> Exception:
    """What the speaker raises, as far as a loop may want to tell it from others."""
    match ended.error:
        case "RefusedError":
            return RefusedError(ended.text, cast(Dismissal, ended.why))
        case "JoinTimeout":
            return JoinTimeout(ended.text)
        case "ModelError":
            return ModelError(ended.text)
        case "IslandError":
            return IslandError(ended.text)
    return IslandError(f"rank 0 of this learner's island ended with {ended.error}: {ended.text}")
