"""What a merge has to be, worked out a second time: the audit's own arithmetic.

Slow and obvious on purpose, from what docs/ARCHITECTURE.md and the configuration say in words. Nothing is shared with
what decides (`schedule`, `quorum`, `admission`): a rule that is wrong there stays right here, and the audit shows the
difference. Plain numbers in. Where the syncer computes with floats, this file computes with fractions, and says by how
much the two may differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from skerry.config import Config, Run, Sync
from skerry.core.vocabulary import Stage

ROUNDING = Fraction(1, 2**50)  # relative: a handful of float operations, each off by at most 2^-53


class Brought(NamedTuple):
    """One merged contribution: its work, and how many versions lie between the last that had its learner and this."""

    tokens: int
    steps: int
    versions: int  # 1: it was in the version before, or has never been in any


class HowFar(NamedTuple):
    """How far the run was: the share of its budget, and the inner steps of all learners that its merges are worth."""

    progress: float
    steps: Fraction


def steps_merged(config: Config, fragment_count: int, merges: int) -> Fraction:
    """A version of every fragment is worth the warm stage's H, for each learner."""
    return Fraction(merges * sync_every(config.sync, "warm") * config.run.learners, fragment_count)


def spent(run: Run, fragment_count: int, steps: int, tokens: int) -> Fraction | None:
    """Of the budget, by so much work on all fragments that was not discarded; None where the budget is time."""
    if run.minutes:
        return None
    return (
        Fraction(tokens, run.tokens * fragment_count)
        if run.tokens
        else Fraction(steps, run.steps * run.learners * fragment_count)
    )


def budget(run: Run) -> Fraction:
    """All of it, in its own unit; progress is a share of this."""
    return Fraction(run.minutes) if run.minutes else Fraction(run.tokens or run.steps * run.learners)


def is_carried_over(before: float, progress: float, was: Run, now: Run) -> bool:
    """What was spent of one budget is as much of the next."""
    due = Fraction(before) * budget(was) / budget(now)
    return abs(Fraction(progress) - due) <= due * ROUNDING


def weight(tokens: int, steps: int) -> float:
    """A contribution weighs its tokens times its tokens per step: w = c²/s."""
    return tokens * tokens / max(1, steps)


def gain(merged: Iterable[Brought], sync_every: int) -> Fraction:
    """What spans k versions counts for 1/k, but never for less than H steps; the mean of that over all tokens."""
    counted = total = Fraction(0)
    for one in merged:
        steps_counted = max(Fraction(one.steps, one.versions), Fraction(min(one.steps, sync_every)))
        counted += one.tokens * steps_counted / one.steps
        total += one.tokens
    return counted / total


def is_gain(said: float, merged: Iterable[Brought], sync_every: int) -> bool:
    exact = gain(merged, sync_every)
    return abs(said - float(exact)) <= float(exact * ROUNDING)  # false for NaN


def is_quorum(said: int, configured: int | float, ready: int) -> bool:
    """A number of learners is never lowered. A share asks for the fewest that are such a part of the ready, or one.

    The float of 0.1 lies a trace above a tenth. So of ten ready learners two are right, and one is too, up to a
    rounding.
    """
    if isinstance(configured, int):
        return said == configured
    part = Fraction(configured) * ready
    is_enough = said >= 1 and said >= part * (1 - ROUNDING)
    is_one_fewer_enough = said >= 2 and said - 1 >= part
    return is_enough and not is_one_fewer_enough


def stages(config: Config, since: HowFar, now: HowFar) -> set[Stage]:
    """The stages in which a round may have been opened that was merged now, and not opened before `since`.

    Progress and steps only grow, as long as the configuration stays. So a round may be warm if the run was at the
    earliest moment, cool if it is now, and steady if at some moment between the two it was no longer warm and not yet
    cool.
    """
    if config.sync.policy == "fixed":
        return {"steady"}
    found: set[Stage] = set()
    if _is_warm(config, since):
        found.add("warm")
    if not _is_warm(config, now) and _cool_after(config.sync, since) <= ROUNDING:
        found.add("steady")
    if _cool_after(config.sync, now) > -ROUNDING:
        found.add("cool")
    return found


def _is_warm(config: Config, at: HowFar) -> bool:
    """For `warm_steps` inner steps a learner, and never beyond `warm_share` of the budget."""
    within_steps = at.steps < config.sync.warm_steps * config.run.learners
    return within_steps and at.progress < config.sync.warm_share


def _cool_after(sync: Sync, at: HowFar) -> Fraction:
    """By how much the run is into the last `cool_share` of its budget."""
    return Fraction(at.progress) + Fraction(sync.cool_share) - 1


def sync_every(sync: Sync, stage: Stage | None) -> int:
    """H: `warm_every` while warm, if that is shorter; else `sync_every`, also in the closing, which has no stage."""
    return sync.warm_every if stage == "warm" and sync.warm_every < sync.sync_every else sync.sync_every


def recipe(config: Config, stage: Stage | None) -> tuple[str, str, float, float, int, int]:
    """Rule, outer rule, its step, momentum, delay and restart.

    Steady merges are as configured; warm, cool and closing ones a plain mean with outer step 1 and no momentum. A
    momentum step is due with every version, unless the outer rule is the delayed one.
    """
    if stage != "steady":
        return "mean", "sgd", 1.0, 0.0, 1, 0
    outer = config.outer
    delay = outer.delay if outer.rule == "delayed" else 1
    return config.merge.rule, outer.rule, outer.lr, outer.momentum, delay, outer.restart
