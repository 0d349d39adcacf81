"""What a run under faults achieved: from its tape, on which the faults stand too, and the rates of an undisturbed twin.

Capacity is what the learners would have merged, stepping all the time at their undisturbed rate. An injected fault
takes some of it away: a killed learner's until its next process said hello, a stopped one's while it was stopped, a
slowed one's the share it was slowed by. Everything else that was not merged is ours to answer for: a cut or slow link,
a dead syncer or a full disk takes nothing from a learner.

A learner is *live* from its first step on a link until it is killed or the syncer has lost it, stops left out. One that
is merely slow or far away is live.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skerry.core.audit import Audit
from skerry.core.facts import Decision, Injected
from skerry.core.ledger import MERGED
from skerry.core.state import RunState
from skerry.core.vocabulary import Sight
from skerry.proof.chaos.plan import ENDS_PROCESS, KILLS
from skerry.run import summary
from skerry.run.facts import Stamped, entries_of
from skerry.run.tally import Tally, back_at, end_of
from skerry.store.store import Store

REPORT = "chaos.json"
NEVER = math.inf
INTERRUPTS = (*KILLS, "stop", "partition", "half_open", "drop", "corrupt", "truncate")
SYNCER_AWAY = (*ENDS_PROCESS, "stop")
STEP_GAP_S = 5.0  # beyond what its pace and its stops explain: a learner that waited
KEPT = (
    "tokens_produced", "tokens_merged", "tokens_pending", "tokens_discarded", "merges", "contributors_mean",
    "merge_gap_max_s", "learner_restarts", "syncer_restarts", "train_s", "bytes_up", "bytes_down", "refused",
)  # fmt: skip

Span = tuple[float, float]


def read(run_dir: Path) -> tuple[Tally, Audit]:
    """The whole tape, every fact of it held against the invariants."""
    tally, audit = Tally(), Audit()
    with Store.open(run_dir, readonly=True) as store:
        for at, fact in entries_of(store):
            audit.take(fact)
            if not isinstance(fact, RunState):
                tally.take(at, fact)
    return tally, audit


def rates_of(t: Tally) -> dict[str, float]:
    """Tokens/s of each learner of an undisturbed run, from its first step to the end of the budget."""
    rates = {}
    for seen in t.seen.values():
        began = min(_witnessed(t, seen.learner, "stepping"), default=NEVER)
        if seen.step > 1 and end_of(t) > began:
            rates[seen.learner] = seen.tokens * (seen.step - 1) / seen.step / (end_of(t) - began)
    return rates


def report(
    t: Tally, status: Mapping[str, Any], rates: Mapping[str, float], speeds: Mapping[str, float]
) -> dict[str, Any]:
    """The numbers; `rates` may be empty, then the set pace is the undisturbed rate."""
    numbers = summary.summarise(t, status, (), speeds)
    learners = [_learner(t, name, rates.get(name) or _undisturbed_rate(t, name, status, speeds))
                for name in sorted({name for name, _ in t.seen})]  # fmt: skip
    merged = numbers["tokens_merged"]
    capacity = sum(one.rate * one.window_s for one in learners)
    left = sum(one.rate * (one.window_s - one.taken_s) for one in learners)
    rounds = [merge for merge in t.merges if not merge.fact.is_closing]
    return {
        "faults": dict(sorted(Counter(fault.kind for fault in t.injected).items())),
        "goodput": _ratio(merged, capacity),
        "goodput_of_capacity": _ratio(merged, left),
        "live": _ratio(sum(one.live_s for one in learners), sum(one.window_s for one in learners)),
        "participation": _participation(rounds, {one.name: one.cut for one in learners}),
        "participation_undisturbed": _participation(rounds, {one.name: one.disturbed for one in learners}),
        "participation_of_ready": _ratio(
            sum(min(d.ready, len(d.parts)) for _, d in rounds), sum(d.ready for _, d in rounds)
        ),
        "merged_share": _ratio(merged, numbers["tokens_produced"]),
        "recovery_s": recoveries(t),
        "syncer_restart_to_merge_s": max(_syncer_recoveries(t, ENDS_PROCESS), default=None),
        "syncer_epoch_to_merge_s": max(_epoch_recoveries(t), default=None),
        "ledger_balance": numbers["ledger"]["balance"],
        "twin_of_pace": _twin_of_pace(t, rates, speeds),
        "step_gap_s_max": {name: one["step_gap_s_max"] for name, one in numbers["learners"].items()},
        **{key: numbers[key] for key in KEPT},
    }


def _undisturbed_rate(t: Tally, name: str, status: Mapping[str, Any], speeds: Mapping[str, float]) -> float:
    """Tokens/s when nothing disturbs: the pace it was set, or what it measured when it runs free.

    Not the pace of the run itself, as everywhere else: faults are to be held against an undisturbed one.
    """
    assert t.config is not None
    lives = [s for s in t.seen.values() if s.learner == name and s.step]
    per_step = sum(s.tokens for s in lives) / max(1, sum(s.step for s in lives))
    measured = status["learners"].get(name, {}).get("step_s", 0.0)
    step_s = t.config.learner.step_s / speeds.get(name, 1.0) or measured
    return per_step / step_s if step_s else 0.0


def _twin_of_pace(t: Tally, rates: Mapping[str, float], speeds: Mapping[str, float]) -> float:
    """What the twin reached of the pace it was set: below 1 the machine is too small, or busy with other things."""
    assert t.config is not None
    steps, tokens = sum(s.step for s in t.seen.values()), sum(s.tokens for s in t.seen.values())
    paces = sum(speeds.get(name, 1.0) for name in rates) * _ratio(tokens, steps)
    return _ratio(sum(rates.values()) * t.config.learner.step_s, paces)


# ---------------------------------------------------------------------------------------------- learners


@dataclass
class _Learner:
    """One learner over the time from the first step of the run to the end of its budget."""

    name: str
    rate: float
    window: Span
    not_live: list[Span]
    cut: list[Span]  # likewise, and while a fault of its own kept it from the others
    disturbed: list[Span]  # likewise, and while any fault of its own lasted
    taken_s: float  # by faults, at its rate

    @property
    def window_s(self) -> float:
        return self.window[1] - self.window[0]

    @property
    def live_s(self) -> float:
        return self.window_s - _length(self.not_live, self.window)


def _learner(t: Tally, name: str, rate: float) -> _Learner:
    window = (t.training_at or end_of(t), end_of(t))
    mine = [fault for fault in t.injected if fault.target == name]
    stops = [(fault.at, fault.until) for fault in mine if fault.kind == "stop"]
    deaths = [(fault.at, back_at(t, name, fault.at)) for fault in mine if fault.kind in KILLS]
    cut = [(fault.at, fault.until) for fault in mine if fault.kind in INTERRUPTS]
    not_live = [*_away(t, name, window), *stops]
    slowed_s = sum((1 - _speed(f)) * _length([(f.at, f.until)], window) for f in mine if f.kind == "slow")
    return _Learner(
        name=name,
        rate=rate,
        window=window,
        not_live=not_live,
        cut=[*not_live, *cut],
        disturbed=[*not_live, *((fault.at, fault.until) for fault in mine)],
        taken_s=_length([*stops, *deaths], window) + slowed_s,
    )


def _away(t: Tally, name: str, window: Span) -> list[Span]:
    """When it was not seen to step: from a kill or the loss of its link to the first step after it."""
    events = [(at, seen.what == "stepping") for at, seen in t.witnessed if seen.learner == name]
    events += [(fault.at, False) for fault in t.injected if fault.target == name and fault.kind in KILLS]
    spans, since = [], window[0]
    was_stepping = False
    for at, is_stepping in sorted(events):
        if is_stepping and not was_stepping:
            spans.append((since, at))
        elif was_stepping and not is_stepping:
            since = at
        was_stepping = is_stepping
    return spans if was_stepping else [*spans, (since, window[1])]


def _speed(fault: Injected) -> float:
    return float(fault.detail.removeprefix("speed "))


def _participation(rounds: Sequence[Stamped[Decision]], apart: Mapping[str, Sequence[Span]]) -> float:
    """Of the learners that were there all the time a round was open, the share that is in its merge."""
    there = together = 0
    for at, decision in rounds:
        live = {name for name, spans in apart.items() if not _touches(spans, at - decision.open_s, at)}
        there += len(live)
        together += len(live & _contributors(decision))
    return _ratio(together, there)


def _contributors(decision: Decision) -> set[str]:
    return {row.learner for row in decision.rows if row.fate == MERGED}


def _witnessed(t: Tally, name: str, what: Sight) -> list[float]:
    return [at for at, seen in t.witnessed if seen.learner == name and seen.what == what]


# ---------------------------------------------------------------------------------------------- recovery


def recoveries(t: Tally) -> dict[str, dict[str, float | None]]:
    """How long until a fault was noticed (from its beginning), and until all was well again (from its end)."""
    stages: dict[str, list[float]] = {"detected": [], "stepping": [], "merged": _syncer_recoveries(t, SYNCER_AWAY)}
    for fault in t.injected:
        if fault.target != "syncer" and fault.kind in INTERRUPTS:
            for stage, seconds in _recovery(t, fault).items():
                stages[stage].append(seconds)
    return {
        stage: {"p50": _quantile(all_s, 0.5), "p99": _quantile(all_s, 0.99), "n": len(all_s)}
        for stage, all_s in stages.items()
    }


def _recovery(t: Tally, fault: Injected) -> dict[str, float]:
    """The stages of one learner's fault; one that the next fault forestalled, or nobody noticed, is left out."""
    name = fault.target
    before = min((f.at for f in t.injected if f.target == name and f.at > fault.at), default=NEVER)
    lost = _first(_witnessed(t, name, "lost"), fault.at, before)
    back = _first((at for at, life in t.lives if life.learner == name), fault.at, NEVER)
    since = max(fault.until, lost or 0.0, back if back and fault.kind in KILLS else 0.0)
    stages = {"detected": lost - fault.at} if lost else {}
    was_cut = lost or fault.kind in KILLS or any(fault.at < at < fault.until for at, _ in t.epochs)
    if was_cut and (stepping := _first(_witnessed(t, name, "stepping"), since, before)):
        stages["stepping"] = stepping - fault.until
    if merged := _first((at for at, decision in t.merges if name in _contributors(decision)), since, before):
        stages["merged"] = merged - fault.until
    return stages


def _syncer_recoveries(t: Tally, kinds: Sequence[str]) -> list[float]:
    """From the start of the next process, or the end of a stop, to the first merge."""
    ends = [fault.until for fault in t.injected if fault.target == "syncer" and fault.kind in kinds]
    firsts = [_first((at for at, _ in t.merges), end, NEVER) for end in ends]
    return [first - end for first, end in zip(firsts, ends, strict=True) if first]


def _epoch_recoveries(t: Tally) -> list[float]:
    """The same without the start of the process: from the epochs after the first to their first merges."""
    firsts = [
        (began, next((at for at, d in t.merges if d.epoch == epoch.epoch), None)) for began, epoch in t.epochs[1:]
    ]
    return [first - began for began, first in firsts if first is not None]


def _first(times: Iterable[float], after: float, before: float) -> float | None:
    return min((at for at in times if after < at < before), default=None)


# ---------------------------------------------------------------------------------------------- violations


def violations(t: Tally, audit: Audit, run_dir: Path, crashes: Sequence[str], speeds: Mapping[str, float]) -> list[str]:
    """Whatever must not be: on the tape, in the processes, in the learners' steps, in the logs."""
    found = [*audit.violations, *crashes]
    for seen in t.seen.values():
        limit_s = _gap_limit_s(t, seen.learner, speeds.get(seen.learner, 1.0))
        if seen.step_gap_s_max > limit_s:
            found.append(
                f"{seen.learner} life {seen.life} waited: {seen.step_gap_s_max:.1f} s in a step, "
                f"where {limit_s:.1f} s can be explained"
            )
    for log in sorted((run_dir / "logs").glob("*.log")):
        if "Traceback (most recent call last)" in log.read_text(errors="replace"):
            found.append(f"a traceback in {log}")
    return found


def _gap_limit_s(t: Tally, name: str, speed: float) -> float:
    assert t.config is not None
    mine = [fault for fault in t.injected if fault.target == name]
    slowest = min((_speed(fault) for fault in mine if fault.kind == "slow"), default=1.0)
    stopped_s = max((fault.until - fault.at for fault in mine if fault.kind == "stop"), default=0.0)
    return STEP_GAP_S + t.config.learner.step_s / speed / slowest + stopped_s


# ---------------------------------------------------------------------------------------------- small things


def _length(spans: Iterable[Span], window: Span) -> float:
    """Seconds inside the window that at least one of the spans covers."""
    covered, reached = 0.0, window[0]
    for start, end in sorted(spans):
        covered += max(0.0, min(end, window[1]) - max(start, reached))
        reached = max(reached, min(end, window[1]))
    return covered


def _touches(spans: Iterable[Span], start: float, end: float) -> bool:
    return any(start <= b and a <= end for a, b in spans)


def _quantile(values: Sequence[float], share: float) -> float | None:
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
