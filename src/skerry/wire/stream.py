"""The bytes of one socket, as they are or through TLS. Nothing blocks, and nothing here knows what they mean.

Both kinds raise `BlockingIOError` where the socket has to be waited for, another `OSError` where it is of no use any
more, and receive nothing (0) once the other side has ended.

TLS goes through buffers in memory and not through an `ssl.SSLSocket`: the system is asked once for several records
where that asks twice for each, a third of a receiver's CPU; what was encrypted is written once, and need not be offered
again with the same length until the system takes it; and the socket is one that anybody may watch or shut. The price
is up to BATCH_BYTES each way that a busy connection holds.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Protocol

from skerry.wire.frames import MAGIC
from skerry.wire.tls import NO_KEYS_THERE, Tls, explain, is_admin, principal_of

BATCH_BYTES = 64 << 10  # that are encrypted, or asked of the system, at once
RECORD_BYTES = 16 << 10  # the most that TLS has in one
HEADER_BYTES = 5  # of a record; the last two say how long the rest is
RECORDS_MAX = 64  # that one call takes, however short they are and however quickly more come
RECORD_COST_BYTES = 8 << 10  # that a record counts for at least: the shortest take as much CPU as so much in long ones
IDLE_RECORDS_MAX = 1000  # that bring nothing, beyond those that bring something; Skerry sends none
OTHER_SIDE_CLOSED = "closed by the other side"
UNREAD_BYTES_MAX = 1 << 20  # of our answers to what the other side asks of TLS itself, if it does not read them


class Stream(Protocol):
    """What a connection needs of its socket."""

    is_shaking: bool  # nothing can be said before both sides have proved themselves
    is_full: bool  # the socket did not take all of what was sent last

    @property
    def taken(self) -> int:
        """What was received so far and what it came in, in bytes: what it took of our time is about as much."""

    @property
    def has_more(self) -> bool:
        """Something can be received, though the system knows nothing of it."""

    @property
    def has_unsent(self) -> bool:
        """Something waits for the socket that the caller counts as sent."""

    def receive(self, buffers: list[memoryview]) -> int:
        """As much as is there and fits; if that is less than fits there is no more, but where `has_more` says so."""

    def wake_at(self, count: int) -> None:
        """Whoever watches the socket need not be woken before so many bytes are there, or the other side has ended."""

    def send(self, buffers: list[memoryview]) -> int:
        """Some of it, from its beginning; how much."""

    def flush(self) -> None:
        """Let the socket have what it did not take before."""

    def finish(self) -> None:
        """Say that this was all."""


class Plain:
    """The socket's own bytes."""

    is_shaking = False
    has_more = False
    has_unsent = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_full = False
        self.taken = 0

    def receive(self, buffers: list[memoryview]) -> int:
        count = self._sock.recvmsg_into(buffers)[0]
        self.taken += count
        return count

    def wake_at(self, count: int) -> None:
        with contextlib.suppress(OSError):  # a system may not know it, and says of a dead socket what reading says too
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def send(self, buffers: list[memoryview]) -> int:
        count = self._sock.sendmsg(buffers)
        self.is_full = count < sum(map(len, buffers))
        return count

    def flush(self) -> None:
        return

    def finish(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)


class TlsFailed(OSError):
    """The text is one line for a person; `by_verdict`: the other side, which is who it should be, refuses our key."""

    def __init__(self, text: str, by_verdict: bool = False) -> None:
        super().__init__(text)
        self.by_verdict = by_verdict


class Records:
    """Counts the records of TLS in what comes, by their headers, which are not encrypted."""

    def __init__(self) -> None:
        self.count = 0
        self.cost = 0
        self._next = 0  # how far it is to the next header; less than nothing if a part of that one has come,
        self._head = b""  # which is this

    def within(self, piece: memoryview, most: int) -> int:
        """How much of the next piece has no more than so many headers; that is counted, and the rest is shown again."""
        at, end = self._next, len(piece)
        while most and at + HEADER_BYTES <= end:
            header = piece[at : at + HEADER_BYTES] if at >= 0 else self._head + piece[: at + HEADER_BYTES]
            size = HEADER_BYTES + (header[3] << 8 | header[4])
            self.cost += max(size, RECORD_COST_BYTES)
            self.count += 1
            most -= 1
            at += size
        end = end if most else min(at, end)
        self._head = (self._head if at < 0 else b"") + piece[max(0, at) : end]
        self._next = at - end
        return end


class Secure:
    """Both directions through TLS."""

    def __init__(self, sock: socket.socket, tls: Tls, scratch: memoryview) -> None:
        self.is_shaking = True
        self.is_full = False
        self.has_heard = False  # anything at all
        self._sock, self._tls = sock, tls
        self._scratch = scratch  # where encrypted bytes come in; all of one endpoint may use the same
        self._later = memoryview(b"")  # that has come and is not OpenSSL's yet, for it is too many records for one call
        self._records = Records()  # that OpenSSL has been given,
        self._records_max = 0  # and how many they may be by the end of this call
        self._reads = 0  # of one record or a part of it
        self._idle = 0  # records that brought nothing
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = tls.begin(self._in, self._out)
        self._sealed = memoryview(b"")  # encrypted, and not taken by the socket yet
        self._is_dry = False  # the system had no more, when it was asked last
        self._has_ended = False  # the other side's end has come
        self._failure: OSError | None = None  # to be raised once what came before it was received
        self._is_finished = False

    @property
    def principal(self) -> str:
        return principal_of(self._ssl)

    @property
    def is_admin(self) -> bool:
        return is_admin(self._ssl)

    @property
    def objection(self) -> str:
        return self._tls.objection(self._ssl)

    @property
    def taken(self) -> int:
        return self._records.cost

    @property
    def has_more(self) -> bool:
        return bool(self._later or self._in.pending or self._ssl.pending() or self._failure or self._has_ended)

    @property
    def has_unsent(self) -> bool:
        return bool(self._sealed or self._out.pending)

    def shake(self) -> None:
        """Go on with the handshake as far as it goes; then `is_shaking` says whether it is over."""
        self._records_max = self._records.count + RECORDS_MAX
        while self.is_shaking:
            try:
                self._ssl.do_handshake()
                self.is_shaking = False
            except ssl.SSLWantReadError:
                self.flush()
                if not self._asked():
                    self._check()
                    return
                if self._has_ended:
                    raise TlsFailed(OTHER_SIDE_CLOSED) from None
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):
                    self.flush()  # what TLS says of it tells the other side why
                raise self._explained(error) from None
        self.flush()

    def receive(self, buffers: list[memoryview]) -> int:
        filled, before = 0, self._records.count - self._reads
        self._records_max = self._records.count + RECORDS_MAX
        for buffer in buffers:
            count = self._decrypt(buffer)
            filled += count
            if count < len(buffer):
                break
        self._look_for_idle(self._records.count - self._reads - before)
        if self._out.pending:
            self._answer()
        if not filled:
            self._check()
            if not self._has_ended:
                raise BlockingIOError
        return filled

    def wake_at(self, count: int) -> None:
        """What the system has is not what was said: a part of it may be enough."""

    def _decrypt(self, buffer: memoryview) -> int:
        filled, size = 0, len(buffer)
        read = self._ssl.read
        while filled < size and self._failure is None:
            try:
                count = read(size - filled, buffer[filled:] if filled else buffer)
            except ssl.SSLWantReadError:
                if not self._asked() or self._has_ended:
                    break
                continue
            except ssl.SSLError as error:
                self._failure = self._explained(error)
                break
            if not count:  # it has said that this was all
                self._has_ended = True
                break
            self._reads += 1
            filled += count  # type: ignore[operator]
        return filled

    def _look_for_idle(self, more: int) -> None:
        """So many more records have come than reads brought something, of which each takes one record at most.

        One that came may be read in the next call, so a few more mean nothing.
        """
        self._idle = max(0, self._idle + more)
        if self._idle > IDLE_RECORDS_MAX:
            self._failure = TlsFailed("TLS: it sends records without end that have nothing in them")

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _answer(self) -> None:
        """What the other side has asked of TLS itself is answered; who does not read that must not ask for more."""
        self.flush()
        if self._out.pending > UNREAD_BYTES_MAX:
            self._failure = TlsFailed("TLS: it asks for new keys, and does not read the answers")

    def _asked(self) -> bool:
        """Give OpenSSL more of what comes; False where there is none at present, or enough for this call."""
        if self._records.count >= self._records_max:
            return False
        if self._later:
            self._later = self._given(self._later)
            return True
        if self._is_dry:
            self._is_dry = False
            return False
        try:
            count = self._sock.recv_into(self._scratch)
        except BlockingIOError:
            return False
        except OSError as error:
            self._failure = error
            return False
        self._is_dry = 0 < count < len(self._scratch)
        if not count:
            self._has_ended = True
        elif not self.has_heard:
            self._look(bytes(self._scratch[: len(MAGIC)]))
        self.has_heard = True
        self._later = memoryview(bytes(self._given(self._scratch[:count])))
        return True

    def _given(self, piece: memoryview) -> memoryview:
        """OpenSSL has what this call may still take of a piece; the rest of it."""
        count = self._records.within(piece, self._records_max - self._records.count)
        self._in.write(piece[:count])
        return piece[count:]

    def _look(self, first: bytes) -> None:
        if first == MAGIC:
            raise TlsFailed(NO_KEYS_THERE if not self._tls.is_syncer else "it speaks without TLS")

    def send(self, buffers: list[memoryview]) -> int:
        self.flush()
        if self.has_unsent:
            raise BlockingIOError
        count = self._seal(buffers)
        self.flush()
        return count

    def _seal(self, buffers: list[memoryview]) -> int:
        """Encrypt a batch; short buffers share a record with what follows them."""
        count = 0
        if len(buffers) > 1 and len(buffers[0]) < RECORD_BYTES:
            head = b"".join(first(buffers, RECORD_BYTES))
            count = self._ssl.write(head)
            buffers = skip(buffers, count)
        if buffers and count < BATCH_BYTES:
            count += self._ssl.write(buffers[0][: BATCH_BYTES - count])
        return count

    def flush(self) -> None:
        while True:
            if not self._sealed:
                if not self._out.pending:
                    break
                self._sealed = memoryview(self._out.read())
            try:
                self._sealed = self._sealed[self._sock.send(self._sealed) :]
            except BlockingIOError:
                break
        self.is_full = bool(self._sealed)

    def finish(self) -> None:
        if not self._is_finished and not self.is_shaking:
            with contextlib.suppress(ssl.SSLError):
                self._ssl.unwrap()  # says it, and wants to read the other side's; that one is not waited for
            self._is_finished = True
            self.flush()
        self._sock.shutdown(socket.SHUT_WR)

    def _explained(self, error: ssl.SSLError) -> TlsFailed:
        is_proved = not self.is_shaking
        return TlsFailed(explain(error, is_proved), is_proved and self._tls.is_refused_for_good(error))


def first(buffers: list[memoryview], count: int) -> list[memoryview]:
    """As many bytes of some buffers, from their beginning."""
    found = []
    for buffer in buffers:
        found.append(buffer[:count])
        count -= len(buffer)
        if count <= 0:
            break
    return found


def skip(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of some buffers after `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
