"""The syncer process: a server, a node, one loop, and a status file for whoever looks. It imports no torch."""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from skerry.core.events import Interrupted, Ticked
from skerry.core.vocabulary import Ending
from skerry.node import telemetry
from skerry.node.peers import Learners
from skerry.node.syncer import SyncerNode
from skerry.store.store import Store
from skerry.wire.tcp import Server
from skerry.wire.transport import WireEvent

INBOX_MAX = 1024
TICK_S = 0.02
STATUS_S = 0.5
FAREWELL_S = 3.0  # for learners to take in the last message before this process ends

log = logging.getLogger("skerry.syncer")


class SyncerShell:
    """Runs a SyncerNode against the real clock, real sockets and a real disk."""

    def __init__(self, store: Store, host: str, port: int, token: bytes | None) -> None:
        self.inbox: queue.Queue[WireEvent] = queue.Queue(INBOX_MAX)
        self.root = store.root
        self.learners = Learners()
        self.node = self.learners.node = SyncerNode(store, self.learners, time.monotonic())
        wire = self.node.config.wire
        self.server = self.learners.endpoint = Server(
            host,
            port,
            token,
            self.inbox,
            self.learners.payload_bytes,
            heartbeat_s=wire.heartbeat_s,
            timeout_s=wire.timeout_s,
        )

    def run(self, keep_going: Callable[[], bool]) -> Ending:
        """Serve until the run is closed or `keep_going` says no; the reason it ended."""
        status_at = 0.0
        while not self.node.finished:
            if not keep_going():
                self.node.handle(Interrupted(), time.monotonic())
                break
            self._turn()
            self.node.tidy()
            if time.monotonic() - status_at > STATUS_S:
                status_at = time.monotonic()
                self.write_status()
        self._farewell()
        assert self.node.finished is not None
        return self.node.finished

    def _turn(self) -> None:
        """Take in what is there, at most a bounded batch, then let time pass."""
        try:
            self._take(self.inbox.get(timeout=TICK_S))
            for _ in range(INBOX_MAX):
                self._take(self.inbox.get_nowait())
        except queue.Empty:
            pass
        self.node.handle(Ticked(), time.monotonic())

    def _take(self, event: WireEvent) -> None:
        self.learners.take(event, time.monotonic())

    def _farewell(self) -> None:
        """Learners that were told the run is done report a last time and hang up; then this process may end."""
        deadline = time.monotonic() + (FAREWELL_S if self.node.finished == "closed" else 0.0)
        while self.learners.links and time.monotonic() < deadline:
            try:
                self._take(self.inbox.get(timeout=TICK_S))
            except queue.Empty:
                continue
        self.write_status()
        self.server.close()

    def write_status(self) -> None:
        """The whole position as JSON, replaced in one go; not durable, nothing depends on it."""
        record = telemetry.status(self.node.machine, self.server.bytes_in, self.server.bytes_out, time.time())
        record |= {"pid": os.getpid(), "address": self.server.address}
        try:
            write_json(self.root / "status.json", record)
        except OSError as error:  # if the disk is full, the store says so at its next commit, and stops
            log.warning("status.json cannot be written: %s", error.strerror)


def write_json(path: Path, record: object) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.replace(path)
