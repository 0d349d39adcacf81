"""Where slow work is done: looking at what arrived, merging, hashing, writing.

    pool.submit(work)       the node says what is to be done
    pool.ended()            and takes in, whenever it likes, what has been

The node decides on one thread, and a piece of work may be carried out on another. So a piece of work reads what it was
handed and what never changes, keeps its arrays to itself, and changes nothing that the node owns: its result does, when
the node takes it in. Pieces may end in any order. One that fails raises from `ended`, and so on the deciding thread.

`AtOnce` has no threads: tests, simulator, laboratory and twin are as deterministic with it as the machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

Ended = TypeVar("Ended")


class Behind(NamedTuple):
    """Long work that lets others go first, but no more than so many of those that come after it."""

    most: int


Rank = Literal["short", "long"] | Behind  # what goes before what, where some of it waits


class Pool(Protocol[Ended]):
    def submit(self, work: Callable[[], Ended], rank: Rank = "long") -> None:
        """Have it carried out, now or later, here or elsewhere; what is short may go before what is not."""

    def ended(self) -> list[Ended]:
        """What has ended since the last call, without waiting; raises what a piece of work raised."""


class AtOnce(Generic[Ended]):
    """Work is carried out where it is submitted, in that order."""

    def __init__(self) -> None:
        self._ended: list[Ended] = []

    def submit(self, work: Callable[[], Ended], rank: Rank = "long") -> None:
        self._ended.append(work())

    def ended(self) -> list[Ended]:
        taken, self._ended = self._ended, []
        return taken
