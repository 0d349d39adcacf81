"""A fleet over days: what share of it does useful steps, and what share of the time anything steps at all.

As the paper defines them (arXiv 2604.21428): *goodput* is the share of the allocated capacity spent on useful steps, a
step with fewer slices counting for less; *uptime* the share of the time the run is stepping. Chips fail as Poisson
processes and take their whole slice with them; it returns after an exponentiated-Weibull delay (`kernel.spells`).

Three things the paper leaves out: learners that differ (chips, slices, failure rates, speeds), capacity that is there
at night only, and regions that fail as a whole. Where a quorum makes learners wait, two time scales are taken apart:
waiting from step to step (`rounds`), and standing still while fewer than K learners step at all (here).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from skerry.plan.fleet import kernel
from skerry.plan.fleet.kernel import Array
from skerry.plan.fleet.rounds import STEPS, Rounds, draws_of, simulate_rounds
from skerry.stats import half_width

DAY_S = 86_400.0
QUANTILES = 1 << 16  # of the repair delay: a slice's is one of them, all equally likely
FAILURE_S, RIGID_FAILURE_S = 3e-7, 2.5e-8  # what simulating one of each takes, measured on one core
LEARNER_S, ABSENCE_S, STEP_S = 5e-6, 1e-6, 2e-6  # likewise; a step is one of `rounds`
REPAIR_POWER, REPAIR_SHAPE = 2.0, 0.8  # of the exponentiated Weibull; its scale follows from the mean


@dataclass(frozen=True)
class Costs:
    """The constants the paper chose and did not print; the defaults are fitted to its Table 1 (`paper.fit`)."""

    step_s: float = 6.667
    restart_s: float = 83.86
    reconfigure_s: float = 11.41  # each downscale, and each upscale
    repair_s: float = 2396.0  # mean


@dataclass(frozen=True)
class Fleet:
    """Learners, each with its own chips, and what they have in common."""

    chips: tuple[float, ...]
    slice_chips: tuple[float, ...]
    mtbi_s: tuple[float, ...]  # of a chip
    speeds: tuple[float, ...]
    is_rigid: bool = False
    checkpoint_s: float = 0.0  # between checkpoints a rigid learner falls back to; 0: it loses nothing
    costs: Costs = Costs()
    quorum: int = 1
    grace: float = 0.0
    speed_variance: float = 0.0
    at_night: int = 0  # learners, the last ones, that are only there at night
    night_s: float = 0.0  # of each day
    regions: int = 0  # the learners are spread over, that fail as a whole
    region_mtbi_s: float = math.inf
    region_repair_s: float = 0.0

    @property
    def learners(self) -> int:
        return len(self.chips)

    @property
    def waits(self) -> bool:
        return bool(self.quorum > 1 or self.grace or self.speed_variance or len(set(self.speeds)) > 1)

    @property
    def pause_s(self) -> float:
        return self.costs.restart_s if self.is_rigid else self.costs.reconfigure_s


def even_fleet(
    chips: float, learners: int, slice_chips: float = 256.0, mtbi_s: float = 365.25 * DAY_S, *, is_rigid: bool = False,
    costs: Costs | None = None,
) -> Fleet:  # fmt: skip
    """Whole slices, shared out as evenly as they go."""
    slices = round(chips / slice_chips)
    shares = [slices // learners + (m < slices % learners) for m in range(learners)]
    return Fleet(
        chips=tuple(slice_chips * share for share in shares),
        slice_chips=(slice_chips,) * learners,
        mtbi_s=(mtbi_s,) * learners,
        speeds=(1.0,) * learners,
        is_rigid=is_rigid,
        costs=costs or Costs(),
    )


@dataclass(frozen=True)
class Interval:
    """A mean over trials, and where it lies with 95 % confidence."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """One number a trial each."""

    goodput: Array
    uptime: Array
    relative_time: Array  # for the same work, of what those that are always there need alone
    failures: Array
    rounds: Rounds


def interval(values: Array) -> Interval:
    """Of the mean of at least two trials."""
    mean, half = float(values.mean()), half_width(values.tolist())
    assert half is not None
    return Interval(mean, mean - half, mean + half)


@cache
def _repairs() -> Array:
    """Delays with mean 1: the quantiles of (1 - exp(-t^shape))^power."""
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    delays = (-np.log1p(-(shares ** (1 / REPAIR_POWER)))) ** (1 / REPAIR_SHAPE)
    return np.asarray(delays / delays.mean())


def simulate(fleet: Fleet, days: float, trials: int, seed: int = 0, told: Callable[[], None] = lambda: None) -> Outcome:
    """`told` hears of every learner of every trial that is done."""
    total_s = days * DAY_S
    rounds = (
        simulate_rounds(fleet.speeds, fleet.speed_variance, fleet.quorum, fleet.grace, seed)
        if fleet.waits
        else Rounds(1.0, 1.0, float(fleet.learners))
    )
    trial = _Trial(fleet, total_s)
    columns = zip(*(trial.run(seed, number, told) for number in range(trials)), strict=True)
    goodput, uptime, relative_time, failures = (np.array(column) for column in columns)
    return Outcome(goodput * rounds.useful, uptime, relative_time, failures, rounds)


def needs(fleet: Fleet, days: float, trials: int) -> tuple[float, float]:
    """(seconds, bytes) the trials of a simulation take, roughly; the bytes at most."""
    total_s = days * DAY_S
    failures = _failures(fleet, total_s)
    outages = total_s / fleet.region_mtbi_s if fleet.regions else 0.0
    absences = (days if fleet.at_night else 0.0) + outages
    seconds = sum(failures) * (RIGID_FAILURE_S if fleet.is_rigid else FAILURE_S) * (1.5 if fleet.quorum > 1 else 1.0)
    seconds = trials * (seconds + fleet.learners * (LEARNER_S + ABSENCE_S * absences))
    stops = [_stops_max(fleet, total_s, n) for n in failures]
    slices = max(chips / size for chips, size in zip(fleet.chips, fleet.slice_chips, strict=True))
    kept = 56 * max(stops) + 8 * min(slices, _most(max(failures))) + (150 * sum(stops) if fleet.quorum > 1 else 0)
    return seconds, kept + (fleet.regions * 16 + 500) * outages


def rounds_s(fleet: Fleet) -> float:
    """What simulating its rounds takes, once for all trials."""
    return STEP_S * draws_of(fleet.learners) * fleet.learners * STEPS if fleet.waits else 0.0


def _failures(fleet: Fleet, total_s: float) -> list[float]:
    """Each learner's, as expected of it whole."""
    return [chips / mtbi_s * total_s for chips, mtbi_s in zip(fleet.chips, fleet.mtbi_s, strict=True)]


def _most(expected: float) -> int:
    """Failures; one trial in 10^20 has more."""
    return int(expected + 10 * math.sqrt(expected) + 50)


def _stops_max(fleet: Fleet, total_s: float, failures: float) -> int:
    """A stop has a failure, a return or an absence behind it; between two lies a step, or a pause is in the second."""
    in_time = total_s / fleet.costs.step_s + (total_s / fleet.pause_s if fleet.pause_s else 0.0)
    absences = (total_s / DAY_S + 1 if fleet.at_night else 0) + _outages_max(fleet, total_s)
    return int(min(2 * _most(failures), in_time + 10) + 2 * absences)


def _outages_max(fleet: Fleet, total_s: float) -> int:
    return int(10 + 10 * total_s / fleet.region_mtbi_s) if fleet.regions else 0


class _Trial:
    """What all trials of a fleet share, and room for one of them."""

    def __init__(self, fleet: Fleet, total_s: float) -> None:
        self.fleet, self.total_s = fleet, total_s
        self.slices = [max(1, round(c / s)) for c, s in zip(fleet.chips, fleet.slice_chips, strict=True)]
        self.rates = [s / mtbi for s, mtbi in zip(fleet.slice_chips, fleet.mtbi_s, strict=True)]
        self.weights = [n * s * speed for n, s, speed in zip(self.slices, fleet.slice_chips, fleet.speeds, strict=True)]
        self.days_away = _days(fleet, total_s)
        day_s = float((self.days_away[:, 1] - self.days_away[:, 0]).sum())
        self.resident = fleet.learners - fleet.at_night
        self.allocated_s = sum(
            weight * (total_s - (day_s if m >= self.resident else 0.0)) for m, weight in enumerate(self.weights)
        )
        self.repairs_s = _repairs() * fleet.costs.repair_s
        expected = max(n * rate for n, rate in zip(self.slices, self.rates, strict=True)) * total_s
        room = _stops_max(fleet, total_s, expected)
        self.outages_max = _outages_max(fleet, total_s)
        # What is missing has failed in this trial: a fleet of 10^10 slices loses a few of them in a minute.
        self.heap = np.empty(min(max(self.slices), _most(expected)) + 1)
        self.widths = np.empty(room + 1)
        self.downs, self.all_down, self.other = (np.empty((room, 2)) for _ in range(3))

    def run(self, seed: int, number: int, told: Callable[[], None]) -> tuple[float, float, float, int]:
        """(goodput, uptime, relative time, failures) of one trial."""
        fleet, costs = self.fleet, self.fleet.costs
        seeds = np.random.SeedSequence([seed, number]).generate_state(fleet.learners + 1, np.uint64)
        outages = self._outages(np.random.default_rng(seeds[-1]))
        all_down = np.array([[0.0, self.total_s]])
        spells = []
        useful, failures = [], 0
        for m in range(fleet.learners):
            away = outages[m % fleet.regions] if fleet.regions else _NEVER
            if m >= self.resident:
                away = _either(away, self.days_away)
            stops, useful_s, failed = kernel.spells(
                seeds[m], self.total_s, self.slices[m], self.rates[m], costs.step_s,
                fleet.pause_s, fleet.is_rigid, fleet.checkpoint_s,
                self.repairs_s, away, self.heap, self.downs, self.widths,
            )  # fmt: skip
            assert stops < len(self.widths), "more stops than there is room for"
            failures += failed
            useful.append(useful_s * self.weights[m])
            if fleet.quorum > 1:
                spells.append((self.downs[:stops].copy(), self.widths[: stops + 1] * self.weights[m]))
            count = kernel.together(all_down, self.downs[:stops], self.other)
            all_down, self.all_down, self.other = self.other[:count], self.other, self.all_down
            told()
        stalled_s = float((all_down[:, 1] - all_down[:, 0]).sum())
        lost = 0.0
        if fleet.quorum > 1:
            stalled_s, lost = _stalled(spells, fleet.quorum, self.total_s)
        done = sum(useful)
        alone = sum(useful[: self.resident])
        return (done - lost) / self.allocated_s, 1 - stalled_s / self.total_s, alone / done if done else 1.0, failures

    def _outages(self, source: np.random.Generator) -> list[Array]:
        """(from, until) of each region's outages."""
        fleet = self.fleet
        found = []
        for _ in range(fleet.regions):
            up_s = source.exponential(fleet.region_mtbi_s, self.outages_max)
            down_s = source.exponential(fleet.region_repair_s, self.outages_max)
            ends = np.cumsum(up_s + down_s)
            spans = np.stack([ends - down_s, ends], axis=1)
            found.append(spans[spans[:, 0] < self.total_s])
        return found


_NEVER = np.empty((0, 2))


def _days(fleet: Fleet, total_s: float) -> Array:
    """(from, until) of the days; a run begins in the morning."""
    if not fleet.at_night:
        return _NEVER
    starts = np.arange(math.ceil(total_s / DAY_S)) * DAY_S
    return np.minimum(np.stack([starts, starts + DAY_S - fleet.night_s], axis=1), total_s)


def _either(a: Array, b: Array) -> Array:
    """The spans of two lists, joined where they touch, in order of time."""
    joined: list[list[float]] = []
    for start, end in sorted([*a.tolist(), *b.tolist()]):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return np.array(joined).reshape(-1, 2)


def _stalled(spells: Sequence[tuple[Array, Array]], quorum: int, total_s: float) -> tuple[float, float]:
    """Seconds in which fewer than `quorum` learners stepped, and what the others did in them for nothing."""
    times, ups, paces = [np.array([0.0])], [np.array([len(spells)])], [np.array([sum(w[0] for _, w in spells)])]
    for downs, widths in spells:
        times += [downs[:, 0], downs[:, 1]]
        ups += [np.full(len(downs), -1), np.full(len(downs), 1)]
        paces += [-widths[:-1], widths[1:]]
    order = np.argsort(np.concatenate(times), kind="stable")
    at = np.append(np.concatenate(times)[order], total_s)
    seconds = np.diff(at)
    is_stalled = np.cumsum(np.concatenate(ups)[order]) < quorum
    pace = np.cumsum(np.concatenate(paces)[order])
    return float(seconds[is_stalled].sum()), float((seconds * pace)[is_stalled].sum())
