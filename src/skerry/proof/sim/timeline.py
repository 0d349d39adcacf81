"""Virtual time: a heap of things to come. Things due at the same moment happen in the order they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Timeline:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0

    def at(self, delay_s: float, call: Callable[[], object]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + max(0.0, delay_s), self._order, call))

    def run_until(self, end: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        while self._heap and self._heap[0][0] <= end:
            if is_over():
                return True
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = max(self.now, end)
        return is_over()
