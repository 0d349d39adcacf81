"""What an endpoint knows of one peer, and when the peer counts as gone. Nothing here reads a clock or a socket."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from skerry.wire.connection import Connection, Outgoing
from skerry.wire.quotas import Intake
from skerry.wire.rate import Bucket

DRAIN_S = 2.0  # to take last words: a dropped peer ours, and we those of a peer that has ended
ONE_LINE_TIMEOUTS = 3  # one connection may be silent this many times longer while the other is not
NEVER = float("inf")


@dataclass(slots=True, eq=False)
class Peer:
    """A side that proved itself: its control connection, and its bulk connections as they come."""

    id: int
    address: str
    session: bytes
    control: Connection
    opened: float
    attach_by: float  # deadline of its bulk connections
    streams: int  # how many of them there are to be
    bulk: dict[int, Connection] = field(default_factory=dict)  # by stream
    bulk_queues: dict[int, deque[Outgoing]] = field(default_factory=dict)  # what waits for one that is not there yet
    queued_bytes: int = 0
    intake: Intake | None = None  # what bounds what it says, if anything does
    bucket: Bucket | None = None  # what bounds its payloads, if anything does
    counted_to: float = 0.0  # up to when the time of payloads is told
    end_by: float = NEVER  # deadline of what is still to be read, once a connection has ended
    end_reason: str = ""

    @property
    def connections(self) -> list[Connection]:
        return [self.control, *self.bulk.values()]

    def bulk_queue(self, stream: int) -> deque[Outgoing]:
        """Where payloads wait for their stream."""
        if stream in self.bulk:
            return self.bulk[stream].outgoing
        return self.bulk_queues.setdefault(stream, deque())

    def busy_s(self, connection: Connection) -> float:
        """A payload is complete: for how long any was on its way since the last one was.

        Streams work side by side, so the seconds of each would add up to more than there were.
        """
        others = [each.began for each in self.bulk.values() if each is not connection and each.began is not None]
        began = max(self.counted_to, min([connection.last_began, *others]))
        self.counted_to = max(self.counted_to, connection.heard)
        return max(0.0, connection.heard - began)

    def share(self, now: float) -> int | None:
        """How much one stream may send now, where others have something to send too; None: as much as it can."""
        if self.bucket is None:
            return None
        busy = sum(bool(connection.outgoing) for connection in self.bulk.values())
        return -(-self.bucket.allowed(now) // max(1, busy))

    def end_soon(self, now: float, reason: str) -> None:
        """As good as lost, but its last words may be on their way: a refusal says more than an end."""
        if self.end_by == NEVER:
            self.end_by, self.end_reason = now + DRAIN_S, reason

    def forgive(self, now: float, timeout_s: float) -> None:
        """The silence so far was ours: start the peer's clocks again."""
        self.attach_by = now + timeout_s
        self.end_by = max(self.end_by, now + DRAIN_S)

    def silence(self, now: float, timeout_s: float) -> str | None:
        """Why the peer counts as gone; None while it does not."""
        if now > self.end_by:
            return self.end_reason
        silent_s = [now - connection.heard for connection in self.connections]
        if min(silent_s) > timeout_s:
            return f"silent for {timeout_s:g} s"
        for connection, seconds in zip(self.connections, silent_s, strict=True):
            if seconds > timeout_s * ONE_LINE_TIMEOUTS:
                return f"{connection.role} connection silent for {timeout_s * ONE_LINE_TIMEOUTS:g} s"
        if len(self.bulk) < self.streams and now > self.attach_by:
            return f"no bulk connection within {timeout_s:g} s"
        return None
