"""Connections in virtual time that only take their time: what `lab` and `goodput` put in place of the wire.

A line is a learner's connection and its end of it, the hub the syncer's end of all. Ways are named by who sends, "up"
the learner and "down" the syncer. How long something takes and who hears of it is for who makes the line to say. (The
simulator of faults has links of its own, which carry real frames and lose them: `sim.network`.)
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod

from skerry.core.messages import Message
from skerry.node.algebra import Payload


class Line(ABC):
    """Once cut it is gone for good; a learner that comes back has another."""

    bytes_in = bytes_out = 0

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.peer = next(hub.numbers)
        self.is_up = True
        hub.lines[self.peer] = self

    @abstractmethod
    def carry(self, way: str, message: Message, payload: Payload | None, tag: object) -> None: ...

    @abstractmethod
    def lost(self) -> None:
        """It was cut just now."""

    def cut(self) -> None:
        if self.is_up:
            self.is_up = False
            del self.hub.lines[self.peer]
            self.lost()

    # the learner's endpoint

    def send(self, peer: int, message: Message, payload: Payload | None = None, tag: object = None) -> None:
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

    def send(self, peer: int, message: Message, payload: Payload | None = None, tag: object = None) -> None:
        if peer in self.lines:
            self.lines[peer].carry("down", message, payload, tag)

    def drop(self, peer: int, reason: str) -> None:
        if peer in self.lines:
            self.lines[peer].cut()

    def close(self) -> None:
        for line in list(self.lines.values()):
            line.cut()
