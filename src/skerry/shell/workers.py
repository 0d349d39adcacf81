"""The threads that do the syncer's slow work: kernels, hashes and the disk let go of the GIL, so they run side by side.

What has ended waits in a queue for the deciding thread, which `wake` calls when there is something. Nothing here is
bounded: a fragment merges once at a time, and the shell takes in no contributions while too many wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

from skerry.node.work import Ended


class Workers(Generic[Ended]):
    """A `Pool` of `count` threads; `wake` is called on one of them after each piece of work."""

    def __init__(self, count: int, wake: Callable[[], None]) -> None:
        self._executor = ThreadPoolExecutor(count, "skerry-worker")
        self._wake = wake
        self._ended: deque[Ended | _Failed] = deque()

    def submit(self, work: Callable[[], Ended]) -> None:
        self._executor.submit(self._carry_out, work)

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
        self._executor.shutdown(cancel_futures=True)

    def _carry_out(self, work: Callable[[], Ended]) -> None:
        try:
            self._ended.append(work())
        except BaseException as error:  # whatever it is, it ends the process, from the deciding thread
            self._ended.append(_Failed(error))
        self._wake()


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error
