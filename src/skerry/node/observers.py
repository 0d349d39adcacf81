"""Who may watch the nodes: a few named moments, told on the thread where they happen.

An observer looks and never changes anything. The product has nobody look (`UNWATCHED`); the simulator's oracle learns
here what really happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from skerry.core.events import LearnerEvent, Merge, SyncerEvent
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


class SyncerObserver(Protocol):
    def event_came(self, event: SyncerEvent) -> None:
        """An event is about to be handled, with what follows from it alone; `Ticked` comes with a look."""

    def event_done(self, event: SyncerEvent) -> None:
        """It was handled; what follows from it is durable, or was sent."""

    def merging(self, order: Merge) -> None:
        """The next version of a fragment is about to be computed."""

    def committing(self, records: Sequence[bytes]) -> None:
        """Records are about to be written; whether they are, if this is the end, nobody knows."""

    def committed(self, records: Sequence[bytes]) -> None:
        """The same records are durable."""


class Unwatched:
    """Nobody looks; a base for who looks at little."""

    def event_came(self, event: LearnerEvent | SyncerEvent) -> None: ...
    def event_done(self, event: SyncerEvent) -> None: ...
    def contributed(self, out: Outstanding) -> None: ...
    def settled(self, fragment: int, seq: int) -> None: ...
    def fast_forwarded(self, reason: GivenUp) -> None: ...
    def merging(self, order: Merge) -> None: ...
    def committing(self, records: Sequence[bytes]) -> None: ...
    def committed(self, records: Sequence[bytes]) -> None: ...


UNWATCHED = Unwatched()
