"""The syncer process: a server, a node, one loop, and a status file for whoever looks.

Identity comes from the connection: a peer is the learner and life it was welcomed as, and a message that says
otherwise ends it. This process imports no torch.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from skerry.algo import codecs
from skerry.algo.fragments import Layout, first_difference
from skerry.core.events import Departed, Interrupted, Joined, PublicationSent, Reported, Ticked
from skerry.core.messages import (
    PROTOCOL,
    Answer,
    Ask,
    Contribution,
    Hello,
    Message,
    Refused,
    Report,
    SyncerMessage,
    Welcome,
)
from skerry.node import telemetry
from skerry.node.syncer import SyncerNode
from skerry.store.store import Store
from skerry.wire.frames import ProtocolError
from skerry.wire.tcp import Server
from skerry.wire.transport import Lost, Opened, Received, Sent, WireEvent

INBOX_MAX = 1024
TICK_S = 0.02
STATUS_S = 0.5
FAREWELL_S = 3.0  # for learners to take in the last message before this process ends
NAME = re.compile(r"[a-z0-9._-]{1,64}")

log = logging.getLogger("skerry.syncer")


class SyncerShell:
    """Translates between peers on the wire and learners in the node, and keeps the time."""

    def __init__(self, store: Store, host: str, port: int, token: bytes | None) -> None:
        self.inbox: queue.Queue[WireEvent] = queue.Queue(INBOX_MAX)
        self.peers: dict[int, tuple[str, int]] = {}  # peer -> (learner, life)
        self.links: dict[tuple[str, int], int] = {}  # (learner, life) -> peer
        self.joining: dict[str, int] = {}  # learner -> peer that said hello and is not welcomed yet
        self.root = store.root
        self.node = SyncerNode(store, self, time.time, time.monotonic())
        wire = self.node.config.wire
        self.server = Server(
            host,
            port,
            token,
            self.inbox,
            self._payload_bytes,
            heartbeat_s=wire.heartbeat_s,
            timeout_s=wire.timeout_s,
        )

    # ------------------------------------------------------------------------------------------ the loop

    def run(self, keep_going: Callable[[], bool]) -> str:
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

    def _farewell(self) -> None:
        """Learners that were told the run is done report a last time and hang up; then this process may end."""
        deadline = time.monotonic() + (FAREWELL_S if self.node.finished == "closed" else 0.0)
        while self.links and time.monotonic() < deadline:
            try:
                self._take(self.inbox.get(timeout=TICK_S))
            except queue.Empty:
                continue
        self.write_status()
        self.server.close()

    def write_status(self) -> None:
        """The whole position as JSON, replaced in one go; not durable, nothing depends on it."""
        now = time.monotonic()
        record = telemetry.status(self.node.machine, now, self.server.bytes_in, self.server.bytes_out, time.time())
        record |= {"pid": os.getpid(), "address": self.server.address}
        try:
            write_json(self.root / "status.json", record)
        except OSError as error:  # if the disk is full, the store says so at its next commit, and stops
            log.warning("status.json cannot be written: %s", error.strerror)

    # ------------------------------------------------------------------------------------------ wire -> node

    def _take(self, event: WireEvent) -> None:
        now = time.monotonic()
        match event:
            case Opened():
                log.info("connection from %s", event.address)
            case Received():
                try:
                    self._received(event, now)
                except ProtocolError as error:
                    log.warning("dropped a peer: %s", error)
                    self.server.drop(event.peer, str(error))
            case Sent():
                if event.peer in self.peers and isinstance(event.tag, tuple):
                    learner, life = self.peers[event.peer]
                    self.node.handle(PublicationSent(learner, life, *event.tag), now)
            case Lost():
                self._lost(event, now)

    def _received(self, event: Received, now: float) -> None:
        message = event.message
        if isinstance(message, Hello):
            self._hello(event.peer, message, now)
            return
        if isinstance(message, Ask):
            created = self.node.machine.state.created
            self.server.send(event.peer, Answer(created.run, created.config))
            return
        if event.peer not in self.peers:
            raise ProtocolError(f"{type(message).__name__} before a hello")
        if not isinstance(message, Report | Contribution):
            raise ProtocolError(f"a learner does not send {type(message).__name__}")
        if (message.learner, message.life) != self.peers[event.peer]:
            raise ProtocolError(f"a message in the name of {message.learner!r} life {message.life}")
        if isinstance(message, Report):
            if len(message.positions) != len(self.node.fragments):
                raise ProtocolError(f"a report on {len(message.positions)} fragments")
            self.node.handle(Reported(message), now)
        elif event.payload is not None:
            self.node.contribution(message, event.payload, now)

    def _hello(self, peer: int, hello: Hello, now: float) -> None:
        if peer in self.peers:
            raise ProtocolError("a second hello")
        reason = self._objection(hello)
        if reason:
            log.warning("refused a learner: %s", reason)
            self.server.send(peer, Refused(reason))
            self.server.drop(peer, reason)
            return
        self.joining[hello.learner] = peer
        self.node.handle(Joined(hello.learner, hello.process, hello.life), now)
        self.joining.pop(hello.learner, None)

    def _objection(self, hello: Hello) -> str:
        """Why this learner cannot take part, in one line; empty if it can."""
        if hello.protocol != PROTOCOL:
            return (
                f"protocol {hello.protocol} of the learner is not protocol {PROTOCOL} of the syncer: upgrade the older"
            )
        if not NAME.fullmatch(hello.learner):
            return f"learner name {hello.learner[:80]!r}: use 1 to 64 of a-z, 0-9, '.', '_' and '-'"
        if hello.layout_digest == self.node.layout.digest:
            return ""
        try:
            theirs = msgspec.json.decode(hello.layout, type=Layout)
        except msgspec.DecodeError:
            raise ProtocolError("a hello whose layout cannot be read") from None
        difference = first_difference(theirs, self.node.layout) or "their order differs"
        return f"the model differs from the run's: {difference} (here: the learner, there: the run)"

    def _lost(self, event: Lost, now: float) -> None:
        who = self.peers.pop(event.peer, None)
        if who is None:
            log.info("connection that is no learner's ended: %s", event.reason)
        elif self.links.get(who) == event.peer:
            log.info("%s: %s", who[0], event.reason)
            del self.links[who]
            self.node.handle(Departed(*who), now)

    def _payload_bytes(self, message: Message) -> int:
        """The only legal payload length of a bulk message; called by the I/O thread before it allocates."""
        if not isinstance(message, Contribution):
            raise ProtocolError(f"{type(message).__name__} carries no payload")
        if not 0 <= message.fragment < len(self.node.fragments):
            raise ProtocolError(f"fragment {message.fragment} of {len(self.node.fragments)}")
        if message.codec not in (self.node.config.wire.codec_up, "fp32"):
            raise ProtocolError(f"codec {message.codec[:16]!r} is not the run's {self.node.config.wire.codec_up}")
        return codecs.payload_bytes(message.codec, self.node.fragments[message.fragment].size)

    # ------------------------------------------------------------------------------------------ node -> wire

    def send(
        self, learner: str, life: int, message: SyncerMessage, payload: memoryview | bytes | None, tag: object
    ) -> None:
        if isinstance(message, Welcome):
            self._bind(learner, life)
        peer = self.links.get((learner, life))
        if peer is not None:
            self.server.send(peer, message, payload, tag)

    def _bind(self, learner: str, life: int) -> None:
        """From here on this peer is that life; an older connection of the same life is over."""
        peer = self.joining.pop(learner)
        before = self.links.get((learner, life))
        if before is not None:
            self.peers.pop(before, None)
            self.server.drop(before, "the same learner connected again")
        self.links[learner, life] = peer
        self.peers[peer] = (learner, life)
        log.info("%s joined (life %d)", learner, life)

    def dismiss(self, learner: str, life: int, reason: str) -> None:
        peer = self.links.pop((learner, life), None) if life else self.joining.pop(learner, None)
        if peer is not None:
            self.peers.pop(peer, None)
            self.server.send(peer, Refused(reason))
            self.server.drop(peer, reason)


def write_json(path: Path, record: object) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.replace(path)
