"""The beginning of a run: learners that come at about the same time take their first step together.

Whoever came first would otherwise train alone until the others are there, in the steps in which a model moves most. So
as long as nobody has taken a step, a learner is given all of the model but the last fragment, and begins when that
comes: to everyone at once, when all that the run expects have the rest, or when for some time nobody else has come. It
is the one time that learners wait for each other; a run that has begun never does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from skerry.core.membership import Member


@dataclass
class Gathering:
    """Who is there before the first step: `expected` learners, or those of whom the last came `wait_s` ago."""

    expected: int
    wait_s: float
    fragment_count: int
    here: int = 0  # learners that lack nothing but the last fragment
    most: int = 0  # that were here at once
    since: float | None = None  # when the last of those came

    @property
    def held_back(self) -> int:
        """The fragment without which nobody begins."""
        return self.fragment_count - 1

    def look(self, members: Iterable[Member], now: float) -> None:
        self.here = sum(member.connected and member.adopted >= self.held_back for member in members)
        if self.here > self.most:
            self.most, self.since = self.here, now

    def is_over(self, now: float) -> bool:
        return self.here >= self.expected or (self.here > 0 and self._left_s(now) <= 0)

    def explain(self, now: float) -> str:
        """What is waited for, for a person."""
        if not self.here:
            return "for learners"
        return f"for learners: {self.here} of {self.expected} are here, and begin in {self._left_s(now):.0f} s at most"

    def _left_s(self, now: float) -> float:
        return self.wait_s if self.since is None else self.since + self.wait_s - now
