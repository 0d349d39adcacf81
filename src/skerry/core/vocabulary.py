"""The words that facts, messages and orders are written in: every closed set of them, and nothing else.

Logic compares these words and never a sentence. A sentence for a person is made from them where it is shown.
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["created", "training", "closing", "closed"]
"""Of a run, in this order; it is created until the first inner step."""

PHASES: tuple[Phase, ...] = ("created", "training", "closing", "closed")

Stage = Literal["warm", "steady", "cool"]
"""Of training, in this order: what H is and what a merge does. A merge of the closing has no stage."""

STAGES: tuple[Stage, ...] = ("warm", "steady", "cool")

Fate = Literal["merged", "fast-forward", "died", "absent at close"]
"""Of a stretch of work: merged, given up by its learner, lost with its life, or not in when the run closed."""

Closes = Literal["all in", "grace over", "no grace", "the rest cannot make it", "everyone is leaving", "the last work"]
"""Why what was held for a fragment was merged just then; the first four are those of a round."""

Sight = Literal["lost", "stepping"]
"""What the syncer noticed of a life: its link is gone, or it took its first step on a new link."""

Ending = Literal["closed", "interrupted"]
"""Why a syncer process has nothing left to do."""
