"""The simulated network: real frames through real parsers, on links that delay, lose, double, reorder and spoil them.

A link has two lines each way, control and bulk, and no line keeps its order. But in a world that was healed, versions
of a fragment do, as on the one stream that carries them: a delta that overtakes the one before it is of no use, and
what a learner lacks after faults is a chain of them, so demands in time are those of TCP. What is on its way dies with
the link. A blocked direction keeps what it carries; whoever hears nothing for `timeout_s` gives the link up, as the
real endpoint does. Hello, welcome, refusal and done are never lost alone or doubled: on TCP, a link that loses one is a
link that breaks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Protocol

from skerry.core.messages import Done, Hello, Message, Publication, Refused, Welcome
from skerry.errors import ProtocolError
from skerry.wire import frames
from skerry.wire.frames import BULK_LINE, CONTROL_LINE, Delivery, Dialect, Parser, Payload
from skerry.wire.transport import OTHER_SIDE_CLOSED, Lost, Opened, Received, Sent, WireEvent

if TYPE_CHECKING:
    from skerry.proof.sim.world import World

ONCE = (Hello, Welcome, Refused, Done)


class Process(Protocol):
    """What the network asks of whoever sits at its end."""

    is_dead: bool
    paused_until: float

    def take(self, event: WireEvent) -> None: ...


class End:
    """One end of a link: its endpoint, its number there, and what reads what arrives."""

    def __init__(self, endpoint: SimEndpoint, direction: str) -> None:
        self.endpoint, self.direction = endpoint, direction
        self.peer = next(endpoint.peers)
        self.up = True
        self.deaf = False  # it was dropped: what comes in is not read any more
        self.other: End
        self.link: SimLink
        self.parsers = [Parser(endpoint.dialect), Parser(endpoint.dialect)]
        self.parsers[0].legal, self.parsers[1].legal = CONTROL_LINE, BULK_LINE


class SimLink:
    def __init__(
        self, world: World, learner: str, client: SimEndpoint, server: SimEndpoint, principal: str = ""
    ) -> None:
        self.world, self.learner = world, learner
        self.client, self.server = End(client, "up"), End(server, "down")
        self.client.other, self.server.other = self.server, self.client
        self.transfers = itertools.count(1)
        self.streams: dict[int, deque[bytes]] = defaultdict(deque)  # fragment -> versions of it on their way, in order
        self.is_greeted = False  # on a real connection nothing overtakes the hello
        for end in (self.client, self.server):
            end.link = self
            end.endpoint.ends[end.peer] = end
            proves = principal if end is self.server else ""
            opened = Opened(end.peer, learner, proves)
            world.at(0.0, lambda end=end, opened=opened: self._tell(end, opened))  # type: ignore[misc]

    @property
    def is_up(self) -> bool:
        return self.client.up and self.server.up

    def carry(self, sender: End, message: Message, payload: Payload | None, tag: object) -> None:
        world, weather = self.world, self.world.scenario
        is_bulk = payload is not None
        data = self._frames(message, payload)
        mean_s = weather.delay_s + (weather.bulk_s if is_bulk else 0.0)
        least_s = world.faults.slower_s(self.learner, is_bulk)
        copies = 1
        if world.faults.is_on and not isinstance(message, ONCE):
            copies = (world.random.random() >= weather.loss) + (world.random.random() < weather.duplicates)
        is_first = isinstance(message, Hello)
        line = deque([data] * copies)
        if isinstance(message, Publication) and world.is_healed:
            line = self.streams[message.fragment]
            line.append(data)
        for _ in range(copies):
            wait_s = least_s + min(8 * mean_s, world.random.expovariate(1 / mean_s))
            world.at(wait_s, lambda: self._arrive(sender.other, is_bulk, line.popleft(), is_first))
        if tag is not None:
            sent = Sent(sender.peer, tag)
            leave_s = mean_s + (weather.leave_s if is_bulk else 0.0)
            world.at(world.random.uniform(0, leave_s), lambda: self._tell(sender, sent))

    def _frames(self, message: Message, payload: Payload | None) -> bytes:
        if payload is None:
            return frames.encode(message)
        parts = frames.encode_bulk(next(self.transfers), message, frames.flat(payload))
        return b"".join(bytes(buffer) for part in parts for buffer in part)

    def _arrive(self, end: End, is_bulk: bool, data: bytes, is_first: bool) -> None:
        if not end.up or end.deaf or end.endpoint.process.is_dead:
            return
        world = self.world
        is_paused = end.endpoint.process.paused_until > world.now
        is_early = end is self.server and not (is_first or self.is_greeted)
        if is_paused or is_early or world.faults.blocked_s(self.learner, end.other.direction) > 0:
            world.at(0.5, lambda: self._arrive(end, is_bulk, data, is_first))
            return
        self.is_greeted = True
        data, breaks_off = world.faults.spoil(self.learner, data)
        try:
            for item in end.parsers[is_bulk].feed(data):
                assert isinstance(item, Delivery)
                self._tell(end, Received(end.peer, item.message, item.payload))
        except ProtocolError as error:
            world.saw["frame refused"] += 1
            self.lose(end, str(error))
        if breaks_off:
            self.cut()

    def _tell(self, end: End, event: WireEvent) -> None:
        if end.up:
            end.endpoint.tell(event)

    def lose(self, end: End, reason: str, after_s: float = 0.0) -> None:
        """This end gives the link up; the other one notices in its own time."""
        if not end.up:
            return
        end.up = False
        self.world.at(after_s, lambda: end.endpoint.tell(Lost(end.peer, reason)))
        if end.other.up:
            wait_s = self.world.random.uniform(0, 1) + self.world.faults.blocked_s(self.learner, end.direction)
            self.world.at(wait_s, lambda: self.lose(end.other, OTHER_SIDE_CLOSED))

    def cut(self) -> None:
        """It breaks; each end notices in its own time."""
        for end in (self.client, self.server):
            self.lose(end, "connection reset", self.world.random.uniform(0, 1))

    def silent(self) -> None:
        """Blocked for as long as anyone would wait: who hears nothing gives it up."""
        for end in (self.client, self.server):
            if self.world.faults.blocked_s(self.learner, end.other.direction) > 0 and end.up:
                self.world.saw["silent link given up"] += 1
                self.lose(end, "silent")


class SimEndpoint:
    """An `Endpoint` in virtual time."""

    def __init__(self, world: World, process: Process, dialect: Dialect) -> None:
        self.world, self.process, self.dialect = world, process, dialect
        self.ends: dict[int, End] = {}
        self.peers = itertools.count(1)
        self.bytes_in = self.bytes_out = 0
        self._waiting: deque[WireEvent] = deque()

    def send(
        self, peer: int, message: Message, payload: Payload | None = None, tag: object = None, lane: int = 0
    ) -> None:
        end = self.ends.get(peer)
        if end is not None and end.up:
            self.world.oracle.check_leaving(end.link.learner, message, payload)
            end.link.carry(end, message, payload, tag)

    def drop(self, peer: int, reason: str) -> None:
        """What was sent before is still delivered, if it arrives within a second."""
        end = self.ends.get(peer)
        if end is not None:
            end.deaf = True
            self.world.at(1.0, lambda: end.link.lose(end, reason))

    def close(self) -> None:
        for end in self.ends.values():
            end.link.lose(end, "closed")

    def tell(self, event: WireEvent) -> None:
        """In the order it came, also where the process stands still for a while."""
        self._waiting.append(event)
        if len(self._waiting) == 1:
            self._deliver()

    def _deliver(self) -> None:
        while self._waiting and not self.process.is_dead:
            if self.process.paused_until > self.world.now:
                self.world.at(0.5, self._deliver)
                return
            event = self._waiting[0]
            self.process.take(event)
            self._waiting.popleft()
