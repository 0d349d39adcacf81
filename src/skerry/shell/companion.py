"""The node half of a learner in a process of its own: `python -m skerry.shell.companion SOCKET MEMORY`.

It is started by a trainer (`shell/beside.py`) with two open files, an end of a socket pair and the memory of the cells,
and told on the socket who it is: nothing of that stands on a command line or in an environment. It ends with the
trainer, whose end of the socket is then closed, and with nothing else: an interrupt is for the trainer, which hands
over what is left. It does not import torch. What it logs is told to the trainer, whose logging it passes through.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from skerry.node.mailbox import Record, TrainingRecord
from skerry.shell.channel import Beat, Channel, Introduction, Said
from skerry.shell.home import OnHost, node_threads
from skerry.shell.memory import SharedMemory
from skerry.shell.node import NodeLoop

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
ENDING_S = 0.5  # for what is under way when the trainer is gone

log = logging.getLogger("skerry.learner")


class Teller(logging.Handler):
    """Has the trainer log what is logged here."""

    def __init__(self, post: Post) -> None:
        super().__init__()
        self._post = post

    def emit(self, record: logging.LogRecord) -> None:
        self._post.send(Said(record.name, record.levelno, self.format(record)))


class Post:
    """The node's end: a thread hears what the trainer says, so that the node is woken by it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.wake: Callable[[], None] = lambda: None  # is called when something was heard
        self._heard: deque[Record] = deque()
        self._sending = threading.Lock()  # any thread may log
        self._said_at = time.monotonic()

    def send(self, record: Record) -> None:
        with self._sending:
            self._said_at = time.monotonic()
            self._channel.send(record)

    def beat(self, every_s: float) -> None:
        """A sign of life, where nothing was said for so long."""
        if time.monotonic() - self._said_at >= every_s:
            self.send(Beat())

    def flush(self) -> None:
        with self._sending:
            self._channel.flush()

    def receive(self) -> list[Record]:
        return [self._heard.popleft() for _ in range(len(self._heard))]

    def introduction(self) -> Introduction:
        """The first thing that is said; a trainer that is gone before it needs no companion."""
        while not self._heard:
            self._hear()
            if self._channel.is_over:
                sys.exit(0)
        introduction = self._heard.popleft()
        assert isinstance(introduction, Introduction)
        return introduction

    def listen(self) -> None:
        """On a thread of its own, until the trainer is gone; and then so is this process, whatever it is at."""
        while not self._channel.is_over:
            self._hear()
            self.wake()
        time.sleep(ENDING_S)
        os._exit(0)

    def _hear(self) -> None:
        """Wait until the trainer says something, or is gone."""
        select.select([self._channel.sock], [], [])
        self._heard += self._channel.receive()


def _wake_with_the_parents_end() -> None:
    """Have the kernel continue this process when the trainer ends: one that was stopped would not see it, and stay."""
    with contextlib.suppress(OSError, AttributeError):  # where there is no such call, as on macOS
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent, (sock, memory) = os.getppid(), map(int, sys.argv[1:])
    _wake_with_the_parents_end()
    channel = Channel(socket.socket(fileno=sock), Introduction | TrainingRecord)
    post = Post(channel)
    introduction = post.introduction()
    logging.root.handlers[:] = [Teller(post)]
    logging.root.setLevel(introduction.log_level)
    threading.Thread(target=post.listen, name="skerry-trainer", daemon=True).start()
    threads = node_threads()
    loop = NodeLoop(introduction.who, post, OnHost(SharedMemory(memory, threads), threads))
    post.wake = loop.wake

    def is_over() -> bool:
        post.beat(loop.heartbeat_s)
        post.flush()
        return channel.is_over or os.getppid() != parent  # a fork of the trainer may hold its end of the socket open

    loop.run(is_over)
    loop.close()


if __name__ == "__main__":
    main()
