"""Ending the process that serves a run, in order, from outside: as Ctrl-C does, and never another process.

A process id in a file may be another's by now. So a process is held by a descriptor first, and then has to prove that
it has the run's lock open; the signal goes through the descriptor, which never comes to mean another process.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from skerry.errors import Refusal, RunFailed
from skerry.run.status import holders_of
from skerry.store.lock import Holder

SAYS_S = 5.0  # how often a person hears that it still waits


class Ended(NamedTuple):
    """A process that was told to end, and did."""

    pid: int
    is_supervisor: bool
    words: list[str]  # its command line
    folder: str  # where it was given


def stop(root: Path, within_s: float, say: Callable[[str], None]) -> Ended | None:
    """End who serves the run, its supervisor if it has one, and wait until it is gone; None if nobody does."""
    syncer, supervisor = holders_of(root)
    holder = supervisor or syncer
    if holder is None:
        return None
    if not holder.is_here:
        raise Refusal(
            f"{root}: process {holder.pid} serves it on another machine, in another container or as another user: "
            "stop it there"
        )
    process = _opened(holder)
    try:
        if process is None or holder not in holders_of(root):
            return None  # it ended just now
        ended = Ended(holder.pid, holder is supervisor, *_origin(holder.pid))
        say(f"asked process {holder.pid} to end")
        signal.pidfd_send_signal(process, signal.SIGTERM)
        _wait(process, holder.pid, within_s, say)
    except PermissionError:
        raise Refusal(f"{root}: process {holder.pid} serves it for another user: stop it as that user") from None
    finally:
        if process is not None:
            os.close(process)
    return ended


def _opened(holder: Holder) -> int | None:
    try:
        return os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return None


def _origin(pid: int) -> tuple[list[str], str]:
    """How it was started, as far as the system says."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        return words, os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return [], ""


def _wait(process: int, pid: int, within_s: float, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < within_s:
        if select.select([process], [], [], min(SAYS_S, within_s - waited_s))[0]:
            return
        say(f"waiting for process {pid} to end ({time.monotonic() - began:.0f} s)")
    raise RunFailed(
        f"process {pid} was asked to end and has not within {within_s:g} s: look at what it says, or end it with "
        f"kill -9 {pid}, after which the run goes on from its last commit"
    )
