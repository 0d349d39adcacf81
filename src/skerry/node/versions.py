"""A fragment's version out of the store: from a checkpoint, by the merges since, done again from the journal.

Merges are deterministic, so this gives the very values there were; the digest of the whole state, which the tape has of
every version, says so. One checkpoint or a stretch of the journal may be damaged: where an earlier checkpoint leads to
the same version, it is used, and who goes on with the run writes the damaged one anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from skerry.algo.fragments import Fragment
from skerry.core.state import Checkpoint, FragmentState, RunState
from skerry.errors import FileDamaged
from skerry.node.algebra import FLOAT32, Algebra, Values
from skerry.store.journal import Place
from skerry.store.store import FILES, Store

log = logging.getLogger("skerry.store")


def newest(
    store: Store, state: RunState, fragments: Sequence[Fragment], algebra: Algebra = FLOAT32, threads: int = 1
) -> list[Values]:
    """Of every fragment, for who goes on with the run: checkpoints that are found damaged are written anew."""

    def one(fragment: Fragment) -> Values:
        at = state.fragments[fragment.index]
        values, damaged = _found(store, fragment, at, algebra, at.version)
        for checkpoint in damaged:
            mend(store, fragment, at, checkpoint, algebra)
        return values

    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(one, fragments))


def load(
    store: Store, fragment: Fragment, at: FragmentState, algebra: Algebra = FLOAT32, version: int | None = None
) -> Values:
    """The fragment's newest version, or an earlier one that can still be had; `FileDamaged` if it cannot."""
    return _found(store, fragment, at, algebra, at.version if version is None else version)[0]


def _found(
    store: Store, fragment: Fragment, at: FragmentState, algebra: Algebra, wanted: int
) -> tuple[Values, list[Checkpoint]]:
    """The wanted version, and the damaged checkpoints that would have led there sooner."""
    first: FileDamaged | None = None
    damaged: list[Checkpoint] = []
    for checkpoint in [c for c in reversed(at.checkpoints) if c.version <= wanted]:
        try:
            values = _redone(store, fragment, at, algebra, checkpoint, wanted)
        except FileDamaged as error:
            first = first or error
            damaged.append(checkpoint)
        else:
            if first is not None:
                log.warning("fragment %d: %s; taken from version %d instead", fragment.index, first, checkpoint.version)
            return values, damaged
    raise first or FileDamaged(f"fragment {fragment.index}: version {wanted} is not kept any more")


def mend(
    store: Store, fragment: Fragment, at: FragmentState, checkpoint: Checkpoint, algebra: Algebra = FLOAT32
) -> bool:
    """Write a damaged checkpoint anew, from an earlier one and the merges since; whether that could be done.

    Its contents are the same, and so its name is: the tape need not hear of it.
    """
    earlier = replace(at, checkpoints=[c for c in at.checkpoints if c.version < checkpoint.version])
    try:
        values = load(store, fragment, earlier, algebra, checkpoint.version)
    except FileDamaged:
        return False
    return rewrite(store, fragment, checkpoint, values, algebra)


def rewrite(
    store: Store, fragment: Fragment, checkpoint: Checkpoint, values: Values, algebra: Algebra = FLOAT32
) -> bool:
    """Write a damaged file anew with these values; False if they are not what it held."""
    is_mended = store.mend(checkpoint.file, algebra.parts(values))
    if is_mended:
        what = f"fragment {fragment.index} version {checkpoint.version}"
        log.warning("%s: %s/%s/%s was damaged and is written anew", what, store.root, FILES, checkpoint.file)
    return is_mended


def whole(store: Store, fragment: Fragment, checkpoint: Checkpoint, algebra: Algebra = FLOAT32) -> Values:
    """What a checkpoint's file holds, checked."""
    values = algebra.load(store.get(checkpoint.file), fragment)
    _check(algebra.state_digest(values) == checkpoint.state, fragment, checkpoint.version)
    return values


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
