"""How long something takes that is done again and again: counts by length, however often it is done.

Each bin ends a quarter above the one before it, so a quantile is too long by a quarter at most. Counts only grow:
whoever wants a stretch takes the difference of two looks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

FINEST_S = 1e-6  # what is shorter counts as this long
RATIO = 1.25  # of a bin's end to that of the bin before
BIN_MAX = 100  # FINEST_S x RATIO ** BIN_MAX is more than an hour: what is longer counts as that


class Durations:
    """Seconds in, counts by bin out."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, took_s: float) -> None:
        in_bin = min(BIN_MAX, math.ceil(math.log(max(took_s, FINEST_S) / FINEST_S, RATIO)))
        self.counts[in_bin] = self.counts.get(in_bin, 0) + 1


def between(before: Mapping[int, int], after: Mapping[int, int]) -> dict[int, int]:
    """The counts of a stretch, from looks at its beginning and its end."""
    return {n: after[n] - before.get(n, 0) for n in sorted(after) if after[n] > before.get(n, 0)}


def quantile(counts: Mapping[int, int], share: float) -> float:
    """The end of the bin, in seconds, by which so large a share is reached; there has to be something in it."""
    needed, reached = share * sum(counts.values()), 0
    for in_bin in sorted(counts):
        reached += counts[in_bin]
        if reached >= needed:
            break
    return float(FINEST_S * RATIO**in_bin)
