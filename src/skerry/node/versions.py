"""A fragment's version out of the store: from a checkpoint, by the merges since, done again from the journal.

Merges are deterministic, so this gives the very values there were; the digest of the whole state, which the tape has of
every version, says so. One checkpoint or a stretch of the journal may be damaged: where an earlier checkpoint leads to
the same version, it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from skerry.algo.fragments import Fragment
from skerry.core.state import Checkpoint, FragmentState, RunState
from skerry.errors import FileDamaged
from skerry.node.algebra import FLOAT32, Algebra, Values
from skerry.store.journal import Place
from skerry.store.store import Store

log = logging.getLogger("skerry.store")


def newest(
    store: Store, state: RunState, fragments: Sequence[Fragment], algebra: Algebra = FLOAT32, threads: int = 1
) -> list[Values]:
    """Of every fragment."""
    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(lambda f: load(store, f, state.fragments[f.index], algebra), fragments))


def load(
    store: Store, fragment: Fragment, at: FragmentState, algebra: Algebra = FLOAT32, version: int | None = None
) -> Values:
    """The fragment's newest version, or an earlier one that can still be had; `FileDamaged` if it cannot."""
    wanted = at.version if version is None else version
    first: FileDamaged | None = None
    for checkpoint in [c for c in reversed(at.checkpoints) if c.version <= wanted]:
        try:
            values = _redone(store, fragment, at, algebra, checkpoint, wanted)
        except FileDamaged as error:
            first = first or error
        else:
            if first is not None:
                log.warning("fragment %d: %s; taken from version %d instead", fragment.index, first, checkpoint.version)
            return values
    raise first or FileDamaged(f"fragment {fragment.index}: version {wanted} is not kept any more")


def whole(store: Store, fragment: Fragment, checkpoint: Checkpoint, algebra: Algebra = FLOAT32) -> Values:
    """What a checkpoint's file holds, checked."""
    values = algebra.load(store.get(checkpoint.file), fragment)
    _check(algebra.state_digest(values) == checkpoint.state, fragment, checkpoint.version)
    return values


def last_reachable(store: Store, fragment: Fragment, at: FragmentState, algebra: Algebra = FLOAT32) -> int | None:
    """The newest version that can be had; None if there is none."""
    for version in range(at.version, at.checkpoints[0].version - 1, -1):
        try:
            load(store, fragment, at, algebra, version)
        except FileDamaged:
            continue
        return version
    return None


def _redone(
    store: Store, fragment: Fragment, at: FragmentState, algebra: Algebra, checkpoint: Checkpoint, wanted: int
) -> Values:
    values = whole(store, fragment, checkpoint, algebra)
    for redo in at.redo:
        if checkpoint.version < redo.version <= wanted:
            merged = algebra.advance(redo, fragment, values, store.entry(Place(*redo.entry)))
            _check(merged.state == redo.state, fragment, redo.version)
            values = merged.values
    return values


def _check(is_right: bool, fragment: Fragment, version: int) -> None:
    if not is_right:
        where = f"fragment {fragment.index} version {version}"
        raise FileDamaged(f"{where}: what checkpoint and journal give is another: restore the files from a copy")
