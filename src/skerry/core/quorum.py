"""Quorum and the adaptive grace window: decide(...) -> a verdict that carries its reason.

With K contributions complete the round may close; it then waits at most the measured slack, for learners that can
still make it. Learners never wait, so a missed grace costs age, not work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from skerry.core.vocabulary import Closes


class Verdict(NamedTuple):
    """Why a round closes, or what it waits for, in words for a person."""

    closes: Closes | None
    waits: str = ""


def quorum_size(quorum: int | float, ready: int) -> int:
    """K: a number is never lowered; a share is of the ready learners, at least one."""
    return quorum if isinstance(quorum, int) else max(1, math.ceil(quorum * ready))


def grace_s(gamma: float, delay: int, step_s: float | None, quorum_s: float | None, sync_s: float | None) -> float:
    """The window: gamma max(0, tau xi_step - xi_quorum - xi_sync), at most one step; none before all were measured."""
    if step_s is None or quorum_s is None or sync_s is None:
        return 0.0
    return min(step_s, gamma * max(0.0, delay * step_s - quorum_s - sync_s))


def decide(
    held: int, quorum: int, missing: Mapping[str, float], quorum_at: float | None, grace: float, now: float
) -> Verdict:
    """Close or wait. `missing` maps each learner pulled but not in to when it is expected."""
    if held < quorum or quorum_at is None:
        return Verdict(None, f"{held} of quorum {quorum}")
    if not missing:
        return Verdict("all in")
    deadline = quorum_at + grace
    if now >= deadline:
        return Verdict("grace over" if grace > 0 else "no grace")
    hoped = sorted(learner for learner, expected in missing.items() if expected <= deadline)
    if not hoped:
        return Verdict("the rest cannot make it")
    return Verdict(None, f"grace for {', '.join(hoped)}")
