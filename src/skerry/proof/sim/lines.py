"""Connections in virtual time that only take their time: what `lab` and `twin` put in place of the wire.

A line is a learner's connection and its end of it, the hub the syncer's end of all. Ways are named by who sends, "up"
the learner and "down" the syncer, and so are the two ends. Control overtakes bulk; bulk goes through one payload at a
time each way. How long something takes and who hears of it is for who makes the line to say. What a learner says and
hears passes through its node thread (`sim.workers`), which outlives a line. (The simulator of faults has links of its
own, which carry real frames and lose them: `sim.network`.)
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from functools import partial
from typing import NamedTuple

from skerry.core.messages import Message
from skerry.node.algebra import Payload
from skerry.proof.sim.timeline import Timeline
from skerry.proof.sim.workers import NodeThread
from skerry.wire.transport import Lost, Opened, Received, Sent, WireEvent

OTHER = {"up": "down", "down": "up"}


class Trip(NamedTuple):
    """What the way of a message is like at the moment."""

    takes_s: float  # a payload from its first byte to its last,
    buffered_s: float  # of which so much lies in buffers on the way: for its sender it has left
    latency_s: float


class Line(ABC):
    """Once cut it is gone for good; a learner that comes back has another."""

    bytes_in = bytes_out = 0

    def __init__(self, hub: Hub, timeline: Timeline, learner: str, latency_s: float, thread: NodeThread) -> None:
        self.hub, self.timeline, self.thread = hub, timeline, thread
        self.peer = next(hub.numbers)
        self.is_up = True
        self._free_at = {"up": 0.0, "down": 0.0}
        hub.lines[self.peer] = self
        for end in ("down", "up"):
            timeline.at(latency_s, partial(self.tell, end, Opened(self.peer, learner)))

    @abstractmethod
    def trip(self, way: str, message: Message, payload: Payload | None) -> Trip: ...

    @abstractmethod
    def tell(self, end: str, event: WireEvent) -> None:
        """To that end, once it can hear it; nothing but a `Lost` after the line was cut."""

    def carry(self, way: str, message: Message, payload: Payload | None, tag: object) -> None:
        now = self.timeline.now
        leaves_at = now + (self.thread.says_in_s(message) if way == "up" else 0.0)
        trip = self.trip(way, message, payload)
        if payload is not None:
            self.hub.payload_bytes[way] += len(payload)
            leaves_at = self._free_at[way] = max(leaves_at, self._free_at[way]) + trip.takes_s
        received = Received(self.peer, message, payload, trip.takes_s)
        self.timeline.at(leaves_at + trip.latency_s - now, partial(self._arrive, OTHER[way], received))
        if tag is not None:
            gone_s = max(0.0, leaves_at - trip.buffered_s - now)
            self.timeline.at(gone_s, partial(self.tell, way, Sent(self.peer, tag)))

    def _arrive(self, end: str, received: Received) -> None:
        wait_s = self.thread.hears_in_s(received.message) if end == "up" else 0.0
        if wait_s:
            self.timeline.at(wait_s, partial(self.tell, end, received))
        else:
            self.tell(end, received)

    def cut(self) -> None:
        """Both ends notice at once."""
        if self.is_up:
            self.is_up = False
            del self.hub.lines[self.peer]
            for end in ("up", "down"):
                self.tell(end, Lost(self.peer, "cut"))

    # the learner's endpoint

    def send(
        self, peer: int, message: Message, payload: Payload | None = None, tag: object = None, lane: int = 0
    ) -> None:
        self.carry("up", message, payload, tag)

    def drop(self, peer: int, reason: str) -> None:
        self.cut()

    def close(self) -> None:
        self.cut()


class Hub:
    """The syncer's endpoint."""

    bytes_in = bytes_out = 0

    def __init__(self) -> None:
        self.lines: dict[int, Line] = {}
        self.numbers = itertools.count(1)
        self.payload_bytes = {"up": 0, "down": 0}

    def send(
        self, peer: int, message: Message, payload: Payload | None = None, tag: object = None, lane: int = 0
    ) -> None:
        if peer in self.lines:
            self.lines[peer].carry("down", message, payload, tag)

    def drop(self, peer: int, reason: str) -> None:
        if peer in self.lines:
            self.lines[peer].cut()

    def close(self) -> None:
        for line in list(self.lines.values()):
            line.cut()
