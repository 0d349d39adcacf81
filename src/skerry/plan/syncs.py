"""A concrete run on concrete links: what each sync takes, what H becomes, and how much of the work is merged.

For learner m with steps of T_m seconds, a link of B_m bit/s each way and a round trip of r_m; K is the quorum and T_K
the K-th fastest learner's step. b = ceil(P / H) fragments leave at one boundary; `up` and `down` are the bytes of the b
largest of them, in their codecs.

    sync_m   = r + 8 up / B + merges + 8 down / B       from the snapshot until the new version can be adopted
    fits     : sync_m <= tau T_m                        else the version adopted is older than tau steps; nobody waits
    cycle_m  = 8 max(up, down of all fragments) / B     the least time in which the link carries every fragment once
    merging  = sum of all fragments' merges             the syncer merges in one thread, MERGE_NS an element
    wait     = T_K K / (M + 1)                          a snapshot is taken at a boundary: the K-th of M in a step
    trip     = wait + K-th least (r + 8 up / B) + grace from asking a quorum to the merge
    period   = max(H T_K + wait, K-th least cycle, merging, trip)
    H_effective = period / T_K                          period is the time between two merges of a fragment
    known_m  = 2 r + 8 (up + down) / B                  until it may be asked again: pull, contribution, version, report

A late link makes no period longer than that: who would miss a round is asked ahead of it. Where `known` is longer than
the period, learners take turns. Three short real runs, H by the rate of merges and by the steps in a contribution:
where steps are the bound, planned 4.4, measured 4.3 and 4.9; 16.4, 16.5 and 16.5 (`wait` was chosen with this run in
view); on links 70 % full, planned before, 16.4, 16.0 and 15.5. Full links do worse (planned 28, measured 46 and 38), so
there it is a lower bound; why was not isolated. Late links are in docs/PLAN.md: `trip` and `known` were written with
those runs in view.

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
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import Layout, split
from skerry.config import Config
from skerry.core.quorum import grace_s, quorum_size
from skerry.core.schedule import pace_s, rounds_open_max
from skerry.plan.bandwidth import Period

# One thread of a busy two-core machine and its disk, 8 M elements: 46 and 57 for the outer step, the delta, two hashes
# and the file; 1.1 and 1.3 a contribution, looked through and added.
MERGE_NS = 50.0  # an element of a merged fragment
CONTRIBUTION_NS = 1.2  # and of each contribution to it


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

    @property
    def quorum(self) -> int:
        return quorum_size(self.config.sync.quorum, len(self.islands))

    @property
    def step_s(self) -> float:
        """The K-th fastest learner's step."""
        return sorted(i.step_s for i in self.islands)[self.quorum - 1]

    @property
    def pace_s(self) -> float:
        """Of a step that H counts."""
        found = pace_s([i.step_s for i in self.islands], self.quorum)
        assert found is not None, "a quorum of more than all learners"
        return found

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
    known_s: float
    behind: float  # versions, where its link is too slow for the deltas; else 0

    @property
    def steps(self) -> float:
        """That the learner makes meanwhile."""
        return self.sync_s / self.island.step_s


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
        return max(self.period_s * max(1.0, sync.behind), sync.cycle_s, sync.known_s)


def sizes_of(plan: RunPlan) -> list[int]:
    return [fragment.size for fragment in split(plan.layout, plan.config.sync.num_fragments)]


def stretch(plan: RunPlan, sizes: Sequence[int], period: Period) -> Stretch:
    sync, wire, learners = plan.config.sync, plan.config.wire, len(plan.islands)
    every, delay, count = period.sync_every, sync.fragment_sync_delay, len(sizes)
    burst = min(count, math.ceil(count / every))
    at_once = sorted(sizes)[-burst:]
    merge_s = 1e-9 * (MERGE_NS + CONTRIBUTION_NS * learners)
    up, down = (8 * sum(payload_bytes(c, s) for s in at_once) for c in (wire.codec_up, wire.codec_down))
    whole = 8 * max(sum(payload_bytes(c, s) for s in sizes) for c in (wire.codec_up, wire.codec_down))
    step_s = plan.step_s

    def kth(values: Sequence[float]) -> float:
        return sorted(values)[plan.quorum - 1]

    rates = [plan.rate(i) for i in plan.islands]
    took = [i.rtt_s + (up + down) / b + merge_s * sum(at_once) for i, b in zip(plan.islands, rates, strict=True)]
    wait_s = step_s * plan.quorum / (learners + 1)
    quorum_s = wait_s + kth([i.rtt_s + up / b for i, b in zip(plan.islands, rates, strict=True)])
    adopted_s = kth([i.step_s / 2 + t - up / b for i, b, t in zip(plan.islands, rates, took, strict=True)])
    window = grace_s(sync.grace, delay, step_s, quorum_s, adopted_s)
    rounds = rounds_open_max(delay, count, every)
    bounds = {
        "steps": every * plan.pace_s + wait_s,
        "links": kth([whole / rate for rate in rates]),
        "syncer": merge_s * sum(sizes),
        "trips": quorum_s + window,
    }
    period_s = max(bounds.values())
    syncs = []
    for island, rate, sync_s in zip(plan.islands, rates, took, strict=True):
        cycle_s = whole / rate
        behind = 32 * sum(sizes) / rate / period_s if cycle_s > period_s * (1 + 1e-9) else 0.0
        fits, load = sync_s <= delay * island.step_s, cycle_s / (every * plan.pace_s)
        known_s = 2 * island.rtt_s + (up + down) / rate
        syncs.append(Sync(island, up / rate, down / rate, sync_s, fits, load, cycle_s, known_s, behind))
    return Stretch(period, burst, rounds, window, bounds, tuple(syncs))


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
