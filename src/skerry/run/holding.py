"""Waiting for a run directory that somebody holds for a moment.

Who serves a run holds its directory until it ends, so nobody waits for that. An order on the directory, a prune and the
like hold it for as long as they read the tape, and a syncer that starts holds it before it can say anything: those are
waited for, for a bounded time. Behind that the same command may do later, and its exit code says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from skerry.errors import StoreBusy, StoreInUse
from skerry.run.status import holders_of, is_served

Made = TypeVar("Made")

HELD_S = 10.0  # for whoever holds it for a moment
LOOK_S = 0.1


def when_free(root: Path, do: Callable[[], Made], say: Callable[[str], None], within_s: float = HELD_S) -> Made:
    """What `do` makes of a directory once nobody else holds it; who waits says so, in one line."""
    until, is_told = time.monotonic() + within_s, False
    while True:
        try:
            return do()
        except StoreInUse:
            if is_served(root):
                raise
            if time.monotonic() > until:
                raise busy(root, within_s) from None
        if not is_told:
            say(f"waiting for up to {within_s:g} s: process {holder_named(root)} holds {root} and does not serve it")
            is_told = True
        time.sleep(LOOK_S)


def busy(root: Path, within_s: float = HELD_S) -> StoreBusy:
    """What is said when the wait was in vain; the caller raises it."""
    return StoreBusy(
        f"{root} has been held by process {holder_named(root)} for {within_s:g} s, which does not serve it yet: try "
        f"again in a moment; skerry status {root} says what it does"
    )


def holder_named(root: Path) -> str:
    return str(next((holder.pid for holder in holders_of(root) if holder is not None and holder.pid), "unknown"))
