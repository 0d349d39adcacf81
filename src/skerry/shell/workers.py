"""The threads that do the syncer's slow work: kernels, hashes and the disk let go of the GIL, so they run side by side.

What is short goes first: a merge takes as long as dozens of looks at contributions, and what is decided next hangs on
those. What is to go behind others is put off for so many of them and no longer, however busy the threads are. What has
ended waits in a queue for the deciding thread, which `wake` calls when there is something. Nothing here is bounded: a
fragment merges once at a time, and the shell takes in no contributions while too many wait.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from queue import PriorityQueue
from typing import Generic, NamedTuple

from skerry.node.work import Behind, Ended, Rank

SHORT, LONG, LAST = range(3)


class Workers(Generic[Ended]):
    """A `Pool` of `count` threads; `wake` is called on one of them after each piece of work."""

    def __init__(self, count: int, wake: Callable[[], None], name: str = "worker") -> None:
        self._wake = wake
        self._waiting: PriorityQueue[tuple[_Place, Callable[[], Ended] | None]] = PriorityQueue()
        self._numbers = itertools.count()  # in which they were submitted
        self._turns = itertools.count()  # of long work alone
        self._ended: deque[Ended | _Failed] = deque()
        self.is_closed = False
        self._threads = [threading.Thread(target=self._run, name=f"skerry-{name}_{n}") for n in range(count)]
        for thread in self._threads:
            thread.daemon = True  # whoever fails to close them does not wait for them
            thread.start()

    def submit(self, work: Callable[[], Ended], rank: Rank = "long") -> None:
        behind = rank.most if isinstance(rank, Behind) else 0
        order, turn = (SHORT, 0) if rank == "short" else (LONG, next(self._turns) + behind)
        self._waiting.put((_Place(order, turn, behind, next(self._numbers)), work))

    def ended(self) -> list[Ended]:
        taken: list[Ended] = []
        while self._ended:
            one = self._ended.popleft()
            if isinstance(one, _Failed):
                raise one.error
            taken.append(one)
        return taken

    def close(self) -> None:
        """Drop what has not begun and wait for the rest: a thread cannot be broken off in the middle of a write."""
        self.is_closed = True
        for _ in self._threads:
            self._waiting.put((_Place(LAST, 0, 0, next(self._numbers)), None))
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._waiting.get()[1]) is not None:
            if not self.is_closed:
                self._carry_out(work)

    def _carry_out(self, work: Callable[[], Ended]) -> None:
        try:
            self._ended.append(work())
        except BaseException as error:  # whatever it is, it ends the process, from the deciding thread
            self._ended.append(_Failed(error))
        self._wake()


class _Place(NamedTuple):
    """In the line; the least goes first, and no two are the same."""

    order: int
    turn: int  # that it waits for
    behind: int  # of several that wait for one turn those come last that were put off
    number: int


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error
