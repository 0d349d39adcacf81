"""One socket, and what is on its way through it in both directions.

Rules that hold here: nothing blocks, and no call does more than about WORK_BYTES of work. Trouble is not
raised but noted: `ended` says that the other side will say no more, `broken` why the socket is of no use.
Only a stream that makes no sense raises, a `ProtocolError`. Where there is TLS its handshake comes first, and what it
has decrypted and nobody has read yet (`has_more`) is not seen by whoever watches the socket. Nothing here knows what a
peer or a deadline is for.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from skerry.wire.frames import NONCE_BYTES, Delivery, Handshake, Parser, Payload
from skerry.wire.quotas import Progress
from skerry.wire.stream import BATCH_BYTES, Plain, Secure, Stream, TlsFailed, first, skip
from skerry.wire.tls import Tls

WORK_BYTES = 512 << 10  # per socket and turn, so that control never waits long
SMALL_BYTES = 16 << 10  # what is shorter is not worth a call of its own: it leaves, and is read, with what follows it
WAKE_BYTES_MAX = 1 << 20  # that are let come before a socket is read, where so many must come,
WAKE_S = 0.002  # if that takes no longer: what lies unread is missing in the window of a long link
SCRATCH_BYTES = SMALL_BYTES + BATCH_BYTES  # for what is short, and behind it for what TLS has not decrypted yet

Role = Literal["new", "control", "bulk"]


@dataclass(slots=True)
class Outgoing:
    """One message as frames still to be sent; each frame is a few buffers."""

    frames: Iterator[tuple[Payload, ...]]
    bytes: int  # that its peer's queue is charged with
    tag: object = None


@dataclass(slots=True)
class Meter:
    """Bytes that went through the sockets of one endpoint."""

    bytes_in: int = 0
    bytes_out: int = 0


class Connection:
    """A socket with its parser and its queue of messages, and what its owner keeps about it."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        parser: Parser,
        meter: Meter,
        scratch: memoryview,
        deadline: float,
        tls: Tls | None = None,
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._stream: Stream = Plain(sock) if tls is None else Secure(sock, tls, scratch[SMALL_BYTES:])
        self.is_secure = tls is not None
        self.principal = ""  # the name in the other side's certificate, once that is proved
        self.is_admin = False  # that certificate is an admin's
        self.is_refused = False  # by the other side, which has proved itself, for our key
        self.address = address
        self.place = ""  # on a syncer's side: whom it stands for, where nothing is proved,
        self.is_exception = False  # and whether it was only let in because some are awaited from there
        self.is_own = False  # likewise, where no proof is asked for: who dialled it is a user who may join
        self.parser = parser
        self.role: Role = "new"
        self.peer = 0  # the id of the peer that it belongs to; 0 for a stranger's
        self.nonce = secrets.token_bytes(NONCE_BYTES)  # what the other side must prove the token over
        self.heard_nonce = b""  # on a learner's connection: the syncer's
        self.session = b""  # on a learner's bulk connection: the session to attach to,
        self.stream = 0  # and which of its bulk connections this is
        self.deadline = deadline  # of the handshake, then of draining
        self.outgoing: deque[Outgoing] = deque()  # the first may be partly sent
        self.dialling = False  # our own attempt is under way
        self.draining = False  # we will say no more than what is queued
        self.ended = False  # the other side will say no more
        self.broken = ""  # why nothing more can be read or written
        self.closed = False
        self.passed_over = False  # it could have been read, had the inbox not been full by then
        self.heard = self.spoke = time.monotonic()
        self.bytes_out = self.bytes_in = 0
        self.began: float | None = None  # when the first byte came of what is being read
        self.last_began = 0.0  # the same of the last message that is complete
        self.reckoned = (0, 0)  # frames of it, and what was taken for them, that its peer's quota was charged with
        self.progress: Progress | None = None  # of what has begun to come, where somebody looks at that
        self._read_bytes_max = None if tls is None else WORK_BYTES  # TLS reads on for as long as there is something
        self._woken_at = 1  # so many bytes that can be read
        self._meter = meter
        self._scratch = scratch[:SMALL_BYTES]  # for what is short; all of one endpoint may use the same
        self._writing: list[memoryview] = []  # the unsent rest of one frame

    def __repr__(self) -> str:
        return f"<{self.role} connection of {self.address}>"

    @property
    def host(self) -> str:
        """Of the other side; its port is another each time."""
        return self.address.rpartition(":")[0]

    def dialled(self) -> None:
        """Our attempt has ended: see how."""
        self.dialling = False
        try:
            if number := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.broken = os.strerror(number).lower()
            elif self.sock.getsockname() == self.sock.getpeername():
                self.broken = "connected to itself"  # happens on loopback when nobody listens
        except OSError as error:  # the other side hung up between two of these calls
            self._break(error)

    @property
    def is_shaking(self) -> bool:
        """The handshake of TLS is not over: nothing can be said yet."""
        return self._stream.is_shaking

    @property
    def taken(self) -> int:
        """What its peer is charged with: all bytes that came, and with TLS what they came in."""
        return self._stream.taken

    @property
    def has_more(self) -> bool:
        """Something can be read, though the socket does not say so."""
        return self._stream.has_more and not self.broken and not self.ended

    @property
    def has_unsent(self) -> bool:
        """Something that counts as sent waits for the socket."""
        return self._stream.has_unsent

    @property
    def is_silent(self) -> bool:
        """It has said nothing at all."""
        return not (self._stream.has_heard if isinstance(self._stream, Secure) else self.bytes_in)

    @property
    def objection(self) -> str:
        """Why, at this moment, we will not have who has proved its key; empty where we will, or nobody has a key."""
        return self._stream.objection if isinstance(self._stream, Secure) else ""

    def shake(self) -> None:
        """Go on with the handshake of TLS; once it is over the other side's name is known."""
        assert isinstance(self._stream, Secure)
        try:
            self._stream.shake()
            if not self._stream.is_shaking:
                self.principal, self.is_admin = self._stream.principal, self._stream.is_admin
        except OSError as error:
            self._break(error)

    def speak_plainly(self) -> None:
        """To who does not know that TLS is spoken here, and waits for a word."""
        self._stream, self.is_secure = Plain(self.sock), False

    def read(self, may_go_on: Callable[[], bool]) -> Iterator[Delivery | Handshake]:
        """What has arrived, item by item; before each call of the system the caller is asked whether it takes more.

        What is long is received straight into its place. What is short, a header, a message, comes with all that lies
        behind it, for each call lets go of the GIL and waits for it; all that one call has brought has to be taken.
        Where much must come the socket wakes us once for a good piece of it, and not for each packet.
        """
        work_bytes, may_be_more, before, begun = 0, True, self.heard, self.taken
        while may_be_more and self.taken - begun < WORK_BYTES and may_go_on():
            place = self.parser.buffer()[: self._read_bytes_max]
            place_bytes = len(place) if len(place) >= SMALL_BYTES else 0
            count = self._receive([place, self._scratch] if place_bytes else [self._scratch])
            may_be_more = count == place_bytes + SMALL_BYTES or (self.has_more and count > 0)
            work_bytes += count
            for item in self._items(place_bytes, count):
                if item is not None:
                    self.last_began, self.began = self.heard if self.began is None else self.began, None
                    yield item
            if self.parser.is_idle:
                self.began = None
            elif self.began is None:
                self.began = self.heard
        if work_bytes:
            self._wait_for(work_bytes, self.heard - before)

    def _items(self, place_bytes: int, count: int) -> Iterator[Delivery | Handshake | None]:
        """What is complete with so many bytes, the first of them in their place, the others behind each other."""
        if place_bytes:
            yield self.parser.received(min(count, place_bytes))
        if count > place_bytes:
            yield from self.parser.items(self._scratch[: count - place_bytes])

    def _wait_for(self, bytes: int, seconds: float) -> None:
        """So many bytes came in that time: be woken for what comes in WAKE_S, and for nothing that may not come."""
        count = min(self.parser.to_come, WAKE_BYTES_MAX)
        if bytes * WAKE_S < count * seconds:
            count = int(bytes * WAKE_S / seconds)
        self._wake_at(count if count >= SMALL_BYTES else 1)

    def hurry(self, since: float) -> None:
        """If nothing was read since then, what comes is slower than it was: be woken for every byte of it."""
        if self.heard < since:
            self._wake_at(1)

    def _wake_at(self, count: int) -> None:
        if count != self._woken_at:
            self._woken_at = count
            self._stream.wake_at(count)

    def discard(self) -> None:
        """Read for nothing: closing a socket with unread bytes could lose what we sent."""
        self._receive([self._scratch], Plain(self.sock))

    def write(self, bytes_max: int | None = None) -> Iterator[Outgoing]:
        """Send what is queued, as far as the socket takes it; yields each message that has left completely.

        No more than `bytes_max` leave, if that is given.
        """
        work_bytes, limit = 0, WORK_BYTES if bytes_max is None else min(WORK_BYTES, bytes_max)
        if self.dialling or self.is_shaking:
            return
        if self.has_unsent:
            self._flush()
        while work_bytes < limit and self.outgoing and not self.broken:
            if sum(map(len, self._writing)) < SMALL_BYTES:
                self._writing += self._next_frames()
            if not self._writing:
                yield self.outgoing.popleft()
                continue
            work_bytes += self._send(None if bytes_max is None else limit - work_bytes)
            if self._stream.is_full:
                return

    def _next_frames(self) -> list[memoryview]:
        """Of the first message; a small frame goes with the one behind it, or it would wake the reader for nothing."""
        buffers: list[memoryview] = []
        for frame in self.outgoing[0].frames:
            buffers += map(memoryview, frame)
            if len(buffers[-1]) >= SMALL_BYTES:
                break
        return buffers

    def finish(self) -> None:
        """Tell the other side that this was all."""
        try:
            self._stream.finish()
        except OSError as error:
            self._break(error)

    def close(self) -> None:
        self.closed = True
        self.outgoing.clear()
        self._writing = []
        self.sock.close()

    def _receive(self, buffers: list[memoryview], stream: Stream | None = None) -> int:
        try:
            count = (stream or self._stream).receive(buffers)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._break(error)
            return 0
        self.ended = not count
        self.heard = time.monotonic()
        self._meter.bytes_in += count
        self.bytes_in += count
        return count

    def _send(self, bytes_max: int | None) -> int:
        buffers = self._writing if bytes_max is None else first(self._writing, bytes_max)
        try:
            count = self._stream.send(buffers)
        except BlockingIOError:
            self._stream.is_full = True
            return 0
        except OSError as error:
            self._break(error)
            return 0
        self.spoke = time.monotonic()
        self._meter.bytes_out += count
        self.bytes_out += count
        self._writing = skip(self._writing, count)
        return count

    def _flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._break(error)

    def _break(self, error: OSError) -> None:
        self.broken = str(error) if isinstance(error, TlsFailed) else why(error)
        self.is_refused = isinstance(error, TlsFailed) and error.by_verdict


def why(error: Exception) -> str:
    """An error of the system in words, for a person."""
    return (getattr(error, "strerror", None) or str(error)).lower()


def name_of(address: Any) -> str:
    return address_of(str(address[0]), int(address[1]))


def is_file(host: str) -> bool:
    """Whether this names a file with the address in it, and no host."""
    return host.startswith("@")


def address_of(host: str, port: int) -> str:
    if is_file(host):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def addresses_of(addresses: Iterable[tuple[str, int]]) -> str:
    return ", ".join(address_of(*address) for address in addresses)
