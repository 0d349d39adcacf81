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

Fate = Literal["merged", "fast-forward", "died", "absent at close", "expelled"]
"""Of a stretch of work: merged, given up by its learner, lost with its life, not in when the run closed, or not wanted
any more because an operator turned its learner out."""

Closes = Literal["all in", "grace over", "no grace", "the rest cannot make it", "everyone is leaving", "the last work"]
"""Why what was held for a fragment was merged just then; the first four are those of a round."""

Sight = Literal["lost", "left", "stepping", "expelled"]
"""What the syncer noticed of a life: its link is gone, it left and has nothing more to bring, it took its first step on
a new link, or it was turned out."""

Verb = Literal["finish", "set", "extend", "drop", "readmit"]
"""What an operator orders of a run: close it now, change its configuration or its budget, turn a learner out, or let it
in again."""

ADMIN = "admin"
"""The organisational unit in an admin's certificate; a learner's has none."""

LOCAL_ADMIN = "_admin"
"""The name in the key that a syncer makes for orders from its own machine; no key that is issued can have it."""

Ending = Literal["closed", "interrupted"]
"""Why a syncer process has nothing left to do."""

LearnerState = Literal["training", "stopped", "leaving", "left"]
"""Of a learner by its own report; it is stopped when the run closes, and leaving when it goes before."""

Flaw = Literal["damaged", "not finite", "too large"]
"""What is wrong with a contribution's bytes or values."""

Refusal = Literal[
    Flaw,
    "duplicate",
    "overlap",
    "tokens without steps",
    "no work",
    "implausible",
    "unknown base",
    "rolled back",
    "one is held",
    "full",
    "old life",
    "expelled",
    "closed",
]
"""Why a contribution is not held."""

Dismissal = Literal["unfit", "closed", "taken over", "expelled", "ahead", "in use", "full"]
"""Why a process is sent away: it does not fit the run, the run is over, a newer process has its name, an operator has
turned it out, or one of the two is ahead of the other: the learner has seen what the syncer's tape does not hold, or
either speaks a newer protocol. Or a process that is alive has its name, or the run has all the learners it can have.
The last three are not for good; of "ahead" builds of every version know that."""

NOT_FOR_GOOD: tuple[Dismissal, ...] = ("ahead", "in use", "full")

GivenUp = Literal["stale", "settled but not at hand", "not finite", "refused", "rolled back"]
"""Why a learner gave its drift up and went on from the published model."""

WayOut = Literal[
    "settled",  # it left by itself, and all its work is settled
    "done",  # the run is closed, and all its work is settled
    "no last versions",  # the run is closed, but versions with its last work did not come
    "timeout",  # somebody else did not do their part in time
    "refused",  # the syncer will not have it
]
"""How a learner's process comes to its end."""
