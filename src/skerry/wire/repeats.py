"""What happens again and again is counted, and said only when it is news: who dials on may be turned away for days.

A peer chooses what it does and how often, and often under which name. So as many peers are remembered as a person would
read about, and no more; and however many there are, they make no more lines than a person would read. Who has proved
something, a key or the token, or where neither is asked for is of a user who may join, has rows and lines that nobody
else can take; of strangers only their sum is told.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skerry.text import counted
from skerry.wire.quotas import Allowance, Places

SAID_AGAIN_S = 300.0  # the same of the same peer is news again after this
REMEMBERED_MAX = 64  # pairs of a peer and what it met with; the one that has not been met for longest makes way
LINES_PER_S = 1.0  # of all peers together,
LINES_BURST = 128.0  # once they have said nothing for a while,
NAME_LINES_PER_S = 1 / 60  # and of one of them,
NAME_LINES_BURST = 10.0  # likewise
REASONS_MAX = 16  # for which strangers are turned away, and how many of each are told apart in the log,
NAMED_MAX = 4  # before only their number is said
ADDRESSES_MAX = 1024  # of strangers with one reason that are counted
LEFT_OUT_S = 60.0  # how often it is said how many lines were left out

_NUMBER = re.compile(r"\d+")


class Lines:
    """How many lines may be said, of one name and in all, and how many were not."""

    def __init__(self, burst: float = LINES_BURST) -> None:
        self._burst = burst
        self._all: Allowance | None = None  # from the first on, whose time is not known before it comes
        self._of = Places(NAME_LINES_PER_S, NAME_LINES_BURST)
        self._left_out, self._told_at = 0, float("-inf")

    def has_one(self, who: str, now: float) -> bool:
        """Whether one more may be said; if so it is."""
        self._all = self._all or Allowance(LINES_PER_S, self._burst, now)
        if self._all.wait_s(now) or self._of.wait_s(who, now):
            self._left_out += 1
            return False
        self._all.spend(1, now)
        self._of.charge(who, now)
        return True

    def left_out(self, now: float) -> int:
        """How many were not said since this was last told; 0 too if that was a moment ago."""
        if not self._left_out or now - self._told_at < LEFT_OUT_S:
            return 0
        count, self._left_out, self._told_at = self._left_out, 0, now
        return count


class _Seen(NamedTuple):
    what: str
    times: int
    at: float  # the last time
    said_at: float


@dataclass(slots=True)
class _Crowd:
    """Strangers that met with the same."""

    what: str  # the last time
    who: str = ""  # if it was always the same
    is_same: bool = True  # what they met with, to the letter
    times: int = 0
    at: float = 0.0
    said_at: float = float("-inf")
    named: set[str] = field(default_factory=set)  # since then
    places: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        if self.who:
            return self.who
        more = "more than " if len(self.places) >= ADDRESSES_MAX else ""
        return f"{counted(self.times, 'connection')} from {more}{_addresses(len(self.places))}"


class Repeats:
    """By peer and what it met with; the I/O thread and the node's both write here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], _Seen] = {}  # the last met last
        self._crowds: dict[str, _Crowd] = {}  # of strangers, by the kind of what they met with; likewise
        self._lines, self._crowd_lines = Lines(), Lines()

    def is_news(self, who: str, what: str, now: float, kind: str = "") -> bool:
        """Count it once more; whether it is to be said. What is of one kind has one row, however it is worded."""
        with self._lock:
            before = self._seen.pop((who, kind or what), None)
            is_new = before is None or before.what != what or now - before.said_at >= SAID_AGAIN_S
            is_said = is_new and self._lines.has_one(who, now)
            said_at = now if is_said else before.said_at if before else float("-inf")
            self._seen[who, kind or what] = _Seen(what, before.times + 1 if before else 1, now, said_at)
            if len(self._seen) > REMEMBERED_MAX:
                del self._seen[next(iter(self._seen))]
            return is_said

    def forget(self, who: str, kind: str) -> None:
        """What it met with of this kind is over: it has no row any more, and is news if it comes again."""
        with self._lock:
            self._seen.pop((who, kind), None)

    def stranger(self, who: str, place: str, what: str, now: float) -> str:
        """Count one that has proved nothing; whom to speak of now, empty if nothing is to be said.

        The first few of a kind are named, and after that it is said now and then how many there were.
        """
        with self._lock:
            crowd = self._crowd(_kind_of(what))
            crowd.who = who if not crowd.times or crowd.who == who else ""
            crowd.is_same &= not crowd.times or crowd.what == what
            crowd.what, crowd.times, crowd.at = what, crowd.times + 1, now
            if len(crowd.places) < ADDRESSES_MAX:
                crowd.places.add(place)
            is_due = now - crowd.said_at >= SAID_AGAIN_S
            is_named = who in crowd.named or len(crowd.named) >= NAMED_MAX
            if (is_named and not is_due) or not self._crowd_lines.has_one(who, now):
                return ""
            if is_due:
                crowd.named.clear()
                crowd.said_at = now
            crowd.named.add(who)
            return str(crowd) if is_due else who

    def _crowd(self, kind: str) -> _Crowd:
        crowd = self._crowds.pop(kind, None) or _Crowd(kind)
        self._crowds[kind] = crowd
        if len(self._crowds) > REASONS_MAX:
            del self._crowds[next(iter(self._crowds))]
        return crowd

    def left_out(self, now: float) -> int:
        """How many lines were not said of late, where it is time to say that."""
        with self._lock:
            return self._lines.left_out(now) + self._crowd_lines.left_out(now)

    def rows(self, now: float) -> list[dict[str, Any]]:
        """For a status: who, why, how often, and how long ago it was for the last time."""
        with self._lock:
            rows = [(who, seen.what, seen.times, seen.at) for (who, _), seen in self._seen.items()]
            rows += [(str(each), _shown(each, kind), each.times, each.at) for kind, each in self._crowds.items()]
        return [{"who": who, "why": why, "count": times, "ago_s": now - at} for who, why, times, at in rows]


def _kind_of(what: str) -> str:
    """What strangers met with, without what they chose of it: its first clause, and no number in it."""
    return _NUMBER.sub("…", what.partition(": ")[0])


def _addresses(count: int) -> str:
    return "1 address" if count == 1 else f"{count} addresses"


def _shown(crowd: _Crowd, kind: str) -> str:
    return crowd.what if crowd.who or crowd.is_same else kind
