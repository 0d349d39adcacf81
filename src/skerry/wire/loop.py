"""One thread that waits for sockets, and runs what other threads hand to it.

Rules that hold here: handlers, calls and `step` run in the loop's thread, so what only they touch needs no
lock. Of the sockets that are ready, those of the lowest priority number are served first; one of which something can be
read that the system knows nothing of (`again`) counts as ready while it is watched for that. After every turn
`step` says how long the next one may wait, or that it was the last. Nothing here knows peers or frames.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

log = logging.getLogger("skerry.wire")

Handler = Callable[[int], None]  # is told which of READ and WRITE the socket is ready for


class Loop:
    """The thread, its selector and its calls; `end` runs last, however the loop ends."""

    def __init__(self, name: str, step: Callable[[], float | None], end: Callable[[], None]) -> None:
        self.failure: str | None = None  # the bug that ended the thread
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._step, self._end = step, end
        self._calls: deque[Callable[[], None]] = deque()
        self._ended = False
        self._lock = threading.Lock()  # over the two above
        self._selector = selectors.DefaultSelector()
        self._watched: dict[socket.socket, tuple[int, int]] = {}  # for which events, and with which priority
        self._again: dict[socket.socket, None] = {}  # that can be read, whatever the selector says
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self.watch(self._wake_in, READ, 0, self._woken)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the loop's thread call this soon; may be called from any thread, and does nothing after the end."""
        with self._lock:
            if self._ended:
                return
            self._calls.append(partial(function, *arguments))
            if len(self._calls) == 1:
                self._wake_out.send(b"\0")

    def watch(self, sock: socket.socket, events: int, priority: int, handler: Handler) -> None:
        """Call the handler whenever one of the events is there; a socket keeps the handler it came with."""
        watched = self._watched.get(sock)
        if watched is None:
            self._selector.register(sock, events, (priority, handler))
        elif watched != (events, priority):
            self._selector.modify(sock, events, (priority, handler))
        self._watched[sock] = (events, priority)

    def forget(self, sock: socket.socket) -> None:
        """Stop watching an open socket; it may be one that is not watched."""
        if self._watched.pop(sock, None) is not None:
            self._selector.unregister(sock)

    def again(self, sock: socket.socket) -> None:
        """At the next turn at which it is watched for READ it is ready, once."""
        self._again[sock] = None

    def calm(self, sock: socket.socket) -> None:
        """Only the selector says from now on when it is ready."""
        self._again.pop(sock, None)

    def _run(self) -> None:
        try:
            while (wait_s := self._step()) is not None:
                self._turn(wait_s)
        except Exception as error:
            log.exception("the I/O thread died")
            self.failure = repr(error)
        finally:
            with self._lock:
                self._ended = True
                self._calls.clear()
            self._end()
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()

    def _turn(self, wait_s: float) -> None:
        ready = self._ready(wait_s)
        for key, events in sorted(ready, key=_priority) if len(ready) > 1 else ready:
            key.data[1](events)
        if self._calls:
            with self._lock:
                calls, self._calls = self._calls, deque()
            for call in calls:
                call()

    def _ready(self, wait_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        again = self._again and [sock for sock in self._again if self._watched.get(sock, (0, 0))[0] & READ]
        if not again:
            return self._selector.select(wait_s)
        found = {key.fd: (key, events) for key, events in self._selector.select(0.0)}
        for sock in again:
            del self._again[sock]
            key = self._selector.get_key(sock)
            found[key.fd] = (key, found.get(key.fd, (key, 0))[1] | READ)
        return list(found.values())

    def _woken(self, events: int) -> None:
        self._wake_in.recv(4096)


def _priority(ready: tuple[selectors.SelectorKey, int]) -> int:
    priority: int = ready[0].data[0]
    return priority
