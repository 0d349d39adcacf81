"""Evaluating a run while it goes: at every share of its budget, from outside.

Whoever watches is a process of its own, on any machine that sees the run directory. It looks at the status now and
then, and reads the model when a further share of the budget is spent; where an evaluation takes longer than that share,
those that came due meanwhile are left out. When the run is closed its last model is evaluated and all that was found is
put on the tape, unless it has a supervisor, which does both itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skerry.core.facts import Evaluated
from skerry.errors import FileDamaged
from skerry.run.evaluations import Model, fact_of, keep, put_on_tape, read, waiting
from skerry.run.status import status_of

LOOK_S = 1.0
Measure = Callable[[Model], dict[str, float]]


def looks(root: Path) -> Iterator[dict[str, Any]]:
    """The run's status, again and again until it is closed and nobody holds it."""
    while (status := status_of(root))["serving"] != "closed":
        yield status
        time.sleep(LOOK_S)


def follow(
    root: Path, every: float, measure: Measure, statuses: Iterable[dict[str, Any]], say: Callable[[str], None]
) -> None:
    """Evaluate the run as `statuses` show it going on; the first of them counts as a share.

    Where the run is given another budget it is less far than it was: shares count from there.
    """
    last, known = max((shares(one.progress, every) for one in waiting(root)), default=-1), None
    for status in statuses:
        now, budget = shares(status["progress"], every), status.get("budget")
        if known is not None and budget != known:
            last = min(last, now)
        known = budget
        if now > last:
            last = now
            _evaluate(root, measure, say)


def finish(root: Path, measure: Measure, say: Callable[[str], None]) -> list[Evaluated]:
    """Evaluate the last model of a closed run, and put the whole curve on its tape; that curve."""
    _evaluate(root, measure, say)
    curve = waiting(root)
    put_on_tape(root)
    return curve


def shares(progress: float, every: float) -> int:
    """How many whole shares of the budget are spent; 0.15 are three of 0.05, though floats say a little less."""
    return math.floor(progress / every + 1e-9)


def _evaluate(root: Path, measure: Measure, say: Callable[[str], None]) -> None:
    try:
        model = read(root)
    except FileDamaged as error:  # the next share may find it whole
        say(f"left out: {error}")
        return
    found = fact_of(model, measure(model))
    keep(root, found)
    say(told(found))


def told(found: Evaluated) -> str:
    """For a person."""
    return f"{100 * found.progress:3.0f} %  {figures_told(found.figures)}"


def figures_told(figures: Mapping[str, float | None]) -> str:
    """For a person; None is what is not finite."""
    return ", ".join(f"{name} {'not finite' if value is None else f'{value:.5g}'}" for name, value in figures.items())
