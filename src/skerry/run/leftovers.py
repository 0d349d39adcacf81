"""What lies under a name beside the one that a command makes, until that is whole.

Whoever makes it holds it, so that what nobody holds any more was left by one that was killed: the next to make the same
removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from skerry.store.files import is_temporary
from skerry.store.lock import LOCK

TAPE, UNFINISHED = "tape", "tape.unfinished"  # by which a folder is told from one of somebody's own


@contextlib.contextmanager
def held(path: Path) -> Iterator[int]:
    """Hold a file or a folder until the end, however that comes; `BlockingIOError` if another process does."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def making(path: Path) -> Iterator[None]:
    """Hold what this process makes; on a file system that knows no such locks nobody removes anything either."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(held(path))
        yield


def remove_left(path: Path) -> None:
    """What was to become this file or folder and is nobody's any more; what somebody is at work on stays."""
    beside, names = path.absolute().parent, list[str]()
    with contextlib.suppress(OSError):  # it is not there yet, or may not be listed
        names = os.listdir(beside)
    for name in (name for name in names if is_temporary(name, path.name)):
        with contextlib.suppress(OSError), held(beside / name) as fd:  # a link, another's, or held
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode):
                (beside / name).unlink()
            elif stat.S_ISDIR(mode) and _is_a_run(os.listdir(beside / name)):
                shutil.rmtree(beside / name)


def _is_a_run(inside: list[str]) -> bool:
    """Or what was to be one: whatever else has such a name is left alone."""
    return not inside or not {TAPE, UNFINISHED, LOCK}.isdisjoint(inside)
