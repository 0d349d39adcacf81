"""A syncer from outside: what the wire brings waits in line, and is taken in turn by turn, whoever has the clock.

    while not node.finished:
        driver.offer(event)     for everything the wire has brought
        driver.turn()

A turn takes in what waits, for TURN_S at most, then looks once at where things stand, and ends. So one look does for
many events, and whoever drives gets to the clock, to signals and to the status however much is waiting. The bound is
longer than a burst of contributions takes: a look before they are in closes rounds with half of the learners. For the
same reason the look waits, as long at most, for contributions that the pool still looks into.

The line is in the order in which things came, but for two things. An operator's order goes first. And a report restates
a learner's whole position, so a newer one takes the place of the older that still waits. A contribution then waits
behind one report of each learner at most, and a syncer that has fallen behind has no more of them to take in than there
are learners.

The process of a syncer drives it in real time; simulator, laboratory and twin do in virtual time. Nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from skerry.core.messages import Report
from skerry.node.peers import Learners
from skerry.node.syncer import SyncerNode
from skerry.wire.transport import Instructed, Received, WireEvent, payload_bytes

TURN_S = 0.05  # a turn takes nothing further in after this long; what it has begun it finishes
LINE_MAX = 1024  # beyond it nothing should be offered, so that the other side of the wire feels it


@dataclass(slots=True)
class _Place:
    event: WireEvent


class SyncerDriver:
    """Owns what waits to be taken in; node and learners are whoever's who makes the driver."""

    def __init__(self, node: SyncerNode, learners: Learners, clock: Callable[[], float]) -> None:
        self.node, self.learners, self.clock = node, learners, clock
        self._line: deque[_Place] = deque()
        self._line_bytes = 0  # of payloads in it,
        self._line_of: dict[int, int] = {}  # and by peer, where there are any
        self._reports: dict[int, _Place] = {}  # peer -> where its report stands
        self._look_by = clock()  # whatever is still being looked into

    def __repr__(self) -> str:
        return f"<driver of {self.node.machine}, {len(self._line)} in line>"

    def __len__(self) -> int:
        """How much waits."""
        return len(self._line)

    @property
    def room(self) -> int:
        """How many events more may be offered; none while too much waits for the disk."""
        return 0 if self.node.log.is_full else LINE_MAX - len(self._line)

    @property
    def waiting_bytes(self) -> int:
        """Of payloads that wait in line or are being looked into."""
        return self._line_bytes + self.node.unseen_bytes

    @property
    def waiting_of(self) -> dict[int, int]:
        """The same by peer; of who is gone it is nobody's any more."""
        waiting = dict(self._line_of)
        for learner, unseen_bytes in self.node.unseen_of.items():
            for peer in self.learners.peers_of(learner):
                waiting[peer] = waiting.get(peer, 0) + unseen_bytes
        return waiting

    def offer(self, event: WireEvent) -> None:
        """Something has come; it is taken in at its turn."""
        if isinstance(event, Instructed):
            self._line.appendleft(_Place(event))  # somebody waits for the answer, and few orders come
        elif not isinstance(event, Received) or not isinstance(event.message, Report):
            self._line.append(_Place(event))
            self._count(event, payload_bytes(event))
        elif event.peer not in self._reports:
            self._reports[event.peer] = _Place(event)
            self._line.append(self._reports[event.peer])
        elif _number(event) > _number(self._reports[event.peer].event):
            self._reports[event.peer].event = event

    def turn(self) -> None:
        """Take in what waits, as far as the time goes, and what has ended; and look.

        While contributions are being looked into the look is left to a later turn, TURN_S after the last one at most.
        """
        ends_at = self.clock() + TURN_S
        while self._line:
            self._take(self._line.popleft().event)
            if self.clock() >= ends_at:
                break
        self.node.finish(self.clock())
        if not self.node.has_unseen or self.clock() >= self._look_by:
            self.node.look(self.clock())
            self._look_by = self.clock() + TURN_S

    def _take(self, event: WireEvent) -> None:
        if isinstance(event, Received) and isinstance(event.message, Report):
            del self._reports[event.peer]
        self._count(event, -payload_bytes(event))
        self.learners.take(event, self.clock())

    def _count(self, event: WireEvent, more_bytes: int) -> None:
        if more_bytes:
            self._line_bytes += more_bytes
            if left := self._line_of.pop(event.peer, 0) + more_bytes:
                self._line_of[event.peer] = left


def _number(event: WireEvent) -> int:
    assert isinstance(event, Received) and isinstance(event.message, Report)
    return event.message.number
