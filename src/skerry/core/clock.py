"""The syncer's own time, which stands while its process or machine sleeps.

A laptop that was closed for a night has spent no budget, and no round was open for a day. Two counts: `now`, by which
everything is measured and waited for, and `elapsed_s`, the seconds of training that the budget is about. Neither ever
goes back.
"""

from __future__ import annotations

AWAY_S = 60.0  # no merge takes this long: the machine slept, or its clock jumped


class Clock:
    """Told the time from outside; `trained_s` is what was trained before this process began."""

    def __init__(self, now: float, trained_s: float) -> None:
        self.now = now
        self._asleep_s = 0.0  # by which it is behind what it is told
        self._trained_s = trained_s
        self._origin: float | None = None  # when training would have begun had it never paused

    def __repr__(self) -> str:
        return f"<clock {self.now:.3f} elapsed={self.elapsed_s:.3f} {'runs' if self.is_running else 'stands'}>"

    def advance(self, told: float) -> float:
        """Move on to the time that is told, and say by how much; over a sleep the clock does not move."""
        now = max(told - self._asleep_s, self.now)
        passed_s = now - self.now
        if passed_s > AWAY_S:
            self._asleep_s += passed_s
            return 0.0
        self.now = now
        return passed_s

    def start(self) -> None:
        """The first step was taken: from now on time is training time."""
        self._origin = self.now - self._trained_s

    @property
    def is_running(self) -> bool:
        """Training was seen since this process began."""
        return self._origin is not None

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far; while the syncer is away, or nobody has come back yet, they stand."""
        return self._trained_s if self._origin is None else self.now - self._origin
