"""Where a node has its arrays, and what it computes with there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from skerry import algo
from skerry.algo import Use
from skerry.node.algebra import FLOAT32, LearnerAlgebra
from skerry.node.cells import Lay


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
    """In numpy's arrays, with compiled kernels."""

    algebra = FLOAT32

    def __init__(self, lay: Lay) -> None:
        self.lay = lay

    def entered(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def warm_up(self, tell: Callable[[], None], each: Callable[[Use], object]) -> None:
        algo.warm_up(tell, each)
