"""What is true of a run: a fold over the facts on its tape.

The syncer, export, the summary and every other reader build it the same way, `state.apply(fact)`, so a restart and a
reader can never disagree. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from skerry.core.facts import (
    RULES,
    Buffered,
    Checkpointed,
    Committed,
    Decision,
    Discarded,
    Entry,
    EpochStarted,
    Evaluated,
    Fact,
    Injected,
    Kept,
    LifeStarted,
    Ordered,
    Paused,
    PhaseChanged,
    Pruned,
    Restored,
    Result,
    RolledBack,
    RunCreated,
    Sampled,
    SteppedBack,
    Witnessed,
)
from skerry.core.ledger import MERGED, Ledger
from skerry.core.vocabulary import Phase
from skerry.errors import TapeDamaged, TapeUnknown


class Checkpoint(Struct, frozen=True, array_like=True):
    """A version that a file holds whole."""

    version: int
    file: str
    state: bytes  # digest of all of it
    theta: bytes  # sha256 of its published values


class Redo(Struct, frozen=True, array_like=True):
    """A merge that can be done again from the version before it and its entry in the journal, without contributions."""

    version: int
    outer: str
    lr: float
    momentum: float
    delay: int
    restart: int
    codec: str
    delta: str
    entry: Entry
    digest: bytes
    state: bytes


class FragmentState(Struct):
    """The newest version of a fragment, and how to have it: from a checkpoint, by the merges since."""

    version: int
    digest: bytes
    state: bytes
    checkpoints: list[Checkpoint]  # by version: the newest two, so that one may be damaged, and what the closing needs
    redo: list[Redo]  # every merge since the first of them
    sync_every: int = 0  # H that was asked for when this version was merged; 0 for genesis
    merged_in: dict[str, int] = field(default_factory=dict)  # learner -> the version its work was last merged into
    since: int = 0  # the version that a rollback made: work on an earlier one is given up


class KeptVersion(Struct, frozen=True):
    """A version of the whole model that is kept for good."""

    number: int
    checkpoints: tuple[Checkpoint, ...]  # by fragment
    progress: float
    elapsed_s: float

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(checkpoint.version for checkpoint in self.checkpoints)


class LifeState(Struct):
    """The newest life of a learner, and what its earlier lives produced."""

    life: int
    process: str
    index: int
    since: float = 0.0  # the run's elapsed time when it began
    is_over: bool = False  # it was turned out: whoever comes back under its name is another life
    has_left: bool = False  # with all of its work settled: nobody waits for it


class RunState(Struct, tag="Fold"):
    """The folded run; it is itself written as the first record of a tape segment."""

    created: RunCreated
    fragments: list[FragmentState]
    ledger: Ledger
    epoch: int = 0
    lives: dict[str, LifeState] = field(default_factory=dict)
    phase: Phase = "created"
    before_close: tuple[int, ...] = ()  # versions that the closing began with
    elapsed_s: float = 0.0
    progress: float = 0.0
    merges: int = 0
    merges_alone: int = 0  # with a single contributor
    contributors: int = 0  # summed over merges
    ready: int = 0  # summed over merges
    kept: list[KeptVersion] = field(default_factory=list)  # without the start, which needs no mention
    last_kept: KeptVersion | None = None  # the newest there was, were it removed since: when the next is due goes by it
    first_segment: int = 1  # of the tape; those before it were removed on purpose
    journal_file: int = 0  # the newest that a record speaks of, were it removed since; 0: not said
    buffers: dict[str, Buffered] = field(default_factory=dict)  # the newest of each learner
    config_set: bytes = b""  # the configuration that orders have left; empty: that of the creation holds
    orders: int = 0  # of the operator's, so far
    budgets: int = 0  # that the run has had beside its first: progress is a share of the newest
    budget_since: int = 0  # as many orders there were when it was given
    dropped: dict[str, str] = field(default_factory=dict)  # learner that an order keeps out -> who gave it
    is_finishing: bool = False  # it was ordered to close, whatever is left of its budget

    @property
    def config(self) -> bytes:
        """The configuration in force, encoded."""
        return self.config_set or self.created.config

    @property
    def is_rolled_back(self) -> bool:
        """It was taken back to a kept version, once at least."""
        return any(at.since for at in self.fragments)

    @property
    def files(self) -> set[str]:
        """Every file that must not be collected."""
        kept = {c.file for version in self.kept for c in version.checkpoints}
        kept |= {given.file for given in self.buffers.values()}
        return {c.file for f in self.fragments for c in f.checkpoints} | kept | set(self.created.files)

    @property
    def start(self) -> KeptVersion:
        """Version 0 of every fragment, as a kept version."""
        about = zip(self.created.files, self.created.states, self.created.thetas, strict=True)
        return KeptVersion(0, tuple(Checkpoint(0, *each) for each in about), 0.0, 0.0)

    def kept_version(self, number: int) -> KeptVersion | None:
        """By the number that people call it; None if it is not kept."""
        return next((version for version in [self.start, *self.kept] if version.number == number), None)

    @property
    def journal(self) -> set[int]:
        """Every file of the journal that must not be collected."""
        return {redo.entry.file for f in self.fragments for redo in f.redo}

    def apply(self, fact: Fact) -> None:
        match fact:
            case Committed():
                self._commit(fact.decision, fact.result)
            case Checkpointed():
                at = self.fragments[fact.fragment]
                assert at.checkpoints[-1].version < fact.version <= at.version, (fact, at)
                state = next(redo.state for redo in at.redo if redo.version == fact.version)
                at.checkpoints.append(Checkpoint(fact.version, fact.file, state, fact.theta))
                self._forget(fact.fragment)
            case SteppedBack():
                self._next_version(fact, fact.digest, fact.state)
                self._begin_again(fact)
            case Kept():
                self._keep(fact)
            case RolledBack():
                for at in self.fragments:
                    at.since = at.version
            case Pruned():
                self.first_segment = fact.segment
                self.kept = [version for version in self.kept if version.number not in fact.kept]
            case Discarded():
                for seen in fact.seen:
                    self.ledger.see(seen)
                self.ledger.book(fact.rows)
                self.elapsed_s = max(self.elapsed_s, fact.elapsed_s)
            case LifeStarted():
                assert fact.life == (self.lives[fact.learner].life if fact.learner in self.lives else 0) + 1, fact
                for name in fact.forgotten:
                    self.ledger.forget(name, self.lives.pop(name).life)
                    self.buffers.pop(name, None)
                self.lives[fact.learner] = LifeState(fact.life, fact.process, fact.index, fact.elapsed_s)
                for seen in fact.seen:
                    self.ledger.see(seen)
                self.ledger.fold(fact.learner, fact.folded)
                self.elapsed_s = max(self.elapsed_s, fact.elapsed_s)
            case Buffered():
                self.buffers[fact.learner] = fact
                self.elapsed_s = max(self.elapsed_s, fact.elapsed_s)
            case Paused():
                for seen in fact.seen:
                    self.ledger.see(seen)
                self.elapsed_s = max(self.elapsed_s, fact.elapsed_s)
            case EpochStarted():
                assert fact.epoch == self.epoch + 1, (fact, self.epoch)
                self.epoch = fact.epoch
            case PhaseChanged():
                for seen in fact.seen:
                    self.ledger.see(seen)
                self.phase = fact.phase
                self.before_close = fact.versions or self.before_close
                self.elapsed_s = max(self.elapsed_s, fact.elapsed_s)
            case Ordered():
                self._obey(fact)
            case Restored():
                at = self.fragments[fact.fragment]
                assert (fact.version, fact.digest) == (at.version, at.digest), (fact, at)
                at.state = fact.state
                self._begin_again(fact)
            case Witnessed(what="expelled"):
                self._turn_out(fact.learner, fact.life)
            case Witnessed(what="left"):
                known = self.lives[fact.learner]
                known.has_left = known.has_left or known.life == fact.life
            case Witnessed() | Sampled() | Injected() | Evaluated():
                pass  # measurements: nothing follows from them
            case RunCreated():
                raise AssertionError("a run is created once")

    def _commit(self, decision: Decision, result: Result) -> None:
        for seen in decision.seen:
            self.ledger.see(seen)
        self.ledger.book(decision.rows)
        learners = [row.learner for row in decision.rows if row.fate == MERGED]
        at = self._next_version(decision, result.digest, result.state)
        at.redo.append(_redo(decision, result))
        self.journal_file = result.entry.file
        at.sync_every = decision.every
        at.merged_in |= dict.fromkeys(learners, decision.version)
        merged = len(learners)
        self.merges += 1
        self.merges_alone += merged == 1
        self.contributors += merged
        self.ready += decision.ready
        if decision.orders >= self.budget_since:  # else it is a share of a budget that is no more
            self.progress = max(self.progress, decision.progress)
        self.elapsed_s = max(self.elapsed_s, decision.elapsed_s)

    def _obey(self, fact: Ordered) -> None:
        self.orders += 1
        self.elapsed_s = max(self.elapsed_s, fact.elapsed_s)
        self.progress = fact.progress
        match fact.verb:
            case "finish":
                self.is_finishing = True
            case "drop":
                self.dropped[fact.learner] = fact.by
                self._turn_out(fact.learner, self.lives[fact.learner].life)
            case "readmit":
                self.dropped.pop(fact.learner, None)
            case "set" | "extend":
                self.config_set = fact.config
        if fact.verb == "extend":
            self._measure_anew(fact)

    def _turn_out(self, learner: str, life: int) -> None:
        """What it had pending is booked as expelled; more of the same life would be work that nobody can place."""
        known = self.lives[learner]
        known.is_over = known.is_over or known.life == life

    def _measure_anew(self, fact: Ordered) -> None:
        """Shares of the budget are of the newest one, also those at which versions were kept."""
        self.budgets, self.budget_since = self.budgets + 1, self.orders
        scale = fact.progress / fact.progress_before if fact.progress_before else 1.0
        self.kept = [replace(version, progress=version.progress * scale) for version in self.kept]
        if self.last_kept is not None:
            self.last_kept = replace(self.last_kept, progress=self.last_kept.progress * scale)

    def _next_version(self, to: Decision | SteppedBack, digest: bytes, state: bytes) -> FragmentState:
        at = self.fragments[to.fragment]
        assert to.version == at.version + 1 and to.parent == at.digest, (to, at)
        at.version, at.digest, at.state = to.version, digest, state
        return at

    def _begin_again(self, fact: Restored | SteppedBack) -> None:
        """The fragment has one whole file, and nothing leads to it from before."""
        at = self.fragments[fact.fragment]
        at.checkpoints, at.redo = [Checkpoint(fact.version, fact.file, fact.state, fact.theta)], []
        if self.before_close:
            pinned = list(self.before_close)
            pinned[fact.fragment] = fact.version
            self.before_close = tuple(pinned)

    def _keep(self, fact: Kept) -> None:
        about = zip(self.fragments, fact.versions, fact.files, strict=True)
        found = [next(c for c in at.checkpoints if (c.version, c.file) == (v, file)) for at, v, file in about]
        self.last_kept = KeptVersion(fact.number, tuple(found), fact.progress, fact.elapsed_s)
        self.kept.append(self.last_kept)
        self.elapsed_s = max(self.elapsed_s, fact.elapsed_s)

    def _forget(self, p: int) -> None:
        """Checkpoints and merges that nobody needs any more."""
        at = self.fragments[p]
        pinned = self.before_close[p] if self.before_close else at.version
        first = min(at.checkpoints[-2:][0].version, max(c.version for c in at.checkpoints if c.version <= pinned))
        at.checkpoints = [c for c in at.checkpoints if c.version >= first]
        at.redo = [redo for redo in at.redo if redo.version > first]


def created(fact: RunCreated) -> RunState:
    about = zip(fact.files, fact.digests, fact.states, fact.thetas, strict=True)
    fragments = [
        FragmentState(0, digest, state, [Checkpoint(0, file, state, theta)], []) for file, digest, state, theta in about
    ]
    return RunState(fact, fragments, Ledger(len(fragments)))


def _redo(d: Decision, result: Result) -> Redo:
    outer = (d.outer, d.lr, d.momentum, d.delay, d.restart)
    return Redo(d.version, *outer, d.codec, d.delta, result.entry, result.digest, result.state)


def fold(facts: Iterable[Fact | RunState]) -> RunState:
    """The state after all facts; the first, and no other, is RunCreated or an earlier fold."""
    state: RunState | None = None
    for fact in facts:
        is_first = isinstance(fact, RunCreated | RunState)
        if is_first != (state is None):
            raise TapeDamaged("the tape does not tell of one run from its creation on: restore it from a copy")
        if isinstance(fact, RunState):
            state = fact
        elif isinstance(fact, RunCreated):
            state = created(fact)
        elif state is not None:
            state.apply(fact)
    assert state is not None, "the tape is empty"
    return state


_facts = msgspec.msgpack.Decoder(Fact | RunState)


def decode_fact(record: bytes) -> Fact | RunState:
    """A record of the tape as what it says; a run that follows rules nobody here knows is refused."""
    try:
        fact: Fact | RunState = _facts.decode(record)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TapeUnknown(
            f"the tape holds a record that is no fact of this version ({error}): use a later version of Skerry, "
            "or restore it from a copy"
        ) from None
    about = fact.created if isinstance(fact, RunState) else fact
    if isinstance(about, RunCreated) and about.rules != RULES:
        known = f"rules {RULES} are known here"
        raise TapeUnknown(f"run {about.run} follows rules {about.rules}, {known}: use a later version of Skerry")
    return fact


def state_of(records: Iterable[bytes]) -> RunState:
    """The state after these records of a tape, whose first is a run's creation or a fold."""
    return fold(decode_fact(record) for record in records)
