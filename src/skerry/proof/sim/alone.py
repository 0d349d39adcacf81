"""What a simulated learner did alone, reckoned anew from what its node heard: boundaries, links, versions.

Kept apart from the machine's own reckoning, which is what is tested: work of more steps alone than the bound spends no
budget, and other work does.
"""

from __future__ import annotations

from typing import NamedTuple

from skerry.core.events import Boundary, LearnerEvent, Told, Unlinked
from skerry.core.messages import Welcome


class Span(NamedTuple):
    """Steps (after, upto] of a life."""

    after: int
    upto: int

    def common(self, other: Span) -> Span:
        after = max(self.after, other.after)
        return Span(after, max(after, min(self.upto, other.upto)))


class Alone:
    """One process; `steps_max` is the run's bound, 0 where it has none."""

    def __init__(self, steps_max: int) -> None:
        self.steps_max = steps_max
        self.too_long: list[Span] = []  # in order,
        self.with_links: list[Span] = []  # and those of them in which it had links that brought no version
        self._has_had_link = False
        self._steps = 0
        self._lost_at: int | None = None  # the step at which a link was lost, since when no version has come
        self._is_linked = False

    def hears(self, event: LearnerEvent) -> None:
        match event:
            case Boundary():
                self._steps += event.steps
            case Unlinked():
                self._is_linked = False
                self._lost_at = self._steps if self._lost_at is None else self._lost_at
            case Told(message=Welcome()):
                self._is_linked = True
                if self._lost_at is not None and 0 < self.steps_max < self._steps - self._lost_at:
                    self.too_long.append(Span(self._lost_at, self._steps))
                    self.with_links += self.too_long[-1:] if self._has_had_link else []
                    self._lost_at = None
                self._has_had_link = self._lost_at is not None

    def took_version(self) -> None:
        if self._is_linked:
            self._lost_at, self._has_had_link = None, False
