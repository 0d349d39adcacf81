"""What was last said of a run, and what its tape lacks by that: the chain of hashes cannot tell a cut-off end.

The syncer says it in its status, a rollback in the status that it leaves, the supervisor in its summary: never more
than was durable on the tape. Nothing is decided by it but whether to go on, and who removes it goes on with what is
there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from skerry.core.facts import Fact
from skerry.core.state import RunState, fold
from skerry.errors import StoreError, TapeDamaged
from skerry.run.sense import sensible, whole_fact
from skerry.store.files import UNREADABLE, contents
from skerry.store.store import Store

STATUS = "status.json"
SUMMARY = "summary.json"

Words = list[tuple[str, dict[str, Any]]]  # the name of a file, and what it says


def open_to_read(root: Path) -> Store:
    """The store of a run, whoever serves it meanwhile; where its tape is gone, that is said."""
    try:
        return Store.open(root, readonly=True)
    except StoreError:
        if not (root / "tape").exists() and (lost := lost_tape(root)):
            raise StoreError(lost) from None
        raise


def open_to_write(root: Path) -> Store:
    """The same for who writes, and holds it; a tape that was cut off is refused before anything is written."""
    whole_state(root)
    return Store.open(root)


def whole_state(root: Path) -> RunState:
    """The run in a directory, whoever serves it meanwhile; refused if its tape was cut off."""
    words = last_words(root)  # first: a live syncer only adds to the tape
    with open_to_read(root) as store:
        state = state_in(store)
        check_whole(store, state, words)
    return state


def state_in(store: Store) -> RunState:
    """The run that a store holds; refused, with what is known of why, if it holds none."""
    if not store.records:
        raise StoreError(no_run(store))
    number = -1

    def place() -> str:
        return f"{store.root}/tape/{store.tape.number:06d}.seg record {number}"

    def told() -> Iterator[Fact | RunState]:
        nonlocal number
        for body in store.records:
            number += 1
            yield whole_fact(body, place)

    with sensible(place):
        return fold(told())


def no_run(store: Store) -> str:
    """Why a store without a record holds no run."""
    return cut_off(store, None) or f"{store.root}: holds no run: check the path"


def check_whole(store: Store, state: RunState, words: Words) -> None:
    """Refuse a tape that lacks what these words say, which were read before it was."""
    if cut := cut_off(store, state, words):
        raise TapeDamaged(cut)


def cut_off(store: Store, state: RunState | None, words: Words | None = None) -> str:
    """Why a tape that leads to this state cannot be all of it, by what was last said of the run; empty if it can.

    Where somebody may be serving the run, `words` were read before the tape was.
    """
    words = last_words(store.root) if words is None else words
    if state is None:
        return lacking(store, words, 0, False, 0)
    return lacking(store, words, state.merges, state.phase == "closed", state.epoch)


def lost_tape(root: Path) -> str:
    """Why a directory without a tape is not a fresh one; empty if it is."""
    for name, said in last_words(root):
        if said["merges"]:
            told = f"{name} says that its run had {said['merges']} merges"
            return f"{root}/tape is missing, and {told}: restore it from a copy, or begin in a fresh directory"
    return ""


def lacking(store: Store, words: Words, merges: int, is_closed: bool, epoch: int | None) -> str:
    """What the tape should hold by someone's last words and does not.

    `is_closed`: it holds the end, or may do so. `epoch` is its last one, None if nobody knows: a rollback adds no
    merge, but an epoch.
    """
    for name, said in words:
        later = said.get("epoch")
        lacks_end = said.get("phase") == "closed" and said["merges"] == merges and not is_closed
        is_later = isinstance(later, int) and epoch is not None and later > epoch
        lacks_epoch = is_later and said["merges"] >= merges  # a tape with more merges was put back on purpose
        if said["merges"] > merges or lacks_end or lacks_epoch:
            more = " and the end of the run" if lacks_end else ""
            more += f" in epoch {later}, after epoch {epoch} here" if lacks_epoch and store.records else ""
            told = f"{name} says {said['merges']}{more}"
            end = f"{store.root}/tape/{store.tape.number:06d}.seg at byte {store.tape.size}"
            advice = "restore it from a copy, or "
            advice += f"remove {name} to go on without what is lost" if store.records else "begin in a fresh directory"
            return f"{end}: truncated: the tape ends with {merges} merges, {told}: {advice}"
    return ""


def strange(root: Path) -> str:
    """Which last words are not read, because what lies there is a link or no plain file; empty if there are none."""
    for path in (root / SUMMARY, root / STATUS):
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            return f"{path}: is a link or no plain file, and not read: remove it"
    return ""


def last_words(root: Path) -> Words:
    """What the supervisor and the syncer, or who rolled back since, last said of this run, if they did."""
    words = []
    for name in (SUMMARY, STATUS):
        try:
            said = msgspec.json.decode(contents(root / name))
        except UNREADABLE:
            continue
        if isinstance(said, dict) and isinstance(said.get("merges"), int):
            words.append((name, said))
    return words
