"""What happened to a real run, read from its tape: when whose processes lived, how long steps took, what links did.

Measurements and faults only. What the run made of them (rounds, merges, who took part) is what a twin in virtual time
has to find out by itself (`twin.py`). Times are seconds since the first syncer started.

A life ends at the kill that was injected into it; where none was, when its link was lost for good, or when the next one
began. A learner's next process is there when it said hello: how long a process takes to start is the machine's affair.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, get_args

import msgspec
from msgspec import Struct

from skerry import config as configs
from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import Fragment
from skerry.core.facts import Decision, EpochStarted, Fact, Injected, LifeStarted, RunCreated, Sample, Sampled
from skerry.core.ledger import MERGED
from skerry.core.messages import FULL
from skerry.core.vocabulary import Stage
from skerry.engines.supervisor import LOCAL, Local
from skerry.errors import MeasurementError
from skerry.proof.chaos.plan import ENDS_PROCESS
from skerry.proof.chaos.report import REPORT
from skerry.run.delays import NONE, Delays, delays_of
from skerry.run.facts import Stamped, facts_of, first_segment, fragments_of
from skerry.run.sense import sensible
from skerry.run.tally import Tally, end_of
from skerry.store.store import Store

LATENCY_S = 0.001  # of a link no fault delays: the tape does not say
CUTS = ("drop", "corrupt", "truncate")
STOP_SHARE = 0.9  # a step that took so much of a stop was stopped
Span = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Life:
    learner: str
    number: int
    begins: float
    ends: float


@dataclass(frozen=True)
class Window:
    """A few seconds of one learner, as sampled."""

    until: float
    step_s: tuple[float, ...]
    up_s_per_byte: float
    down_s_per_byte: float


@dataclass
class Measurements:
    config: configs.Config
    fragments: tuple[Fragment, ...]
    tally: Tally
    lives: list[Life] = field(default_factory=list)
    windows: dict[str, list[Window]] = field(default_factory=dict)
    steps: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # (learner, life) -> its steps' times
    step_tokens: dict[str, int] = field(default_factory=dict)
    syncer_away: list[Span] = field(default_factory=list)
    faults: list[Injected] = field(default_factory=list)  # their times since the start
    rates: dict[str, float] = field(default_factory=dict)  # tokens/s of each learner while nothing disturbs it
    delays: Delays = NONE

    @property
    def sizes(self) -> list[int]:
        return [fragment.size for fragment in self.fragments]

    def spans(self, target: str, *kinds: str) -> list[Span]:
        return [(f.at, f.until) for f in self.faults if f.target == target and f.kind in kinds]

    def worst(self, learner: str, kind: str, now: float) -> float:
        """The number of a fault that is on: seconds of delay, or Mbit/s."""
        on = [f for f in self.faults if f.target == learner and f.kind == kind and f.at <= now < f.until]
        return max((float(f.detail.split()[1]) for f in on), default=0.0)

    def blocked_until(self, learner: str, way: str, now: float) -> float:
        """When a link that carries nothing this way now does so again; now if it does."""
        spans = self.spans(learner, "partition")
        spans += [(f.at, f.until) for f in self.faults
                  if f.target == learner and f.kind == "half_open" and way in f.detail]  # fmt: skip
        return max((until for at, until in spans if at <= now < until), default=now)

    def step_s(self, life: Life, number: int, now: float, source: random.Random) -> float:
        """What this step of the run took; what one about then took, if the run did not get so far."""
        measured = self.steps.get((life.learner, life.number), ())
        return measured[number] if number < len(measured) else source.choice(self._window(life.learner, now).step_s)

    def size(self, codec: str, fragment: int, base_version: int) -> int:
        """Bytes of a payload as the run had it."""
        return payload_bytes("fp32" if base_version == FULL else codec, self.fragments[fragment].size)

    def s_per_byte(self, learner: str, way: str, now: float) -> float:
        """Of a link: as measured about then, or as a fault narrows it."""
        window = self._window(learner, now)
        measured = window.up_s_per_byte if way == "up" else window.down_s_per_byte
        mbit = self.worst(learner, "bandwidth", now)
        return max(measured, 8e-6 / mbit) if mbit else measured

    def _window(self, learner: str, now: float) -> Window:
        mine = self.windows[learner]
        return next((window for window in mine if window.until >= now), mine[-1])

    def undisturbed_s(self, learner: str, speed: float) -> float:
        """What a step takes when nothing slows it: the pace it was set, or what was measured where it runs free."""
        windows, slow = self.windows[learner], self.spans(learner, "slow")
        calm = [s for w in windows if not any(a <= w.until < b + 10 for a, b in slow) for s in w.step_s]
        return self.config.learner.step_s / speed or statistics.median(calm or [s for w in windows for s in w.step_s])


class ChaosReport(Struct):
    """Of what skerry chaos reported: the rates it took for undisturbed."""

    rates: dict[str, float] = {}


def read(run_dir: Path) -> Measurements:
    with Store.open(run_dir, readonly=True) as store:
        if first_segment(store) > 1:
            raise MeasurementError(f"{run_dir}: its tape was pruned, and a twin needs all of it")
        facts = list(facts_of(store))
    local, report = _told(run_dir / LOCAL, Local([])), _told(run_dir / REPORT, ChaosReport())
    with sensible(lambda: f"{run_dir}/tape"):
        return measurements_of(facts, str(run_dir), local.speeds, report.rates)


def _told(file: Path, otherwise: T) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=type(otherwise)) if file.is_file() else otherwise
    except (ValueError, RecursionError) as error:
        raise MeasurementError(f"{file}: {error}: mend it, or take it away to go by the tape alone") from None


def measurements_of(
    facts: Sequence[Stamped[Fact]], where: str, speeds: Sequence[float] = (), rates: Mapping[str, float] | None = None
) -> Measurements:
    """`speeds` are those of learner-0, learner-1, …; `rates` go before what the tape says."""
    tally = Tally()
    for at, fact in facts:
        tally.take(at, fact)
    if tally.training_at is None or not tally.merges:
        raise MeasurementError(f"{where}: has no merge yet, so there is nothing to compare with")
    if tally.pauses:
        raise MeasurementError(f"{where}: was stopped and resumed by its operator; only uninterrupted runs have a twin")
    if tally.closing_at is None:
        raise MeasurementError(f"{where}: has not come to the end of its budget yet")
    if tally.orders:
        raise MeasurementError(f"{where}: was changed by its operator's orders on the way; only others have a twin")
    created = next(fact for _, fact in facts if isinstance(fact, RunCreated))
    began = tally.epochs[0].at
    measured = Measurements(configs.decode(created.config), fragments_of(created), tally)
    measured.faults = [msgspec.structs.replace(f, at=f.at - began, until=f.until - began) for f in tally.injected]
    measured.syncer_away = _absences(facts, measured.faults, began)
    measured.lives = _lives(tally, measured.faults, began)
    _measure(measured, [Stamped(at, fact) for at, fact in facts if isinstance(fact, Sampled)], began)
    for life in measured.lives:
        if not measured.windows.get(life.learner):
            raise MeasurementError(
                f"{where}: has no measured step of {life.learner} on its tape: it was there too briefly"
            )
    speed = {f"learner-{n}": one for n, one in enumerate(speeds)}
    for name, tokens in measured.step_tokens.items():
        measured.rates[name] = tokens / measured.undisturbed_s(name, speed.get(name, 1.0))
    measured.rates |= rates or {}
    measured.delays = delays_of((fact for _, fact in facts), measured.sizes)
    return measured


def _absences(facts: Sequence[Stamped[Fact]], faults: Sequence[Injected], began: float) -> list[Span]:
    """Between a syncer's end, or the last that is known of it, and the next one's start."""
    found, last = [], began
    for at, fact in facts:
        if isinstance(fact, EpochStarted) and fact.epoch > 1:
            until = at - began
            ends = [f.at for f in faults if f.target == "syncer" and f.kind in ENDS_PROCESS and f.at < until]
            found.append((max(last - began, *ends) if ends else last - began, until))
        if not isinstance(fact, Injected):
            last = at
    return found


def _lives(tally: Tally, faults: Sequence[Injected], began: float) -> list[Life]:
    found = []
    for at, life in tally.lives:
        limit = min(
            (other for other, next_ in tally.lives if next_.learner == life.learner and other > at), default=None
        )
        ends = _end(tally, faults, Stamped(at, life), limit, began)
        found.append(Life(life.learner, life.life, at - began, ends))
    return found


def _end(
    tally: Tally, faults: Sequence[Injected], life: Stamped[LifeStarted], limit: float | None, began: float
) -> float:
    until, name = (limit or end_of(tally)) - began, life.fact.learner
    kills = [f.at for f in faults if f.target == name and f.kind == "kill"]
    inside = [at for at in kills if life.at - began < at < until]
    if inside:
        return inside[0]
    seen = [one for one in tally.witnessed if one.fact.learner == name and life.at < one.at < until + began]
    if seen and seen[-1].fact.what in ("lost", "left"):
        return seen[-1].at - began
    return until if limit else float("inf")


def _measure(measured: Measurements, sampled: Iterable[Stamped[Sampled]], began: float) -> None:
    steps: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for at, fact in sampled:
        for sample in fact.samples:
            name = sample.learner
            steps[name] = steps.get(name, 0) + sample.steps
            tokens[name] = tokens.get(name, 0) + sample.tokens
            window = _window(measured, sample, at - began)
            if window.step_s:
                measured.windows.setdefault(name, []).append(window)
                # in order, and where not every step was reported the ones that were stand for the others too
                count, shown = max(sample.steps, len(window.step_s)), len(window.step_s)
                all_s = [window.step_s[n * shown // count] for n in range(count)]
                measured.steps.setdefault((name, sample.life), []).extend(all_s)
    measured.step_tokens = {name: round(tokens[name] / steps[name]) for name in steps if steps[name]}


def _window(measured: Measurements, sample: Sample, until: float) -> Window:
    stops = [b - a for a, b in measured.spans(sample.learner, "stop")]
    limit_s = STOP_SHARE * min(stops, default=float("inf"))
    return Window(
        until,
        tuple(s for s in sample.step_s if s < limit_s),
        sample.up_s / sample.up_bytes if sample.up_bytes else 0.0,
        sample.down_s / sample.down_bytes if sample.down_bytes else 0.0,
    )


def numbers(measured: Measurements, tally: Tally) -> dict[str, float]:
    """What is compared, of the run's tape and of its twin's; how the last work is cut into merges is left out."""
    per = tally.fragment_count
    train_s = end_of(tally) - (tally.training_at or 0.0)
    capacity = sum(measured.rates.values()) * train_s
    merged = [len(decision.parts) for _, decision in tally.merges if not decision.is_closing]
    return {
        "goodput": tally.merged / per / capacity,
        "merges": len(merged),
        "merges_closing": len(tally.merges) - len(merged),
        "contributors_mean": sum(merged) / max(1, len(merged)),
        "tokens_merged": tally.merged / per,
        "tokens_produced": tally.produced / per,
        "train_s": train_s,
        **_by_stage([decision for _, decision in tally.merges]),
    }


def _by_stage(merges: Sequence[Decision]) -> dict[str, float]:
    """Steps that a contribution covers and learners in a merge, in each stage of training."""
    found: dict[str, float] = {}
    for stage in get_args(Stage):
        mine = [decision for decision in merges if decision.stage == stage]
        spans = [row.steps for decision in mine for row in decision.rows if row.fate == MERGED]
        found[f"span_{stage}"] = sum(spans) / max(1, len(spans))
        found[f"contributors_{stage}"] = len(spans) / max(1, len(mine))
    return found
