"""Holds somebody else's command for the supervisor of a local run: a process of its own between the two.

    python leash.py SUPERVISOR_PID GRACE_S COMMAND …

The command gets a process group. SIGTERM to the leash, or the end of the supervisor, is SIGTERM to that whole group;
what is there after the grace is killed. When the command has ended, so does all that it left behind, and the leash ends
with its exit code. On Linux that includes whoever began a session of their own, as torchrun's workers do, because
orphans below the leash become its children; and if the leash itself is killed, the command gets SIGTERM, and what stays
all the same is the supervisor's to end (`adopting`, `end_orphans`). Elsewhere it is the process group alone.

It imports nothing but the standard library, and little of that: each command has one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.2
SWEEP_S = 5.0  # for what was killed to be gone


def main(parent: int, grace_s: float, words: list[str]) -> int:
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.append(number))
    prctl = _prctl()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        command = subprocess.Popen(words, process_group=0, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM))
    except OSError as error:
        print(f"skerry: {words[0]}: cannot be started ({error.strerror}): check the island's command", file=sys.stderr)
        return 127
    until: float | None = None
    while not _has_ended(command):
        if until is None and (told or os.getppid() != parent):
            until = time.monotonic() + grace_s
            _signal_group(command.pid, signal.SIGTERM)
        elif until is not None and time.monotonic() > until:
            break
    _sweep(command.pid)
    code = command.wait()
    return code if code >= 0 else 128 - code


def _has_ended(command: subprocess.Popen[bytes]) -> bool:
    """Look for a moment; it is not reaped, so that its number stays its own until its group is gone.

    Orphans that came to this process are: a command that runs for weeks may leave many, and each would keep its number.
    """
    until = time.monotonic() + POLL_S
    while time.monotonic() < until:
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid == command.pid:
                return True
            os.waitpid(found.si_pid, os.WNOHANG)
        time.sleep(POLL_S / 10)
    return False


def _sweep(group: int) -> None:
    """Kill what is left below this process."""
    _signal_group(group, signal.SIGKILL)
    deadline = time.monotonic() + SWEEP_S
    while (left := [pid for pid in _children() if pid != group]) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(POLL_S / 10)


def _children(pid: int | str = "self") -> list[int]:
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # that thread is gone
            found += [int(word) for word in file.read_text().split()]
    return found


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # a system may refuse a group of which only the dead are left
        os.killpg(group, number)


# ---------------------------------------------------------------------------------------------- the supervisor's side


@contextmanager
def adopting() -> Iterator[None]:
    """Meanwhile what a killed leash leaves behind becomes a child of this process, on Linux."""
    prctl = _prctl()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def end_orphans(leash: int, marks: Sequence[str]) -> None:
    """Kill what a leash that is gone has left to this process, and all below that.

    Only children of this process are killed, for their numbers stay theirs until it has waited for them: those in the
    session of the leash, those with all these words in their environment, and those that were below such a one.
    """
    deadline, theirs = time.monotonic() + SWEEP_S, set[int]()
    while left := [pid for pid in _children() if pid in theirs or _is_of(pid, leash, marks)]:
        for pid in left:
            theirs.update(_below(pid))
            with suppress(ProcessLookupError, ChildProcessError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S / 10)


def _is_of(pid: int, leash: int, marks: Sequence[str]) -> bool:
    try:
        if os.getsid(pid) == leash:
            return True
        said = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return bool(marks) and all(os.fsencode(mark) in said for mark in marks)


def _below(pid: int) -> list[int]:
    found = _children(pid)
    for child in found:  # which grows meanwhile
        found += [one for one in _children(child) if one not in found]
    return found


def _prctl() -> Callable[[int, int], object]:
    if not sys.platform.startswith("linux"):
        return lambda what, value: None
    call = ctypes.CDLL(None).prctl
    return lambda what, value: call(what, ctypes.c_ulong(value), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
