"""What frames cost: payloads over the product's endpoints, against bare sockets that compute the same checksum.

Both subjects carry the same payloads over loopback between the same two processes. The product's are contributions
from a learner's client to a syncer's server, over so many streams. The bare ones have a blocking socket and a thread a
stream on either side (with TLS: an `ssl.SSLSocket`), and nothing but payloads and their xxh3 goes through them; they
hash and receive a payload into memory of its own that is used again, as the product does, in pieces of the product's
chunks. Of either, the receiver holds the last few payloads. Subjects alternate in short stretches, so that what else
the machine does meets both.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from skerry.core.messages import Contribution
from skerry.errors import RunFailed
from skerry.proof.bench.reference import ROUNDS, Spread, Tell, spread
from skerry.proof.bench.wire_far import HOST, STRETCH_S_MAX, Done, Ports, Ready, Stretch, Subject
from skerry.python import module_argv
from skerry.run.keys import Keys
from skerry.wire.client import Client
from skerry.wire.frames import CHUNK_BYTES
from skerry.wire.tls import Tls
from skerry.wire.transport import Inbox, Opened

STRETCH_MIB = 64  # that one subject carries before it is the other's turn
MIB = 1 << 20
SEED = 16


class Row(Struct, frozen=True):
    """One payload size over so many streams: medians, and how far the ratio went."""

    mib: float
    streams: int
    gb_s: float
    cpu_s_per_gb: float  # of both processes
    cpu_ratio: float  # to the bare sockets beside it
    cpu_ratio_spread: Spread
    bare_gb_s: float
    bare_cpu_s_per_gb: float


class Pair(NamedTuple):
    """The key files of a run that is measured and thrown away."""

    syncer: Path
    learner: Path

    @classmethod
    def made(cls, run: Path) -> Pair:
        keys, learner = Keys(run), run / "bench.key"
        learner.touch(0o600)
        learner.write_bytes(keys.issue("bench").pem)
        return cls(keys.syncer_file(), learner)


class Taken(NamedTuple):
    """What a subject took for a gigabyte."""

    seconds: float
    cpu_s: float


def measure(
    sizes_mib: Sequence[float], streams: Sequence[int], mib: float, tell: Tell, has_tls: bool = False
) -> list[Row]:
    """A row for each size and number of streams; each subject carries at least `mib` in each round."""
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        keys = Pair.made(Path(folder)) if has_tls else None
        return [row for count in streams for row in _rows(sizes_mib, count, mib, keys, tell)]


def _rows(sizes_mib: Sequence[float], streams: int, mib: float, keys: Pair | None, tell: Tell) -> Iterator[Row]:
    with _far(streams, keys) as far, _near(far, streams, keys) as near:
        for size_mib in sizes_mib:
            tell(f"{size_mib:g} MiB, streams {streams}")
            yield _row(near, size_mib, mib)


def _row(near: _Near, size_mib: float, mib: float) -> Row:
    payload = np.random.default_rng(SEED).bytes(round(size_mib * MIB))
    _pair(near, payload, 0)  # the first of each finds memory and windows small
    pairs = [_pair(near, payload, mib) for _ in range(ROUNDS)]
    ratio = spread([product.cpu_s / bare.cpu_s for bare, product in pairs])
    return Row(
        mib=size_mib,
        streams=near.streams,
        gb_s=1 / statistics.median(product.seconds for _, product in pairs),
        cpu_s_per_gb=statistics.median(product.cpu_s for _, product in pairs),
        cpu_ratio=ratio.median,
        cpu_ratio_spread=ratio,
        bare_gb_s=1 / statistics.median(bare.seconds for bare, _ in pairs),
        bare_cpu_s_per_gb=statistics.median(bare.cpu_s for bare, _ in pairs),
    )


def _pair(near: _Near, payload: bytes, mib: float) -> tuple[Taken, Taken]:
    """Bare sockets and the product in turn, until each has carried so much."""
    size_mib = len(payload) / MIB
    payloads = near.streams * max(1, round(min(mib, STRETCH_MIB) / size_mib / near.streams))
    stretches = max(1, round(mib / size_mib / payloads))
    turns = [
        (near.carry("bare", payload, payloads), near.carry("product", payload, payloads)) for _ in range(stretches)
    ]
    bare, product = zip(*turns, strict=True)
    return _mean(bare), _mean(product)


def _mean(stretches: Sequence[Taken]) -> Taken:
    return Taken(*(statistics.fmean(column) for column in zip(*stretches, strict=True)))


class _Far:
    """The far process, as this one sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.ports = msgspec.json.decode(self._line(), type=Ports)

    def begin(self, stretch: Stretch) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(stretch) + b"\n")
        self._process.stdin.flush()
        msgspec.json.decode(self._line(), type=Ready)

    def done(self) -> Done:
        return msgspec.json.decode(self._line(), type=Done)

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RunFailed("the receiving process ended: see above")
        return line


class _Near:
    """The sending side of both subjects."""

    def __init__(self, far: _Far, streams: int, keys: Pair | None) -> None:
        tls = keys and Tls(keys.learner)
        self.streams = streams
        self._far = far
        self._inbox = Inbox()
        self._client = Client(HOST, far.ports.product, None, self._inbox, lambda message: 0, tls=tls)
        bare = [socket.create_connection((HOST, far.ports.bare)) for _ in range(streams)]
        self._sockets = [tls.dialled(sock) for sock in bare] if tls else bare
        opened = self._inbox.get(timeout=STRETCH_S_MAX)
        assert isinstance(opened, Opened), opened
        self._peer = opened.peer

    def close(self) -> None:
        self._client.close()
        for sock in self._sockets:
            sock.close()

    def carry(self, subject: Subject, payload: bytes, payloads: int) -> Taken:
        """Send so many payloads and wait until all are there."""
        gigabytes = payloads * len(payload) / 1e9
        self._far.begin(Stretch(subject, len(payload), payloads))
        began, began_cpu_s = time.monotonic(), time.process_time()
        (self._send_contributions if subject == "product" else self._send_bare)(payload, payloads)
        cpu_s = self._far.done().cpu_s + time.process_time() - began_cpu_s
        return Taken((time.monotonic() - began) / gigabytes, cpu_s / gigabytes)

    def _send_contributions(self, payload: bytes, payloads: int) -> None:
        for index in range(payloads):
            message = Contribution("bench", 1, index, index, 0, 0, 0, 1, 1, "int4", b"")
            self._client.send(self._peer, message, payload, lane=index)

    def _send_bare(self, payload: bytes, payloads: int) -> None:
        each = (memoryview(payload), payloads // self.streams)
        threads = [threading.Thread(target=_send_bare, args=(sock, *each)) for sock in self._sockets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _send_bare(sock: socket.socket, payload: memoryview, payloads: int) -> None:
    for _ in range(payloads):
        state = xxhash.xxh3_64()
        for offset in range(0, len(payload), CHUNK_BYTES):
            chunk = payload[offset : offset + CHUNK_BYTES]
            state.update(chunk)
            sock.sendall(chunk)
        sock.sendall(state.digest())


@contextlib.contextmanager
def _far(streams: int, keys: Pair | None) -> Iterator[_Far]:
    words = module_argv("skerry.proof.bench.wire_far", "--streams", str(streams))
    words += ["--key-file", str(keys.syncer)] if keys else []
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield _Far(process)
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def _near(far: _Far, streams: int, keys: Pair | None) -> Iterator[_Near]:
    near = _Near(far, streams, keys)
    try:
        yield near
    finally:
        near.close()
