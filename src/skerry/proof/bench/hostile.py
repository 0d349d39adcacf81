"""Peers that mean harm, in a process of their own: each sends one kind of thing as quickly as it was told, and no more.

    python -m skerry.proof.bench.hostile '{"port": 4000, "kind": "ask", …}'

They hold the run's token, or a key each where it has keys, but for those who guess: these try other tokens, or have
keys of another run. Each dials from a loopback address of its own, so that no bound on one address holds them all. They
yield to everybody (nice 19) and keep to a rate: on a machine with few cores they would otherwise take from the syncer
what they could never take over a network, its cores. Whoever is turned away comes again, a few times a second. What
goes wrong for one of them does not matter.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from skerry.algo.fragments import Tensor, layout_of
from skerry.core.messages import FULL, PROTOCOL, Ask, Contribution, FragmentPosition, Hello, Report, Welcome
from skerry.plan.layouts import even
from skerry.wire import frames, handshake
from skerry.wire.frames import CHUNK_BYTES, NONCE_BYTES, Attached, Challenge, Delivery, Handshake, Parser
from skerry.wire.handshake import Credentials
from skerry.wire.tls import Tls

Flood = Literal["ask", "half-sent", "reports", "connections", "guesses", "junk", "hello"]
FLOODS: tuple[Flood, ...] = get_args(Flood)
NICE = 19
MESSAGES_PER_S = 20_000.0  # of each at most, where it is messages
DIALS_PER_S = 100.0  # of each, where it is connections, guesses or junk
REDIALS_PER_S = 20.0  # of each that was turned away
BATCH_S = 0.01  # messages leave in batches of so long
LAYOUT_TENSORS = 90_000  # of a foreign model, 3.9 MB in a hello
OPEN_MAX = 200  # connections that each keeps open
PATIENCE_S = 2.0  # of any call


class Harm(Struct, frozen=True):
    """Who is to be harmed, how, and by how many."""

    port: int
    kind: Flood
    count: int
    token: str  # empty where there are keys
    keys: tuple[str, ...]  # the key file of each; none where there is a token
    parameters: int
    fragments: int
    streams: int
    codec: str
    payload_bytes: int  # of a contribution to the first fragment


def main() -> None:
    harm = msgspec.json.decode(sys.argv[1], type=Harm)
    os.nice(NICE)
    for index in range(harm.count):
        threading.Thread(target=_for_ever, args=(_Peer(harm, index),), daemon=True).start()
    print("begun", flush=True)
    sys.stdin.read()  # whoever started this ends it by closing the other end


def hostile_name(index: int) -> str:
    return f"hostile-{index}"


def _for_ever(peer: _Peer) -> None:
    for _ in _paced(REDIALS_PER_S):
        with contextlib.suppress(OSError, Exception), contextlib.ExitStack() as stack:
            KINDS[peer.harm.kind](peer, stack)


def _paced(per_s: float) -> Iterator[int]:
    """Numbers, one at a time, no more often than this; what was missed is not made up."""
    next_at = time.monotonic()
    for number in itertools.count():
        time.sleep(max(0.0, next_at - time.monotonic()))
        next_at = max(next_at + 1 / per_s, time.monotonic())
        yield number


class _Peer:
    """One that means harm, and what it knows."""

    def __init__(self, harm: Harm, index: int) -> None:
        self.harm, self.index = harm, index
        self.name, self.process, self.life = hostile_name(index), secrets.token_hex(8), 0
        self.number = itertools.count(1)
        self.credentials = Credentials(harm.token.encode() or None, PROTOCOL, self.name)
        self.tls = Tls(harm.keys[index]) if harm.keys else None

    def dial(self, stack: contextlib.ExitStack | None = None, *, is_bare: bool = False) -> socket.socket:
        """A connection, through TLS where there are keys, unless it is to be bare."""
        sock = socket.create_connection(("127.0.0.1", self.harm.port), PATIENCE_S, (f"127.0.0.{2 + self.index}", 0))
        if self.tls is not None and not is_bare:
            sock = self.tls.dialled(sock)
        return stack.enter_context(sock) if stack is not None else sock

    def joined(self, stack: contextlib.ExitStack, streams: int) -> tuple[socket.socket, list[socket.socket]]:
        """Connections that are let in: for messages, and for payloads."""
        control = self.dial(stack)
        session = self._shaken(control, b"", 0)
        bulk = [self.dial(stack) for _ in range(streams)]
        for stream, sock in enumerate(bulk):
            self._shaken(sock, session, stream)
        return control, bulk

    def _shaken(self, sock: socket.socket, session: bytes, stream: int) -> bytes:
        parser = Parser(frames.learner_dialect(lambda message: 0))
        challenge = _heard(sock, parser)
        assert isinstance(challenge, Challenge)
        sock.sendall(
            frames.encode(
                handshake.answer(self.credentials, secrets.token_bytes(NONCE_BYTES), challenge, session, stream)
            )
        )
        attached = _heard(sock, parser)
        assert isinstance(attached, Attached)
        return attached.session

    def hello(self, control: socket.socket) -> None:
        layout = even(self.harm.parameters, self.harm.fragments)
        said = Hello(PROTOCOL, self.name, self.process, self.life, msgspec.json.encode(layout), layout.digest)
        control.sendall(frames.encode(said))
        parser = Parser(frames.learner_dialect(lambda message: 0))
        parser.legal = frames.CONTROL_LINE
        heard = _heard(control, parser)
        assert isinstance(heard, Delivery) and isinstance(heard.message, Welcome)
        self.life = heard.message.life

    def report(self) -> bytes:
        """Where it stands: nowhere, so that no round waits for it."""
        positions = (FragmentPosition(FULL, 0, 0, 0),) * self.harm.fragments
        said = Report(self.name, self.life, next(self.number), 0, 0, 0.1, "training", positions)
        return frames.encode(said)


def _heard(sock: socket.socket, parser: Parser) -> Delivery | Handshake:
    while True:
        count = sock.recv_into(parser.buffer()[:4096])
        if not count:
            raise ConnectionError
        if (item := parser.received(count)) is not None:
            return item


# ------------------------------------------------------------------------------------------------------ what they do


def _ask(peer: _Peer, stack: contextlib.ExitStack) -> None:
    """Questions without end, of which no answer is read."""
    control, _ = peer.joined(stack, peer.harm.streams)
    batch = frames.encode(Ask()) * round(MESSAGES_PER_S * BATCH_S)
    for _ in _paced(1 / BATCH_S):
        control.sendall(batch)


def _half_sent(peer: _Peer, stack: contextlib.ExitStack) -> None:
    """A contribution on every stream, but for its last byte; then one more is begun, as many as are let."""
    _, bulk = peer.joined(stack, peer.harm.streams)
    payload = memoryview(bytes(peer.harm.payload_bytes))
    for transfer in _paced(REDIALS_PER_S):
        for sock in bulk:
            said = Contribution(peer.name, 1, transfer + 1, 0, 0, 0, 0, 1, 1, peer.harm.codec, bytes(16))
            parts = b"".join(bytes(part) for each in frames.encode_bulk(transfer, said, payload) for part in each)
            sock.sendall(parts[:-1] if len(payload) <= CHUNK_BYTES else parts[:-CHUNK_BYTES])


def _reports(peer: _Peer, stack: contextlib.ExitStack) -> None:
    """A learner that joins and then reports as no learner does."""
    control, _ = peer.joined(stack, peer.harm.streams)
    peer.hello(control)
    batches = [b"".join(peer.report() for _ in range(round(MESSAGES_PER_S * BATCH_S))) for _ in range(10)]
    for number in _paced(1 / BATCH_S):
        control.sendall(batches[number % len(batches)])


def _connections(peer: _Peer, stack: contextlib.ExitStack) -> None:
    """Connections that say nothing, as many as can be kept."""
    kept: list[socket.socket] = []
    try:
        for _ in _paced(DIALS_PER_S):
            kept.append(peer.dial(is_bare=True))
            if len(kept) > OPEN_MAX:
                kept.pop(0).close()
    finally:
        for sock in kept:
            sock.close()


def _guesses(peer: _Peer, stack: contextlib.ExitStack) -> None:
    for _ in _paced(DIALS_PER_S):
        with contextlib.suppress(OSError, AssertionError), peer.dial() as sock:
            if peer.tls is None:
                peer.credentials = Credentials(secrets.token_hex(16).encode(), PROTOCOL, peer.name)
            peer._shaken(sock, b"", 0)


def _junk(peer: _Peer, stack: contextlib.ExitStack) -> None:
    """Bytes that mean nothing, before the token or the key is proved and after it."""
    for number in _paced(DIALS_PER_S):
        is_proved = number % 10 == 0
        with contextlib.suppress(OSError, AssertionError), peer.dial(is_bare=not is_proved) as sock:
            if is_proved:
                peer._shaken(sock, b"", 0)
            sock.sendall(secrets.token_bytes(1000))


def _hello(peer: _Peer, stack: contextlib.ExitStack) -> None:
    """A model of very many tensors that is not the run's; whoever is refused comes again with it."""
    control, _ = peer.joined(stack, 0)
    control.sendall(_foreign_hello())
    while control.recv(4096):
        pass


@functools.cache
def _foreign_hello() -> bytes:
    layout = layout_of(Tensor(f"{number:x}", (1,), "other") for number in range(LAYOUT_TENSORS))
    return frames.encode(Hello(PROTOCOL, "foreign", "p", 0, msgspec.json.encode(layout), layout.digest))


KINDS: dict[Flood, Callable[[_Peer, contextlib.ExitStack], None]] = {
    "ask": _ask,
    "half-sent": _half_sent,
    "reports": _reports,
    "connections": _connections,
    "guesses": _guesses,
    "junk": _junk,
    "hello": _hello,
}

if __name__ == "__main__":
    main()
