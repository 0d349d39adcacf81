"""Who may watch the nodes: a few named moments, told on the node's own thread.

An observer looks and never changes anything. The product has nobody look (`UNWATCHED`); the simulator's oracle learns
here what really happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from skerry.core.events import LearnerEvent
from skerry.core.vocabulary import GivenUp

if TYPE_CHECKING:
    from skerry.node.learner import Outstanding


class LearnerObserver(Protocol):
    def event_came(self, event: LearnerEvent) -> None:
        """An event from outside is about to be handled, with everything that follows from it."""

    def contributed(self, out: Outstanding) -> None:
        """A contribution was encoded, and is about to be sent for the first time."""

    def settled(self, fragment: int, seq: int) -> None:
        """A contribution has left the drift; what the codec could not say is the residual now."""

    def fast_forwarded(self, reason: GivenUp) -> None:
        """The drift will be given up at the next boundary."""


class Unwatched:
    """Nobody looks."""

    def event_came(self, event: LearnerEvent) -> None: ...
    def contributed(self, out: Outstanding) -> None: ...
    def settled(self, fragment: int, seq: int) -> None: ...
    def fast_forwarded(self, reason: GivenUp) -> None: ...


UNWATCHED = Unwatched()
