"""Fragments whose newest file is damaged: which they are, and three ways to have a whole one again.

Exactly, from the version before and the recorded contributions; the published values from a learner that holds them,
with what can be had of the outer state; or a new version with the values of the one before. Rules that hold here:
values are believed only if they have the digest on the tape; versions never go back; damage to a file that the run does
not go on from is no damage. What a function returns is a fact to commit; its file is put already.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from skerry import config as configs
from skerry.algo.fragments import Fragment
from skerry.core.facts import Committed, Restored, SteppedBack
from skerry.core.state import FragmentState, RunState
from skerry.errors import FileDamaged, StoreError
from skerry.node.algebra import FLOAT32, Values
from skerry.run.facts import facts_of, fragments_of
from skerry.run.replay import Different, held_of
from skerry.store.store import Store

log = logging.getLogger("skerry.syncer")


class Damage(NamedTuple):
    """A fragment whose newest version cannot be read, and what is wrong with its file."""

    fragment: Fragment
    at: FragmentState
    what: str

    def __str__(self) -> str:
        return f"fragment {self.fragment.index} version {self.at.version}"


def damaged(store: Store, state: RunState) -> list[Damage]:
    """Every fragment that the run cannot go on from."""
    found = []
    for fragment, at in zip(fragments_of(state.created), state.fragments, strict=True):
        try:
            store.get(at.file)
        except FileDamaged as error:
            found.append(Damage(fragment, at, str(error)))
    return found


def explain(root: Path, damage: Sequence[Damage]) -> str:
    """Why the run cannot go on, and how it can: one line."""
    first, more = damage[0], f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
    previous = f", --repair previous: from version {first.at.version - 1}" if first.at.version else ""
    return (
        f"{first}{more}: {first.what}, or start it with --repair "
        f"(skerry syncer --run {root} --repair: from records or a learner{previous})"
    )


# ---------------------------------------------------------------------------------------------- exactly


def remake(store: Store, state: RunState, damage: Damage) -> Restored | None:
    """The very same file, merged again from what the run recorded; None if it did not, or if that is damaged too."""
    config, old_file = configs.decode(state.created.config), damage.at.file_before
    if config.store.record != "full" or not old_file:
        return None
    try:
        fact = _commit_of(store, damage)
        if fact is None or not fact.result.payloads:
            return None
        old = FLOAT32.load(store.get(old_file), damage.fragment)
        held = [one for _, one in held_of(store, fact, damage.fragment)]
    except (StoreError, Different) as error:
        log.warning("%s cannot be merged again: %s", damage, error)
        return None
    merged = FLOAT32.merge(fact.decision, damage.fragment, old, held, config.merge.threads)
    if merged.digest != damage.at.digest or store.put(FLOAT32.parts(merged.values)) != fact.result.file:
        log.warning("%s: merging the recorded contributions again gives something else", damage)
        return None
    p, version = damage.fragment.index, damage.at.version
    source = f"version {version - 1} and its recorded contributions"
    return Restored(p, version, fact.result.file, fact.result.digest, source)


def _commit_of(store: Store, damage: Damage) -> Committed | None:
    wanted = (damage.fragment.index, damage.at.version)
    commits = (fact for _, fact in facts_of(store) if isinstance(fact, Committed))
    return next((c for c in commits if (c.decision.fragment, c.decision.version) == wanted), None)


# ---------------------------------------------------------------------------------------------- from a learner


def take_copy(store: Store, damage: Damage, learner: str, payload: memoryview) -> Restored | None:
    """A file around a learner's copy of the published values; None if they are not what the tape says."""
    theta, version = FLOAT32.decode(payload), damage.at.version
    if FLOAT32.digest(theta) != damage.at.digest:
        return None
    zero = np.zeros_like(theta)
    velocity, source = zero, f"{learner}; velocity and residual lost"
    if not version:
        source = learner  # a genesis has neither
    else:
        try:
            velocity = FLOAT32.load(store.get(damage.at.file_before), damage.fragment).velocity
            source = f"{learner}; velocity of version {version - 1}, residual lost"
        except FileDamaged as error:
            log.warning("%s: no velocity to take over: %s", damage, error)
    file = store.put(FLOAT32.parts(Values(theta, velocity, zero)))
    return Restored(damage.fragment.index, version, file, damage.at.digest, source)


# ---------------------------------------------------------------------------------------------- the version before


def step_back(store: Store, state: RunState, damage: Damage) -> SteppedBack:
    """A new version with the values of the one before the damaged: what the damaged one merged is lost."""
    before = damage.at.version - 1
    if before < 0:
        raise FileDamaged(f"{damage}: {damage.what}; no version is before it: start with --repair, without previous")
    try:
        values = FLOAT32.load(store.get(damage.at.file_before), damage.fragment)
    except FileDamaged as error:
        again = "or start with --repair, without previous"
        raise FileDamaged(f"{damage}: version {before} is damaged too: {error}, {again}") from None
    return SteppedBack(
        epoch=state.epoch,
        fragment=damage.fragment.index,
        version=damage.at.version + 1,
        parent=damage.at.digest,
        file=store.put(FLOAT32.parts(values)),
        digest=FLOAT32.digest(values.theta),
    )
