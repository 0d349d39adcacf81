"""Who holds a run directory: a file with the holder's process id in it, locked until that process ends.

The lock says whether anybody holds it, however the last holder died; the id says who. An id alone proves nothing, for
its process may be gone and the number be another's by now. So a holder is known to be a process of this machine only if
it has this very file open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

LOCK = "lock"  # of a run directory: who writes its tape, a syncer
SUPERVISOR = "supervisor.lock"  # who starts that syncer again when it ends: the supervisor of a local run
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PID_BYTES_MAX = 20
_LOOKED_S = 0.25  # for a look to be over
_TRY_S = 0.01
_DYING_S = 5.0  # for a dead process to be cleared away


class Holder(NamedTuple):
    """The process that holds a lock, as it calls itself."""

    pid: int  # 0 if it has not said
    is_here: bool  # else it is another machine's, another container's or another user's


def take(fd: int) -> str:
    """Hold this open file until it is closed: "", or the process id of who holds it already.

    Who looks whether a dead process still holds it has it for a moment (`_is_locked`), and a page looks every second.
    So what is held is tried for a little longer.
    """
    if not _took(fd):
        return os.read(fd, _PID_BYTES_MAX).decode("ascii", "replace").strip() or "unknown"
    os.ftruncate(fd, 0)
    try:
        os.write(fd, b"%d\n" % os.getpid())
    except OSError as error:
        if error.errno not in NO_ROOM:  # on a full disk it is held without a name: what frees space must be possible
            raise
    return ""


def _took(fd: int) -> bool:
    until = time.monotonic() + _LOOKED_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
        time.sleep(_TRY_S)


def holder_of(path: Path) -> Holder | None:
    """Who holds this file at present; a holder that ended in order, or died, is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        words = os.read(fd, _PID_BYTES_MAX).strip()
        if not words:
            return None  # released in order; a lock is not tried without need, for who takes it just then would fail
        pid = int(words) if words.isdigit() else 0
        if pid and pid != os.getpid() and _has_open(pid, fd):
            return Holder(pid, is_here=True)
        return Holder(pid, is_here=False) if _stays_locked(fd, pid) else None
    finally:
        os.close(fd)


def locker_of(fd: int) -> int:
    """The process that has locked this open file or folder, as the system tells; 0 where it does not."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    # A line of it: "1: FLOCK ADVISORY WRITE 4711 fd:01:123456 0 EOF".
    inode = str(os.fstat(fd).st_ino)
    found = [words for words in map(str.split, lines) if len(words) > 5 and words[5].rpartition(":")[2] == inode]
    pids = [int(words[4]) for words in found if words[1] == "FLOCK" and words[4].isdigit()]
    return next((pid for pid in pids if _has_open(pid, fd)), 0)  # others have a file of this number on another disk


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


def _stays_locked(fd: int, pid: int) -> bool:
    """Whether it is locked, and not only for as long as its dead process takes to be cleared away.

    What a process that is killed has open cannot be seen any more a moment before it is closed.
    """
    until = time.monotonic() + _DYING_S
    while _is_locked(fd):
        if not _is_dying(pid) or time.monotonic() > until:
            return True
        time.sleep(_TRY_S)
    return False


def _is_dying(pid: int) -> bool:
    """Whether this is a process of this machine that has ended, of which something is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return False


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
