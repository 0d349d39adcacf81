"""Sockets: the endpoint of a syncer (`Server`) and of a learner (`Client`), one I/O thread over epoll each.

A peer is one control connection (small frames, heartbeats) and one bulk connection. Each begins with a
handshake:

    syncer  -> Challenge   its protocol and a nonce
    learner -> Proof       on the control connection: a nonce of its own, and the MAC of both under the token
               or Attach   on the bulk connection: the same, and the session that the control connection got
    syncer  -> Attached    the session, and the syncer's own MAC; or Denied, with a reason

Rules that hold here: sockets, connections and peers belong to the I/O thread; other threads only hand it
calls. No socket gets more than about WORK_BYTES of work a turn, and control connections are served first,
so that no bulk transfer keeps a heartbeat waiting. Everything that waits has a deadline. Silence counts
only while this side was listening: not while its inbox was full, nor while its process was stopped. A peer
that breaks the protocol is dropped and the endpoint goes on. Nothing here knows what a message means.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import itertools
import logging
import os
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import Full
from typing import Any, Literal

from skerry.core.events import PROTOCOL, Message, Refused
from skerry.wire import frames
from skerry.wire.frames import (
    NONCE_BYTES,
    SESSION_BYTES,
    Attach,
    Attached,
    Challenge,
    Delivery,
    Denied,
    Dialect,
    Handshake,
    Parser,
    Payload,
    PayloadLimit,
    Proof,
    ProtocolError,
    one_line,
)
from skerry.wire.transport import OTHER_SIDE_CLOSED, Inbox, Lost, Opened, Received, Sent, WireError, WireEvent

HEARTBEAT_S = 1.0
TIMEOUT_S = 10.0
HANDSHAKE_S = 5.0
ONE_LINE_TIMEOUTS = 3  # one connection may be silent this many times longer while the other is not
DRAIN_S = 2.0  # for a dropped peer to read its last messages
CLOSE_S = 1.0  # the same, when the endpoint closes
JOIN_S = CLOSE_S + 2.0
TICK_S = 0.05  # how often deadlines are looked at
FULL_INBOX_POLL_S = 0.005
REDIAL_S_MIN, REDIAL_S_MAX = 0.2, 5.0
STRANGERS_MAX = 64  # connections that are not authenticated
ACCEPTS_PER_TURN = 16
ACCEPT_PAUSE_S = 1.0  # after the system could not give us a socket
WORK_BYTES = 512 << 10  # per socket and turn, so that control never waits long
QUEUE_BYTES_MAX = 1 << 30  # queued for one peer; one message alone may be larger

log = logging.getLogger("skerry.wire")

Role = Literal["new", "control", "bulk"]


class Connection:
    """One socket and what is on its way through it."""

    def __init__(self, sock: socket.socket, address: str, parser: Parser, deadline: float) -> None:
        self.sock = sock
        self.address = address
        self.parser = parser
        self.role: Role = "new"
        self.peer: Peer | None = None
        self.nonce = secrets.token_bytes(NONCE_BYTES)  # what the other side must prove the token over
        self.dialling = False
        self.session = b""  # on a learner's bulk connection: the session to attach to
        self.challenge = b""  # on a learner's connection: the syncer's nonce
        self.outgoing: deque[Outgoing] = deque()
        self.current: Outgoing | None = None
        self.writing: list[memoryview] = []  # the unsent rest of one frame
        self.draining = False  # we will say no more than what is queued
        self.ended = False  # the other side will say no more
        self.closed = False
        self.deadline = deadline  # of the handshake, then of draining
        self.heard = self.spoke = time.monotonic()
        self.registered = 0

    @property
    def has_output(self) -> bool:
        return bool(self.writing or self.current or self.outgoing)

    def __repr__(self) -> str:
        return f"<{self.role} connection of {self.address}>"


@dataclass(slots=True)
class Outgoing:
    """One message as frames still to be sent; each frame is a few buffers."""

    frames: Iterator[tuple[Payload, ...]]
    bytes: int
    tag: object = None


@dataclass(slots=True, eq=False)
class Peer:
    id: int
    address: str
    control: Connection
    session: bytes
    opened: float
    attach_by: float  # deadline of its bulk connection
    end_by: float = float("inf")  # deadline of what is still to be read, once a connection has ended
    end_reason: str = ""
    bulk: Connection | None = None
    bulk_queue: deque[Outgoing] = field(default_factory=deque)
    queued_bytes: int = 0

    @property
    def connections(self) -> list[Connection]:
        return [self.control] if self.bulk is None else [self.control, self.bulk]


class _TcpEndpoint:
    """What both sides share: the loop, the peers and their queues. A side adds its handshake."""

    def __init__(
        self,
        token: bytes | None,
        inbox: Inbox,
        dialect: Dialect,
        heartbeat_s: float,
        timeout_s: float,
        handshake_s: float,
        queue_bytes_max: int,
        protocol: int,
    ) -> None:
        if token is not None and not token.strip():
            raise WireError("the token is empty: put at least one line of random text into the token file")
        self.bytes_in = 0
        self.bytes_out = 0
        self._token = token
        self._inbox = inbox
        self._dialect = dialect
        self._heartbeat_s, self._timeout_s, self._handshake_s = heartbeat_s, timeout_s, handshake_s
        self._queue_bytes_max = queue_bytes_max
        self._protocol = protocol
        self._peers: dict[int, Peer] = {}
        self._connections: dict[Connection, None] = {}  # a set that keeps its order: the oldest first
        self._peer_ids = itertools.count(1)
        self._transfer_ids = itertools.count(1)
        self._backlog: deque[WireEvent] = deque()  # what a full inbox left behind
        self._paused = False  # while there is a backlog, no messages are read
        self._ticked = float("-inf")
        self._close_by: float | None = None
        self._failure: str | None = None
        self._ended = False
        self._calls: deque[Callable[[], None]] = deque()
        self._calls_lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, (None, self._woken))
        name = f"skerry-{type(self).__name__.lower()}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---------------------------------------------------------------------------------------- from any thread

    def send(self, peer: int, message: Message, payload: Payload | None = None, tag: object = None) -> None:
        """Queue a message; the payload must not change until `Sent` or `Lost`. A dead peer is ignored."""
        if self._failure is not None:
            raise WireError(f"the I/O thread died: {self._failure}")
        if payload is None:
            frame = frames.encode(message)
            self._call(self._enqueue, peer, Outgoing(iter([(frame,)]), len(frame), tag), False)
        else:
            view = frames.flat(payload)
            outgoing = Outgoing(frames.encode_bulk(next(self._transfer_ids), message, view), len(view), tag)
            self._call(self._enqueue, peer, outgoing, True)

    def drop(self, peer: int, reason: str) -> None:
        """Give a peer up; what was sent to it before is still delivered if it reads promptly."""
        self._call(self._drop, peer, reason)

    def close(self) -> None:
        """Give every peer up likewise and stop, within a bounded time; no event follows."""
        self._call(self._begin_close)
        self._thread.join(JOIN_S)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with self._calls_lock:
            if self._ended:
                return
            self._calls.append(partial(function, *arguments))
            if len(self._calls) == 1:
                self._wake_out.send(b"\0")

    # ----------------------------------------------------------------------------------------- the I/O thread

    def _run(self) -> None:
        try:
            while not self._finished():
                self._turn()
        except Exception as error:
            log.exception("the I/O thread died")
            self._failure = one_line(f"{type(error).__name__}: {error}")
            with contextlib.suppress(Full):
                for peer in self._peers.values():
                    self._inbox.put_nowait(Lost(peer.id, f"the I/O thread died: {self._failure}"))
        finally:
            with self._calls_lock:
                self._ended = True
                self._calls.clear()
            for connection in list(self._connections):
                self._close(connection)
            self._release()
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()

    def _turn(self) -> None:
        ready = self._selector.select(FULL_INBOX_POLL_S if self._backlog else self._tick_s)
        for key, mask in sorted(ready, key=lambda pair: _priority(pair[0].data[0])):
            key.data[1](mask)
        with self._calls_lock:
            calls, self._calls = self._calls, deque()
        for call in calls:
            call()
        if self._backlog:
            self._deliver()
        now = time.monotonic()
        if now - self._ticked >= self._tick_s:
            self._tick(now)

    @property
    def _tick_s(self) -> float:
        return min(TICK_S, self._heartbeat_s / 2)

    def _tick(self, now: float) -> None:
        if self._paused or now - self._ticked > self._timeout_s / 2:
            self._forgive(now)
        self._ticked = now
        for connection in list(self._connections):
            if now > connection.deadline and not connection.closed:
                self._expire(connection)
        for peer in list(self._peers.values()):
            if (silence := self._silence(peer, now)) is not None:
                self._lose(peer, silence)
        for peer in list(self._peers.values()):
            for connection in peer.connections:
                idle = not connection.has_output and not connection.ended
                if idle and now - connection.spoke >= self._heartbeat_s:
                    self._write_frame(connection, frames.PING_FRAME)

    def _forgive(self, now: float) -> None:
        """Silence so far was ours: start every clock again."""
        for connection in self._connections:
            connection.heard = now
            if connection.role == "new" and not connection.draining:
                connection.deadline = now + self._handshake_s
        for peer in self._peers.values():
            peer.attach_by = now + self._timeout_s
            peer.end_by = max(peer.end_by, now + DRAIN_S)

    def _silence(self, peer: Peer, now: float) -> str | None:
        if now > peer.end_by:
            return peer.end_reason
        silent_s = [now - connection.heard for connection in peer.connections]
        if min(silent_s) > self._timeout_s:
            return f"silent for {self._timeout_s:g} s"
        for connection, seconds in zip(peer.connections, silent_s, strict=True):
            if seconds > self._timeout_s * ONE_LINE_TIMEOUTS:
                return f"{connection.role} connection silent for {self._timeout_s * ONE_LINE_TIMEOUTS:g} s"
        if peer.bulk is None and now > peer.attach_by:
            return f"no bulk connection within {self._timeout_s:g} s"
        return None

    def _expire(self, connection: Connection) -> None:
        if connection.draining:
            self._close(connection)
        else:
            self._fail(connection, f"handshake not finished in {self._handshake_s:g} s")

    def _woken(self, mask: int) -> None:
        self._wake_in.recv(4096)

    # ------------------------------------------------------------------------------------- events to the node

    def _emit(self, event: WireEvent) -> None:
        if self._close_by is not None:
            return
        self._backlog.append(event)
        if len(self._backlog) == 1:
            self._deliver()

    def _deliver(self) -> None:
        with contextlib.suppress(Full):
            while self._backlog:
                self._inbox.put_nowait(self._backlog[0])
                self._backlog.popleft()
        if bool(self._backlog) != self._paused:
            self._paused = not self._paused
            self._forgive(time.monotonic())
            for connection in self._connections:
                self._set_interest(connection)

    # -------------------------------------------------------------------------------------------------- peers

    def _enqueue(self, peer_id: int, outgoing: Outgoing, bulk: bool) -> None:
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        if peer.queued_bytes and peer.queued_bytes + outgoing.bytes > self._queue_bytes_max:
            self._lose(peer, f"reads too slowly: more than {self._queue_bytes_max} bytes are queued for it")
            return
        peer.queued_bytes += outgoing.bytes
        connection = peer.bulk if bulk else peer.control
        if connection is None:
            peer.bulk_queue.append(outgoing)
        else:
            connection.outgoing.append(outgoing)
            self._write(connection)

    def _drop(self, peer_id: int, reason: str) -> None:
        if (peer := self._peers.get(peer_id)) is not None:
            self._lose(peer, reason, drain_s=DRAIN_S)

    def _lose(self, peer: Peer, reason: str, drain_s: float = 0.0) -> None:
        del self._peers[peer.id]
        for connection in [each for each in self._connections if each.peer is peer]:
            if drain_s:
                self._drain(connection, drain_s)
            else:
                self._close(connection)
        log.info("peer %d at %s lost: %s", peer.id, peer.address, one_line(reason))
        self._emit(Lost(peer.id, one_line(reason)))
        self._after_loss(peer, reason)

    def _open_peer(self, connection: Connection, session: bytes) -> Peer:
        now = time.monotonic()
        peer = Peer(next(self._peer_ids), connection.address, connection, session, now, now + self._timeout_s)
        self._peers[peer.id] = peer
        self._bind(connection, peer, "control")
        self._emit(Opened(peer.id, peer.address))
        return peer

    def _attach_bulk(self, connection: Connection, peer: Peer) -> None:
        """Let the bulk queue flow; what the handshake still has to say goes first."""
        peer.bulk = connection
        peer.bulk_queue.extendleft(reversed(connection.outgoing))
        connection.outgoing = peer.bulk_queue
        self._bind(connection, peer, "bulk")
        self._write(connection)

    def _bind(self, connection: Connection, peer: Peer, role: Role) -> None:
        connection.peer, connection.role, connection.deadline = peer, role, float("inf")
        connection.parser.legal = frames.CONTROL_LINE if role == "control" else frames.BULK_LINE
        self._set_interest(connection)

    def _mac(self, who: str, protocol: int, challenge: bytes, own_nonce: bytes, session: bytes) -> bytes:
        """HMAC under the token; `who` and fixed field lengths keep one proof from standing in for another."""
        if self._token is None:
            return b""
        text = who.encode().ljust(8) + struct.pack("<Q", protocol) + challenge + own_nonce + session
        return hmac.digest(self._token, text, "sha256")

    # -------------------------------------------------------------------------------------------- connections

    def _adopt(self, sock: socket.socket, address: str) -> Connection:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock, address, Parser(self._dialect), time.monotonic() + self._handshake_s)
        self._connections[connection] = None
        return connection

    def _set_interest(self, connection: Connection) -> None:
        if connection.closed:
            return
        wanted = 0
        if connection.draining or self._may_read(connection):
            wanted |= selectors.EVENT_READ
        if connection.dialling or connection.has_output:
            wanted |= selectors.EVENT_WRITE
        data = (connection, partial(self._serve, connection))
        if wanted and not connection.registered:
            self._selector.register(connection.sock, wanted, data)
        elif wanted and wanted != connection.registered:
            self._selector.modify(connection.sock, wanted, data)
        elif not wanted and connection.registered:
            self._selector.unregister(connection.sock)
        connection.registered = wanted

    def _may_read(self, connection: Connection) -> bool:
        """A full inbox stops messages, but not handshakes: a busy node does not turn learners away."""
        if connection.dialling or connection.ended:
            return False
        return connection.role == "new" or not self._paused

    def _serve(self, connection: Connection, mask: int) -> None:
        if connection.dialling:
            self._dialled(connection)
        elif mask & selectors.EVENT_READ and not connection.closed:
            self._read(connection)
        if mask & selectors.EVENT_WRITE and not connection.closed:
            self._write(connection)

    def _read(self, connection: Connection) -> None:
        if connection.draining:
            self._discard(connection)
            return
        work_bytes = 0
        while work_bytes < WORK_BYTES and self._may_read(connection):
            if connection.closed or connection.draining:
                return
            try:
                count = connection.sock.recv_into(connection.parser.buffer())
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(connection, _why(error))
                return
            if not count:
                self._end(connection)
                return
            work_bytes += count
            self.bytes_in += count
            connection.heard = time.monotonic()
            try:
                item = connection.parser.received(count)
                if isinstance(item, Delivery):
                    assert connection.peer is not None  # the parser takes no message from strangers
                    self._emit(Received(connection.peer.id, item.message, item.payload))
                elif item is not None:
                    self._shake(connection, item)
            except ProtocolError as error:
                self._broke_protocol(connection, str(error))

    def _end(self, connection: Connection) -> None:
        """The other side closed this connection; what it said on its other one before is still read."""
        connection.ended = True
        peer = connection.peer
        if peer is None or connection.role == "new" or all(each.ended for each in peer.connections):
            self._fail(connection, OTHER_SIDE_CLOSED)
        else:
            self._end_soon(peer, OTHER_SIDE_CLOSED)
            self._set_interest(connection)

    def _end_soon(self, peer: Peer, reason: str) -> None:
        """The peer is as good as lost, but its last words may be on their way: a refusal says more than an end."""
        if peer.end_by == float("inf"):
            peer.end_by, peer.end_reason = time.monotonic() + DRAIN_S, reason

    def _discard(self, connection: Connection) -> None:
        """Read a draining connection to its end: closing it with unread bytes could lose what we sent."""
        try:
            if not connection.sock.recv(WORK_BYTES):
                self._close(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)

    def _write(self, connection: Connection) -> None:
        if connection.closed:
            return
        work_bytes = 0
        while work_bytes < WORK_BYTES and not connection.dialling and self._refill(connection):
            try:
                count = connection.sock.sendmsg(connection.writing)
            except BlockingIOError:
                break
            except OSError as error:
                self._fail(connection, _why(error))
                return
            work_bytes += count
            self.bytes_out += count
            connection.spoke = time.monotonic()
            connection.writing = _skip(connection.writing, count)
        if connection.draining and not connection.has_output:
            self._finish_draining(connection)
        self._set_interest(connection)

    def _refill(self, connection: Connection) -> bool:
        """See that there is something to write; tells of the messages that are completely written."""
        while not connection.writing:
            if connection.current is None:
                if not connection.outgoing:
                    return False
                connection.current = connection.outgoing.popleft()
            buffers = next(connection.current.frames, None)
            if buffers is not None:
                connection.writing = [memoryview(buffer) for buffer in buffers]
                continue
            done, connection.current = connection.current, None
            if connection.peer is not None:
                connection.peer.queued_bytes -= done.bytes
                if done.tag is not None and connection.peer.id in self._peers:
                    self._emit(Sent(connection.peer.id, done.tag))
        return True

    def _write_frame(self, connection: Connection, frame: bytes) -> None:
        connection.outgoing.append(Outgoing(iter([(frame,)]), 0))
        self._write(connection)

    def _drain(self, connection: Connection, drain_s: float) -> None:
        """Send what is queued, then close; the other side has `drain_s` to take it."""
        if connection.dialling:
            self._close(connection)
        elif not connection.draining and not connection.closed:
            connection.draining, connection.deadline = True, time.monotonic() + drain_s
            self._write(connection)

    def _finish_draining(self, connection: Connection) -> None:
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(connection)

    def _fail(self, connection: Connection, reason: str) -> None:
        """The connection is gone, and with it its peer, if it has one."""
        if connection.draining:
            self._close(connection)
        elif connection.peer is not None and connection.peer.id in self._peers:
            if connection.role == "new":  # its bulk connection could not be had
                self._close(connection)
                self._end_soon(connection.peer, reason)
            else:
                self._lose(connection.peer, reason)
        else:
            self._close(connection)
            if connection.peer is None:
                self._stranger_failed(connection, reason)

    def _close(self, connection: Connection) -> None:
        if connection.closed:
            return
        if connection.registered:
            self._selector.unregister(connection.sock)
        connection.closed, connection.registered = True, 0
        connection.writing, connection.current = [], None
        connection.outgoing = deque()
        connection.sock.close()
        del self._connections[connection]

    def _begin_close(self) -> None:
        if self._close_by is not None:
            return
        self._close_by = time.monotonic() + CLOSE_S
        self._backlog.clear()
        self._release()
        for peer in list(self._peers.values()):
            self._lose(peer, "this side closed", drain_s=CLOSE_S)
        for connection in list(self._connections):
            if connection.peer is None and not connection.draining:
                self._close(connection)

    def _finished(self) -> bool:
        return self._close_by is not None and (not self._connections or time.monotonic() > self._close_by)

    # --------------------------------------------------------------------------------------- what a side adds

    def _shake(self, connection: Connection, item: Handshake) -> None:
        """Answer one message of the handshake."""
        raise NotImplementedError

    def _broke_protocol(self, connection: Connection, reason: str) -> None:
        self._fail(connection, reason)

    def _stranger_failed(self, connection: Connection, reason: str) -> None:
        """A connection that belongs to no peer yet is closed."""

    def _after_loss(self, peer: Peer, reason: str) -> None:
        """A peer is lost and forgotten."""

    def _dialled(self, connection: Connection) -> None:
        """A connection attempt of ours has ended."""

    def _release(self) -> None:
        """Give up what is not a connection; may be called twice."""


class Server(_TcpEndpoint):
    """The syncer's endpoint: lets in who holds the token. Without a token it serves only loopback."""

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes | None,
        inbox: Inbox,
        payload_limit: PayloadLimit,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        timeout_s: float = TIMEOUT_S,
        handshake_s: float = HANDSHAKE_S,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        protocol: int = PROTOCOL,
    ) -> None:
        self._listener = _listen(host, port, open_to_all=token is None)
        try:
            dialect = frames.syncer_dialect(payload_limit)
            super().__init__(token, inbox, dialect, heartbeat_s, timeout_s, handshake_s, queue_bytes_max, protocol)
        except WireError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self.address = _name(self._listener.getsockname())
        self._sessions: dict[bytes, Peer] = {}
        self._accept_after: float | None = None
        self._selector.register(self._listener, selectors.EVENT_READ, (None, self._accept))
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Server {self.address}, {len(self._peers)} peers>"

    def _accept(self, mask: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, name = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it left before we came
            except OSError as error:  # most likely out of file descriptors: let some close first
                log.error("cannot accept connections: %s", _why(error))
                self._selector.unregister(self._listener)
                self._accept_after = time.monotonic() + ACCEPT_PAUSE_S
                return
            self._welcome(sock, _name(name))

    def _welcome(self, sock: socket.socket, address: str) -> None:
        strangers = [connection for connection in self._connections if connection.peer is None]
        if len(strangers) >= STRANGERS_MAX:
            self._fail(strangers[0], f"made way: {STRANGERS_MAX} connections are not authenticated")
        connection = self._adopt(sock, address)
        challenge = Challenge(self._protocol, connection.nonce, self._token is not None)
        self._write_frame(connection, frames.encode(challenge))

    def _shake(self, connection: Connection, item: Handshake) -> None:
        assert isinstance(item, Proof | Attach)  # the dialect decodes nothing else
        if (refusal := self._refusal(connection, item)) is not None:
            self._deny(connection, refusal, final=True)
        elif isinstance(item, Proof):
            session = secrets.token_bytes(SESSION_BYTES)
            self._grant(connection, item, session)
            self._sessions[session] = self._open_peer(connection, session)
            self._write(connection)
        else:
            peer = self._sessions.get(item.session)
            if peer is None or peer.bulk is not None:
                self._deny(connection, "no such session, or it has its bulk connection", final=False)
                return
            self._grant(connection, item, item.session)
            self._attach_bulk(connection, peer)

    def _refusal(self, connection: Connection, item: Proof | Attach) -> str | None:
        if item.protocol != self._protocol:
            return _mismatch(syncer=self._protocol, learner=item.protocol)
        if len(item.nonce) != NONCE_BYTES:
            raise ProtocolError(f"nonce of {len(item.nonce)} bytes")
        if self._token is not None and not item.mac:
            return "this syncer requires a token: pass --token-file with a copy of the syncer's"
        if self._token is None and item.mac:
            return "this syncer has no token: leave --token-file out, or start the syncer with the same one"
        who, session = ("attach", item.session) if isinstance(item, Attach) else ("proof", b"")
        expected = self._mac(who, self._protocol, connection.nonce, item.nonce, session)
        if not hmac.compare_digest(expected, item.mac):
            return "wrong token: pass --token-file with a copy of the syncer's"
        return None

    def _grant(self, connection: Connection, item: Proof | Attach, session: bytes) -> None:
        mac = self._mac("syncer", self._protocol, item.nonce, connection.nonce, session)
        connection.outgoing.append(Outgoing(iter([(frames.encode(Attached(session, mac)),)]), 0))

    def _deny(self, connection: Connection, reason: str, final: bool) -> None:
        log.warning("%s refused: %s", connection.address, one_line(reason))
        connection.outgoing.append(Outgoing(iter([(frames.encode(Denied(one_line(reason), final)),)]), 0))
        self._drain(connection, DRAIN_S)

    def _broke_protocol(self, connection: Connection, reason: str) -> None:
        if connection.peer is None:
            self._deny(connection, reason, final=False)
        else:
            self._fail(connection, reason)

    def _stranger_failed(self, connection: Connection, reason: str) -> None:
        log.info("%s: %s", connection.address, reason)

    def _after_loss(self, peer: Peer, reason: str) -> None:
        del self._sessions[peer.session]

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if self._accept_after is not None and now > self._accept_after and self._close_by is None:
            self._accept_after = None
            self._selector.register(self._listener, selectors.EVENT_READ, (None, self._accept))

    def _release(self) -> None:
        if self._listener.fileno() >= 0:
            if self._accept_after is None:
                self._selector.unregister(self._listener)
            self._listener.close()


class Client(_TcpEndpoint):
    """The learner's endpoint: dials the syncer, and dials again whenever it is lost, until closed or refused.

    `jitter` returns a number in [0, 1): it spreads the learners of a syncer that went away over its return.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes | None,
        inbox: Inbox,
        payload_limit: PayloadLimit,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        timeout_s: float = TIMEOUT_S,
        handshake_s: float = HANDSHAKE_S,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        protocol: int = PROTOCOL,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if not host or not 0 < port < 65536:
            raise WireError(f"{_join(host, port)} is no address of a syncer: give host:port")
        dialect = frames.learner_dialect(payload_limit)
        super().__init__(token, inbox, dialect, heartbeat_s, timeout_s, handshake_s, queue_bytes_max, protocol)
        self.address = _join(host, port)
        self.trouble = "connecting"  # why there is no connection at present, for a person
        self._host, self._port = host, port
        self._jitter = jitter
        self._routes: deque[tuple[int, Any]] = deque()  # (family, address) not tried yet in this attempt
        self._dial_at: float | None = 0.0  # None: a connection is there or under way, or we were refused
        self._failures = 0  # in a row
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Client of {self.address}, {self.trouble or 'connected'}>"

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if self._dial_at is not None and now >= self._dial_at and self._close_by is None:
            self._dial_at = None
            self._dial()

    def _dial(self) -> None:
        """Try the next address of the host; when none is left, look them up again."""
        try:
            if not self._routes:
                found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                self._routes.extend((family, address) for family, _, _, _, address in found)
            self._connect(*self._routes.popleft())
        except (OSError, UnicodeError) as error:
            self._unreachable(_why(error))

    def _connect(self, family: int, address: Any, session: bytes = b"") -> Connection:
        connection = self._adopt(socket.socket(family, socket.SOCK_STREAM), _name(address))
        connection.dialling, connection.session = True, session
        result = connection.sock.connect_ex(address)
        if result not in (0, errno.EINPROGRESS):
            self._close(connection)
            raise OSError(result, os.strerror(result))
        self._set_interest(connection)
        return connection

    def _dialled(self, connection: Connection) -> None:
        result = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if result:
            self._fail(connection, os.strerror(result).lower())
        elif connection.sock.getsockname() == connection.sock.getpeername():
            self._fail(connection, "connected to itself")  # happens on loopback when nobody listens
        else:
            connection.dialling = False
            self._set_interest(connection)

    def _shake(self, connection: Connection, item: Handshake) -> None:
        if isinstance(item, Challenge) and not connection.challenge:
            self._prove(connection, item)
        elif isinstance(item, Attached) and connection.challenge:
            self._attached(connection, item)
        elif isinstance(item, Denied) and item.final and not connection.session:
            self._refused(connection, item.reason)
        elif isinstance(item, Denied):
            self._fail(connection, item.reason)
        else:
            raise ProtocolError(f"{type(item).__name__} out of turn")

    def _prove(self, connection: Connection, challenge: Challenge) -> None:
        if challenge.protocol != self._protocol:
            self._refused(connection, _mismatch(syncer=challenge.protocol, learner=self._protocol))
            return
        if len(challenge.nonce) != NONCE_BYTES:
            raise ProtocolError(f"nonce of {len(challenge.nonce)} bytes")
        nonce, session = connection.nonce, connection.session
        answer: Proof | Attach
        if session:
            mac = self._mac("attach", self._protocol, challenge.nonce, nonce, session)
            answer = Attach(self._protocol, nonce, session, mac)
        else:
            answer = Proof(self._protocol, nonce, self._mac("proof", self._protocol, challenge.nonce, nonce, b""))
        connection.challenge = challenge.nonce
        self._write_frame(connection, frames.encode(answer))

    def _attached(self, connection: Connection, item: Attached) -> None:
        expected = self._mac("syncer", self._protocol, connection.nonce, connection.challenge, item.session)
        if len(item.session) != SESSION_BYTES or not hmac.compare_digest(expected, item.mac):
            raise ProtocolError("what answers there does not hold the token")
        if connection.session:
            if item.session != connection.session or connection.peer is None:
                raise ProtocolError("bulk connection attached to another session")
            self._attach_bulk(connection, connection.peer)
            return
        self.trouble = ""
        peer = self._open_peer(connection, item.session)
        try:
            bulk = self._connect(connection.sock.family, connection.sock.getpeername(), item.session)
            bulk.peer = peer
        except OSError as error:
            self._lose(peer, _why(error))

    def _refused(self, connection: Connection, reason: str) -> None:
        """Dialling again would not help: tell the node, and stop."""
        self._close(connection)
        self.trouble = one_line(reason)
        self._emit(Received(next(self._peer_ids), Refused(self.trouble), None))

    def _stranger_failed(self, connection: Connection, reason: str) -> None:
        self._unreachable(reason)

    def _after_loss(self, peer: Peer, reason: str) -> None:
        if time.monotonic() - peer.opened > REDIAL_S_MAX:
            self._failures = 0  # it was a good connection: this is not the same trouble again
        self._routes.clear()
        self._unreachable(reason)

    def _unreachable(self, reason: str) -> None:
        """Dial again: at once if the host has another address, after a while otherwise."""
        self.trouble = one_line(reason)
        delay_s = 0.0
        if not self._routes:
            delay_s = min(REDIAL_S_MAX, REDIAL_S_MIN * 2.0 ** min(self._failures, 10))
            delay_s *= 0.5 + self._jitter() / 2
            self._failures += 1
            log.info("%s: %s; dialling again in %.1f s", self.address, self.trouble, delay_s)
        self._dial_at = time.monotonic() + delay_s


def _listen(host: str, port: int, open_to_all: bool) -> socket.socket:
    """A listening socket on the first address of the host that can be had."""
    where = _join(host, port)
    if not 0 <= port < 65536:
        raise WireError(f"{where}: a port is a number below 65536")
    try:
        flags = socket.AI_PASSIVE
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        raise WireError(f"cannot listen on {where}: {_why(error)}") from None
    trouble = ""
    for family, _, _, _, address in found:
        if open_to_all and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise WireError(f"{where} can be reached from other machines: pass --token-file, or listen on 127.0.0.1")
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            trouble = _why(error)
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
            listener.setblocking(False)
            return listener
        except OSError as error:
            listener.close()
            trouble = _why(error)
            if error.errno == errno.EADDRINUSE:
                raise WireError(f"{where} is in use: stop what listens there, or pass another port") from None
    raise WireError(f"cannot listen on {where}: {trouble}")


def _priority(connection: Connection | None) -> int:
    """Calls and new connections first, then control connections, then bulk."""
    if connection is None:
        return 0
    return 2 if connection.role == "bulk" else 1


def _mismatch(*, syncer: int, learner: int) -> str:
    return f"the syncer speaks protocol {syncer} and the learner {learner}: install the same version on both"


def _skip(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of some buffers after `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def _why(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def _name(address: Any) -> str:
    return _join(str(address[0]), int(address[1]))


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
