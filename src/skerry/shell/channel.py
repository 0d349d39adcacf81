"""A mailbox between two processes: records over a socket pair, each behind its length, and neither side ever waits.

The kernel keeps the order and says when the other process is gone, whatever it was at; there is no lock that somebody
could die with. What cannot be written now is kept and written the next time.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import msgspec

from skerry.node.mailbox import Record
from skerry.shell.node import Who

LENGTH_BYTES = 4
READ_BYTES = 1 << 16
READS_MAX = 16  # at once: somebody may write as fast as it is read


class Introduction(Record, frozen=True):
    """The first thing that a trainer says to the process beside it."""

    who: Who
    log_level: int


class Said(Record, frozen=True):
    """A line for the trainer's log."""

    logger: str
    level: int
    text: str


class Beat(Record, frozen=True):
    """Nothing, but that the node lives: its trainer would not notice that it stands."""


class Channel:
    """One end; what comes is of the type `hears`. It is for one thread to send and flush, and for one to receive."""

    def __init__(self, sock: socket.socket, hears: Any) -> None:
        self.sock = sock
        self.is_over = False  # the other process is gone, or has let go of its end
        self._decoder = msgspec.msgpack.Decoder(hears)
        self._incoming = bytearray()
        self._outgoing = bytearray()
        sock.setblocking(False)

    def send(self, record: msgspec.Struct) -> None:
        body = msgspec.msgpack.encode(record)
        self._outgoing += len(body).to_bytes(LENGTH_BYTES, "little") + body
        self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self.sock.send(self._outgoing)]
        except BlockingIOError:
            pass  # the other side does not read at present
        except OSError:
            self._outgoing.clear()
            self.is_over = True

    def receive(self) -> list[Any]:
        """What has come, as far as it is whole."""
        try:
            for _ in range(READS_MAX):
                if not (data := self.sock.recv(READ_BYTES)):
                    self.is_over = True
                    break
                self._incoming += data
                if len(data) < READ_BYTES:
                    break  # that was all: to be told so by the system costs as much again
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True
        return self._whole() if self._incoming else []

    def _whole(self) -> list[Any]:
        records, at = [], 0
        while len(self._incoming) - at >= LENGTH_BYTES:
            begin = at + LENGTH_BYTES
            end = begin + int.from_bytes(self._incoming[at:begin], "little")
            if end > len(self._incoming):
                break
            records.append(self._decoder.decode(bytes(self._incoming[begin:end])))
            at = end
        del self._incoming[:at]
        return records

    def close(self) -> None:
        """For good, whoever else has this end open: a fork of this process may."""
        with contextlib.suppress(OSError):  # the other side is gone
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
