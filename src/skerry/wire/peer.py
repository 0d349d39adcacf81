"""What an endpoint knows of one peer, and when the peer counts as gone. Nothing here reads a clock or a socket."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from skerry.wire.connection import Connection, Outgoing

DRAIN_S = 2.0  # to take last words: a dropped peer ours, and we those of a peer that has ended
ONE_LINE_TIMEOUTS = 3  # one connection may be silent this many times longer while the other is not
NEVER = float("inf")


@dataclass(slots=True, eq=False)
class Peer:
    """A side that proved itself: its control connection, and its bulk connection once it is there."""

    id: int
    address: str
    session: bytes
    control: Connection
    opened: float
    attach_by: float  # deadline of its bulk connection
    bulk: Connection | None = None
    bulk_queue: deque[Outgoing] = field(default_factory=deque)  # what waits for the bulk connection
    queued_bytes: int = 0
    end_by: float = NEVER  # deadline of what is still to be read, once a connection has ended
    end_reason: str = ""

    @property
    def connections(self) -> list[Connection]:
        return [self.control] if self.bulk is None else [self.control, self.bulk]

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
        if self.bulk is None and now > self.attach_by:
            return f"no bulk connection within {timeout_s:g} s"
        return None
