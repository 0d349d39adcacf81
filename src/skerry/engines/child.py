"""A process that a supervisor has on this machine, over all its lives: its command line, its log, how it last ended.

A child is started, killed and put off until later here, and what a killed leash has left of it is swept before its next
life. Whether it is brought back, when, and what its end means for the run, its supervisor decides (`supervisor.py`): a
child knows of no run, no other child and no protocol.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import Literal

from skerry.engines import Member, State, last_line_of, leash
from skerry.engines.spec import OURS
from skerry.errors import one_line
from skerry.store.files import appended

PROCESS = "process "  # and its id: where a member is
LOG_BYTES_MAX = 64 << 20  # of a log when its process starts again; then it is put aside, in place of the one before

Restart = Literal["always", "failure", "never"]


@dataclass
class Child:
    """One child process and its log; `due_at` is when it is to be started again.

    `excused_s` is set when it was driven to end by itself: however it does, it is back that long after.
    """

    name: str
    words: list[str]  # its command line
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)  # beside what the machine has
    folder: Path | None = None
    island: str = ""
    index: int = 0  # in its island
    restart: Restart = "failure"
    process: subprocess.Popen[bytes] | None = None
    due_at: float | None = None
    started_at: float = 0.0  # wall-clock
    since: float = 0.0  # likewise, of its state
    excused_s: float | None = None
    crashes: int = 0  # on end, without having run for long between them
    restarts: int = 0
    ended: bool = False
    detail: str = ""  # how it ended
    trouble: str = ""  # why it could not be started
    error: OSError | None = None  # the same, as the system says it
    leash: int | None = None  # the process that holds or held its command, until what that may have left is swept
    leaves_at: float | None = None  # monotonic: it was told to go, and is ended then if it has not

    def start(self) -> None:
        self.sweep()
        self.restarts += self.started_at > 0.0
        self.due_at, self.ended, self.detail = None, False, ""
        self.started_at = self.since = time.time()
        self.process, self.trouble, self.error = None, "", None
        try:
            with _log(self.log) as log:
                self._begin(log)
        except (OSError, ValueError) as error:
            # Its folder is gone, a link lies where its log belongs, or the machine has no room for a process: a crash
            # of this one, whatever it is, and the others go on.
            self.error = error if isinstance(error, OSError) else None
            self.trouble = f"it cannot be started in {self.folder or '.'} ({_reason(error)})"
            with contextlib.suppress(OSError, ValueError), _log(self.log) as log:
                log.write(f"skerry: {self.trouble}\n".encode(errors="replace"))

    def _begin(self, log: BufferedRandom) -> None:
        inherited = {key: value for key, value in os.environ.items() if key not in OURS}
        self.process = subprocess.Popen(
            self.words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.env},
            cwd=self.folder,
            start_new_session=True,  # Ctrl-C is for the supervisor, which then ends them in order
        )
        self.leash = self.process.pid if leash.__file__ in self.words else None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def code(self) -> int | None:
        return None if self.process is None else self.process.returncode

    def kill(self, away_s: float) -> None:
        """SIGKILL; it is back after this long."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.away(away_s, "killed (SIGKILL)")

    def away(self, away_s: float, detail: str) -> None:
        self.due_at, self.since, self.detail = time.monotonic() + away_s, time.time(), detail

    def sweep(self) -> None:
        """End what a leash that was killed could not: two lives of one learner would train under one name."""
        if self.leash is not None:
            marks = [f"{key}={self.env[key]}" for key in ("SKERRY_NAME", "SKERRY_TOKEN_FILE") if key in self.env]
            leash.end_orphans(self.leash, marks if len(marks) == 2 else [])
            self.leash = None

    def end(self, detail: str = "") -> None:
        """It has ended, and is not brought back."""
        self.sweep()
        self.ended, self.since, self.detail = True, time.time(), detail

    def last_line(self) -> str:
        return self.trouble or last_line_of(self.log)

    @property
    def how(self) -> str:
        """How its last life ended, in a word or two."""
        return "not started" if self.process is None else f"exit {self.code}"

    def member(self, is_up: bool = True) -> Member:
        """As other commands see it; `is_up`: it does what it is there for."""
        state: State
        if self.due_at is not None:
            state = "restarting"
        elif self.ended:
            state = "failed" if self.detail else "ended"
        elif self.process is None:
            state = "waiting"
        else:
            state = "running" if is_up else "starting"
        pid = f"{PROCESS}{self.process.pid}" if self.process is not None and state in ("running", "starting") else ""
        return Member(self.name, self.island, state, pid, self.restarts, self.since, one_line(self.detail))


def aside(log: Path) -> Path:
    """What was said before, of a log that had grown long."""
    return log.with_name(f"{log.name}.1")


def _log(path: Path) -> BufferedRandom:
    """Open to be written at its end; one that has grown long is put aside first."""
    if path.parent.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path.parent))
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):  # who writes to a pipe waits for a reader
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        if found.st_size > LOG_BYTES_MAX:
            with contextlib.suppress(OSError):  # then it grows on
                path.replace(aside(path))
    return appended(path)


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return str(error)
