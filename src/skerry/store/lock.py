"""Who holds a run directory: a file with the holder's process id in it, locked until that process ends.

The lock says whether anybody holds it, however the last holder died; the id says who. An id alone proves nothing, for
its process may be gone and the number be another's by now. So a holder is known to be a process of this machine only if
it has this very file open.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import NamedTuple

LOCK = "lock"  # of a run directory: who writes its tape, a syncer
SUPERVISOR = "supervisor.lock"  # who starts that syncer again when it ends: the supervisor of a local run
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PID_BYTES_MAX = 20


class Holder(NamedTuple):
    """The process that holds a lock, as it calls itself."""

    pid: int  # 0 if it has not said
    is_here: bool  # else it is another machine's, another container's or another user's


def take(fd: int) -> str:
    """Hold this open file until it is closed: "", or the process id of who holds it already."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(fd, _PID_BYTES_MAX).decode("ascii", "replace").strip() or "unknown"
    os.ftruncate(fd, 0)
    try:
        os.write(fd, b"%d\n" % os.getpid())
    except OSError as error:
        if error.errno not in NO_ROOM:  # on a full disk it is held without a name: what frees space must be possible
            raise
    return ""


def holder_of(path: Path) -> Holder | None:
    """Who holds this file at present; a holder that ended in order, or died, is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        words = os.read(fd, _PID_BYTES_MAX).strip()
        if not words:
            return None  # released in order; a lock is not tried without need, for who takes it just then would fail
        pid = int(words) if words.isdigit() else 0
        if pid and pid != os.getpid() and _has_open(pid, fd):
            return Holder(pid, is_here=True)
        return Holder(pid, is_here=False) if _is_locked(fd) else None
    finally:
        os.close(fd)


def _has_open(pid: int, fd: int) -> bool:
    """Whether that process has this file open too; False if it may not be asked."""
    wanted = os.fstat(fd)
    try:
        theirs = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in theirs:
        try:
            found = os.stat(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if os.path.samestat(found, wanted):
            return True
    return False


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
