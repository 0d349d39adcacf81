"""One look at where things stand: what it is decided from, and what it may order.

The machine takes a View when a look begins. Rounds and the closing decide from it and return orders; they keep nothing
of it, and only the machine carries orders out. So a decision can be tested by handing in a View, and what it led to by
reading what came back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from skerry.core.facts import Seen
from skerry.core.held import Held
from skerry.core.membership import Member
from skerry.core.state import RunState
from skerry.core.vocabulary import Closes, Stage


@dataclass(frozen=True)
class View:
    """Who is there and what holds at `now`; members are in the order of their ids. Readers change nothing in it."""

    now: float
    elapsed_s: float
    stage: Stage
    sync_every: int  # H
    quorum: int  # K
    members: tuple[Member, ...]  # all that were heard of since this process began
    ready: tuple[Member, ...]  # those K counts
    ahead: int  # learners that were turned away because they are ahead of this tape
    held: Held
    state: RunState

    @property
    def connected(self) -> list[Member]:
        return [m for m in self.members if m.connected]

    @property
    def leaving(self) -> list[Member]:
        return [m for m in self.connected if m.is_leaving]

    @property
    def seen(self) -> tuple[Seen, ...]:
        """The highest position seen of each member's life."""
        return tuple(self.state.ledger.seen(m.learner, m.life) for m in self.members)


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
    reason: Closes
    quorum: int
    ready: int
    opened_at: float
