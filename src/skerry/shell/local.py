"""A local run: one syncer and several learners as child processes under one supervisor.

The supervisor starts them, brings back what dies, carries out the kills it was asked for at a fraction of the run, and
never touches the protocol: it reads the status file and, at the end, the tape. Its children end when it does. A worse
disturber (`proof/chaos/supervisor.py`) changes how learners dial and what is done to whom.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import DiskFull, RunFailed
from skerry.run.evaluations import waiting
from skerry.run.summary import Kill
from skerry.shell.evaluate import figures_told
from skerry.store import lock

POLL_S = 0.1
RESTART_S = 2.0  # a killed process stays away this long
CRASHES_MAX = 5  # of one child, not counting kills, before the run is given up
TERM_S = 4.0  # between asking a learner to end and ending it
SYNCER_TERM_S = 60.0  # likewise the syncer, which writes checkpoints meanwhile
LOCAL = "local.json"
START_S = 120.0  # for the syncer to come up


class Local(msgspec.Struct):
    """What the supervisor must know again when it resumes a run."""

    speeds: list[float]


@dataclass
class Child:
    """One child process and its log; `due_at` is when it is to be started again.

    `excused_s` is set when it was driven to end by itself: however it does, it is back that long after.
    """

    name: str
    arguments: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    due_at: float | None = None
    started_at: float = 0.0  # wall-clock
    excused_s: float | None = None
    crashes: int = 0
    ended: bool = False

    def start(self) -> None:
        self.due_at = None
        self.started_at = time.time()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "skerry", *self.arguments, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the supervisor, which then ends them in order
            )

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self, away_s: float) -> None:
        """SIGKILL; it is back after this long."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.due_at = time.monotonic() + away_s

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1] if lines else "it said nothing"


@dataclass
class LocalRun:
    """Everything the supervisor holds; `run` blocks until the syncer has closed the run."""

    run_dir: Path
    speeds: Sequence[float]
    kills: list[Kill]
    syncer_arguments: list[str] = field(default_factory=list)
    learner_arguments: list[str] = field(default_factory=list)  # of each
    status: dict[str, Any] = field(default_factory=dict)
    news: list[str] = field(default_factory=list)  # what happened to processes, for a person
    syncer: Child | None = None
    learners: list[Child] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)  # of children that nobody had killed
    port: int = 0
    is_evaluated: bool = False  # while it goes, by a process beside it
    evaluator: Child | None = None
    evaluations_told: int = 0

    def run(self, show: Callable[[], None]) -> None:
        """Start, watch, kill, bring back; `show` is called whenever there may be something to see."""
        with self._supervising(), self.ends_everything():
            self.start_syncer()
            self._start_learners()
            if self.is_evaluated:
                self._start_evaluator()
            assert self.syncer is not None
            while not self.syncer.ended:
                self.read_status()
                self.disturb()
                for child in [self.syncer, *self.learners]:
                    self._tend(child)
                self._look_at_evaluator()
                show()
                time.sleep(POLL_S)
            self.read_status()
            self._wait_for_learners()

    # ------------------------------------------------------------------------------------------ starting

    def start_syncer(self) -> None:
        logs = self.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "status.json").unlink(missing_ok=True)
        arguments = ["syncer", "--run", str(self.run_dir), "--port", "0", *self.syncer_arguments]
        self.syncer = Child("syncer", arguments, logs / "syncer.log")
        self.syncer.start()
        deadline = time.monotonic() + START_S
        while not self.read_status():
            if not self.syncer.is_running:
                raise RunFailed(_said(self.syncer))
            if time.monotonic() > deadline:
                raise RunFailed(f"the syncer did not come up within {START_S:.0f} s: see {self.syncer.log}")
            time.sleep(POLL_S)
        self.port = int(self.status["address"].rpartition(":")[2])
        self.syncer.arguments = ["syncer", "--run", str(self.run_dir), "--port", str(self.port)]

    def _start_learners(self) -> None:
        for index, speed in enumerate(self.speeds):
            name = f"learner-{index}"
            address = f"127.0.0.1:{self.port_for(name)}"
            arguments = ["learner", "--syncer", address, "--name", name, "--speed", str(speed)]
            arguments += ["--pace-file", str(self.pace_file(name)), *self.learner_arguments]
            child = Child(name, arguments, self.run_dir / "logs" / f"{name}.log")
            child.start()
            self.learners.append(child)

    def _start_evaluator(self) -> None:
        """With one thread and what the others leave of the cores."""
        arguments = ["evaluate", str(self.run_dir), "--watch", "--threads", "1"]
        self.evaluator = Child("evaluator", arguments, self.run_dir / "logs" / "evaluator.log")
        self.evaluator.start()

    def port_for(self, name: str) -> int:
        """What this learner dials."""
        return self.port

    def pace_file(self, name: str) -> Path:
        return self.run_dir / "paces" / name

    def child(self, name: str) -> Child:
        assert self.syncer is not None
        return next(child for child in [self.syncer, *self.learners] if child.name == name)

    def read_status(self) -> bool:
        try:
            self.status = msgspec.json.decode((self.run_dir / "status.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return False
        return True

    # ------------------------------------------------------------------------------------------ watching

    def disturb(self) -> None:
        """Called between two looks at the children: the kills that are due."""
        progress = self.status.get("progress", 0.0)
        for kill in self.kills:
            if kill.killed_at is not None or progress < kill.at:
                continue
            child = self.child(kill.victim)
            if not child.is_running:
                continue
            kill.killed_at = time.time()
            child.kill(RESTART_S)
            self.tell(f"{child.name} killed (SIGKILL)")

    def calm(self) -> None:
        """Undo what disturbs at present; called before the children are ended, however the run went."""

    def tell(self, text: str) -> None:
        self.news.append(f"{100 * self.status.get('progress', 0.0):3.0f} %  {text}")

    def _tend(self, child: Child) -> None:
        """Start what is due, note what has ended, bring back what crashed, give up on what refuses to run."""
        if child.due_at is not None:
            if time.monotonic() >= child.due_at:
                child.start()
                self.tell(f"{child.name} started again")
            return
        if child.ended or child.is_running:
            return
        assert child.process is not None
        code = child.process.returncode
        if code == 0:
            child.ended = True
        elif child.excused_s is not None:
            child.due_at = time.monotonic() + child.excused_s
            child.excused_s = None
            self.tell(f"{child.name} ended (exit {code}): {child.last_line().removeprefix('skerry: ')}")
        elif code == RunFailed.code:
            raise RunFailed(_said(child))
        elif code == DiskFull.code:
            raise DiskFull(_said(child))
        else:
            child.crashes += 1
            if child.crashes > CRASHES_MAX:
                raise RunFailed(f"{child.name} crashed {child.crashes} times: {_said(child)}")
            child.due_at = time.monotonic() + RESTART_S
            self.crashes.append(f"{child.name} crashed (exit {code}): see {child.log}")
            self.tell(self.crashes[-1])

    def _look_at_evaluator(self) -> None:
        """The run does not need it: what it finds and what becomes of it are told, and that is all."""
        if self.evaluator is None or self.evaluator.ended:
            return
        found = waiting(self.run_dir)
        for one in found[self.evaluations_told :]:
            self.tell(f"held out: {figures_told(one.figures)}, at {100 * one.progress:.0f} %")
        self.evaluations_told = len(found)
        if self.evaluator.is_running:
            return
        self.evaluator.ended = True
        if self.evaluator.process is not None and self.evaluator.process.returncode:
            self.tell(f"the run goes on without its evaluator: {_said(self.evaluator)}")

    def _wait_for_learners(self) -> None:
        deadline = time.monotonic() + TERM_S
        while any(child.is_running for child in self.learners) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    # ------------------------------------------------------------------------------------------ ending

    @contextlib.contextmanager
    def _supervising(self) -> Iterator[None]:
        """Whoever looks at the run finds this process, also while its syncer is away; two would fight over it."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / lock.SUPERVISOR).open("a+b") as file:
            file.seek(0)
            if holder := lock.take(file.fileno()):
                raise RunFailed(
                    f"{self.run_dir} is run by process {holder} already: stop it, or choose another directory"
                )
            try:
                yield
            finally:
                file.truncate(0)

    @contextlib.contextmanager
    def ends_everything(self) -> Iterator[None]:
        """However this ends, no process is left behind; learners go first, so that their last work is merged."""
        before = signal.signal(signal.SIGTERM, _as_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            self.calm()
            _end([*self.learners, *([self.evaluator] if self.evaluator else [])], TERM_S)
            _end([self.syncer] if self.syncer else [], SYNCER_TERM_S)


def _end(children: Sequence[Child], patience_s: float) -> None:
    processes = [c.process for c in children if c.process is not None and c.is_running]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + patience_s
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _said(child: Child) -> str:
    return f"{child.last_line().removeprefix('skerry: ')} (log: {child.log})"
