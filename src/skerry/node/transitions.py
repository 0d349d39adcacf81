"""What a syncer's log says of the run itself: one line for each transition, none for what happens all the time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from skerry.core.facts import Committed, Fact, Kept, Ordered, Paused, PhaseChanged
from skerry.core.vocabulary import Phase, Stage

Line = tuple[str, tuple[object, ...]]  # a template and what stands in it

PHASES: dict[Phase, str] = {
    "training": "training begins: the first inner step was taken",
    "closing": "the budget is spent: learners stop and hand in what is left",
    "closed": "the run is closed",
}


def closed_by(finish: Ordered) -> str:
    """Why a run closes that an order finished."""
    return f"closed by an order of {finish.by}, at {100 * finish.progress:.0f} % of its budget"


class Transitions:
    """Told every fact in order; remembers the stage, which no fact announces, and the order that finished the run.

    That order may be one of an earlier process: then `is_finishing`, and whose it was is not known here.
    """

    def __init__(self, is_finishing: bool = False) -> None:
        self._stage: Stage | None = None
        self._is_finishing = is_finishing
        self._finish: Ordered | None = None

    def lines(self, facts: Iterable[Fact]) -> Iterator[Line]:
        for fact in facts:
            match fact:
                case Ordered() if fact.verb == "finish":
                    self._finish = fact
                case PhaseChanged() if fact.phase == "closing" and self._finish is not None:
                    yield "%s: learners stop and hand in what is left", (closed_by(self._finish),)
                case PhaseChanged() if fact.phase == "closing" and self._is_finishing:
                    yield "closed by an order of an operator: learners stop and hand in what is left", ()
                case PhaseChanged() if fact.phase in PHASES:
                    yield PHASES[fact.phase], ()
                case Committed() if fact.decision.stage not in (None, self._stage):
                    self._stage = fact.decision.stage
                    yield "the %s stage is under way: H = %d", (fact.decision.stage, fact.decision.every)
                case Kept():
                    yield (
                        "version %d of the whole model is kept, at %.0f %% of the run",
                        (
                            fact.number,
                            100 * fact.progress,
                        ),
                    )
                case Paused():
                    yield "the run is paused after %.0f s of training", (fact.elapsed_s,)
