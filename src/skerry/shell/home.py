"""Where a node has its arrays, and what it computes with there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from skerry import algo
from skerry.algo import Use
from skerry.node.algebra import Float32, LearnerAlgebra
from skerry.node.cells import Lay

THREADS_MAX = 4  # which read and write memory as fast as most hosts can
CORES_PER_THREAD = 4


class Home(Protocol):
    """A node's arrays are of one kind: those that its algebra makes and its cells hold."""

    @property
    def algebra(self) -> LearnerAlgebra: ...
    @property
    def lay(self) -> Lay: ...

    def entered(self) -> AbstractContextManager[object]:
        """Around everything that a thread does with such arrays."""

    def warm_up(self, tell: Callable[[], None], each: Callable[[Use], object]) -> None:
        """Have every kernel ready, as `algo.warm_up` does."""


class OnHost:
    """In numpy's arrays, with compiled kernels over a few threads."""

    def __init__(self, lay: Lay, threads: int = 1) -> None:
        self.lay, self.algebra = lay, Float32(threads)

    def entered(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def warm_up(self, tell: Callable[[], None], each: Callable[[Use], object]) -> None:
        algo.warm_up(tell, each)


def node_threads() -> int:
    """For one pass over a fragment: most cores are the trainer's, and those of what loads its data."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(THREADS_MAX, cores // CORES_PER_THREAD))
