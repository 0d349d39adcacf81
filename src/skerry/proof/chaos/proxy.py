"""A TCP proxy between learners and the syncer that makes bad weather: late, slow, cut off, reset, damaged.

Each learner dials its own route. A route has a gate in each direction; a connection is a pipe through each of
them. What a pipe has read waits in its queue until it is due, then takes its turn at the gate.

Rules that hold here: all state belongs to the loop's thread; other threads hand it calls and wait for the
answer. No byte is lost, changed or overtaken unless `reset`, `corrupt` or `truncate` was called. The end of a
stream and a reset by one side travel like bytes: in order, late, and not through a blocked lane. A queue that
is full stops its pipe from reading, so that TCP holds the sender back. Faults are drawn from the seed; where
a stream is cut into reads is not ours to choose.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from skerry.wire.loop import READ, WRITE, Loop

QUANTUM_BYTES = 1500  # of one connection at least, before it is the next one's turn at a limited rate,
QUANTUM_S = 0.0005  # or what passes in this time: at a high rate small turns would cost more than they are worth
BURST_S = 0.02  # of its rate that a gate saves up while nobody sends
CHUNK_BYTES = 64 << 10  # of one read
KEPT_BYTES_MAX = 256 << 10  # of one connection in one direction, unless rate and delay call for more
KERNEL_BYTES = 64 << 10  # small, so that a slow lane is felt by the sender
ANSWER_S = 1.0  # how often one who waits for an answer looks whether the thread still lives
IDLE_S = 3600.0
NEVER = float("inf")

T = TypeVar("T")


@dataclass(frozen=True)
class Lane:
    """The weather in one direction of a route."""

    delay_s: float = 0.0  # each byte arrives this much later
    rate_bps: float = 0.0  # bits per second, for all connections of the route together; 0: unlimited
    blocked: bool = False  # a partition: bytes stay where they are, connections stay open


@dataclass(frozen=True)
class Weather:
    up: Lane = Lane()  # from the learner to the syncer
    down: Lane = Lane()


CLEAR = Weather()


@dataclass(frozen=True)
class Counts:
    """What has happened on a route so far."""

    bytes_up: int
    bytes_down: int
    connections: int  # accepted
    resets: int  # connections that `reset` aborted
    corrupted: int
    truncated: int


class Proxy:
    """Routes and the thread that serves them. Every method may be called from any thread."""

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)
        self._routes: dict[str, _Route] = {}
        self._closing = False
        self._loop = Loop("skerry-proxy", self._step, self._end)
        self._loop.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort every connection and end the thread."""
        self._loop.call(self._begin_close)
        self._loop.thread.join()
        assert self._loop.failure is None, self._loop.failure

    def add(self, name: str, host: str, port: int) -> int:
        """A new route to this address, in clear weather; returns the port on 127.0.0.1 to dial instead."""
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        route = _Route(self._loop, family, address, self._dice)
        self._ask(self._open, name, route)
        return route.port

    def set(self, name: str, weather: Weather) -> None:
        """The weather of a route from now on, for the connections it has and for new ones."""
        self._ask(self._routes[name].set, weather)

    def reset(self, name: str) -> int:
        """Abort every connection of a route; returns how many."""
        return self._ask(self._routes[name].reset)

    def corrupt(self, name: str, direction: str) -> bool:
        """Flip one bit in what passes next in this direction, "up" or "down"; False if there is no connection."""
        return self._ask(self._routes[name].corrupt, direction)

    def truncate(self, name: str, direction: str) -> bool:
        """Pass only a part of what passes next in this direction, then abort; False if there is no connection."""
        return self._ask(self._routes[name].truncate, direction)

    def counts(self, name: str) -> Counts:
        return self._ask(self._routes[name].counts)

    def _ask(self, function: Callable[..., T], *arguments: Any) -> T:
        """Have the loop's thread call this; returns when it has."""
        answer: Future[T] = Future()
        self._loop.call(lambda: answer.set_result(function(*arguments)))
        while self._loop.thread.is_alive():
            with contextlib.suppress(TimeoutError):
                return answer.result(ANSWER_S)
        raise AssertionError(f"the proxy was asked after its end ({self._loop.failure or 'closed'})")

    def _open(self, name: str, route: _Route) -> None:
        assert name not in self._routes, f"a second route {name!r}"
        self._routes[name] = route
        self._loop.watch(route.listener, READ, 0, route.accept)

    def _begin_close(self) -> None:
        self._closing = True

    def _step(self) -> float | None:
        if self._closing:
            return None
        now = time.monotonic()
        gates = [gate for route in self._routes.values() for gate in route.gates.values()]
        due = min([gate.serve(now) for gate in gates], default=NEVER)
        return min(max(due - time.monotonic(), 0.0), IDLE_S)

    def _end(self) -> None:
        for route in self._routes.values():
            route.close()


class _Route:
    """A port that leads to an address through two gates."""

    def __init__(self, loop: Loop, family: int, address: Any, dice: random.Random) -> None:
        self.loop, self.family, self.address = loop, family, address
        self.gates = {"up": _Gate(dice), "down": _Gate(dice)}
        self.links: list[_Link] = []
        self.listener = _socket(socket.AF_INET)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(128)
        self.port: int = self.listener.getsockname()[1]
        self._connections = self._resets = 0

    @property
    def blocked(self) -> bool:
        return any(gate.lane.blocked for gate in self.gates.values())

    def accept(self, events: int) -> None:
        try:
            near, _ = self.listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it left before we came
        near.setblocking(False)
        self._connections += 1
        link = _Link(self, near)
        self.links.append(link)
        link.dial()
        link.watch()

    def set(self, weather: Weather) -> None:
        self.gates["up"].lane, self.gates["down"].lane = weather.up, weather.down
        for link in list(self.links):
            link.dial()
            link.watch()

    def reset(self) -> int:
        count = len(self.links)
        for link in list(self.links):
            link.abort()
        self._resets += count
        return count

    def corrupt(self, direction: str) -> bool:
        self.gates[direction].to_corrupt += bool(self.links)
        return bool(self.links)

    def truncate(self, direction: str) -> bool:
        self.gates[direction].to_truncate += bool(self.links)
        return bool(self.links)

    def counts(self) -> Counts:
        up, down = self.gates["up"], self.gates["down"]
        corrupted, truncated = up.corrupted + down.corrupted, up.truncated + down.truncated
        return Counts(up.passed_bytes, down.passed_bytes, self._connections, self._resets, corrupted, truncated)

    def close(self) -> None:
        for link in list(self.links):
            link.abort()
        self.loop.forget(self.listener)
        self.listener.close()


class _Gate:
    """One direction of a route: its weather, the pipes that share it, and whose turn it is."""

    def __init__(self, dice: random.Random) -> None:
        self.lane = Lane()
        self.pipes: deque[_Pipe] = deque()  # the first one's turn is next
        self.to_corrupt = self.to_truncate = 0  # asked for, and not done yet
        self.passed_bytes = self.corrupted = self.truncated = 0
        self._dice = dice
        self._budget = NEVER  # bytes that may pass now
        self._budgeted = 0.0  # when that was so

    @property
    def kept_bytes_max(self) -> int:
        """Twice what is under way at full rate: a long lane must not be slow for lack of room."""
        return max(KEPT_BYTES_MAX, int(2 * self.lane.rate_bps / 8 * self.lane.delay_s))

    @property
    def quantum_bytes(self) -> int:
        return max(QUANTUM_BYTES, min(CHUNK_BYTES, int(self.lane.rate_bps / 8 * QUANTUM_S)))

    def serve(self, now: float) -> float:
        """Let everything pass that may pass by now; returns when there will be more to do."""
        if self.lane.blocked:
            return NEVER
        self._earn(now)
        while ready := [pipe for pipe in self.pipes if pipe.due <= now]:
            most = CHUNK_BYTES if len(ready) == 1 or not self.lane.rate_bps else self.quantum_bytes
            for pipe in ready:
                lacking = min(pipe.next_bytes, QUANTUM_BYTES) - self._budget
                if lacking > 0:
                    self.pipes.rotate(-self.pipes.index(pipe))
                    return now + lacking * 8 / self.lane.rate_bps
                passed_bytes = self._pass(pipe, int(min(most, self._budget)))
                self.passed_bytes += passed_bytes
                self._budget -= passed_bytes
                pipe.link.watch()
        return min([pipe.due for pipe in self.pipes], default=NEVER)

    def _earn(self, now: float) -> None:
        rate = self.lane.rate_bps / 8
        burst = max(rate * BURST_S, QUANTUM_BYTES)
        self._budget = min(burst, self._budget + (now - self._budgeted) * rate) if rate else NEVER
        self._budgeted = now

    def _pass(self, pipe: _Pipe, most: int) -> int:
        data = pipe.queue[0].data[:most]
        if not data:
            pipe.finish()
            return 0
        if self.to_truncate:
            return self._pass_part(pipe, data)
        if self.to_corrupt:
            return self._pass_damaged(pipe, data)
        return pipe.send(data)

    def _pass_part(self, pipe: _Pipe, data: memoryview) -> int:
        self.to_truncate -= 1
        self.truncated += 1
        count = pipe.send(data[: self._dice.randrange(len(data))])
        pipe.link.abort()
        return count

    def _pass_damaged(self, pipe: _Pipe, data: memoryview) -> int:
        damaged = bytearray(data)
        place, bit = self._dice.randrange(len(data)), self._dice.randrange(8)
        damaged[place] ^= 1 << bit
        count = pipe.send(memoryview(damaged))
        if place < count:  # otherwise only sound bytes have left, and the rest is damaged another time
            self.to_corrupt -= 1
            self.corrupted += 1
        return count


class _Link:
    """A learner's connection, the one to the syncer that continues it, and the two pipes between them."""

    def __init__(self, route: _Route, near: socket.socket) -> None:
        self._route = route
        self._near, self._far = near, _socket(route.family)
        self._up = _Pipe(self, route.gates["up"], self._near, self._far, stalled=True)  # until the far end answers
        self._down = _Pipe(self, route.gates["down"], self._far, self._near)
        self._dialled = self._answered = self._closed = False
        self._watched = {self._near: 0, self._far: 0}

    def dial(self) -> None:
        """Connect to the syncer, once no lane is blocked: a TCP handshake needs both."""
        if self._dialled or self._route.blocked:
            return
        self._dialled = True
        gave_up = self._up.broken or (self._up.ended and not self._up.kept_bytes)  # while it could not be dialled
        if gave_up or self._far.connect_ex(self._route.address) not in (0, errno.EINPROGRESS):
            self.abort()

    def watch(self) -> None:
        """Wait for what the two sockets can do now."""
        if self._closed:
            return
        self._watch(self._near, self._up, self._down)
        if self._dialled:
            self._watch(self._far, self._down, self._up)

    def _watch(self, sock: socket.socket, out: _Pipe, into: _Pipe) -> None:
        events = (READ if out.may_read else 0) | (WRITE if into.stalled else 0)
        if events == self._watched[sock]:
            return
        self._watched[sock] = events
        if events:
            self._route.loop.watch(sock, events, 0, self._near_ready if sock is self._near else self._far_ready)
        else:
            self._route.loop.forget(sock)

    def _near_ready(self, events: int) -> None:
        self._ready(events, self._up, self._down)

    def _far_ready(self, events: int) -> None:
        if not self._closed and not self._answered:
            self._answer()
        self._ready(events, self._down, self._up)

    def _ready(self, events: int, out: _Pipe, into: _Pipe) -> None:
        if self._closed:  # by what was served before it in this turn
            return
        if events & WRITE:
            into.stalled = False
        if events & READ and out.may_read:
            out.read()
        self.watch()

    def _answer(self) -> None:
        """The attempt to connect has ended: see how."""
        self._answered = True
        with contextlib.suppress(OSError):  # raised by one that was reset since
            refused = self._far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not refused and self._far.getsockname() != self._far.getpeername():  # itself, when nobody listens
                return
        self.abort()

    def lost(self, sock: socket.socket) -> None:
        """One end was reset: what it has said still passes, then its reset; nothing more goes to it."""
        out, into = (self._up, self._down) if sock is self._near else (self._down, self._up)
        out.broken = True
        out.keep(b"")
        into.ended, into.kept_bytes = True, 0
        into.queue.clear()

    def finished(self) -> None:
        """A pipe has passed its end on: with both, all is said."""
        if self._up.finished and self._down.finished:
            self._close()

    def abort(self) -> None:
        for sock in (self._near, self._far):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # so that close is a reset
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._route.links.remove(self)
        for pipe in (self._up, self._down):
            pipe.gate.pipes.remove(pipe)
        for sock in (self._near, self._far):
            self._route.loop.forget(sock)
            sock.close()


@dataclass(slots=True)
class _Kept:
    """Bytes of one read; none stand for the end."""

    arrived: float
    data: memoryview


class _Pipe:
    """One direction of a connection: a queue between two sockets."""

    def __init__(
        self, link: _Link, gate: _Gate, source: socket.socket, target: socket.socket, stalled: bool = False
    ) -> None:
        self.link, self.gate = link, gate
        self.queue: deque[_Kept] = deque()
        self.kept_bytes = 0
        self.stalled = stalled  # the target takes no more at present
        self.ended = False  # the source will say no more
        self.broken = False  # it was reset
        self.finished = False  # the target knows of the end
        self._source, self._target = source, target
        gate.pipes.append(self)

    @property
    def may_read(self) -> bool:
        return not self.ended and self.kept_bytes + CHUNK_BYTES <= self.gate.kept_bytes_max

    @property
    def due(self) -> float:
        """When the next bytes may pass, for all that this pipe knows."""
        return self.queue[0].arrived + self.gate.lane.delay_s if self.queue and not self.stalled else NEVER

    @property
    def next_bytes(self) -> int:
        return len(self.queue[0].data)

    def read(self) -> None:
        try:
            self.keep(self._source.recv(CHUNK_BYTES))
        except BlockingIOError:
            return
        except OSError:
            self.link.lost(self._source)

    def keep(self, data: bytes) -> None:
        self.queue.append(_Kept(time.monotonic(), memoryview(data)))
        self.kept_bytes += len(data)
        self.ended = not data

    def send(self, data: memoryview) -> int:
        """Pass on the first bytes of the queue, perhaps damaged; returns how many the target took."""
        try:
            count = self._target.send(data)
        except BlockingIOError:
            count = 0
        except OSError:
            self.link.lost(self._target)
            return 0
        self.stalled = count < len(data)
        self._drop(count)
        return count

    def _drop(self, count: int) -> None:
        self.kept_bytes -= count
        self.queue[0].data = self.queue[0].data[count:]
        if not self.queue[0].data:
            self.queue.popleft()

    def finish(self) -> None:
        """Pass the end on, as it came."""
        self.queue.popleft()
        if self.broken:
            self.link.abort()
            return
        with contextlib.suppress(OSError):  # the target is gone: its own pipe will tell
            self._target.shutdown(socket.SHUT_WR)
        self.finished = True
        self.link.finished()


def _socket(family: int) -> socket.socket:
    """What a listening one is set to, but for blocking, the sockets that it accepts inherit."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
