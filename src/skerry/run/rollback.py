"""Kept versions of a run: which there are, and going back to one after a divergence.

A rollback is one commit: a new epoch, every fragment stepped back to what it was in the kept version (published values,
velocity and residual), and the word that nothing before it counts. Versions never go back, so the old values come as
new versions, and what was merged since then stays on the tape. So does the budget that it took: the work was done and
its tokens are spent, learners and audit rely on progress that never falls within one budget, and the lower inner rate
of where the run is now is what a run that has diverged wants. The files are the kept ones, so nothing is written but
the commit; all of them are read first, and none is taken if one is damaged.

Learners that still stand on what was rolled back are told so when they come again (`core/learner.py`).
"""

from __future__ import annotations

import msgspec

from skerry.core.facts import EpochStarted, Fact, RolledBack, SteppedBack
from skerry.core.state import KeptVersion, RunState
from skerry.errors import FileDamaged, Refusal
from skerry.node import versions
from skerry.node.algebra import FLOAT32, Algebra
from skerry.run.facts import fragments_of
from skerry.store.store import Store


def kept_version(state: RunState, number: int) -> KeptVersion:
    """The one that a person names; refused if it is not kept."""
    found = state.kept_version(number)
    if found is None:
        there = ", ".join(str(version.number) for version in state.kept) or "none"
        raise Refusal(f"version {number} is not kept: kept are {there}, and 0, the start of the run")
    return found


def roll_back(store: Store, state: RunState, number: int) -> list[Fact]:
    """Take the whole run back to a kept version, durable on return; what was written."""
    facts = way_back(store, state, number)
    store.commit([msgspec.msgpack.encode(fact) for fact in facts])
    return facts


def way_back(store: Store, state: RunState, number: int, algebra: Algebra = FLOAT32) -> list[Fact]:
    """The facts of one commit that take the whole run back to a kept version; nobody may be serving it."""
    if state.phase in ("closing", "closed"):
        raise Refusal(
            f"{store.root}: the budget is spent, there is nothing left to go on with: take the model of that version "
            f"with skerry export {store.root} --version {number}"
        )
    version = kept_version(state, number)
    epoch = state.epoch + 1
    backs = _steps_back(store, state, version, epoch, algebra)
    return [EpochStarted(epoch), *backs, RolledBack(epoch, number)]


def _steps_back(store: Store, state: RunState, version: KeptVersion, epoch: int, algebra: Algebra) -> list[SteppedBack]:
    """A fragment at a time is held in memory."""
    backs = []
    for fragment, at in zip(fragments_of(state.created), state.fragments, strict=True):
        checkpoint = version.checkpoints[fragment.index]
        try:
            values = versions.whole(store, fragment, checkpoint, algebra)
        except FileDamaged as error:
            which = f"kept version {version.number}, fragment {fragment.index}"
            raise FileDamaged(f"{which}: {error}, or try skerry syncer --run {store.root} --repair") from None
        backs.append(
            SteppedBack(
                epoch=epoch,
                fragment=fragment.index,
                version=at.version + 1,
                parent=at.digest,
                to=checkpoint.version,
                file=checkpoint.file,
                digest=algebra.digest(values.theta),
                state=checkpoint.state,
                theta=checkpoint.theta,
            )
        )
    return backs
