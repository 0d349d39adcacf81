"""What happens again and again is counted, and said only when it is news: who dials on may be turned away for days.

A peer chooses what it does and how often, so as many peers are remembered as a person would read about, and no more.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

SAID_AGAIN_S = 300.0  # the same of the same peer is news again after this
REMEMBERED_MAX = 64  # pairs of a peer and what it met with; the one that has not been met for longest makes way


class _Seen(NamedTuple):
    times: int
    at: float  # the last time
    said_at: float


class Repeats:
    """By peer and what it met with; the I/O thread and the node's both write here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], _Seen] = {}  # the last met last

    def is_news(self, who: str, what: str, now: float) -> bool:
        """Count it once more; whether it is to be said."""
        with self._lock:
            before = self._seen.pop((who, what), None)
            is_news = before is None or now - before.said_at >= SAID_AGAIN_S
            said_at = now if before is None or is_news else before.said_at
            self._seen[who, what] = _Seen(before.times + 1 if before else 1, now, said_at)
            if len(self._seen) > REMEMBERED_MAX:
                del self._seen[next(iter(self._seen))]
            return is_news

    def rows(self, now: float) -> list[dict[str, Any]]:
        """For a status: who, why, how often, and how long ago it was for the last time."""
        with self._lock:
            seen = list(self._seen.items())
        return [{"who": who, "why": why, "count": s.times, "ago_s": now - s.at} for (who, why), s in seen]
