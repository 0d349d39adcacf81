"""Step times, transfers and labour of each life since the last look, to be written to the tape now and then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from skerry.core.facts import Sample
from skerry.core.messages import Report

SAMPLE_S = 5.0  # how often they are written to the tape
STEPS_MAX = 32  # reported step times kept of one life between two looks


@dataclass
class _Window:
    since: Report
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    up_bytes: int = 0
    up_s: float = 0.0


class Samples:
    """Collects by life; `take` hands over what came together and begins anew."""

    def __init__(self, now: float) -> None:
        self._taken_at = now
        self._windows: dict[tuple[str, int], _Window] = {}
        self._last: dict[tuple[str, int], Report] = {}

    def reported(self, report: Report) -> None:
        key = (report.learner, report.life)
        last = self._last.get(key)
        window = self._window(report if last is None else last)
        if (last is None or report.step > last.step) and report.step_s > 0 and len(window.step_s) < STEPS_MAX:
            window.step_s.append(report.step_s)
            window.losses += [report.loss] if report.loss else []
            window.grad_norms += [report.grad_norm] if report.grad_norm else []
        self._last[key] = report

    def arrived(self, learner: str, life: int, payload_bytes: int, payload_s: float) -> None:
        if (last := self._last.get((learner, life))) is not None:
            window = self._window(last)
            window.up_bytes += payload_bytes
            window.up_s += payload_s

    def take(self) -> tuple[Sample, ...]:
        """Everything since the last time, by learner; lives that did nothing are left out."""
        taken = [self._sample(key, window) for key, window in sorted(self._windows.items())]
        self._windows.clear()
        return tuple(s for s in taken if s.steps or s.up_bytes or s.down_bytes)

    def take_due(self, now: float) -> tuple[Sample, ...]:
        """Everything since the last time if that was SAMPLE_S ago, else nothing yet."""
        if now - self._taken_at < SAMPLE_S:
            return ()
        self._taken_at = now
        return self.take()

    def forget(self, learner: str) -> None:
        """Its life is over."""
        for known in (self._windows, self._last):
            for key in [k for k in known if k[0] == learner]:
                del known[key]

    def _window(self, since: Report) -> _Window:
        key = (since.learner, since.life)
        if key not in self._windows:
            self._windows[key] = _Window(since)
        return self._windows[key]

    def _sample(self, key: tuple[str, int], window: _Window) -> Sample:
        last, since = self._last[key], window.since
        return Sample(
            *key,
            last.step - since.step,
            last.tokens - since.tokens,
            tuple(window.step_s),
            window.up_bytes,
            window.up_s,
            last.payload_bytes - since.payload_bytes,
            last.payload_s - since.payload_s,
            last.encoded - since.encoded,
            last.encode_s - since.encode_s,
            last.adopted - since.adopted,
            last.adopt_s - since.adopt_s,
            _mean(window.losses),
            _mean(window.grad_norms),
        )


def _mean(said: Sequence[float]) -> float | None:
    """Of what is finite: neither a tape nor a plot has a use for the rest."""
    finite = [value for value in said if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else None
