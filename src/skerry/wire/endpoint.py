"""What both sides of the TCP transport share: peers, their queues and their deadlines, over one I/O thread.

A peer is one control connection (small frames, heartbeats) and a few bulk connections, its streams: one TCP
stream does not fill a long link. A lane has one stream for as long as the peer lasts, so payloads of one lane
keep their order. A side, in `server` and in `client`, adds how connections come about.

Rules that hold here: connections and peers belong to the I/O thread; other threads only hand it calls.
Control connections are served before bulk, so that no transfer keeps a heartbeat waiting; who was passed
over because the inbox was full comes first when it is not, so that control alone cannot keep bulk out.
Everything that waits has a deadline. Silence counts only while this side was listening: not while its inbox
was full (on bulk connections: of bytes), nor while its process was stopped. A peer that breaks the protocol is
dropped and the endpoint goes on. Where there is TLS its handshake is the first part of ours, under the same deadline;
what was decrypted and not read in one turn is read in the next, without waiting for the socket, and once each turn, so
that no connection keeps others waiting. Where there are quotas (`quotas`), a peer that sends too much is not read for a
while. Nothing here knows what a message means.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from typing import TypedDict

from skerry.core.messages import Message
from skerry.errors import ProtocolError, WireError, one_line
from skerry.memory import Arrays
from skerry.wire import frames
from skerry.wire.connection import SCRATCH_BYTES, Connection, Meter, Outgoing, Role
from skerry.wire.frames import Delivery, Dialect, Handshake, Parser, Payload
from skerry.wire.loop import READ, WRITE, Loop
from skerry.wire.peer import DRAIN_S, NEVER, ONE_LINE_TIMEOUTS, Peer
from skerry.wire.quotas import PEER_SHARE, Intake, Progress, Quotas
from skerry.wire.rate import BYTES_PER_MBIT, Bucket
from skerry.wire.tls import Tls
from skerry.wire.transport import OTHER_SIDE_CLOSED, Inbox, Lost, Opened, Received, Sent, WireEvent

HEARTBEAT_S = 1.0
TIMEOUT_S = 10.0
HANDSHAKE_S = 5.0
CLOSE_S = 1.0  # for peers to read their last messages when the endpoint closes
JOIN_S = CLOSE_S + 2.0
TICK_S = 0.05  # how often deadlines are looked at
FULL_INBOX_POLL_S = 0.005
RATE_POLL_S = 0.01  # while the rate holds something back
QUEUE_BYTES_MAX = 64 << 20  # of messages without payload, for one peer; one alone may be larger
MESSAGE_BYTES = 512  # that a message in a queue takes beside its frame
FREE_PAYLOADS_MAX = 8  # whose memory is kept for the next; about as many as one merge lets go of

log = logging.getLogger("skerry.wire")


class Limits(TypedDict, total=False):
    """What both sides may be given by keyword."""

    heartbeat_s: float
    timeout_s: float
    handshake_s: float
    queue_bytes_max: int
    mbit_max: float
    quotas: Quotas | None
    tls: Tls | None


class TcpEndpoint(ABC):
    """Both sides' peers and queues; a side fills in the methods at the end."""

    def __init__(
        self,
        inbox: Inbox,
        dialect: Dialect,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        timeout_s: float = TIMEOUT_S,
        handshake_s: float = HANDSHAKE_S,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        mbit_max: float = 0.0,
        quotas: Quotas | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._inbox = inbox
        self._tls = tls
        self._dialect = dialect
        self._heartbeat_s, self._timeout_s, self._tick_s = heartbeat_s, timeout_s, _tick_s(heartbeat_s)
        self._handshake_s = handshake_s
        self._queue_bytes_max = queue_bytes_max
        self._quotas = quotas
        self._intakes: dict[str, Intake] = {}  # by the name that a key proves
        self._is_crowded = False  # with payloads that are on their way
        self._bytes_per_s = mbit_max * BYTES_PER_MBIT  # of payloads to one peer; 0: no bound
        self._held_back: dict[Connection, None] = {}  # bulk connections that the rate lets send no more at present
        self._held_off: dict[Connection, float] = {}  # that are not read before this time, for what came on them
        self._meter = Meter()
        self._arrays = Arrays(FREE_PAYLOADS_MAX)  # of all payloads that come in
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))  # where all else comes in
        self._peers: dict[int, Peer] = {}
        self._connections: dict[Connection, None] = {}  # a set that keeps its order: the oldest first
        self._peer_ids = itertools.count(1)
        self._transfer_ids = itertools.count(1)
        self._backlog: deque[WireEvent] = deque()  # what a full inbox left behind
        self._paused = False  # while there is a backlog, no messages are read,
        self._bulk_paused = False  # and while too many bytes wait, no payloads
        self._ticked = self._let_on_at = self._read_on_at = self._beat_at = -NEVER
        self._close_by = NEVER
        self._loop = Loop(f"skerry-{type(self).__name__.lower()}", self._step, self._end_loop)

    # ---------------------------------------------------------------------------------------- from any thread

    @property
    def bytes_in(self) -> int:
        return self._meter.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._meter.bytes_out

    def send(
        self, peer: int, message: Message, payload: Payload | None = None, tag: object = None, lane: int = 0
    ) -> None:
        """Queue a message; the payload must not change until `Sent` or `Lost`. A dead peer is ignored."""
        if self._loop.failure is not None:
            raise WireError(self._obituary())
        if payload is None:
            frame = frames.encode(message)
            self._loop.call(self._enqueue, peer, Outgoing(iter([(frame,)]), len(frame) + MESSAGE_BYTES, tag))
        else:
            view = frames.flat(payload)
            outgoing = Outgoing(frames.encode_bulk(next(self._transfer_ids), message, view), len(view), tag)
            self._loop.call(self._enqueue_bulk, peer, outgoing, lane)

    def keep_time(self, heartbeat_s: float, timeout_s: float) -> None:
        """From now on speak this often, and count a peer as gone after this much silence."""
        self._loop.call(self._keep_time, heartbeat_s, timeout_s)

    def keep_rate(self, mbit_max: float) -> None:
        """From now on payloads for a peer leave at this rate at most; 0 is no bound."""
        self._loop.call(self._keep_rate, mbit_max * BYTES_PER_MBIT)

    def drop(self, peer: int, reason: str) -> None:
        """Give a peer up; what was sent to it before is still delivered if it reads promptly."""
        self._loop.call(self._drop, peer, reason)

    def close(self) -> None:
        """Give every peer up likewise and stop, within a bounded time; no event follows."""
        self._loop.call(self._begin_close)
        self._loop.thread.join(JOIN_S)

    # ----------------------------------------------------------------------------------------- the I/O thread

    def _step(self) -> float | None:
        """After every turn: deliver, look at deadlines, and say how long the next turn may wait."""
        if self._backlog:
            self._deliver()
        self._look_for_room()
        now = time.monotonic()
        if now - self._let_on_at >= RATE_POLL_S:
            self._let_on(now)
        if self._held_off and now - self._read_on_at >= RATE_POLL_S:
            self._read_on(now)
        if now - self._ticked >= self._tick_s:
            self._tick(now)
        if now > self._close_by or (self._closing and not self._connections):
            return None
        if self._backlog or self._bulk_paused:
            return FULL_INBOX_POLL_S
        return min(RATE_POLL_S, self._tick_s) if self._held_back or self._held_off else self._tick_s

    def _tick(self, now: float) -> None:
        if self._paused or now - self._ticked > self._timeout_s / 2:
            self._forgive(now)
        elif self._bulk_paused:
            self._forgive_bulk(now)
        before, self._ticked = self._ticked, now
        for connection in list(self._connections):
            connection.hurry(before)
            if now > connection.deadline and not connection.closed:
                self._fail(connection, f"handshake not finished in {self._handshake_s:g} s")
        if self._quotas is not None:
            self._look_at_transfers(self._quotas, now)
        if now - self._beat_at >= self._heartbeat_s / 4:
            self._beat_at = now
            self._beat(now)

    def _beat(self, now: float) -> None:
        """Who has been silent for too long, and to whom we have been; not at every tick, there are many of them."""
        for peer in list(self._peers.values()):
            if (silence := peer.silence(now, self._timeout_s)) is not None:
                self._lose(peer, silence)
        for peer in list(self._peers.values()):
            for connection in peer.connections:
                idle = not connection.outgoing and not connection.ended
                times = 1 if connection is peer.control else ONE_LINE_TIMEOUTS  # it may be silent as much longer
                if idle and now - connection.spoke >= times * self._heartbeat_s:
                    self._write_frame(connection, frames.PING_FRAME)

    def _keep_time(self, heartbeat_s: float, timeout_s: float) -> None:
        if (heartbeat_s, timeout_s) != (self._heartbeat_s, self._timeout_s):
            self._heartbeat_s, self._timeout_s, self._tick_s = heartbeat_s, timeout_s, _tick_s(heartbeat_s)
            self._forgive(time.monotonic())  # nobody knew yet how soon to speak

    def _keep_rate(self, bytes_per_s: float) -> None:
        if bytes_per_s != self._bytes_per_s:
            self._bytes_per_s = bytes_per_s
            for peer in self._peers.values():
                peer.bucket = self._bucket()

    def _bucket(self) -> Bucket | None:
        return Bucket(self._bytes_per_s, time.monotonic()) if self._bytes_per_s else None

    def _forgive(self, now: float) -> None:
        """Silence so far was ours: start every clock again."""
        for connection in self._connections:
            connection.heard, connection.progress = now, None
            if connection.role == "new" and not connection.draining:
                connection.deadline = max(connection.deadline, now + self._handshake_s)
        for peer in self._peers.values():
            peer.forgive(now, self._timeout_s)

    def _forgive_bulk(self, now: float) -> None:
        """Payloads were not read: what control says is as good as ever."""
        for peer in self._peers.values():
            peer.forgive(now, self._timeout_s)
            for connection in peer.bulk.values():
                connection.heard, connection.progress = now, None

    @property
    def _closing(self) -> bool:
        return self._close_by < NEVER

    def _begin_close(self) -> None:
        if self._closing:
            return
        self._close_by = time.monotonic() + CLOSE_S
        self._backlog.clear()
        self._release()
        for peer in list(self._peers.values()):
            self._lose(peer, "this side closed", drain_s=CLOSE_S)
        for connection in list(self._connections):
            if not connection.draining:
                self._close(connection)

    def _end_loop(self) -> None:
        if self._loop.failure is not None:
            for peer in self._peers.values():
                self._inbox.offer(Lost(peer.id, self._obituary()))
        for connection in list(self._connections):
            self._close(connection)
        self._release()

    def _obituary(self) -> str:
        return one_line(f"the I/O thread died: {self._loop.failure}")

    # ------------------------------------------------------------------------------------- events to the node

    def _emit(self, event: WireEvent) -> None:
        if self._closing:
            return
        self._backlog.append(event)
        if len(self._backlog) == 1:
            self._deliver()

    def _deliver(self) -> None:
        while self._backlog and self._inbox.offer(self._backlog[0]):
            self._backlog.popleft()
        if bool(self._backlog) != self._paused:
            self._paused = not self._paused
            self._forgive(time.monotonic())
            for connection in self._connections:
                self._watch(connection)

    def _look_for_room(self) -> None:
        if self._inbox.has_room == self._bulk_paused:
            self._bulk_paused = not self._bulk_paused
            self._forgive_bulk(time.monotonic())
            for connection in self._connections:
                self._watch(connection)

    # -------------------------------------------------------------------------------------------------- peers

    def _open_peer(self, connection: Connection, session: bytes, streams: int) -> Peer:
        now = time.monotonic()
        attach_by = now + self._timeout_s
        peer = Peer(next(self._peer_ids), connection.address, session, connection, now, attach_by, streams)
        peer.bucket = self._bucket()
        peer.intake = self._intake(connection.principal, now)
        self._peers[peer.id] = peer
        self._bind(connection, peer, "control")
        self._emit(Opened(peer.id, peer.address, connection.principal))
        return peer

    def _attach_bulk(self, connection: Connection, peer: Peer, stream: int) -> None:
        """Let the queue of this stream flow; what the handshake still has to say goes first."""
        connection.outgoing.extend(peer.bulk_queues.pop(stream, ()))
        peer.bulk[stream] = connection
        self._bind(connection, peer, "bulk")
        self._write(connection)

    def _bind(self, connection: Connection, peer: Peer, role: Role) -> None:
        connection.peer, connection.role, connection.deadline = peer.id, role, NEVER
        connection.parser.legal = frames.CONTROL_LINE if role == "control" else frames.BULK_LINE
        self._watch(connection)

    def _enqueue(self, peer_id: int, outgoing: Outgoing) -> None:
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        if peer.queued_bytes and peer.queued_bytes + outgoing.bytes > self._queue_bytes_max:
            self._lose(peer, f"reads too slowly: more than {self._queue_bytes_max} bytes of messages are queued for it")
            return
        peer.queued_bytes += outgoing.bytes
        peer.control.outgoing.append(outgoing)
        self._write(peer.control)

    def _enqueue_bulk(self, peer_id: int, outgoing: Outgoing, lane: int) -> None:
        """No bound here: payloads are the node's own arrays, and it keeps to a window of them."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        stream = lane % peer.streams
        queue = peer.bulk_queue(stream)
        queue.append(outgoing)
        if stream in peer.bulk and len(queue) == 1:  # else the socket took no more, and says when it does
            self._write(peer.bulk[stream])

    def _drop(self, peer_id: int, reason: str) -> None:
        if (peer := self._peers.get(peer_id)) is not None:
            self._lose(peer, reason, drain_s=DRAIN_S)

    def _lose(self, peer: Peer, reason: str, drain_s: float = 0.0) -> None:
        del self._peers[peer.id]
        for connection in [each for each in self._connections if each.peer == peer.id]:
            if drain_s:
                self._drain(connection, drain_s)
            else:
                self._close(connection)
        log.debug("peer %d at %s lost: %s", peer.id, peer.address, one_line(reason))
        self._emit(Lost(peer.id, one_line(reason)))
        if not self._closing:
            self._after_loss(peer, reason)

    # -------------------------------------------------------------------------------------------- connections

    def _adopt(self, sock: socket.socket, address: str) -> Connection:
        deadline = time.monotonic() + self._handshake_s
        parser = Parser(self._dialect, self._arrays)
        connection = Connection(sock, address, parser, self._meter, self._scratch, deadline, self._tls)
        self._connections[connection] = None
        return connection

    def _watch(self, connection: Connection) -> None:
        """Wait for what this connection can do now."""
        if connection.closed:
            return
        reads = connection.draining or self._may_read(connection)
        has_words = connection.outgoing and not connection.is_shaking and connection not in self._held_back
        writes = connection.dialling or connection.has_unsent or has_words
        if events := (READ if reads else 0) | (WRITE if writes else 0):
            self._loop.watch(connection.sock, events, _priority(connection), partial(self._serve, connection))
        else:
            self._loop.forget(connection.sock)

    def _may_read(self, connection: Connection) -> bool:
        """A full inbox stops messages, but not handshakes: a busy node does not turn learners away."""
        if connection.closed or connection.draining or connection.dialling or connection.ended:
            return False
        if connection in self._held_off:
            return False
        return connection.role == "new" or not (self._paused or (self._bulk_paused and connection.role == "bulk"))

    def _serve(self, connection: Connection, events: int) -> None:
        if connection.closed:  # by what was served before it in this turn
            return
        if connection.dialling:
            connection.dialled()
        if connection.is_shaking and not connection.broken:
            self._secure(connection)
        elif events & READ and connection.draining:
            self._discard(connection)
        elif events & READ and self._may_read(connection):
            if connection.passed_over:
                connection.passed_over = False
                self._watch(connection)
            self._read(connection)
            self._reckon(connection)
        elif events & READ:
            connection.passed_over = True
            self._look_for_more(connection)
        if events & WRITE:
            self._write(connection)

    def _secure(self, connection: Connection) -> None:
        """Go on with the handshake of TLS; what came behind it is read at the next turn."""
        connection.shake()
        if not connection.is_shaking and not connection.broken:
            self._secured(connection)
        self._look_for_more(connection)
        if connection.broken:
            self._fail(connection, connection.broken)
        self._watch(connection)

    def _look_for_more(self, connection: Connection) -> None:
        """What TLS has decrypted, or could, is read at the next turn at which it may be."""
        if connection.has_more and not connection.closed and not connection.draining:
            self._loop.again(connection.sock)

    def _read(self, connection: Connection) -> None:
        try:
            for item in connection.read(partial(self._goes_on, connection)):
                self._take(connection, item)
                if connection.closed or connection.draining:
                    return
        except ProtocolError as error:
            self._broke_protocol(connection, error)
            return
        self._look_for_more(connection)
        if connection.broken:
            self._fail(connection, connection.broken)
        elif connection.ended:
            self._end(connection)

    def _take(self, connection: Connection, item: Delivery | Handshake) -> None:
        if isinstance(item, Delivery):
            assert connection.peer in self._peers  # the parser takes no message from strangers
            payload_s = 0.0 if item.payload is None else self._peers[connection.peer].busy_s(connection)
            self._emit(Received(connection.peer, item.message, item.payload, payload_s))
            self._look_for_room()
        else:
            self._shake(connection, item)

    def _discard(self, connection: Connection) -> None:
        """Wait for a draining connection's end."""
        connection.discard()
        if connection.ended or connection.broken:
            self._close(connection)

    def _end(self, connection: Connection) -> None:
        """The other side closed this connection; what it said on its others before is still read."""
        peer = self._peers.get(connection.peer)
        if peer is None or connection.role == "new" or all(each.ended for each in peer.connections):
            self._fail(connection, OTHER_SIDE_CLOSED)
        else:
            peer.end_soon(time.monotonic(), OTHER_SIDE_CLOSED)
            self._watch(connection)

    def _write(self, connection: Connection) -> None:
        if connection.closed:
            return
        peer = self._peers.get(connection.peer) if connection.role == "bulk" else None
        most = None if peer is None else peer.share(time.monotonic())
        before = connection.bytes_out
        for message in connection.write(most):
            self._sent(connection, message)
        if peer is not None and peer.bucket is not None:
            peer.bucket.spend(connection.bytes_out - before)
            if connection.outgoing and connection.bytes_out - before == most:
                self._held_back[connection] = None
        if connection.draining and not connection.outgoing and not connection.has_unsent:
            connection.finish()
        if connection.broken:
            self._fail(connection, connection.broken)
        self._watch(connection)

    def _let_on(self, now: float) -> None:
        """What the rate held back may go on, as far as it lets it by now."""
        self._let_on_at = now
        held_back, self._held_back = self._held_back, {}
        for connection in held_back:
            self._write(connection)

    def _sent(self, connection: Connection, message: Outgoing) -> None:
        if (peer := self._peers.get(connection.peer)) is not None:
            peer.queued_bytes -= message.bytes if connection is peer.control else 0
            if message.tag is not None:
                self._emit(Sent(peer.id, message.tag))

    def _write_frame(self, connection: Connection, frame: bytes) -> None:
        connection.outgoing.append(Outgoing(iter([(frame,)]), 0))
        self._write(connection)

    def _drain(self, connection: Connection, drain_s: float) -> None:
        """Send what is queued, then close; the other side has `drain_s` to take it."""
        if connection.dialling or connection.is_shaking:
            self._close(connection)
        elif not connection.draining and not connection.closed:
            connection.draining, connection.deadline = True, time.monotonic() + drain_s
            self._write(connection)

    def _fail(self, connection: Connection, reason: str) -> None:
        """The connection is gone, and with it its peer, if it has one."""
        peer = self._peers.get(connection.peer)
        if peer is not None and connection.role != "new":
            self._lose(peer, reason)
            return
        self._close(connection)
        if peer is not None:  # its bulk connection could not be had
            peer.end_soon(time.monotonic(), reason)
        elif not connection.draining:
            self._stranger_failed(connection, reason)

    def _close(self, connection: Connection) -> None:
        if not connection.closed:
            self._loop.forget(connection.sock)
            self._loop.calm(connection.sock)
            connection.close()
            self._held_off.pop(connection, None)
            del self._connections[connection]

    # ------------------------------------------------------------------------------------------------- quotas

    def _intake(self, principal: str, now: float) -> Intake | None:
        """A name that is proved has one for all its connections, however often it comes; there are as many as keys."""
        if self._quotas is None:
            return None
        fresh = Intake(self._quotas, now)
        return self._intakes.setdefault(principal, fresh) if principal else fresh

    def _goes_on(self, connection: Connection) -> bool:
        """Asked before each read: reckon with what the last one brought, and say whether there may be another."""
        self._reckon(connection)
        return self._may_read(connection)

    def _reckon(self, connection: Connection) -> None:
        """Charge its peer with what came, and do not read on for as long as that was too much."""
        peer = self._peers.get(connection.peer)
        if peer is None or peer.intake is None or connection.role == "new" or connection in self._held_off:
            return
        now, is_bulk = time.monotonic(), connection.role == "bulk"
        before, connection.reckoned = connection.reckoned, (connection.parser.frames, connection.taken)
        wait_s = peer.intake.came(is_bulk, connection.reckoned[0] - before[0], connection.reckoned[1] - before[1], now)
        if not wait_s and is_bulk and self._has_too_much(peer, connection):
            wait_s = RATE_POLL_S
        if wait_s:
            self._held_off[connection] = now + wait_s
            self._watch(connection)

    def _has_too_much(self, peer: Peer, connection: Connection) -> bool:
        """Of its payloads too many wait to be looked at, or it would begin one more while all together have enough."""
        if self._inbox.bytes_of(peer.id) > self._inbox.bytes_max // PEER_SHARE:
            return True
        others = (each for each in peer.bulk.values() if each is not connection)
        begins = self._is_crowded and not connection.parser.transfers.is_open
        return begins and any(each.parser.transfers.is_open for each in others)

    def _read_on(self, now: float) -> None:
        """Those who have waited for long enough are read again; the silence meanwhile was ours."""
        self._read_on_at = now
        for connection, until in list(self._held_off.items()):
            connection.heard, connection.progress = now, None
            if now >= until:
                del self._held_off[connection]
                self._watch(connection)

    def _look_at_transfers(self, quotas: Quotas, now: float) -> None:
        """How much is on its way in all; and who has begun to send something and does not go on."""
        self._is_crowded = sum(each.parser.transfers.bytes for each in self._connections) > quotas.transfer_bytes_max
        for peer in list(self._peers.values()):
            if peer.intake is not None and peer.intake.is_flood(now):
                self._lose(peer, "it says far more than a learner has to say, and does not stop")
            elif any(_stands(each, peer, now, quotas.transfer_bytes_per_s_min) for each in peer.connections):
                self._lose(peer, "what it has begun to send does not go on")

    # --------------------------------------------------------------------------------------- what a side adds

    @abstractmethod
    def _shake(self, connection: Connection, item: Handshake) -> None:
        """Answer one message of the handshake."""

    def _secured(self, connection: Connection) -> None:
        """Both sides have proved their certificates."""
        return  # who is to speak first does

    @abstractmethod
    def _stranger_failed(self, connection: Connection, reason: str) -> None:
        """A connection that belongs to no peer yet is closed."""

    @abstractmethod
    def _after_loss(self, peer: Peer, reason: str) -> None:
        """A peer is lost and forgotten, and this side is not closing."""

    def _broke_protocol(self, connection: Connection, error: ProtocolError) -> None:
        self._fail(connection, str(error))

    def _release(self) -> None:
        """Give up what is not a connection; may be called twice."""
        return  # not every side has such a thing


def _priority(connection: Connection) -> int:
    """Control before bulk; but an inbox that control alone fills must not keep bulk waiting for ever."""
    if connection.passed_over:
        return 0
    return 2 if connection.role == "bulk" else 1


def _stands(connection: Connection, peer: Peer, now: float, per_s_min: float) -> bool:
    """Something has begun to come on it, and too little has followed.

    Of payloads what came on the others counts too: streams share a narrow link unevenly, and one may starve for long.
    """
    bytes = sum(each.bytes_in for each in peer.bulk.values()) if connection.role == "bulk" else connection.bytes_in
    if connection.began is None:
        connection.progress = None
        return False
    if connection.progress is None:
        connection.progress = Progress(now, bytes)
    return connection.progress.stands(bytes, now, per_s_min)


def _tick_s(heartbeat_s: float) -> float:
    return min(TICK_S, heartbeat_s / 2)
