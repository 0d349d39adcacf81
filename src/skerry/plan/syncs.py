"""A concrete run on concrete links: what each sync takes, what H becomes, and how much of the work is merged.

For learner m with steps of T_m seconds, a link of B_m bit/s each way and a round trip of r_m; K is the quorum and T_K
the K-th fastest learner's step. b = ceil(P / H) fragments leave at one boundary (H_effective where that is longer); n
are the parameters of the b largest of them, `up` and `down` their bytes in their codecs. `encode`, `adopt`, `inspect`,
`merge` and `commit` are what the product's own work takes (`run/delays.py`); t is merge.threads.

    merging  = (M inspect(n) + merge(n)) / min(t, b) + commit
    sync_m   = encode(n) + r + 8 up / B + merging + 8 down / B + adopt(n)     snapshot to version that can be adopted
    fits     : sync_m <= tau T_m                        else the version adopted is older than tau steps; nobody waits
    round_m  = sync_m + T_m / 2                         and the wait for a boundary, where the next snapshot is taken
    cycle_m  = 8 max(up, down of all fragments) / B     the least time in which the link carries every fragment once
    syncer   = (M inspect(N) + merge(N)) / t            the least in which its workers merge every fragment once
    period   = max(H T_K, K-th least cycle, syncer, K-th least round + grace)
    H_effective = period / T_K                          period is the time between two merges of a fragment

A round is one trip: the step at which a learner's next contribution is due comes with the version, and no message is
waited for at the boundary. A learner whose own cycle or round is longer than the period is in fewer merges; the H that
its link can carry is max(cycle_m, round_m) / T_K.

A learner whose cycle is longer than the period gets whole fragments instead of deltas (it soon lacks more of them than
store.deltas_kept): 32 N / B seconds for all. Where that is more than sync.stale_versions_max periods it gives its work
up each time, and its goodput is 0.

Goodput: the share of all learners' time, weighted by their speed, whose work is merged. With a failure every F seconds
of a learner's life, gone for R:

    goodput_m = (F − lost) / (F + R + join)     lost = period_m / 2 + T_m / 2 + 8 up / B, join = 32 N / B + r

What is lost is what no contribution had brought to the syncer, on average half a period; a learner that comes back
loads the whole model in float32 first. A missing quorum loses nothing: work waits. Without a failure rate only learners
that can never keep up count.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import Layout, split
from skerry.config import Config
from skerry.core.quorum import grace_s, quorum_size
from skerry.core.schedule import pace_s
from skerry.plan.bandwidth import Period
from skerry.plan.needs import State
from skerry.run.delays import MEASURED, Delays


class Island(NamedTuple):
    """One learner and its link, the same rate each way."""

    name: str
    step_s: float
    rate: float  # bit/s
    rtt_s: float


class Failures(NamedTuple):
    every_s: float  # of a learner's life
    repair_s: float


class RunPlan(NamedTuple):
    config: Config
    layout: Layout
    islands: tuple[Island, ...]
    failures: Failures | None = None
    syncer_rate: float = math.inf  # bit/s each way, shared by all learners
    delays: Delays = MEASURED
    state: State = "host"  # where learners have theirs
    fixed_bytes: int = 0  # of the model, that are not trained

    @property
    def quorum(self) -> int:
        return quorum_size(self.config.sync.quorum, len(self.islands))

    @property
    def step_s(self) -> float:
        """The K-th fastest learner's step."""
        return self.kth(i.step_s for i in self.islands)

    @property
    def pace_s(self) -> float:
        """Of a step that H counts."""
        found = pace_s([i.step_s for i in self.islands], self.quorum)
        assert found is not None, "a quorum of more than all learners"
        return found

    def kth(self, values: Iterable[float]) -> float:
        """Of the learners' values the K-th least: what a quorum has."""
        return sorted(values)[self.quorum - 1]

    def workers_s(self, parameters: int) -> float:
        """Of the syncer's workers in all, to look through everybody's contributions to these and merge them."""
        return len(self.islands) * self.delays.inspect_s(parameters) + self.delays.merge_s(parameters)

    def rate(self, island: Island) -> float:
        """Of its payloads; where the run bounds them, the lower bound of the two counts for both ways."""
        wire = self.config.wire
        bounds = [1e6 * mbit for mbit in (wire.mbit_max_up, wire.mbit_max_down) if mbit]
        return min(island.rate, self.syncer_rate / len(self.islands), *bounds)


class Sync(NamedTuple):
    """One learner in one period of the run."""

    island: Island
    up_s: float
    down_s: float
    sync_s: float
    fits: bool
    load: float  # of its link
    cycle_s: float
    round_s: float
    behind: float  # versions, where its link is too slow for the deltas; else 0

    @property
    def steps(self) -> float:
        """That the learner makes meanwhile."""
        return self.sync_s / self.island.step_s

    @property
    def transfer_s(self) -> float:
        """Of a round: payloads on the link, up and down."""
        return self.up_s + self.down_s

    @property
    def carried_s(self) -> float:
        """The least time between two of its contributions to a fragment."""
        return max(self.cycle_s, self.round_s)


class Stretch(NamedTuple):
    """One period of the run: how its merges go."""

    period: Period
    burst: int
    rounds: int
    grace_s: float
    bounds: dict[str, float]  # seconds between two merges of a fragment, by what would make it so long
    syncs: tuple[Sync, ...]

    @property
    def period_s(self) -> float:
        return max(self.bounds.values())

    @property
    def limit(self) -> str:
        return max(self.bounds, key=lambda name: (self.bounds[name], name == "steps"))

    def period_of(self, sync: Sync) -> float:
        """Of one learner: between two merges of a fragment that it is in."""
        return max(self.period_s * max(1.0, sync.behind), sync.carried_s)


def sizes_of(plan: RunPlan) -> list[int]:
    sync = plan.config.sync
    return [fragment.size for fragment in split(plan.layout, sync.num_fragments, sync.cut_tensors)]


class _Round(NamedTuple):
    """The largest fragments of a plan, so many at one boundary: there, merged and back."""

    burst: int
    up: int  # bits
    down: int
    merging_s: float
    sent_s: list[float]  # by learner: from its snapshots until they are at the syncer,
    back_s: list[float]  # and from the commits until they can be adopted

    @property
    def syncs_s(self) -> list[float]:
        return [sent_s + self.merging_s + back_s for sent_s, back_s in zip(self.sent_s, self.back_s, strict=True)]


def stretch(plan: RunPlan, sizes: Sequence[int], period: Period) -> Stretch:
    sync, wire, count = plan.config.sync, plan.config.wire, len(sizes)
    whole = 8 * max(sum(payload_bytes(c, s) for s in sizes) for c in (wire.codec_up, wire.codec_down))
    bounds = {
        "steps": period.sync_every * plan.pace_s,
        "links": plan.kth(whole / plan.rate(i) for i in plan.islands),
        "syncer": plan.workers_s(sum(sizes)) / min(plan.config.merge.threads, count),
    }
    round_ = _round(plan, sizes, _burst(plan, sizes, max(bounds.values())))
    halves = [i.step_s / 2 for i in plan.islands]  # the wait for a boundary
    adopted_s = plan.kth(back_s + half_s for back_s, half_s in zip(round_.back_s, halves, strict=True))
    sent_s, fetched_s = plan.kth(round_.sent_s), round_.merging_s + adopted_s
    window = grace_s(sync.grace, sync.fragment_sync_delay, plan.step_s, sent_s, fetched_s)
    rounds_s = [sync_s + half_s for sync_s, half_s in zip(round_.syncs_s, halves, strict=True)]
    bounds["trips"] = plan.kth(rounds_s) + window
    period_s = max(bounds.values())
    syncs = []
    for island, sync_s, round_s in zip(plan.islands, round_.syncs_s, rounds_s, strict=True):
        rate = plan.rate(island)
        cycle_s = whole / rate
        behind = 32 * sum(sizes) / rate / period_s if cycle_s > period_s * (1 + 1e-9) else 0.0
        fits, load = sync_s <= sync.fragment_sync_delay * island.step_s, cycle_s / bounds["steps"]
        syncs.append(Sync(island, round_.up / rate, round_.down / rate, sync_s, fits, load, cycle_s, round_s, behind))
    rounds = min(count, math.ceil(count * max(rounds_s) / period_s) + round_.burst)  # on their way at once
    return Stretch(period, round_.burst, rounds, window, bounds, tuple(syncs))


def _round(plan: RunPlan, sizes: Sequence[int], burst: int) -> _Round:
    at_once, took, wire = sorted(sizes)[-burst:], plan.delays, plan.config.wire
    up, down = (8 * sum(payload_bytes(c, s) for s in at_once) for c in (wire.codec_up, wire.codec_down))
    encode_s, adopt_s = took.encode_s(sum(at_once)), took.adopt_s(sum(at_once))
    merging_s = plan.workers_s(sum(at_once)) / min(plan.config.merge.threads, burst) + took.commit_s
    sent_s = [encode_s + i.rtt_s / 2 + up / plan.rate(i) for i in plan.islands]
    back_s = [i.rtt_s / 2 + down / plan.rate(i) + adopt_s for i in plan.islands]
    return _Round(burst, up, down, merging_s, sent_s, back_s)


def _burst(plan: RunPlan, sizes: Sequence[int], least_s: float) -> int:
    """Fragments that leave at one boundary: P over H, and where a round of so many takes longer over that longer H."""

    def is_too_many(burst: int) -> bool:
        period_s = max(least_s, plan.kth(_round(plan, sizes, burst).syncs_s))
        return math.ceil(len(sizes) * plan.pace_s / period_s) < burst

    fewer = range(2, min(len(sizes), math.ceil(len(sizes) * plan.pace_s / least_s)) + 1)
    return 1 + bisect_left(fewer, True, key=is_too_many)


def goodput_of(plan: RunPlan, sizes: Sequence[int], at: Stretch, sync: Sync) -> float:
    if sync.behind > plan.config.sync.stale_versions_max:
        return 0.0
    if plan.failures is None:
        return 1.0
    lost = at.period_of(sync) / 2 + sync.island.step_s / 2 + sync.up_s
    life, away = plan.failures.every_s, plan.failures.repair_s + join_s(plan, sizes, sync.island)
    return max(0.0, life - lost) / (life + away)


def join_s(plan: RunPlan, sizes: Sequence[int], island: Island) -> float:
    """Until a learner that joins holds the whole model."""
    return 32 * sum(sizes) / plan.rate(island) + island.rtt_s


def goodput(plan: RunPlan, sizes: Sequence[int], stretches: Sequence[Stretch]) -> float:
    speed = sum(1 / i.step_s for i in plan.islands)
    return sum(
        at.period.share * goodput_of(plan, sizes, at, sync) / sync.island.step_s / speed
        for at in stretches
        for sync in at.syncs
    )


def quorum_share(plan: RunPlan, sizes: Sequence[int]) -> float:
    """Share of the time in which at least K learners are there; a K that is a share of them always is, with one."""
    if plan.failures is None:
        return 1.0
    chances = np.array([1.0])
    for island in plan.islands:
        away = plan.failures.repair_s + join_s(plan, sizes, island)
        there = plan.failures.every_s / (plan.failures.every_s + away)
        chances = np.convolve(chances, [1 - there, there])
    needed = plan.quorum if isinstance(plan.config.sync.quorum, int) else 1
    return float(chances[needed:].sum())
