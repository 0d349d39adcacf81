"""What a node sees of the network: an endpoint to send through and an inbox of five kinds of event.

Rules that hold here: each `Opened` is followed by exactly one `Lost` with the same peer id, unless this
side closes its endpoint; nothing about a peer comes before its `Opened` or after its `Lost`. A peer id is
never used again: a peer that comes back is another one. Messages without payload keep their order, and so
do bulk messages of one lane, but nothing may rely on the order between lanes or kinds. The inbox belongs to the
node, and is bounded by count and by bytes: when too many events are in it the endpoint stops reading, when too
many bytes are it stops reading payloads, so that the other side feels it, and goes on when there is room.

The in-memory endpoints below stand in for sockets in tests: same rules, same frames, delivery inside `send`.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Protocol

from skerry.core.messages import Message, Order
from skerry.errors import ProtocolError
from skerry.wire.frames import BULK_LINE, CONTROL_LINE, Delivery, Dialect, Parser, Payload, encode, encode_bulk, flat
from skerry.wire.stream import OTHER_SIDE_CLOSED as OTHER_SIDE_CLOSED

INBOX_BYTES_MAX = 256 << 20  # of payloads that came and wait to be looked at, on either side
NOBODY: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class Opened:
    """A peer is connected and authenticated."""

    peer: int
    address: str
    principal: str = ""  # the name in the certificate whose key it has; empty: the connection proves none


@dataclass(frozen=True, slots=True)
class Received:
    """A message with its whole payload, which now belongs to the node.

    A `Refused` may come without an `Opened`. If it is final, the syncer will never have this learner as it is (its
    token is wrong), and the endpoint has stopped dialling; else they speak different protocols, and it dials on.
    """

    peer: int
    message: Message
    payload: memoryview | None
    payload_s: float = 0.0  # from its first byte to its last; what payloads side by side took is counted once


@dataclass(frozen=True, slots=True)
class Sent:
    """The message sent with this tag has left: its payload may be changed again."""

    peer: int
    tag: object


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer is gone, with what was queued for it; `reason` is one line for a person."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Instructed:
    """An operator who has proved an admin's credential gives an order, and waits: it is no peer, and no `Lost` follows.

    `by` is that credential, in a word or two.
    """

    peer: int  # whom to answer; an id like a peer's
    order: Order
    by: str


WireEvent = Opened | Received | Sent | Lost | Instructed


class Inbox(Queue[WireEvent | None]):
    """What came and waits for the node; None is no event, and wakes whoever waits for one.

    It is bounded by the number of events, and by the bytes of payloads in it and in the hands of who takes them out:
    `settle` says how much of what was taken out still waits elsewhere. Without room for bytes payloads are not read any
    more, but everything else is. One thread takes out and settles.
    """

    def __init__(self, count_max: int = 0, bytes_max: int = INBOX_BYTES_MAX) -> None:
        super().__init__(count_max)
        self.bytes_max = bytes_max
        self._waiting_bytes = self._taken_bytes = 0
        self._waiting_of: dict[int, int] = {}  # the same by peer, where there are any
        self._taken_of = NOBODY

    @property
    def has_room(self) -> bool:
        """For payloads; one more is let in beyond the bound."""
        return self._waiting_bytes + self._taken_bytes <= self.bytes_max

    def offer(self, item: WireEvent) -> bool:
        """Put it in, if there is room for one more event."""
        with self.mutex:
            if 0 < self.maxsize <= self._qsize():
                return False
            self._put(item)
            self.not_empty.notify()
            return True

    def drain(self, count_max: int, timeout_s: float) -> list[WireEvent | None]:
        """What is in it, in one go; where nothing is, the first that comes in time."""
        try:
            taken = [self.get(timeout=timeout_s)]
        except Empty:
            return []
        with self.mutex:
            while self._qsize() and len(taken) < count_max:
                taken.append(self._get())
            self.not_full.notify_all()
        return taken

    def bytes_of(self, peer: int) -> int:
        """Of one peer's payloads that wait; what was taken out since it was last settled is not among them."""
        return self._waiting_of.get(peer, 0) + self._taken_of.get(peer, 0)

    def settle(self, waiting_bytes: int = 0, waiting_of: Mapping[int, int] = NOBODY) -> None:
        """Of all payloads that were taken out so many bytes still wait, and whose; the others are done with."""
        self._taken_bytes, self._taken_of = waiting_bytes, waiting_of

    def _put(self, item: WireEvent | None) -> None:
        super()._put(item)
        if item is not None and (bytes := payload_bytes(item)):
            self._waiting_bytes += bytes
            self._waiting_of[item.peer] = self._waiting_of.get(item.peer, 0) + bytes

    def _get(self) -> WireEvent | None:
        item = super()._get()
        if item is not None and (taken_bytes := payload_bytes(item)):
            self._waiting_bytes -= taken_bytes
            self._taken_bytes += taken_bytes
            if left := self._waiting_of.pop(item.peer) - taken_bytes:
                self._waiting_of[item.peer] = left
        return item


def payload_bytes(event: WireEvent | None) -> int:
    return len(event.payload) if isinstance(event, Received) and event.payload is not None else 0


class Endpoint(Protocol):
    """One side of the network; its methods may be called from any thread; only `close` waits."""

    @property
    def bytes_in(self) -> int: ...

    @property
    def bytes_out(self) -> int: ...

    def send(
        self, peer: int, message: Message, payload: Payload | None = None, tag: object = None, lane: int = 0
    ) -> None:
        """Queue a message; the payload must not change until `Sent` or `Lost`. A dead peer is ignored.

        Payloads of one lane, any number, arrive in the order in which they were sent.
        """

    def drop(self, peer: int, reason: str) -> None:
        """Give a peer up; what was sent to it before is still delivered if it reads promptly."""

    def close(self) -> None:
        """Give every peer up likewise and stop, within a bounded time; no event follows."""


# -------------------------------------------------------------------------------------------------- in memory


class MemoryEndpoint:
    """An endpoint whose network is a function call; `join` connects two of them."""

    def __init__(self, inbox: Inbox, dialect: Dialect) -> None:
        self.inbox = inbox
        self.dialect = dialect
        self.bytes_in = 0
        self.bytes_out = 0
        self._links: dict[int, _Link] = {}
        self._peers = itertools.count(1)
        self._transfers = itertools.count(1)
        self._backlog: deque[WireEvent] = deque()
        self._lock = threading.RLock()

    def send(
        self, peer: int, message: Message, payload: Payload | None = None, tag: object = None, lane: int = 0
    ) -> None:
        with self._lock:
            buffers: Iterable[Payload] = (encode(message),) if payload is None else ()
            if payload is not None:
                frames = encode_bulk(next(self._transfers), message, flat(payload))
                buffers = itertools.chain.from_iterable(frames)
            for buffer in buffers:
                link = self._links.get(peer)
                if link is None:
                    return
                self.bytes_out += len(buffer)
                link.remote._arrived(link.remote_peer, buffer)
            if tag is not None and peer in self._links:
                self._emit(Sent(peer, tag))

    def drop(self, peer: int, reason: str) -> None:
        with self._lock:
            if (link := self._links.pop(peer, None)) is not None:
                self._emit(Lost(peer, reason))
                link.remote._closed(link.remote_peer)

    def close(self) -> None:
        with self._lock:
            for link in self._links.values():
                link.remote._closed(link.remote_peer)
            self._links.clear()

    def deliver(self) -> None:
        """Move what a full inbox left behind; every later event does so too."""
        with self._lock:
            while self._backlog and self.inbox.offer(self._backlog[0]):
                self._backlog.popleft()

    def _arrived(self, peer: int, data: Payload) -> None:
        self.bytes_in += len(data)
        try:
            for item in self._links[peer].parser.feed(data):
                assert isinstance(item, Delivery)  # the parser is past the handshake
                self._emit(Received(peer, item.message, item.payload))
        except ProtocolError as error:
            self.drop(peer, str(error))

    def _closed(self, peer: int) -> None:
        if self._links.pop(peer, None) is not None:
            self._emit(Lost(peer, OTHER_SIDE_CLOSED))

    def _emit(self, event: WireEvent) -> None:
        self._backlog.append(event)
        self.deliver()


@dataclass(slots=True)
class _Link:
    remote: MemoryEndpoint
    remote_peer: int
    parser: Parser


def join(server: MemoryEndpoint, client: MemoryEndpoint, principal: str = "") -> tuple[int, int]:
    """Connect two endpoints; returns the client's peer id at the server and the server's at the client."""
    client._lock = server._lock  # delivery crosses from one to the other: one lock for the whole network
    with server._lock:
        at_server, at_client = next(server._peers), next(client._peers)
        server._links[at_server] = _Link(client, at_client, _open_parser(server.dialect))
        client._links[at_client] = _Link(server, at_server, _open_parser(client.dialect))
        server._emit(Opened(at_server, f"memory:{at_server}", principal))
        client._emit(Opened(at_client, f"memory:{at_client}"))
    return at_server, at_client


def _open_parser(dialect: Dialect) -> Parser:
    parser = Parser(dialect)
    parser.legal = CONTROL_LINE | BULK_LINE
    return parser
