"""What a run achieved, from its own evidence: the tape, the learners' last reports, and the supervisor's kills.

Produced comes from the positions seen, merged and discarded from the rows booked, pending from the learners' own marks:
four sources, so that their balance says something. Sums are in tokens x fragments, an integer; what people read is
divided by the number of fragments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from skerry import config as configs
from skerry.algo.fragments import Layout
from skerry.core.facts import (
    Committed,
    Discarded,
    EpochStarted,
    Fact,
    Injected,
    LifeStarted,
    Paused,
    PhaseChanged,
    Row,
    RunCreated,
    Seen,
    Witnessed,
)
from skerry.core.ledger import MERGED
from skerry.core.schedule import COOL, STEADY
from skerry.core.state import RunState
from skerry.node.model import decode_fact
from skerry.shell.local import Kill
from skerry.store.store import Store


@dataclass
class Tally:
    """A fold over the facts that keeps what a summary needs."""

    config: configs.Config | None = None
    parameters: int = 0
    fragment_count: int = 0
    seen: dict[tuple[str, int], Seen] = field(default_factory=dict)
    merged: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    commits: list[Committed] = field(default_factory=list)
    lives: list[LifeStarted] = field(default_factory=list)
    witnessed: list[Witnessed] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    epochs: list[EpochStarted] = field(default_factory=list)
    paused_at: float | None = None
    pauses: list[tuple[float, float]] = field(default_factory=list)  # between the operator's stop and the resume
    training_at: float | None = None
    closing_at: float | None = None
    closed_at: float | None = None

    def take(self, fact: Fact) -> None:
        match fact:
            case RunCreated():
                self.config = configs.decode(fact.config)
                self.fragment_count = len(fact.files)
                self.parameters = msgspec.json.decode(fact.layout, type=Layout).param_count
            case EpochStarted():
                self.epochs.append(fact)
                if self.paused_at is not None:
                    self.pauses.append((self.paused_at, fact.at))
                    self.paused_at = None
            case Paused():
                self.paused_at = fact.at
                self._book((), fact.seen)
            case LifeStarted():
                self.lives.append(fact)
            case Witnessed():
                self.witnessed.append(fact)
            case Injected():
                self.injected.append(fact)
            case Committed():
                self.commits.append(fact)
                self._book(fact.rows, fact.seen)
            case Discarded():
                self._book(fact.rows, fact.seen)
            case PhaseChanged():
                self._book((), fact.seen)
                if fact.phase == "training":
                    self.training_at = self.training_at or fact.at
                elif fact.phase == "closing":
                    self.closing_at = fact.at
                else:
                    self.closed_at = fact.at

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
    for record in store.history():
        fact = decode_fact(record.body)
        if not isinstance(fact, RunState):
            result.take(fact)
    return result


def summarise(
    t: Tally, status: Mapping[str, Any], kills: Sequence[Kill], speeds: Mapping[str, float]
) -> dict[str, Any]:
    """The numbers of a run; `status` is the syncer's last one, with the learners' own marks."""
    assert t.config is not None
    pending = sum(member["unsettled_tokens"] for member in status["learners"].values())
    per = t.fragment_count
    killed = {kill.victim for kill in kills if kill.killed_at is not None}
    gaps = {s.learner: s.step_gap_s_max for s in t.seen.values() if s.learner not in killed}
    steps = sum(s.step for s in t.seen.values())
    learner_count = len({s.learner for s in t.seen.values()})
    capacity, disturbed = _capacity(t, status, kills, speeds)
    return {
        "merges": len(t.commits),
        "merges_alone": sum(sum(r.fate == MERGED for r in c.rows) == 1 for c in t.commits),
        "tokens_produced": _share(t.produced, per),
        "tokens_merged": _share(t.merged, per),
        "tokens_pending": _share(pending, per),
        "tokens_discarded": {reason: _share(n, per) for reason, n in sorted(t.discarded.items())},
        "ledger": {
            "unit": "token x fragment",
            "produced": t.produced,
            "merged": t.merged,
            "discarded": dict(sorted(t.discarded.items())),
            "pending": pending,
            "balance": t.produced - t.merged - sum(t.discarded.values()) - pending,
        },
        "contributors_mean": _mean([sum(r.fate == MERGED for r in c.rows) for c in t.commits]),
        "sync_every_effective": _mean([_steps_max(c) for c in t.commits if c.phase in (STEADY, COOL)]),
        "goodput": t.merged / per / capacity if capacity else 0.0,
        "goodput_of_capacity": t.merged / per / (capacity - disturbed) if capacity > disturbed else 0.0,
        "merge_gap_max_s": max((_unpaused_s(t, a.at, b.at) for a, b in itertools.pairwise(t.commits)), default=0.0),
        "learner_step_gap_max_s": max(gaps.values(), default=0.0),
        "learner_restarts": len(t.lives) - len({life.learner for life in t.lives}),
        "syncer_restarts": len(t.epochs) - 1,
        "steps": steps,
        "train_s": _train_s(t),
        "bytes_up": sum(s.bytes_up for s in t.seen.values()),
        "bytes_down": sum(s.bytes_down for s in t.seen.values()),
        "bytes_data_parallel": round(2 * (learner_count - 1) / max(1, learner_count) * 4 * t.parameters * steps),
        "parameters": t.parameters,
        "fragments": per,
        "versions": [sum(c.fragment == p for c in t.commits) for p in range(per)],
        "refused": dict(status["refused"]),
        "learners": {name: _learner(t, name, speeds.get(name, 1.0)) for name in sorted({k[0] for k in t.seen})},
    }


def _capacity(
    t: Tally, status: Mapping[str, Any], kills: Sequence[Kill], speeds: Mapping[str, float]
) -> tuple[float, float]:
    """Tokens the learners would have made stepping all the time, and those an injected kill took from them."""
    capacity = disturbed = 0.0
    for name in sorted({k[0] for k in t.seen}):
        rate = undisturbed_rate(t, name, status, speeds)
        capacity += rate * _train_s(t)
        for kill in kills:
            if kill.victim == name and kill.killed_at is not None:
                disturbed += rate * max(0.0, back_at(t, name, kill.killed_at) - kill.killed_at)
    return capacity, disturbed


def undisturbed_rate(t: Tally, name: str, status: Mapping[str, Any], speeds: Mapping[str, float]) -> float:
    """Tokens/s when nothing disturbs: the pace it was set, or what it measured when it runs free."""
    assert t.config is not None
    lives = [s for s in t.seen.values() if s.learner == name and s.step]
    per_step = sum(s.tokens for s in lives) / max(1, sum(s.step for s in lives))
    measured = status["learners"].get(name, {}).get("step_s", 0.0)
    step_s = t.config.learner.step_s / speeds.get(name, 1.0) or measured
    return per_step / step_s if step_s else 0.0


def back_at(t: Tally, name: str, killed_at: float) -> float:
    """When the learner's next process said hello, or the end: what it takes after that counts as ours."""
    back = min((life.at for life in t.lives if life.learner == name and life.at > killed_at), default=end_of(t))
    return min(back, end_of(t))


def end_of(t: Tally) -> float:
    """When the budget was spent, or as far as the run got."""
    return t.closing_at or (t.commits[-1].at if t.commits else t.training_at or 0.0)


def _train_s(t: Tally) -> float:
    """From the first step to the end of the budget, the syncer's own absence included."""
    return 0.0 if t.training_at is None else _unpaused_s(t, t.training_at, end_of(t))


def _unpaused_s(t: Tally, start: float, end: float) -> float:
    """Seconds from start to end without the operator's pauses."""
    return end - start - sum(max(0.0, min(end, b) - max(start, a)) for a, b in t.pauses)


def _learner(t: Tally, name: str, speed: float) -> dict[str, Any]:
    rows = [(row, weight) for c in t.commits for row, weight in _weighted(c)]
    mine = [(row, weight) for row, weight in rows if row.learner == name]
    total = sum(weight for _, weight in rows)
    return {
        "speed": speed,
        "lives": max(life for who, life in t.seen if who == name),
        "steps": sum(s.step for s in t.seen.values() if s.learner == name),
        "merges_share": len(mine) / len(t.commits) if t.commits else 0.0,
        "weight_share": sum(weight for _, weight in mine) / total if total else 0.0,
        "tokens_merged": _share(sum(row.tokens for row, _ in mine), t.fragment_count),
        "step_gap_s_max": max(s.step_gap_s_max for s in t.seen.values() if s.learner == name),
    }


def _steps_max(c: Committed) -> int:
    """Steps of the fastest contributor since its last merge of this fragment: H as it turned out."""
    return max(row.steps for row in c.rows if row.fate == MERGED)


def _weighted(c: Committed) -> list[tuple[Row, float]]:
    return list(zip([row for row in c.rows if row.fate == MERGED], c.weights, strict=True))


def _share(units: int, fragments: int) -> int | float:
    """Tokens as people count them; an integer where it is one."""
    return units // fragments if units % fragments == 0 else units / fragments


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
