"""What the ranks of an island say to each other: small records over a socket between the speaker and each other rank.

    follower    Arrived, once; then at each boundary a Report
    speaker     Table, Look, Do and Reset, as often as a boundary needs them; each boundary ends with Ended

Arrays go over the model's own process group, at the moments that these records say. The records do not: a message of
gloo takes fifty times as long as one of a socket, NCCL's would wait for the device, and neither hears of a signal
while it waits. A rank that is gone is an `IslandError`, at the next word to it or from it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from skerry.core.messages import Frozen
from skerry.errors import IslandError, one_line
from skerry.shell.learner import Handover, Standing

MEET_S_MAX = 300.0  # until every rank is there: some may compile, or load a model, first
MEET_LOOK_S = 0.01  # until the next look at the roll, twice as long each time, for one store serves all ranks,
MEET_LOOK_S_MAX = 1.0  # and no longer than this
DIAL_S = 5.0  # for one address, and for whoever calls to say who it is
CARD_BYTES = 1024
SECRET_BYTES = 16
LENGTH_BYTES = 4
CALL_BYTES = SECRET_BYTES + LENGTH_BYTES  # the secret and the caller's rank
HEARD = b"\1"  # a follower's answer to the answer
CALLERS_MAX = 64  # at once: one more, and who has been silent longest goes
KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))  # a machine that vanished: 90 s

Verb = Literal["read", "add", "write", "blend"]


class Said(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one rank tells another."""


# ---------------------------------------------------------------------------------------------- a follower says


class Arrived(Said, frozen=True):
    """It has attached a model of this layout, with these digests of what is not trained."""

    layout: bytes
    frozen: Frozen = None


class Report(Said, frozen=True):
    """It is at a boundary: after a step of its own batch, or in its closing."""

    tokens: int = 0
    loss: float = 0.0
    wants_to_leave: bool = False
    is_closing: bool = False
    refusal: str = ""  # its model was another than that attached, at a boundary before
    grad_norm: float = 0.0


# ---------------------------------------------------------------------------------------------- the speaker says


class Table(Said, frozen=True):
    """The run's fragments, by whose numbers the others are spoken of."""

    fragments: bytes


class Look(Said, frozen=True):
    """These are read or changed next; who finds that they should not be says so in its next report.

    An answer at once would be one more time that every rank waits for the others, at nearly every step. A rank whose
    model is another obeys on the tensors that were attached, so nothing is spoiled, and a step more is counted.
    """

    fragments: tuple[int, ...]


class Do(Said, frozen=True):
    """Carry a fragment, with the other ranks: what it holds goes over the model's process group."""

    what: Verb
    fragment: int
    alpha: float = 1.0


class Reset(Said, frozen=True):
    """Forget the optimizers' state."""


class Ended(Said, frozen=True):
    """The boundary is over: where the learner stands, the same for every rank, or the error that all of them raise."""

    is_running: bool = True
    where: Standing = Standing()  # without its configuration,
    config: bytes = b""  # which is here where it is another than before
    handover: Handover | None = None  # what became of its steps, once it is closed
    error: str = ""  # its class
    text: str = ""
    why: str = ""  # of a refusal


FollowerSays = Arrived | Report
SpeakerSays = Table | Look | Do | Reset | Ended


# ---------------------------------------------------------------------------------------------- a line


class Line:
    """A socket to the rank at its other end; what comes is of the type `hears`."""

    def __init__(self, sock: socket.socket, rank: int, hears: Any) -> None:
        self.rank = rank
        self._sock, self._file = sock, sock.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(hears)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def say(self, said: Said) -> None:
        body = msgspec.msgpack.encode(said)
        with self._lost():
            self._sock.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)

    def hear(self, timeout_s: float | None = None) -> Any:
        """The next record; who gives a time has done with the line when that is over."""
        with self._lost():
            self._sock.settimeout(timeout_s)
            length = int.from_bytes(self._read(LENGTH_BYTES), "little")
            return self._decoder.decode(self._read(length))

    def close(self) -> None:
        self._file.close()
        self._sock.close()

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise ConnectionError("it hung up")
        return data

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the file of a line that was closed
            raise gone(f"rank {self.rank}", str(error)) from None


def gone(rank: str, why: str) -> IslandError:
    return IslandError(
        f"{rank} of this learner's island is gone ({one_line(why)}): the island ends here, and the run goes on; "
        "torchrun starts it again where --max-restarts allows it"
    )


# ---------------------------------------------------------------------------------------------- how ranks meet


_calls = Counter[str]()  # of each group, so far: ranks make their learners in the same order


def call_roll(group: dist.ProcessGroup) -> None:
    """Wait until every rank makes a learner; it is an error of the loop if one does not.

    By the store in which the processes found each other, for that is no collective: where rank 0 alone makes a learner,
    the first collective would meet one of the loop's own, and gloo ends the process for that, or both hang.
    """
    _calls[group.group_name] += 1
    store = distributed_c10d._get_default_store()
    roll = f"skerry/{group.group_name}/{_calls[group.group_name]}"
    keys = {rank: f"{roll}/{rank}" for rank in dist.get_process_group_ranks(group)}
    store.set(keys[dist.get_rank()], "here")
    store.add(roll, 1)
    deadline, look_s = time.monotonic() + MEET_S_MAX, MEET_LOOK_S
    while store.add(roll, 0) < len(keys):
        if time.monotonic() >= deadline:
            missing = ", ".join(str(rank) for rank, key in keys.items() if not store.check([key]))
            raise IslandError(
                f"of the {len(keys)} processes that train this model these made no learner within {MEET_S_MAX:g} s: "
                f"rank {missing}; make a skerry.Learner of the wrapped model on every rank, with the same SKERRY_SYNCER"
            )
        time.sleep(look_s)
        look_s = min(2 * look_s, MEET_LOOK_S_MAX)


class Card(msgspec.Struct, frozen=True):
    """Where the speaker is to be found; who shows the first secret is of the island, who answers the second is it."""

    addresses: tuple[str, ...]
    port: int
    secrets: tuple[bytes, bytes]


def meet(group: dist.ProcessGroup, device: torch.device) -> list[Line]:
    """The speaker's lines to all others, by rank; of another rank, the one to the speaker. Every rank takes part."""
    if dist.get_rank(group) == 0:
        with _listening(dist.get_world_size(group) + CALLERS_MAX) as server:
            both = (secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES))
            card = Card(_addresses(group), server.getsockname()[1], both)
            _shown(card, group, device)
            return _received(server, card, dist.get_world_size(group) - 1)
    return [_dialled(_shown(None, group, device), dist.get_rank(group))]


def _listening(backlog: int) -> socket.socket:
    """At any address of this machine, of both kinds where it has both."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _shown(card: Card | None, group: dist.ProcessGroup, device: torch.device) -> Card:
    """The speaker's card, as every rank has it."""
    body = msgspec.msgpack.encode(card)
    page = (len(body).to_bytes(LENGTH_BYTES, "little") + body).ljust(CARD_BYTES, b"\0")
    sent = torch.frombuffer(bytearray(page), dtype=torch.uint8).to(device)
    dist.broadcast(sent, dist.get_global_rank(group, 0), group)
    page = bytes(sent.tolist())
    length = int.from_bytes(page[:LENGTH_BYTES], "little")
    return msgspec.msgpack.decode(page[LENGTH_BYTES : LENGTH_BYTES + length], type=Card)


def _addresses(group: dist.ProcessGroup) -> tuple[str, ...]:
    """By which other ranks may reach this one: the first rank of all is where they have met before."""
    met = [os.environ.get("MASTER_ADDR", "")] if dist.get_rank() == 0 else []
    return tuple(name for name in [*met, socket.gethostname(), "127.0.0.1"] if name)


class Caller:
    """Somebody who has connected: a rank of the island, once it has shown the secret and has had the answer to it."""

    def __init__(self, sock: socket.socket, card: Card, now: float) -> None:
        self.sock, self.until = sock, now + DIAL_S
        self._card, self._heard = card, b""
        sock.setblocking(False)

    @property
    def rank(self) -> int:
        return int.from_bytes(self._heard[SECRET_BYTES:CALL_BYTES], "little")

    def hear(self) -> bool:
        """Take in what came; whether that is all. An `OSError` where it is a stranger, or has gone."""
        had = len(self._heard)
        if not (more := self.sock.recv(CALL_BYTES + len(HEARD) - had)):
            raise ConnectionError("hung up")
        self._heard += more
        if had < CALL_BYTES <= len(self._heard):
            if not secrets.compare_digest(self._heard[:SECRET_BYTES], self._card.secrets[0]):
                raise ConnectionError("a stranger")
            self.sock.sendall(self._card.secrets[1])
        return len(self._heard) == CALL_BYTES + len(HEARD)


class Door:
    """Where the speaker receives the other ranks, all who call at the same time: anybody can connect, and be silent.

    A follower that did not wait for its answer calls again, so what it gave up does not count.
    """

    def __init__(self, server: socket.socket, card: Card) -> None:
        self._server, self._card = server, card
        self._callers: dict[socket.socket, Caller] = {}  # the one that has been here longest first
        self.lines: dict[int, Line] = {}
        server.setblocking(False)

    def receive(self, count: int) -> None:
        """Until so many ranks are here, or it has taken too long."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._server, selectors.EVENT_READ)
            deadline = time.monotonic() + MEET_S_MAX
            while len(self.lines) < count and (now := time.monotonic()) < deadline:
                for sock in [sock for sock, caller in self._callers.items() if caller.until <= now]:
                    self._turn_away(sock, ready)
                until = min([deadline, *(caller.until for caller in self._callers.values())])
                for key, _ in ready.select(until - now):
                    if key.fileobj is self._server:
                        self._let_in(ready, now)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._callers:
                        self._hear(key.fileobj, ready)
            for sock in list(self._callers):
                self._turn_away(sock, ready)

    def _let_in(self, ready: selectors.BaseSelector, now: float) -> None:
        try:
            sock, _ = self._server.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        if len(self._callers) == CALLERS_MAX:
            self._turn_away(next(iter(self._callers)), ready)
        self._callers[sock] = Caller(sock, self._card, now)
        ready.register(sock, selectors.EVENT_READ)

    def _hear(self, sock: socket.socket, ready: selectors.BaseSelector) -> None:
        try:
            if not self._callers[sock].hear():
                return
        except OSError:
            self._turn_away(sock, ready)
            return
        ready.unregister(sock)
        rank = self._callers.pop(sock).rank
        if rank in self.lines:
            self.lines[rank].close()
        self.lines[rank] = Line(sock, rank, FollowerSays)

    def _turn_away(self, sock: socket.socket, ready: selectors.BaseSelector) -> None:
        ready.unregister(sock)
        del self._callers[sock]
        sock.close()


def _received(server: socket.socket, card: Card, count: int) -> list[Line]:
    door = Door(server, card)
    door.receive(count)
    if missing := count - len(door.lines):
        raise IslandError(
            f"{missing} of {count} other ranks of this island did not come within {MEET_S_MAX:g} s: "
            "make a skerry.Learner of the same model in each, with the same SKERRY_SYNCER"
        )
    return [line for _, line in sorted(door.lines.items())]


def _dialled(card: Card, rank: int) -> Line:
    troubles = []
    for address in card.addresses:
        try:
            sock = socket.create_connection((address, card.port), timeout=DIAL_S)
        except OSError as error:
            troubles.append(f"{address}: {error}")
            continue
        try:
            sock.sendall(card.secrets[0] + rank.to_bytes(LENGTH_BYTES, "little"))
            if secrets.compare_digest(_exactly(sock, SECRET_BYTES), card.secrets[1]):
                sock.sendall(HEARD)
                return Line(sock, 0, SpeakerSays)
            troubles.append(f"{address}: somebody else is there")
        except OSError as error:
            troubles.append(f"{address}: {error}")
        sock.close()
    raise IslandError(
        f"rank {rank} cannot reach rank 0 of its island at port {card.port} ({'; '.join(troubles)}): "
        "let the machines of the island reach each other"
    )


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := sock.recv(size - len(data))):
            raise ConnectionError("hung up")
        data += more
    return data
