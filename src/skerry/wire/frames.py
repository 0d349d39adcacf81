"""Message <-> bytes: frames with a checksum, and a parser that takes any split of the stream.

A frame is a header of 24 bytes and a body, all little-endian. The header: magic (4 bytes), version u8, kind
u8, reserved u16, body length u32, xxh3-64 of the body u64, crc32 of these twenty bytes u32. The kinds:

    HANDSHAKE  msgpack of one struct below; the only kind that is legal before a connection is authenticated
    MESSAGE    msgpack of a message without payload
    BULK       msgpack of (transfer, payload length, message): announces a payload
    CHUNK      transfer u64 | offset u64 | raw bytes: one chunk of an announced payload
    PING       nothing: I am here

Rules that hold here: a peer never chooses a decoder (each side reads only the two unions of its dialect),
and nothing is allocated on its word (a length is compared with the only legal one first). The chunks of a
payload may come in any order but lie on a grid of CHUNK_BYTES, so that each offset has one legal length;
each chunk comes once. Whatever the bytes, the parser raises `ProtocolError` and nothing else. Nothing here
knows sockets, tokens or time.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from skerry.core.messages import Contribution, LearnerMessage, Lent, Message, Order, Publication, SyncerMessage
from skerry.errors import ProtocolError
from skerry.memory import Arrays

MAGIC = b"SKRY"
TLS_BEGINS = (b"\x16\x03", b"\x15\x03")  # a handshake, or an alert
FRAME_VERSION = 1
MESSAGE, BULK, CHUNK, PING, HANDSHAKE = 1, 2, 3, 4, 5

CHUNK_BYTES = 1 << 20
HANDSHAKE_BYTES_MAX = 64 << 10
MESSAGE_BYTES_MAX = 16 << 20
ANNOUNCEMENT_BYTES_MAX = 64 << 10  # a few hundred are usual
TRANSFERS_MAX = 1  # payloads in progress on one connection: a sender finishes one before it begins the next
NONCE_BYTES = 32
SESSION_BYTES = 16

HEADER = struct.Struct("<4sBBHIQ")
CHECK = struct.Struct("<I")
PREFIX = struct.Struct("<QQ")
HEADER_BYTES = HEADER.size + CHECK.size

BODY_BYTES_MIN_MAX = {
    MESSAGE: (1, MESSAGE_BYTES_MAX),
    BULK: (1, ANNOUNCEMENT_BYTES_MAX),
    CHUNK: (PREFIX.size + 1, PREFIX.size + CHUNK_BYTES),
    PING: (0, 0),
    HANDSHAKE: (1, HANDSHAKE_BYTES_MAX),
}
NAMES = {MESSAGE: "message", BULK: "bulk", CHUNK: "chunk", PING: "ping", HANDSHAKE: "handshake"}

STRANGER = frozenset({HANDSHAKE})  # kinds legal on a connection that is not authenticated,
CONTROL_LINE = frozenset({MESSAGE, PING})  # on a control connection,
BULK_LINE = frozenset({BULK, CHUNK, PING})  # on a bulk connection

CARRIES_PAYLOAD = (Contribution, Publication, Lent)  # always travel as BULK; the other messages never do

Payload = bytes | bytearray | memoryview
PayloadLimit = Callable[[Message], int]  # the one legal payload length of a bulk message, or ProtocolError


# -------------------------------------------------------------------------------------------------- handshake


class Challenge(Struct, frozen=True, tag=True):
    """Syncer, on every new connection: prove that you hold the token, if there is one."""

    protocol: int  # of the handshake
    nonce: bytes
    locked: bool
    speaks: int = 2  # behind the handshake; builds that did not say so speak this


class Proof(Struct, frozen=True, tag=True):
    """Learner, on its control connection; `nonce` challenges the syncer in turn."""

    protocol: int
    nonce: bytes
    mac: bytes
    streams: int = 1  # bulk connections that it can have
    speaks: int = 0  # behind the handshake; 0: it did not say, and its hello will
    name: str = ""  # of the learner, for whoever reads why it was turned away


class Attach(Struct, frozen=True, tag=True):
    """Learner, on a bulk connection: this belongs to the session that the control connection was given."""

    protocol: int
    nonce: bytes
    session: bytes
    mac: bytes
    stream: int = 0  # which of the session's bulk connections this is


class Inquire(Struct, frozen=True, tag=True):
    """Whoever holds the token, to be told the status and nothing else: no peer comes of it."""

    protocol: int
    nonce: bytes
    mac: bytes


class Instruct(Struct, frozen=True, tag=True):
    """Whoever holds an admin's credential, to give one order and be told what became of it: no peer comes of it.

    The proof is over the order too, so that nobody on the way can make another of it.
    """

    protocol: int
    nonce: bytes
    mac: bytes
    order: bytes  # encoded; read once it is proved who gives it


class Attached(Struct, frozen=True, tag=True):
    """Syncer: the connection is open and belongs to `session`; `mac` proves that it holds the token."""

    session: bytes
    mac: bytes
    streams: int = 1  # bulk connections that the session has


class Denied(Struct, frozen=True, tag=True):
    """Syncer: no. If `final`, dialling again would be answered the same."""

    reason: str
    final: bool


FromLearner = Proof | Attach | Inquire | Instruct
FromSyncer = Challenge | Attached | Denied
Handshake = FromLearner | FromSyncer


# ---------------------------------------------------------------------------------------------------- writing


def encode(message: Message | Handshake) -> bytes:
    """The whole frame of a message that carries no payload."""
    assert not isinstance(message, CARRIES_PAYLOAD), f"{type(message).__name__} without its payload"
    return _frame(HANDSHAKE if isinstance(message, Handshake) else MESSAGE, msgspec.msgpack.encode(message))


def encode_bulk(transfer: int, message: Message, payload: memoryview) -> Iterator[tuple[Payload, ...]]:
    """The frames of a message and its payload, each as buffers to send in order; nothing is copied."""
    assert isinstance(message, CARRIES_PAYLOAD), f"{type(message).__name__} takes no payload"
    announcement = _frame(BULK, msgspec.msgpack.encode((transfer, len(payload), message)))
    return itertools.chain([(announcement,)], _chunks(transfer, payload))


def _chunks(transfer: int, payload: memoryview) -> Iterator[tuple[Payload, ...]]:
    for offset in range(0, len(payload), CHUNK_BYTES):
        data = payload[offset : offset + CHUNK_BYTES]
        prefix = PREFIX.pack(transfer, offset)
        yield _header(CHUNK, PREFIX.size + len(data), _checksum(prefix, data)) + prefix, data


def flat(payload: Payload) -> memoryview:
    """A payload as plain bytes, without a copy; it must be contiguous."""
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _frame(kind: int, body: bytes) -> bytes:
    assert len(body) <= BODY_BYTES_MIN_MAX[kind][1], f"{len(body)} bytes in one {NAMES[kind]}"
    return _header(kind, len(body), _checksum(body)) + body


def _header(kind: int, body_bytes: int, checksum: int) -> bytes:
    fields = HEADER.pack(MAGIC, FRAME_VERSION, kind, 0, body_bytes, checksum)
    return fields + CHECK.pack(zlib.crc32(fields))


def _checksum(*parts: Payload) -> int:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int(state.intdigest())


PING_FRAME = _frame(PING, b"")


# ---------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Delivery:
    """A complete message, with its complete payload if it carries one."""

    message: Message
    payload: memoryview | None


class TooLong(ProtocolError):
    """A message that would be legal elsewhere: whoever sent it may mean well, and is told."""


class Dialect:
    """What one side is willing to read: its handshake, its messages, and how long their payloads must be."""

    def __init__(
        self, handshake: Any, messages: Any, payload_limit: PayloadLimit, message_bytes_max: int = MESSAGE_BYTES_MAX
    ) -> None:
        self.handshake = msgspec.msgpack.Decoder(handshake)
        self.message = msgspec.msgpack.Decoder(messages)
        self.announcement = msgspec.msgpack.Decoder(tuple[int, int, messages])
        self.payload_limit = payload_limit
        self.message_bytes_max = message_bytes_max


def syncer_dialect(payload_limit: PayloadLimit, message_bytes_max: int = MESSAGE_BYTES_MAX) -> Dialect:
    return Dialect(FromLearner, LearnerMessage, payload_limit, message_bytes_max)


def learner_dialect(payload_limit: PayloadLimit) -> Dialect:
    return Dialect(FromSyncer, SyncerMessage, payload_limit)


_orders = msgspec.msgpack.Decoder(Order)


def encode_order(order: Order) -> bytes:
    return msgspec.msgpack.encode(order)


def decode_order(data: bytes) -> Order:
    order: Order = _decode(_orders, memoryview(data))
    return order


class Parser:
    """Reads one connection: `buffer()` says where the next bytes go, `received(n)` that n of them are there.

    `legal` holds the frame kinds that may come at present; the owner changes it when the handshake is over. A
    chunk can be received straight into its payload. After a ProtocolError the parser is spent.
    """

    def __init__(self, dialect: Dialect, arrays: Arrays | None = None) -> None:
        self.legal = STRANGER
        self.transfers = Transfers(arrays or Arrays())
        self.frames = 0  # that have begun, without chunks: each is a message, an announcement or a heartbeat
        self._dialect = dialect
        self._filled = 0  # bytes of the target that are here
        self._complete: Callable[[], Delivery | Handshake | None]
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._prefix = memoryview(bytearray(PREFIX.size))
        self._expect(self._header, self._header_complete)

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty."""
        return self._target[self._filled :]

    @property
    def to_come(self) -> int:
        """Bytes that must still follow, for what has begun is not complete without them; there may be a few more."""
        return len(self._target) - self._filled + self.transfers.unclaimed_bytes

    @property
    def is_idle(self) -> bool:
        """Between messages: no frame has begun and no payload is on its way."""
        return self._target is self._header and not self._filled and not self.transfers.is_open

    def received(self, count: int) -> Delivery | Handshake | None:
        """Take note of `count` bytes in `buffer()`; returns what they complete, if anything."""
        self._filled += count
        if self._filled == len(self._target):
            return self._complete()
        if self._target is self._header:
            self._check_magic()
        return None

    def items(self, data: Payload) -> Iterator[Delivery | Handshake]:
        """What these bytes complete, wherever the stream was cut; one is parsed when those before it were taken."""
        rest, at, end = memoryview(data), 0, len(data)
        while at < end:
            target = self.buffer()
            count = min(len(target), end - at)
            target[:count] = rest[at : at + count]
            at += count
            if (item := self.received(count)) is not None:
                yield item

    def feed(self, data: Payload) -> list[Delivery | Handshake]:
        """The same, all at once."""
        return list(self.items(data))

    def _expect(self, target: memoryview, complete: Callable[[], Delivery | Handshake | None]) -> None:
        self._target, self._filled, self._complete = target, 0, complete

    def _check_magic(self) -> None:
        """At the first byte that is wrong: who speaks another protocol may never send a whole header."""
        begins = bytes(self._header[: self._filled])
        if begins[:2] in TLS_BEGINS:
            raise ProtocolError("it speaks TLS, and this side does not: give both sides keys (skerry keys), or neither")
        if begins[:4] != MAGIC[: self._filled]:
            raise ProtocolError(f"not a Skerry frame: it begins with {begins!r}")

    def _header_complete(self) -> None:
        magic, version, self._kind, reserved, self._body_bytes, self._checksum = HEADER.unpack_from(self._header)
        if magic != MAGIC:
            self._check_magic()
        if CHECK.unpack_from(self._header, HEADER.size)[0] != zlib.crc32(self._header[: HEADER.size]):
            raise ProtocolError("corrupt frame header")
        if version != FRAME_VERSION or reserved:
            raise ProtocolError(f"frame version {version}.{reserved}, this side reads {FRAME_VERSION}.0")
        name = NAMES.get(self._kind, f"kind {self._kind}")
        if self._kind not in self.legal:
            legal = " or ".join(NAMES[kind] for kind in sorted(self.legal))
            raise ProtocolError(f"{name} frame where only {legal} may come")
        least, most = BODY_BYTES_MIN_MAX[self._kind]
        if not least <= self._body_bytes <= most:
            raise ProtocolError(f"{name} frame of {self._body_bytes} bytes, legal are {least} to {most}")
        if self._kind == MESSAGE and self._body_bytes > self._dialect.message_bytes_max:
            raise TooLong(f"a message of {self._body_bytes} bytes, {self._dialect.message_bytes_max} are enough here")
        self.frames += self._kind != CHUNK
        if self._kind == PING:
            self._verify()
            self._expect(self._header, self._header_complete)
        elif self._kind == CHUNK:
            self._expect(self._prefix, self._prefix_complete)
        else:
            self._expect(memoryview(bytearray(self._body_bytes)), self._body_complete)

    def _prefix_complete(self) -> None:
        self._transfer, offset = PREFIX.unpack(self._prefix)
        target = self.transfers.claim(self._transfer, offset, self._body_bytes - PREFIX.size)
        self._expect(target, self._chunk_complete)

    def _chunk_complete(self) -> Delivery | None:
        self._verify(self._prefix, self._target)
        self._expect(self._header, self._header_complete)
        return self.transfers.chunk_complete(self._transfer)

    def _body_complete(self) -> Delivery | Handshake | None:
        body = self._target
        self._verify(body)
        self._expect(self._header, self._header_complete)
        if self._kind == HANDSHAKE:
            handshake: Handshake = _decode(self._dialect.handshake, body)
            return handshake
        if self._kind == BULK:
            return self._announced(*_decode(self._dialect.announcement, body))
        message: Message = _decode(self._dialect.message, body)
        if isinstance(message, CARRIES_PAYLOAD):
            raise ProtocolError(f"{type(message).__name__} without its payload")
        return Delivery(message, None)

    def _announced(self, transfer: int, payload_bytes: int, message: Message) -> Delivery | None:
        name = type(message).__name__
        if not isinstance(message, CARRIES_PAYLOAD):
            raise ProtocolError(f"{name} takes no payload")
        legal = self._dialect.payload_limit(message)
        if payload_bytes != legal:
            raise ProtocolError(f"{name} announces {payload_bytes} bytes, {legal} are legal")
        return self.transfers.open(transfer, payload_bytes, message)

    def _verify(self, *parts: memoryview) -> None:
        if _checksum(*parts) != self._checksum:
            raise ProtocolError(f"wrong checksum of a {NAMES[self._kind]} frame")


class Transfers:
    """The payloads on their way over one bulk connection, in memory that those before them had."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._open: dict[int, _Transfer] = {}
        self.bytes = 0  # of all of them, once they are complete
        self.unclaimed_bytes = 0  # of chunks that have not begun to come

    def open(self, transfer: int, payload_bytes: int, message: Message) -> Delivery | None:
        """Make room for an announced payload; an empty one is complete at once."""
        if transfer in self._open:
            raise ProtocolError(f"transfer {transfer} announced twice")
        if len(self._open) >= TRANSFERS_MAX:
            raise ProtocolError(f"a transfer announced while {TRANSFERS_MAX} is in progress on the same connection")
        chunk_count = -(-payload_bytes // CHUNK_BYTES)
        if not chunk_count:
            return Delivery(message, memoryview(b""))
        payload = self._arrays.take(payload_bytes, np.uint8).data
        self._open[transfer] = _Transfer(message, payload, bytearray(chunk_count), chunk_count)
        self.bytes += payload_bytes
        self.unclaimed_bytes += payload_bytes
        return None

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def claim(self, transfer: int, offset: int, length: int) -> memoryview:
        """The place of one chunk, given out once."""
        state = self._open.get(transfer)
        if state is None:
            raise ProtocolError(f"chunk of unknown transfer {transfer}")
        index, off_grid = divmod(offset, CHUNK_BYTES)
        if off_grid or index >= len(state.claimed):
            raise ProtocolError(f"chunk at {offset} of a payload of {len(state.payload)} bytes")
        place = state.payload[offset : offset + CHUNK_BYTES]
        if length != len(place):
            raise ProtocolError(f"chunk of {length} bytes at {offset}, {len(place)} are legal")
        if state.claimed[index]:
            raise ProtocolError(f"chunk at {offset} sent twice")
        state.claimed[index] = True
        self.unclaimed_bytes -= length
        return place

    def chunk_complete(self, transfer: int) -> Delivery | None:
        """A claimed chunk is here and verified; the last one delivers the message."""
        state = self._open[transfer]
        state.missing -= 1
        if state.missing:
            return None
        del self._open[transfer]
        self.bytes -= len(state.payload)
        return Delivery(state.message, state.payload)


@dataclass(slots=True)
class _Transfer:
    message: Message
    payload: memoryview
    claimed: bytearray  # one flag a chunk
    missing: int  # chunks


def _decode(decoder: Any, body: memoryview) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"cannot decode a frame: {error}") from None
