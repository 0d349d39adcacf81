"""The far side of `skerry bench wire`: a process of its own that receives payloads, as a syncer's does.

It says on which ports it listens. Then a line of JSON comes for each stretch; one goes back when it is ready for the
first payload, and one when the last is here. It ends with its input.

Whatever brought it, a payload is held until HELD others have come after it, as a syncer holds contributions until they
are merged: a receiver that wrote over its one buffer would have it in cache all the time, and nothing to hand on.
"""

from __future__ import annotations

import argparse
import socket
import ssl
import sys
import threading
import time
from collections import deque
from typing import Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from skerry.memory import Arrays
from skerry.shell.syncer import GATHER_S
from skerry.wire.frames import CHUNK_BYTES
from skerry.wire.server import Server
from skerry.wire.tls import Tls
from skerry.wire.transport import Inbox, Lost, Received

HOST = "127.0.0.1"
STRETCH_S_MAX = 300.0
DIGEST_BYTES = 8
HELD = 8  # payloads: a merge of eight learners has so many

Subject = Literal["product", "bare"]


class Ports(Struct, frozen=True):
    """Where each subject is to be dialled."""

    product: int
    bare: int


class Stretch(Struct, frozen=True):
    """So many payloads of so many bytes, dealt to the streams in turn."""

    subject: Subject
    payload_bytes: int
    payloads: int


class Ready(Struct, frozen=True): ...


class Done(Struct, frozen=True):
    cpu_s: float  # of the far process, in this stretch


class Far:
    """Both subjects, listening."""

    def __init__(self, streams: int, key_file: str | None) -> None:
        self._tls = Tls(key_file, lambda name, serial, is_admin: "") if key_file else None
        self.streams = streams
        self.payload_bytes = 0
        self.inbox = Inbox()
        self.server = Server(
            HOST, 0, None, self.inbox, lambda message: self.payload_bytes, streams=streams, tls=self._tls
        )
        self.listener = socket.create_server((HOST, 0))
        self.sockets: list[socket.socket] = []
        self.held: deque[memoryview] = deque(maxlen=HELD)
        self.arrays = Arrays(HELD)  # of the bare ones' payloads; the server has its own

    @property
    def ports(self) -> Ports:
        return Ports(self.server.port, self.listener.getsockname()[1])

    def accept(self) -> None:
        """The bare connections; the server has a thread that takes its own."""
        accepted = [self.listener.accept()[0] for _ in range(self.streams)]
        self.sockets = [self._tls.accepted(sock) for sock in accepted] if self._tls else accepted

    def receive(self, stretch: Stretch) -> Done:
        self.payload_bytes = stretch.payload_bytes
        _say(Ready())
        began_s = time.process_time()
        if stretch.subject == "product":
            self._receive_deliveries(stretch.payloads)
        else:
            self._receive_bare(stretch)
        return Done(time.process_time() - began_s)

    def _receive_deliveries(self, payloads: int) -> None:
        """Take out of the inbox what the I/O thread has put in, turn by turn, as a syncer does."""
        while payloads:
            for event in self.inbox.drain(payloads, STRETCH_S_MAX):
                if isinstance(event, Lost):
                    raise ConnectionError(event.reason)
                if isinstance(event, Received) and event.payload is not None:
                    self.held.append(event.payload)
                    payloads -= 1
            self.inbox.settle()
            time.sleep(GATHER_S)

    def _receive_bare(self, stretch: Stretch) -> None:
        each = (stretch.payload_bytes, stretch.payloads // self.streams)
        threads = [threading.Thread(target=self._receive_from, args=(sock, *each)) for sock in self.sockets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _receive_from(self, sock: socket.socket, payload_bytes: int, payloads: int) -> None:
        for _ in range(payloads):
            payload = self.arrays.take(payload_bytes, np.uint8).data
            _receive_bare(sock, payload)
            self.held.append(payload)


def _receive_bare(sock: socket.socket, payload: memoryview) -> None:
    """A payload, hashed by the chunk while it is still in the cache, and the digest behind it."""
    digest, state = memoryview(bytearray(DIGEST_BYTES)), xxhash.xxh3_64()
    for offset in range(0, len(payload), CHUNK_BYTES):
        chunk = payload[offset : offset + CHUNK_BYTES]
        _fill(sock, chunk)
        state.update(chunk)
    _fill(sock, digest)
    assert digest == state.digest()


def _fill(sock: socket.socket, target: memoryview) -> None:
    if not isinstance(sock, ssl.SSLSocket):
        if sock.recv_into(target, flags=socket.MSG_WAITALL) < len(target):
            raise ConnectionError("the other side has ended")
        return
    while target:  # TLS gives no more than a record at a time
        if not (count := sock.recv_into(target)):
            raise ConnectionError("the other side has ended")
        target = target[count:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m skerry.proof.bench.wire_far", description=__doc__)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--key-file")
    options = parser.parse_args()
    far = Far(options.streams, options.key_file)
    _say(far.ports)
    far.accept()
    for line in sys.stdin.buffer:
        _say(far.receive(msgspec.json.decode(line, type=Stretch)))


def _say(record: Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
