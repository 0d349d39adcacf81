"""Synthetic learners: the real machine, node and uplink of each, all of them on one I/O thread, and no model.

Once they are started they take a step every so often, and follow the protocol as learners do: snapshots at step
boundaries, honest positions, outstanding contributions, bases, reports. Only the arrays are missing. What they send is
one payload of random drift for each length, made once for all of them, and what they are sent is believed, so an answer
costs them next to nothing and the syncer is what is measured. They share an endpoint, and in each one's reports is the
traffic of its own connections.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from skerry.algo import codecs
from skerry.algo.fragments import Fragment, Layout
from skerry.config import Config
from skerry.core.events import LearnerEvent, Told
from skerry.core.messages import Message, Publication, Refused
from skerry.core.vocabulary import GivenUp
from skerry.node.algebra import Adopted, Float32, Payload
from skerry.node.driver import LearnerDriver, both_halves
from skerry.node.learner import Outstanding
from skerry.node.training import ByHand, TrainingHalf
from skerry.wire.client import Client
from skerry.wire.connection import Connection, Meter
from skerry.wire.frames import Attached
from skerry.wire.tls import Tls
from skerry.wire.transport import Endpoint, Inbox, Lost, Opened, Received, WireEvent

DIALS_MAX = 16  # at once: a syncer lets the oldest of too many strangers go
TOKENS = 512  # of one step
DRIFT = 1e-4  # how far parameters are said to have moved, about
FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Blank:
    """Stands for a flat array: it has a length and no values, and so have its sums."""

    size: int

    def __add__(self, other: Blank) -> Blank:
        return self

    __sub__ = __add__


class Believed(bytes):
    """A digest that equals any other: a blank has no values to take one of."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = bytes.__hash__


class Blanks(Float32):
    """The algebra of a learner whose arrays are blanks."""

    def encode(self, codec: str, drift: Blank, residual: Blank | None = None) -> memoryview:
        return _payload(codec, drift.size)

    def unsaid(self, codec: str, payload: Payload, drift: Blank, residual: Blank | None) -> Blank:
        return drift

    def decode(self, codec: str, payload: Payload) -> Blank:
        return Blank(len(payload) // FP32_BYTES)

    def adopt(self, codec: str, payload: Payload, base: Blank | None) -> Adopted:
        return Adopted(self.decode(codec, payload) if base is None else base, Believed(), is_finite=True)

    def digest(self, theta: Blank) -> bytes:
        return Believed()


@cache
def _payload(codec: str, size: int) -> memoryview:
    drift = np.random.default_rng(size).standard_normal(size, np.float32)
    drift *= np.float32(DRIFT)
    return codecs.encode(codec, drift).data


class BlankParameters:
    """Live parameters that are not there."""

    def read(self, fragment: Fragment) -> Blank:
        return Blank(fragment.size)

    def add(self, fragment: Fragment, increment: Blank) -> None: ...
    def write(self, fragment: Fragment, values: Blank) -> None: ...
    def blend(self, fragment: Fragment, towards: Blank, alpha: float) -> None: ...
    def reset_optimizer(self) -> None: ...


@dataclass
class Sightings:
    """When things happened to the learners, by one clock for all of them; written by the I/O thread."""

    sent: dict[tuple[str, int], float] = field(default_factory=dict)  # (learner, seq) of a contribution
    settled: dict[tuple[str, int], float] = field(default_factory=dict)  # the same, when its version was taken in
    published: dict[tuple[int, int], float] = field(default_factory=dict)  # (fragment, version) at the first learner
    fast_forwards: int = 0


@dataclass(frozen=True)
class Watch:
    """The observer of one learner's node."""

    learner: str
    seen: Sightings

    def event_came(self, event: LearnerEvent) -> None:
        if isinstance(event, Told) and isinstance(event.message, Publication):
            self.seen.published.setdefault((event.message.fragment, event.message.version), time.monotonic())

    def contributed(self, out: Outstanding) -> None:
        self.seen.sent[self.learner, out.contribution.seq] = time.monotonic()

    def settled(self, fragment: int, seq: int) -> None:
        self.seen.settled[self.learner, seq] = time.monotonic()

    def fast_forwarded(self, reason: GivenUp) -> None:
        self.seen.fast_forwards += 1


class Share:
    """What the swarm's endpoint is to one of its members: its bytes are those of the member's connections."""

    def __init__(self, whole: Endpoint) -> None:
        self.meter = Meter()
        self.send, self.drop, self.close = whole.send, whole.drop, whole.close

    @property
    def bytes_in(self) -> int:
        return self.meter.bytes_in

    @property
    def bytes_out(self) -> int:
        return self.meter.bytes_out


@dataclass
class Member:
    """One synthetic learner; `lead` is where in a step it begins, so that not all end theirs at once."""

    training: TrainingHalf
    driver: LearnerDriver
    share: Share
    lead: float
    tls: Tls | None = None
    is_joining: bool = True
    stepped_at: float = 0.0


class _Straight(Inbox):
    """An inbox that keeps nothing: what comes is taken in at once, on the I/O thread."""

    def __init__(self, take: Callable[[WireEvent], None]) -> None:
        super().__init__()
        self._take = take

    def offer(self, item: WireEvent) -> bool:
        self._take(item)
        return True


class Swarm(Client):
    """Many learners behind one endpoint: each of its peers is the syncer as one learner has it.

    Everything happens on the I/O thread, so nothing here needs a lock; other threads may read the counts.
    """

    def __init__(
        self,
        port: int,
        config: Config,
        layout: Layout,
        step_s: float,
        count: int,
        token: bytes | None = None,
        keys: Sequence[Tls] = (),
    ) -> None:
        self.seen = Sightings()
        self.refusal = ""  # why the syncer will not have them
        self.links_lost = 0
        self.members = [
            Member(*self._halves(f"learner-{k}", layout), k / count, keys[k] if keys else None) for k in range(count)
        ]
        self._step_s = step_s
        self._unlinked = deque(self.members)
        self._linked: dict[int, Member] = {}  # by peer
        self._dialling: dict[Connection, Member] = {}  # for whom each connection is
        self._serving: Member | None = None  # whose bulk connections are dialled at this moment
        self._due: list[tuple[float, int, Member]] = []  # a heap of next boundaries
        self._started = False
        self._order = itertools.count()  # of two boundaries at the same time
        super().__init__(
            "127.0.0.1",
            port,
            token,
            _Straight(self._take_event),
            self._payload_bytes,
            heartbeat_s=config.wire.heartbeat_s,
            timeout_s=config.wire.timeout_s,
        )

    def _halves(self, name: str, layout: Layout) -> tuple[TrainingHalf, LearnerDriver, Share]:
        process, watch, blank = secrets.token_hex(8), Watch(name, self.seen), ByHand(BlankParameters())
        training, driver = both_halves(name, layout, blank, process, time.monotonic, Blanks(), watch)
        driver.uplink.endpoint = share = Share(self)
        return training, driver, share

    # ---------------------------------------------------------------------------------------- from any thread

    def start(self) -> None:
        """Let those who have joined take steps; who joins later begins then."""
        self._loop.call(self._start)

    @property
    def joined(self) -> int:
        """Learners that have a base of every fragment."""
        return sum(not member.is_joining for member in self.members)

    @property
    def steps(self) -> int:
        """That all of them have taken."""
        machines = [member.driver.node.machine for member in self.members]
        return sum(machine.step_count for machine in machines if machine is not None)

    @property
    def failure(self) -> str:
        """Why no learner can go on; empty while they can."""
        return self.refusal or (self._obituary() if self._loop.failure else "")

    # ----------------------------------------------------------------------------------------- the I/O thread

    def _step(self) -> float | None:
        """After every turn pass the boundaries that are due, and wait no longer than to the next."""
        wait_s, now = super()._step(), time.monotonic()
        if wait_s is None:
            return None
        while self._due and self._due[0][0] <= now:
            due_at, _, member = heapq.heappop(self._due)
            self._boundary(member, due_at, now)
        return min(wait_s, max(0.0, self._due[0][0] - time.monotonic())) if self._due else wait_s

    def _boundary(self, member: Member, due_at: float, now: float) -> None:
        member.training.boundary(1, TOKENS, now - member.stepped_at)
        member.driver.tick()
        member.stepped_at = now
        next_at = due_at + self._step_s
        self._push(member, next_at if next_at > now else now + self._step_s)  # steps that were missed are not made up

    def _push(self, member: Member, due_at: float) -> None:
        heapq.heappush(self._due, (due_at, next(self._order), member))

    def _tick(self, now: float) -> None:
        super()._tick(now)
        for member in self._linked.values():
            member.driver.tick()

    def _dial(self) -> None:
        """Dial for those who have no syncer, a few at a time."""
        under_way = sum(not connection.peer for connection in self._connections)
        for _ in range(min(len(self._unlinked), DIALS_MAX - under_way)):
            super()._dial()
        if self._unlinked:
            self._dial_at = 0.0  # look again at the next tick

    def _adopt(self, sock: socket.socket, address: str) -> Connection:
        """Every connection is one member's, with that member's key and meter."""
        member = self._serving or self._unlinked.popleft()
        self._tls, self._meter = member.tls, member.share.meter
        connection = super()._adopt(sock, address)
        self._dialling[connection] = member
        return connection

    def _attached(self, connection: Connection, item: Attached) -> None:
        self._serving = self._dialling[connection]
        super()._attached(connection, item)
        self._serving = None

    def _close(self, connection: Connection) -> None:
        super()._close(connection)
        member = self._dialling.pop(connection, None)
        if member is not None and member is not self._serving and not connection.peer:
            self._unlinked.append(member)  # nothing came of it

    def _take_event(self, event: WireEvent) -> None:
        if isinstance(event, Opened):
            assert self._serving is not None
            self._linked[event.peer] = self._serving
        member = self._linked.get(event.peer)
        if isinstance(event, Received) and isinstance(event.message, Refused) and event.message.is_final:
            self.refusal = event.message.text
        if member is None:
            return
        member.driver.take(event)
        if isinstance(event, Lost):
            self.links_lost += 1
            self._unlinked.append(self._linked.pop(event.peer))
        elif member.is_joining:
            self._join(member)

    def _join(self, member: Member) -> None:
        """Take in what has come of the model."""
        member.training.stand()
        member.driver.tick()
        member.is_joining = member.training.must_stand
        if self._started and not member.is_joining:
            self._begin(member)

    def _start(self) -> None:
        self._started = True
        for member in self.members:
            if not member.is_joining:
                self._begin(member)

    def _begin(self, member: Member) -> None:
        member.stepped_at = time.monotonic() + self._step_s * member.lead
        self._push(member, member.stepped_at + self._step_s)

    def _payload_bytes(self, message: Message) -> int:
        """All have the same model, so any who was welcomed knows; nothing bulky comes before a welcome."""
        welcomed = next(m.driver for m in self._linked.values() if m.driver.node.config is not None)
        return welcomed.uplink.payload_bytes(message)
