"""What a run achieved, from its own evidence: the tape, the learners' last reports, and the supervisor's kills.

Produced comes from the positions seen, merged and discarded from the rows booked, pending from the learners' own marks:
four sources, so that their balance says something. Sums are in tokens x fragments, an integer; what people read is
divided by the number of fragments.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skerry.core.facts import Decision, Ordered, Row
from skerry.core.ledger import MERGED
from skerry.core.vocabulary import STAGES
from skerry.run.facts import Stamped
from skerry.run.history import History
from skerry.run.tally import Tally, back_at, data_parallel_bytes, end_of, steps_reached


@dataclass
class Kill:
    """A SIGKILL of `victim` once the run's progress reaches `at`; wall-clock seconds of when it happened."""

    victim: str
    at: float
    killed_at: float | None = None


def summarise(
    t: Tally, status: Mapping[str, Any], kills: Sequence[Kill], speeds: Mapping[str, float]
) -> dict[str, Any]:
    """The numbers of a run; `status` is the syncer's last one, with the learners' own marks."""
    assert t.config is not None
    per = t.fragment_count
    pending = sum(
        round(per * member["unsettled_tokens"]) for member in status["learners"].values()
    )  # whole, as marks are
    killed = {kill.victim for kill in kills if kill.killed_at is not None}
    gaps = {s.learner: s.step_gap_s_max for s in t.seen.values() if s.learner not in killed}
    steps = sum(s.step for s in t.seen.values())
    learner_count = len({s.learner for s in t.seen.values()})
    decisions = [decision for _, decision in t.merges]
    return {
        "merges": t.merges_before + len(decisions),
        "merges_alone": sum(len(d.parts) == 1 for d in decisions),
        "tokens_produced": _share(t.produced, per),
        "tokens_merged": _share(t.merged, per),
        "tokens_pending": _share(pending, per),
        "tokens_discarded": {reason: _share(n, per) for reason, n in sorted(t.discarded.items())},
        "budget": dict(status.get("budget", {})),
        "over_budget": status.get("over_budget", 0.0),
        "tokens_after_budget": {name: _share(n, per) for name, n in _after_budget(decisions).items()},
        "ledger": {
            "unit": "token x fragment",
            "produced": t.produced,
            "merged": t.merged,
            "discarded": dict(sorted(t.discarded.items())),
            "pending": pending,
            "balance": t.produced - t.merged - sum(t.discarded.values()) - pending,
        },
        "contributors_mean": _mean([len(d.parts) for d in decisions]),
        "sync_every_effective": _mean([steps_reached(d) for d in decisions if d.stage in ("steady", "cool")]),
        "stages": {stage: _stage([one for one in t.merges if one.fact.stage == stage]) for stage in STAGES},
        "merge_gap_max_s": max((_unpaused_s(t, a.at, b.at) for a, b in itertools.pairwise(t.merges)), default=0.0),
        "learner_step_gap_max_s": max(gaps.values(), default=0.0),
        "learner_restarts": t.learner_restarts,
        "syncer_restarts": t.syncer_restarts,
        "steps": steps,
        "train_s": _train_s(t),
        "bytes_up": sum(s.bytes_up for s in t.seen.values()),
        "bytes_down": sum(s.bytes_down for s in t.seen.values()),
        "bytes_data_parallel": data_parallel_bytes(t.parameters, learner_count, steps),
        "parameters": t.parameters,
        "fragments": per,
        "versions": t.versions,
        "refused": dict(status["refused"]),
        "orders": [_order(at, fact) for at, fact in t.orders],
        "curve": [{"progress": e.progress, "tokens": round(e.tokens / per), "figures": e.figures} for e in t.evaluated],
        "learners": {name: _learner(t, name, speeds.get(name, 1.0)) for name in sorted({k[0] for k in t.seen})},
    }


def goodput_of(history: History, t: Tally, kills: Sequence[Kill]) -> dict[str, float | None]:
    """As the page and the report have it, and the same of the capacity that no kill took away."""
    lost_s: dict[str, float] = {}
    for kill in kills:
        if kill.killed_at is not None:
            away_s = max(0.0, back_at(t, kill.victim, kill.killed_at) - kill.killed_at)
            lost_s[kill.victim] = lost_s.get(kill.victim, 0.0) + away_s
    return {"goodput": history.goodput(), "goodput_of_capacity": history.goodput(lost_s)}


def _order(at: float, fact: Ordered) -> dict[str, Any]:
    """What an operator ordered, who and when, and what it changed."""
    changes = {one.key: [one.before, one.after] for one in fact.changes}
    return {"at": at, "verb": fact.verb, "by": fact.by, "learner": fact.learner, "changes": changes}


def _train_s(t: Tally) -> float:
    """From the first step to the end of the budget, the syncer's own absence included."""
    return 0.0 if t.training_at is None else _unpaused_s(t, t.training_at, end_of(t))


def _unpaused_s(t: Tally, start: float, end: float) -> float:
    """Seconds from start to end without the operator's pauses."""
    return end - start - sum(max(0.0, min(end, b) - max(start, a)) for a, b in t.pauses)


def _learner(t: Tally, name: str, speed: float) -> dict[str, Any]:
    rows = [(row, weight) for _, decision in t.merges for row, weight in _weighted(decision)]
    mine = [(row, weight) for row, weight in rows if row.learner == name]
    total = sum(weight for _, weight in rows)
    return {
        "speed": speed,
        "lives": max(life for who, life in t.seen if who == name),
        "steps": sum(s.step for s in t.seen.values() if s.learner == name),
        "merges_share": len(mine) / len(t.merges) if t.merges else 0.0,
        "weight_share": sum(weight for _, weight in mine) / total if total else 0.0,
        "tokens_merged": _share(sum(row.tokens for row, _ in mine), t.fragment_count),
        "step_gap_s_max": max(s.step_gap_s_max for s in t.seen.values() if s.learner == name),
    }


def _stage(merges: Sequence[Stamped[Decision]]) -> dict[str, Any]:
    """How the rounds of a stage went: how fast, H as it was asked for and as it turned out, and who was in."""
    decisions = [decision for _, decision in merges]
    took_s = merges[-1].at - merges[0].at if merges else 0.0
    return {
        "merges": len(merges),
        "merges_per_s": (len(merges) - 1) / took_s if took_s > 0 else 0.0,
        "contributors_mean": _mean([len(d.parts) for d in decisions]),
        "sync_every": decisions[0].sync_every if decisions else 0,
        "sync_every_asked": _mean([d.every for d in decisions]),
        "sync_every_reached": _mean([steps_reached(d) for d in decisions]),
    }


def _after_budget(decisions: Sequence[Decision]) -> dict[str, int]:
    """What was merged of each learner once the budget was spent."""
    tokens: dict[str, int] = {}
    for decision in decisions:
        for row in decision.rows:
            if decision.progress >= 1 and row.fate == MERGED:
                tokens[row.learner] = tokens.get(row.learner, 0) + row.tokens
    return dict(sorted(tokens.items()))


def _weighted(decision: Decision) -> list[tuple[Row, float]]:
    merged = [row for row in decision.rows if row.fate == MERGED]
    return [(row, part.weight) for row, part in zip(merged, decision.parts, strict=True)]


def _share(units: int, fragments: int) -> int | float:
    """Tokens as people count them; an integer where it is one."""
    return units // fragments if units % fragments == 0 else units / fragments


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
