"""How far the run is, which fragment is due, how many rounds may be opened when, and what a merge does.

H follows how far the run is (the policy); a fragment is due by steps, never by time, so H does not collapse on a fast
network; openings are paced so that traffic stays smooth, also after an outage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from skerry.config import Config, Run, Sync
from skerry.core.facts import Row
from skerry.core.ledger import MERGED, Ledger, Work
from skerry.core.state import RunState
from skerry.core.vocabulary import Stage


class Recipe(NamedTuple):
    """What a merge does: its rule, and the outer step."""

    rule: str
    outer: str
    lr: float
    momentum: float
    delay: int = 1
    restart: int = 0


NOTHING = Work()
PLAIN = Recipe("mean", "sgd", 1.0, 0.0)  # the model moves to where the learners are


def spent_at(run: Run, ledger: Ledger, elapsed_s: float, given_up: Work = NOTHING) -> float:
    """Share of the budget that is spent: of the time, or of the tokens or steps that were taken and not discarded.

    `given_up` is what will be discarded and is not booked so yet.
    """
    if run.minutes:
        return elapsed_s / (60 * run.minutes)
    kept, count = ledger.kept, ledger.fragment_count
    if run.tokens:
        return (kept.tokens - given_up.tokens) / (run.tokens * count)
    return (kept.steps - given_up.steps) / (run.steps * run.learners * count)


def budget_of(run: Run) -> float:
    """All of it, in the run's own unit: minutes, or tokens or steps of all learners together."""
    return run.minutes or float(run.tokens or run.steps * run.learners)


def over_budget(run: Run, ledger: Ledger) -> float:
    """Tokens or steps beyond the budget: learners took them before they heard that it was spent. 0 where it is time."""
    if run.minutes:
        return 0.0
    return max(0.0, spent_at(run, ledger, 0.0) - 1) * (run.tokens or run.steps * run.learners)


def steps_merged(config: Config, fragment_count: int, merges: int) -> int:
    """Whole inner steps of all learners that so many merges are worth in the warm stage, at the H that it asks for.

    What it is for is that young learners are brought together often enough, so it is counted in versions that the
    run's fragments have had. Where rounds keep H that is the same as counting steps; where they do not, steps would end
    it too early.
    """
    return merges * sync_every_in(config.sync, "warm") * config.run.learners // fragment_count


def stage_at(config: Config, progress: float, steps: int) -> Stage:
    """Warm for so many steps a learner, `steps` being those of all, and never beyond its share; cool at the end."""
    sync = config.sync
    if sync.policy == "fixed":
        return "steady"
    if progress < sync.warm_share and steps < sync.warm_steps * config.run.learners:
        return "warm"
    return "cool" if progress > 1 - sync.cool_share else "steady"


def stage_of(config: Config, state: RunState) -> Stage:
    """Of training, as the run stands."""
    return stage_at(config, state.progress, steps_merged(config, len(state.fragments), state.merges))


def recipe_of(config: Config, stage: Stage | None) -> Recipe:
    """What a merge of this stage does, or one of the closing (None).

    Momentum begins from zero at the end of the warm stage, and is forgotten when the cool one begins: there the mean
    takes out the noise that stretching it and momentum leave in the model.
    """
    if stage != "steady":
        return PLAIN
    outer = config.outer
    delay = outer.delay if outer.rule == "delayed" else 1
    return Recipe(config.merge.rule, outer.rule, outer.lr, outer.momentum, delay, outer.restart)


def weight_of(tokens: int, steps: int) -> float:
    """w = tokens · (tokens / steps): quantity times quality (paper, section 3.2); no steps weigh nothing."""
    return tokens * tokens / steps if steps else 0.0


def gain_of(rows: Iterable[Row], merged_in: Mapping[str, int], version: int, sync_every: int) -> float:
    """How much of its delta a merge takes: all, but for contributions that span several versions.

    Over a link slower than H, half of the learners may be in one version and the others in the next. Each brings the
    drift of two rounds; taken whole, the model would go twice as far as any of them has gone. So one that was last in
    the k-th version before this one counts for 1/k of itself, but never for less than H steps: who does fewer in a
    round, slow or new, brings no more than its due.
    """
    merged = [row for row in rows if row.fate == MERGED]
    spans = [version - merged_in.get(row.learner, version - 1) for row in merged]
    parts = (row.tokens / max(1.0, min(k, row.steps / sync_every)) for row, k in zip(merged, spans, strict=True))
    return math.fsum(parts) / math.fsum(row.tokens for row in merged)


def sync_every_in(sync: Sync, stage: Stage | None) -> int:
    """H in this stage."""
    return min(sync.warm_every, sync.sync_every) if stage == "warm" else sync.sync_every


def first_due(fragment: int, fragment_count: int, sync_every: int) -> int:
    """Unsettled steps at which a fragment's first round at this H is due: staggered offsets over (0, H]."""
    return max(1, math.ceil(sync_every * (fragment + 1) / fragment_count))


def due_at(fragment: int, fragment_count: int, sync_every: int, sync_every_before: int) -> int:
    """Unsettled steps at which a fragment is due: H. At the start, and where H has more than doubled since the
    fragment was last merged, staggered offsets instead, so that traffic stays smooth."""
    is_jump = sync_every > 2 * sync_every_before
    return first_due(fragment, fragment_count, sync_every) if is_jump else sync_every


def steps_due(unsettled: Mapping[int, int], quorum: int) -> float:
    """The steps that H counts; none before K of the ready learners have at least one unsettled.

    `unsettled` maps unsettled steps to how many of the ready learners have so many.

    Those that K learners have. But no less than the K fastest have on average, save one, so that H hardly stretches
    while one of the fast is away; and half of the fastest's, so that it does not stretch tenfold where most are slow.
    Save one: learners of equal speed differ by a step, and their rounds should wait for all of them to have H.
    """
    missing, total = quorum, 0  # of the K fastest: how many are still to be found, and the steps of those found
    for steps in sorted(unsettled, reverse=True):
        if steps < 1:
            break
        count = min(unsettled[steps], missing)
        missing, total = missing - count, total + count * steps
        if not missing:
            return max(steps, total / quorum - 1, max(unsettled) / 2)
    return 0.0


def pace_s(step_s: Sequence[float], quorum: int) -> float | None:
    """Seconds in which `steps_due` grows by one, once K learners' steps were measured."""
    fastest = sorted(step_s)[:quorum]
    if len(fastest) < quorum:
        return None
    return min(quorum / sum(1 / each for each in fastest), 2 * fastest[0])


def is_keeping_due(every: float, state: RunState) -> bool:
    """Whether a version of the whole model is to be kept now, by `store.keep_every`.

    At each such share of the budget, or at each so many versions of the slowest fragment; however many of those have
    gone by since the last one, one is kept.
    """
    if not every:
        return False
    last = state.last_kept  # none: the start is
    if every >= 1:
        return min(at.version for at in state.fragments) // every > (min(last.versions) if last else 0) // every
    return int(state.progress / every) > int((last.progress if last else 0.0) / every)


class Pacer:
    """An allowance of openings: grows by P/H per step that H counts, at most 2 max(1, P/H)."""

    def __init__(self) -> None:
        self.allowance = 1.0
        self._at: float | None = None

    def grow(self, now: float, step_s: float | None, fragments_per_step: float) -> None:
        """`step_s` is how long a step takes that H counts; nothing grows before it was measured."""
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
