"""What a tape adds up to: a fold over its facts that keeps what summaries, reports and twins need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from skerry import config as configs
from skerry.algo.fragments import decode_layout
from skerry.core.facts import (
    Committed,
    Decision,
    Discarded,
    EpochStarted,
    Evaluated,
    Fact,
    Injected,
    LifeStarted,
    Ordered,
    Paused,
    PhaseChanged,
    Row,
    RunCreated,
    Seen,
    SteppedBack,
    Witnessed,
)
from skerry.core.ledger import MERGED
from skerry.core.state import RunState
from skerry.run.facts import Stamped, entries_of
from skerry.run.sense import sensible
from skerry.store.store import Store


@dataclass
class Tally:
    """A fold over the facts that keeps what a summary needs."""

    config: configs.Config | None = None  # in force
    parameters: int = 0
    fragment_count: int = 0
    seen: dict[tuple[str, int], Seen] = field(default_factory=dict)
    merged: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)  # the newest of each fragment
    merges: list[Stamped[Decision]] = field(default_factory=list)
    lives: list[Stamped[LifeStarted]] = field(default_factory=list)
    witnessed: list[Stamped[Witnessed]] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    evaluated: list[Evaluated] = field(default_factory=list)
    epochs: list[Stamped[EpochStarted]] = field(default_factory=list)
    learner_restarts: int = 0  # processes in the place of one that had failed,
    syncer_restarts: int = 0  # and in that of a syncer which nobody had ended
    joined: set[str] = field(default_factory=set)  # who came so far,
    parted: set[str] = field(default_factory=set)  # and who left in order or was turned out, and has not come again
    orders: list[Stamped[Ordered]] = field(default_factory=list)
    paused_at: float | None = None
    pauses: list[tuple[float, float]] = field(default_factory=list)  # between the operator's stop and the resume
    training_at: float | None = None
    closing_at: float | None = None
    merges_before: int = 0  # of which a pruned tape does not tell one by one

    def begin(self, at: float, fold: RunState) -> None:
        """Where a pruned tape begins: sums there are of what was before, times and single merges there are not."""
        self.take(at, fold.created)
        self.config = configs.decode(fold.config)
        self.versions = [fragment.version for fragment in fold.fragments]
        self.merges_before, self.merged = fold.merges, fold.ledger.merged
        self.discarded = {str(fate): tokens for fate, tokens in fold.ledger.discarded.items()}
        for key in fold.ledger.accounts:
            learner, _, life = key.rpartition("/")
            self.seen[learner, int(life)] = fold.ledger.seen(learner, int(life))
        for learner, past in fold.ledger.past.items():
            sums = (past.steps, past.tokens, past.bytes_up, past.bytes_down, past.step_gap_s_max)
            self.seen[learner, past.lives] = Seen(learner, past.lives, *sums)
        self.training_at = None if fold.phase == "created" else at

    def take(self, at: float, fact: Fact) -> None:
        match fact:
            case RunCreated():
                self.config = configs.decode(fact.config)
                self.fragment_count, self.versions = len(fact.files), [0] * len(fact.files)
                self.parameters = decode_layout(fact.layout).param_count
            case EpochStarted():
                self.syncer_restarts += bool(self.epochs) and self.paused_at is None
                self.epochs.append(Stamped(at, fact))
                if self.paused_at is not None:
                    self.pauses.append((self.paused_at, at))
                    self.paused_at = None
            case Paused():
                self.paused_at = at
                self._book((), fact.seen)
            case LifeStarted():
                self._join(fact)
                self.lives.append(Stamped(at, fact))
            case Witnessed():
                self.witnessed.append(Stamped(at, fact))
                if fact.what in ("left", "expelled"):
                    self.parted.add(fact.learner)
            case Injected():
                self.injected.append(fact)
            case Evaluated():
                self.evaluated.append(fact)
            case Ordered():
                self.orders.append(Stamped(at, fact))
                if fact.verb == "drop":
                    self.parted.add(fact.learner)
                self.config = configs.decode(fact.config) if fact.config else self.config
            case Committed():
                self.merges.append(Stamped(at, fact.decision))
                self.versions[fact.decision.fragment] = fact.decision.version
                self._book(fact.decision.rows, fact.decision.seen)
            case SteppedBack():
                self.versions[fact.fragment] = fact.version
            case Discarded():
                self._book(fact.rows, fact.seen)
            case PhaseChanged():
                self._book((), fact.seen)
                if fact.phase == "training":
                    self.training_at = self.training_at or at
                elif fact.phase == "closing":
                    self.closing_at = at

    def _join(self, fact: LifeStarted) -> None:
        """The next process of a name comes after a failure, unless the one before went by somebody's will."""
        self.learner_restarts += fact.learner in self.joined - self.parted
        self.joined.add(fact.learner)
        self.parted.discard(fact.learner)

    def _book(self, rows: Iterable[Row], seen: Iterable[Seen]) -> None:
        for row in rows:
            if row.fate == MERGED:
                self.merged += row.tokens
            else:
                self.discarded[row.fate] = self.discarded.get(row.fate, 0) + row.tokens
        for one in seen:
            before = self.seen.get((one.learner, one.life))
            if before is None or one.tokens >= before.tokens:
                self.seen[one.learner, one.life] = one

    @property
    def produced(self) -> int:
        return sum(s.tokens for s in self.seen.values()) * self.fragment_count


def tally(store: Store) -> Tally:
    """Read the whole tape, its chain verified."""
    result = Tally()
    with sensible(lambda: f"{store.root}/tape"):
        for number, (at, fact) in enumerate(entries_of(store)):
            if not isinstance(fact, RunState):
                result.take(at, fact)
            elif number == 0:
                result.begin(at, fact)
    return result


def end_of(t: Tally) -> float:
    """When the budget was spent, or as far as the run got."""
    return t.closing_at or (t.merges[-1].at if t.merges else t.training_at or 0.0)


def back_at(t: Tally, name: str, killed_at: float) -> float:
    """When the learner's next process said hello, or the end: what it takes after that counts as ours."""
    back = min((at for at, life in t.lives if life.learner == name and at > killed_at), default=end_of(t))
    return min(back, end_of(t))


def steps_reached(decision: Decision) -> int:
    """Steps of the fastest contributor since its last merge of this fragment: H as it turned out."""
    return max(row.steps for row in decision.rows if row.fate == MERGED)


def data_parallel_bytes(parameters: int, learner_count: int, steps: int) -> int:
    """What a ring that adds up float32 gradients after each step would have sent for as many steps."""
    return round(2 * (learner_count - 1) / max(1, learner_count) * 4 * parameters * steps)
