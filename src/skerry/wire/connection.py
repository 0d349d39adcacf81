"""One socket, and what is on its way through it in both directions.

Rules that hold here: nothing blocks, and no call does more than about WORK_BYTES of work. Trouble is not
raised but noted: `ended` says that the other side will say no more, `broken` why the socket is of no use.
Only a stream that makes no sense raises, a `ProtocolError`. Nothing here knows what a peer or a
deadline is for.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from skerry.wire.frames import NONCE_BYTES, Delivery, Handshake, Parser, Payload

WORK_BYTES = 512 << 10  # per socket and turn, so that control never waits long
SMALL_BYTES = 16 << 10  # what is shorter is not worth a call of its own: it leaves, and is read, with what follows it

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
        self, sock: socket.socket, address: str, parser: Parser, meter: Meter, scratch: memoryview, deadline: float
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.address = address
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
        self.bytes_out = 0
        self.began: float | None = None  # when the first byte came of what is being read
        self.last_began = 0.0  # the same of the last message that is complete
        self._meter = meter
        self._scratch = scratch  # for what is short, and long enough for it; all of one endpoint may use the same
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
        if error := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.broken = os.strerror(error).lower()
        elif self.sock.getsockname() == self.sock.getpeername():
            self.broken = "connected to itself"  # happens on loopback when nobody listens

    def read(self, may_go_on: Callable[[], bool]) -> Iterator[Delivery | Handshake]:
        """What has arrived, item by item; before each call of the system the caller is asked whether it takes more.

        What is long is received straight into its place. What is short, a header, a message, comes with all that lies
        behind it, for each call lets go of the GIL and waits for it; all that one call has brought has to be taken.
        """
        work_bytes, may_be_more = 0, True
        while may_be_more and work_bytes < WORK_BYTES and may_go_on():
            place = self.parser.buffer()
            is_long = len(place) >= SMALL_BYTES
            buffer = place if is_long else self._scratch
            count = self._receive(buffer)
            may_be_more = count == len(buffer)
            work_bytes += count
            items = [self.parser.received(count)] if is_long else self.parser.items(self._scratch[:count])
            yield from self._timed(items)

    def _timed(self, items: Iterable[Delivery | Handshake | None]) -> Iterator[Delivery | Handshake]:
        """The items; of each it is noted when it began to come, and of what is not complete likewise."""
        for item in items:
            if item is not None:
                self.last_began, self.began = self.heard if self.began is None else self.began, None
                yield item
        if self.parser.is_idle:
            self.began = None
        elif self.began is None:
            self.began = self.heard

    def discard(self) -> None:
        """Read for nothing: closing a socket with unread bytes could lose what we sent."""
        self._receive(self._scratch)

    def write(self, bytes_max: int | None = None) -> Iterator[Outgoing]:
        """Send what is queued, as far as the socket takes it; yields each message that has left completely.

        No more than `bytes_max` leave, if that is given.
        """
        work_bytes, limit = 0, WORK_BYTES if bytes_max is None else min(WORK_BYTES, bytes_max)
        while work_bytes < limit and self.outgoing and not self.dialling:
            if not self._writing:
                self._writing = self._next_frames()
            if not self._writing:
                yield self.outgoing.popleft()
                continue
            work_bytes += self._send(None if bytes_max is None else limit - work_bytes)
            if self._writing:  # the socket takes no more, or the rate lets no more through
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
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.broken = why(error)

    def close(self) -> None:
        self.closed = True
        self.outgoing.clear()
        self._writing = []
        self.sock.close()

    def _receive(self, buffer: memoryview) -> int:
        try:
            count = self.sock.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.broken = why(error)
            return 0
        self.ended = not count
        self.heard = time.monotonic()
        self._meter.bytes_in += count
        return count

    def _send(self, bytes_max: int | None) -> int:
        buffers = self._writing if bytes_max is None else _first(self._writing, bytes_max)
        try:
            count = self.sock.sendmsg(buffers)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.broken = why(error)
            return 0
        self.spoke = time.monotonic()
        self._meter.bytes_out += count
        self.bytes_out += count
        self._writing = _skip(self._writing, count)
        return count


def why(error: Exception) -> str:
    """An error of the system in words, for a person."""
    return (getattr(error, "strerror", None) or str(error)).lower()


def _first(buffers: list[memoryview], count: int) -> list[memoryview]:
    """As many bytes of some buffers, from their beginning."""
    found = []
    for buffer in buffers:
        found.append(buffer[:count])
        count -= len(buffer)
        if count <= 0:
            break
    return found


def _skip(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of some buffers after `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
