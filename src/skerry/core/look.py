"""One look at where things stand: what it is decided from, and what it may order.

The machine takes a View when a look begins, which costs nothing however many are there. Rounds and the closing decide
from it and return orders; they keep nothing of it, and only the machine carries orders out. So a decision can be tested
by handing in a View, and what it led to by reading what came back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from skerry.core.held import Held
from skerry.core.membership import Member
from skerry.core.roster import Roster
from skerry.core.state import RunState
from skerry.core.vocabulary import Closes, Stage


@dataclass(frozen=True)
class View:
    """Who is there and what holds at `now`; lists of members are by learner id. Readers change nothing in it."""

    now: float
    elapsed_s: float
    stage: Stage
    sync_every: int  # H
    quorum: int  # K
    roster: Roster
    ahead: int  # learners that were turned away because they are ahead of this tape
    held: Held
    state: RunState
    expelled: Collection[str] = ()  # learners that an operator turned out

    @property
    def ready(self) -> Mapping[str, Member]:
        """Those K counts."""
        return self.roster.ready

    @property
    def leaving(self) -> list[Member]:
        return [member for _, member in sorted(self.roster.leaving.items())]

    @property
    def connected(self) -> list[Member]:
        return [member for member in self.roster if member.connected]


class Want(NamedTuple):
    """Pull this learner's contribution to the fragment."""

    member: Member
    fragment: int
    lossless: bool = False


class GivenUp(NamedTuple):
    """Book what the learner has pending on the fragment: it dropped that work and will not contribute it."""

    member: Member
    fragment: int


class Close(NamedTuple):
    """Merge what is held of the fragment, for this reason."""

    fragment: int
    stage: Stage | None  # when its round was opened; None: the closing
    sync_every: int  # H then
    reason: Closes
    quorum: int
    ready: int
    opened_at: float
