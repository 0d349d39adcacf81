"""Unequal learners in one run: how long they wait for one another, and how many come together in a merge.

The paper's learners wait where K demands it, so its Table 5 can be computed: after every step a learner sends a
fragment; a round takes one from each learner that has one waiting, as soon as K of them have, and once the grace window
is over; whoever has stepped `overlap` steps past a fragment that is not merged stands still. The window is a share of a
step of the fastest learner, so that rounds keep up with it and nobody waits. Skerry's own learners never wait (K delays
merges, not steps): for them the useful share is 1, and what K and the window change is who is in a merge.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

DRAWS, DRAWS_MIN = 80, 8  # of the learners' speeds
DRAWN = 80 * 64  # speeds: of more learners fewer draws, for many learners are a mean already
STEPS = 150  # of the fastest learner's (before the draw) in each,
WARM = 50  # of which these go by until whoever is to wait waits
OVERLAP = 2  # steps between a fragment's sending and its use: the paper's


@dataclass(frozen=True)
class Rounds:
    """What a run without failures comes to, a mean over draws of the speeds."""

    useful: float  # share of the capacity, each learner counted by its speed, that did not wait
    contributors: float  # in a merge
    merges_per_step: float  # of the fastest learner


def draws_of(learners: int) -> int:
    return min(DRAWS, max(DRAWS_MIN, DRAWN // learners))


@cache  # fleets that differ in size alone wait alike
def simulate_rounds(speeds: tuple[float, ...], variance: float, quorum: int, grace: float, seed: int = 0) -> Rounds:
    """Each learner's speed is drawn once, within ± `variance` of the given one, all equally likely."""
    source = random.Random(seed)
    count, fastest = draws_of(len(speeds)), max(speeds)
    draws = [
        _run([speed / fastest * source.uniform(1 - variance, 1 + variance) for speed in speeds], quorum, grace, source)
        for _ in range(count)
    ]
    useful, merges, merged = (sum(column) for column in zip(*draws, strict=True))
    return Rounds(useful / count, merged / max(1, merges), merges / (count * STEPS))


def _run(speeds: Sequence[float], quorum: int, grace: float, source: random.Random) -> tuple[float, int, int]:
    """(useful share, merges, contributions merged) of one draw."""
    count = len(speeds)
    window_s = grace / max(speeds)
    events = [(source.random() / speed, m) for m, speed in enumerate(speeds)]  # ends of steps
    heapq.heapify(events)
    waiting = [0] * count  # fragments of each learner that no round has taken
    ready: set[int] = set()  # those that have one
    stopped: dict[int, float] = {}  # since when
    merges = merged = 0
    lost, close_at = 0.0, math.inf
    while True:
        now, m = min(events[0] if events else (math.inf, -1), (close_at, -1))
        if now >= STEPS:
            break
        if m < 0:
            taken = sorted(ready)
            merges, merged, close_at = merges + 1, merged + len(taken), math.inf
            for other in taken:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.remove(other)
                if other in stopped:
                    lost += speeds[other] * max(0.0, now - max(WARM, stopped.pop(other)))
                    heapq.heappush(events, (now + 1 / speeds[other], other))
        else:
            heapq.heappop(events)
            waiting[m] += 1
            ready.add(m)
            if waiting[m] > OVERLAP:
                stopped[m] = now
            else:
                heapq.heappush(events, (now + 1 / speeds[m], m))
        if len(ready) == count:
            close_at = now
        elif len(ready) >= quorum and close_at == math.inf:
            close_at = now + window_s
    lost += sum(speeds[m] * (STEPS - max(WARM, since)) for m, since in stopped.items())
    return 1 - lost / ((STEPS - WARM) * sum(speeds)), merges, merged
