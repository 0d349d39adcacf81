"""How far the run is, which fragment is due, and how many rounds may be opened when.

H follows global progress (the policy); a fragment is due by steps, never by time, so H does not collapse on a fast
network; openings are paced so that traffic stays smooth, also after an outage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from skerry.config import Config, Run, Sync
from skerry.core.ledger import Ledger

WARM = "warm"
STEADY = "steady"


class Recipe(NamedTuple):
    """What a merge does: its rule, and the outer step."""

    rule: str
    outer: str
    lr: float
    momentum: float
    delay: int = 1
    restart: int = 0


PLAIN = Recipe("mean", "sgd", 1.0, 0.0)  # the model moves to where the learners are


def spent_at(run: Run, ledger: Ledger, elapsed_s: float) -> float:
    """Share of the budget that is spent: of the time, of the tokens produced and not discarded, or of the steps."""
    if run.minutes:
        return elapsed_s / (60 * run.minutes)
    if run.tokens:
        kept = ledger.produced - sum(ledger.discarded.values())
        return kept / (run.tokens * ledger.fragment_count)
    return ledger.steps / (run.steps * run.learners)


def phase_at(sync: Sync, progress: float) -> str:
    return WARM if sync.policy == "warm" and progress < sync.warm_share else STEADY


def recipe_of(config: Config, phase: str) -> Recipe:
    """What a merge of this phase does; momentum begins from zero at the end of the warm phase."""
    if phase != STEADY:
        return PLAIN
    outer = config.outer
    delay = outer.delay if outer.rule == "delayed" else 1
    return Recipe(config.merge.rule, outer.rule, outer.lr, outer.momentum, delay, outer.restart)


def sync_every_at(sync: Sync, progress: float) -> int:
    """H at this progress: short in the warm phase, then ramped (or jumping) to `sync_every`."""
    if sync.policy == "fixed":
        return sync.sync_every
    if progress < sync.warm_share:
        return min(sync.warm_every, sync.sync_every)
    if sync.ramp_share and progress < sync.warm_share + sync.ramp_share:
        done = (progress - sync.warm_share) / sync.ramp_share
        return round(sync.warm_every + done * (sync.sync_every - sync.warm_every))
    return sync.sync_every


def first_due(fragment: int, fragment_count: int, sync_every: int) -> int:
    """Unsettled steps at which a fragment's first round is due: staggered offsets over (0, H]."""
    return max(1, math.ceil(sync_every * (fragment + 1) / fragment_count))


def overdue(unsettled: Sequence[int], quorum: int, due_at: int) -> float:
    """How many times over a fragment is due; below 1 it is not.

    Due when K learners have `due_at` unsettled steps, or the fastest has twice that and K have at least one: else a
    slow majority stretches H tenfold. `unsettled` holds the ready learners' unsettled steps.
    """
    if len(unsettled) < quorum:
        return 0.0
    ordered = sorted(unsettled, reverse=True)
    kth, fastest = ordered[quorum - 1], ordered[0]
    led = fastest / (2 * due_at) if kth >= 1 else 0.0
    return max(kth / due_at, led)


def rounds_open_max(delay: int, fragment_count: int, sync_every: int) -> int:
    """At most ceil(tau P / H) + 1 rounds are open: those that fit under tau steps, and one."""
    return math.ceil(delay * fragment_count / sync_every) + 1


class Pacer:
    """An allowance of openings: grows by P/H per step of the K-th fastest learner, at most 2 max(1, P/H)."""

    def __init__(self) -> None:
        self.allowance = 1.0
        self._at: float | None = None

    def grow(self, now: float, step_s: float | None, fragments_per_step: float) -> None:
        """`step_s` is the K-th fastest learner's step time; nothing grows before it was measured."""
        if self._at is not None and step_s:
            steps = max(0.0, now - self._at) / step_s
            self.allowance = min(self.allowance + steps * fragments_per_step, 2 * max(1.0, fragments_per_step))
        self._at = now

    @property
    def has_any(self) -> bool:
        return self.allowance >= 1

    def take(self) -> bool:
        if not self.has_any:
            return False
        self.allowance -= 1
        return True
