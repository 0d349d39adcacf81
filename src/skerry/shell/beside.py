"""What runs beside a training loop: the node half of its learner, in a process of its own or in a thread.

A loop that launches kernels feels every moment of Python that another thread of its process runs, so it is a process
where there can be one. It is an executed module, never a fork: the trainer may hold a device, and its main module is
its own. Where the system has no memory to share without a path, and where somebody prefers it, it is a thread.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal, Protocol

import skerry
from skerry.node.cells import Lay
from skerry.node.mailbox import Mailbox, NodeRecord, Record, mailbox
from skerry.python import module_argv
from skerry.shell.channel import Beat, Channel, Introduction, Said
from skerry.shell.home import Home, OnHost, node_threads
from skerry.shell.memory import OwnMemory, SharedMemory, shared_file
from skerry.shell.node import LAST_TURN_S, NodeLoop, Who

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

Kind = Literal["process", "thread"]

log = logging.getLogger("skerry.learner")


class Beside(Protocol):
    """The node half, as the training half has it: an end of a mailbox, cells, and whether anybody is there."""

    post: Mailbox
    lay: Lay
    failure: BaseException | None  # of what is there no more, where it is known

    @property
    def heard_at(self) -> float:
        """When it last gave a sign of life; a thread of this very process needs to give none."""

    def wake(self) -> None:
        """Something was said; never waits."""

    def flush(self) -> None:
        """Let it have what there was no room for when it was said; never waits."""

    @property
    def obituary(self) -> str:
        """Why it is there no more; empty while it is."""

    @property
    def standstill(self) -> str:
        """Why it is there and does nothing, where that is known."""

    def end(self) -> None:
        """Nothing is left to do."""


class NodeThread:
    """In a thread. Every moment of its Python is one that the training loop waits for the interpreter."""

    standstill = ""
    heard_at = math.inf

    def __init__(self, who: Who, home: Home | None = None) -> None:
        self.post, theirs = mailbox()
        threads = node_threads()
        home = home or OnHost(OwnMemory(threads), threads)
        self.lay = home.lay
        self.loop = NodeLoop(who, theirs, home)
        self.failure: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="skerry-node", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self.loop.wake()

    def flush(self) -> None:
        pass  # there is always room

    @property
    def obituary(self) -> str:
        return "" if self.failure is None else "the learner's node thread died"

    def end(self) -> None:
        self._is_over = True
        self.wake()
        self._thread.join(timeout=LAST_TURN_S)
        self.loop.close()

    def _run(self) -> None:
        try:
            self.loop.run(lambda: self._is_over)
        except BaseException as error:
            self.failure = error
            log.exception("the learner's node thread died")


class NodeProcess:
    """In a process, which ends when this one does or lets go of its end of the socket."""

    failure = None

    def __init__(self, who: Who) -> None:
        ours, theirs = socket.socketpair()
        memory = shared_file()
        self.lay = SharedMemory(memory)
        self.post = Hearing(ours, NodeRecord | Said | Beat)
        files = (theirs.fileno(), memory)
        self._process = subprocess.Popen(
            module_argv("skerry.shell.companion", *map(str, files)),
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the trainer, which then hands over what is left
        )
        theirs.close()
        self.post.send(Introduction(who, logging.getLogger("skerry").getEffectiveLevel()))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def heard_at(self) -> float:
        return self.post.heard_at

    def wake(self) -> None:
        self.post.flush()

    def flush(self) -> None:
        self.post.flush()

    @property
    def obituary(self) -> str:
        return f"the learner's node process {self._ended()}" if self.post.is_over else ""

    @property
    def standstill(self) -> str:
        if not self._is_stopped():
            return ""
        return f"the learner's node process {self.pid} is stopped (kill -CONT {self.pid} lets it go on)"

    def end(self) -> None:
        self.post.close()
        if self._is_stopped():
            self._process.kill()
        try:
            self._process.wait(LAST_TURN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.lay.close()

    @property
    def has_failed(self) -> bool:
        """It ended by itself: nobody else had a hand in it."""
        return self._process.returncode is not None and self._process.returncode >= 0

    def _is_stopped(self) -> bool:
        """By a signal, or by who traces it."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False  # it has ended

    def _ended(self) -> str:
        try:
            code = self._process.wait(LAST_TURN_S)
        except subprocess.TimeoutExpired:
            return "says nothing any more"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with code {code}"


class Hearing(Channel):
    """The training half's end: what the node has to log is logged here. A fork of this process hears nothing."""

    def __init__(self, sock: socket.socket, hears: Any) -> None:
        super().__init__(sock, hears)
        self._owner = os.getpid()
        self.heard_at = time.monotonic()

    def receive(self) -> list[Any]:
        if os.getpid() != self._owner:
            return []  # whoever reads it has it alone, and it is for the trainer
        records: list[Record] = super().receive()
        if records:
            self.heard_at = time.monotonic()
        for said in [record for record in records if isinstance(record, Said)]:
            logging.getLogger(said.logger).log(said.level, "%s", said.text)
        return [record for record in records if not isinstance(record, Said | Beat)]


class Silence:
    """What is said of a node that gives no sign of life: that it does not, and that it is back."""

    def __init__(self) -> None:
        self.trouble = ""  # while there is one
        self._since = 0.0

    def look(self, node: NodeProcess | NodeThread, limit_s: float, as_of: float) -> None:
        """`as_of` is when the loop last could have heard: what came while it was at a step is not read yet."""
        if not self.trouble and as_of - node.heard_at > limit_s:
            self._since = node.heard_at
            self.trouble = node.standstill or f"the learner's node process gives no sign of life for {limit_s:g} s"
            log.warning("%s; training goes on, and nothing of it is shared meanwhile", self.trouble)
        elif self.trouble and node.heard_at > self._since:
            log.warning("the learner's node process is back after %.0f s", node.heard_at - self._since)
            self.trouble = ""


def _environment() -> dict[str, str]:
    """As it is, but this very package is found, and libraries start no threads of their own."""
    here = str(Path(skerry.__file__).parents[1])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return os.environ | dict.fromkeys(ONE_THREAD, "1") | {"PYTHONPATH": path}


def can_be_process() -> bool:
    return hasattr(os, "memfd_create") and bool(sys.executable)


def start_beside(kind: Kind, who: Who, home: Home | None = None) -> NodeProcess | NodeThread:
    """What is on a device can only be a thread's."""
    return NodeProcess(who) if kind == "process" else NodeThread(who, home)
