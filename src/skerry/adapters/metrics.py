"""What a loop's own dashboard is told of its learner, now and then: one small dict, on the training thread.

It is for TensorBoard, Weights & Biases and their like. It is told at most once in `EVERY_S`, and what goes wrong in it
is logged once and ends nobody's training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from skerry.shell.learner import Standing

EVERY_S = 1.0  # a loop that is told more often would draw more than anybody sees

log = logging.getLogger("skerry.learner")

OnMetrics = Callable[[dict[str, Any]], object]


class Metrics:
    """Counts what the loop did, and tells it with where the learner stands."""

    def __init__(self, tell: OnMetrics) -> None:
        if not callable(tell):
            raise TypeError(f"on_metrics is a {type(tell).__name__}: give a function that takes one dict")
        self._tell = tell
        self._steps = self._tokens = 0
        self._told: tuple[float, int] | None = None  # when, and after how many steps
        self._has_failed = False

    def stepped(self, tokens: int, loss: float, standing: Callable[[], Standing]) -> None:
        """A step was taken; where the learner stands is asked only if it is time to tell it."""
        self._steps += 1
        self._tokens += tokens
        now = time.monotonic()
        if self._told is None or now - self._told[0] >= EVERY_S:
            since_s, steps = (now - self._told[0], self._steps - self._told[1]) if self._told else (0.0, 0)
            self._told = (now, self._steps)
            self._say(self._record(loss, standing(), steps / since_s if since_s else 0.0))

    def _record(self, loss: float, where: Standing, steps_per_s: float) -> dict[str, Any]:
        return {
            "step": where.prior_steps + self._steps,  # of this learner, over its restarts
            "tokens": self._tokens,  # of this process
            "loss": loss or None,  # of the last step, if it was said
            "progress": where.progress,  # share of the run's budget that is spent
            "merged_share": where.steps_merged / where.steps if where.steps else 0.0,  # of this process's steps
            "connected": where.connected,
            "alone_steps": where.alone_steps,
            "steps_per_s": steps_per_s,
        }

    def _say(self, record: dict[str, Any]) -> None:
        try:
            self._tell(record)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning("on_metrics failed, training goes on: %s: %s", type(error).__name__, error)
