"""Fragments whose newest version cannot be had from checkpoints and journal: which they are, and three ways out.

Exactly, from an earlier version and the recorded contributions; the published values from a learner that holds them,
without velocity and residual; or a new version with the values of the newest that can be had. Rules that hold here:
values are believed only if they have the digest on the tape; versions never go back; damage to what the run does not
need to go on is no damage. What a function returns is a fact to commit; its file is put already.
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
from skerry.node import versions
from skerry.node.algebra import FLOAT32, Values
from skerry.run.facts import facts_of, fragments_of
from skerry.run.replay import Different, held_of
from skerry.store.store import Store

log = logging.getLogger("skerry.syncer")


class Damage(NamedTuple):
    """A fragment whose newest version cannot be had, and why."""

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
            versions.load(store, fragment, at)
        except FileDamaged as error:
            found.append(Damage(fragment, at, str(error)))
    return found


def explain(root: Path, damage: Sequence[Damage]) -> str:
    """Why the run cannot go on, and how it can: one line."""
    first, more = damage[0], f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
    previous = ", --repair previous: from an earlier version" if first.at.version else ""
    return (
        f"{first}{more}: {first.what}, or start it with --repair "
        f"(skerry syncer --run {root} --repair: from records or a learner{previous})"
    )


# ---------------------------------------------------------------------------------------------- exactly


def remake(store: Store, state: RunState, damage: Damage) -> Restored | None:
    """The very same version, merged again from what the run recorded; None if it did not, or if that is damaged too."""
    config, fragment = configs.decode(state.created.config), damage.fragment
    if config.store.record != "full":
        return None
    reached = versions.last_reachable(store, fragment, damage.at)
    if reached is None:
        return None
    values = versions.load(store, fragment, damage.at, version=reached)
    try:
        for fact in _commits_after(store, damage, reached):
            held = [one for _, one in held_of(store, fact, fragment)]
            delta = FLOAT32.merge(fact.decision, fragment, held, config.merge.threads)
            values = FLOAT32.advance(fact.decision, fragment, values, delta, config.merge.threads).values
    except (StoreError, Different) as error:
        log.warning("%s cannot be merged again: %s", damage, error)
        return None
    if FLOAT32.state_digest(values) != damage.at.state:
        log.warning("%s: merging the recorded contributions again gives something else", damage)
        return None
    return _restored(store, damage, values, f"version {reached} and the recorded contributions since")


def _commits_after(store: Store, damage: Damage, version: int) -> list[Committed]:
    commits = (fact for _, fact in facts_of(store) if isinstance(fact, Committed))
    p, wanted = damage.fragment.index, range(version + 1, damage.at.version + 1)
    found = [c for c in commits if c.decision.fragment == p and c.decision.version in wanted]
    if [c.decision.version for c in found] != list(wanted):
        raise Different(f"the tape does not tell of every merge from version {version} on any more")
    return found


def _restored(store: Store, damage: Damage, values: Values, source: str) -> Restored:
    return Restored(
        fragment=damage.fragment.index,
        version=damage.at.version,
        file=store.put(FLOAT32.parts(values)),
        digest=damage.at.digest,
        state=FLOAT32.state_digest(values),
        theta=FLOAT32.sha256(values.theta),
        source=source,
    )


# ---------------------------------------------------------------------------------------------- from a learner


def can_be_lent(damage: Damage) -> bool:
    """Whether the tape has a sha256 of the very version: a learner need not be believed then."""
    return _sha256_of(damage) is not None


def take_copy(store: Store, damage: Damage, learner: str, payload: memoryview) -> Restored | None:
    """A file around a learner's copy of the published values; None if they are not what the tape says."""
    theta = FLOAT32.decode(payload)
    if FLOAT32.sha256(theta) != _sha256_of(damage) or FLOAT32.digest(theta) != damage.at.digest:
        return None
    zero = np.zeros_like(theta)
    source = f"{learner}; velocity and residual lost" if damage.at.version else learner  # a genesis has neither
    return _restored(store, damage, Values(theta, zero, zero), source)


def _sha256_of(damage: Damage) -> bytes | None:
    return next((c.theta for c in damage.at.checkpoints if c.version == damage.at.version), None)


# ---------------------------------------------------------------------------------------------- the version before


def step_back(store: Store, state: RunState, damage: Damage) -> SteppedBack:
    """A new version with the values of the newest that can be had: what was merged since is lost."""
    to = versions.last_reachable(store, damage.fragment, damage.at)
    if to is None:
        kept = f", or go back to a kept version of all: skerry rollback {store.root}" if state.kept else ""
        raise FileDamaged(
            f"{damage}: {damage.what}; no earlier version can be had: start with --repair, without previous{kept}"
        )
    return back_to(store, state, damage.fragment, to)


def back_to(store: Store, state: RunState, fragment: Fragment, to: int) -> SteppedBack:
    """A new version of a fragment with the values of an earlier one."""
    at = state.fragments[fragment.index]
    values = versions.load(store, fragment, at, version=to)
    return SteppedBack(
        epoch=state.epoch,
        fragment=fragment.index,
        version=at.version + 1,
        parent=at.digest,
        to=to,
        file=store.put(FLOAT32.parts(values)),
        digest=FLOAT32.digest(values.theta),
        state=FLOAT32.state_digest(values),
        theta=FLOAT32.sha256(values.theta),
    )
