"""Transfer cells: the only memory that the two halves of a learner share.

A cell holds the values of one fragment on their way: *up* a snapshot, *down* an increment or a whole version. Who may
touch it follows from the records (`node/mailbox.py`). Copies to and from a device end later than the record that speaks
of them leaves, so each cell has a *mark* in the same memory: the number of its last use, written once the copy is over.

    up      the training half stores and marks; the node loads once it is marked, and says `Freed`
    down    the node stores, then says `Change`; the training half loads and marks, and says that it was applied
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from skerry.algo import drift
from skerry.algo.fragments import F32
from skerry.memory import Arrays
from skerry.node.algebra import Array

CELLS_BYTES = 64 << 20  # each way, or two cells if they are larger; a blend takes two for one fragment
COUNT_MIN = 2  # so that one is filled while the other is read
PAGE = 4096  # cells begin on one
FLOAT_BYTES = 4
MARK_BYTES = 8


class Cell(Protocol):
    def store(self, values: Array, *less: Array) -> None:
        """Hold the values, less the others."""

    def load(self, size: int) -> Array: ...
    def less(self, base: Array) -> Array:
        """What it holds, less the base: an array of its own."""

    def mark(self, number: int) -> None: ...
    def is_marked(self, number: int) -> bool: ...


class Cells(NamedTuple):
    up: Sequence[Cell]
    down: Sequence[Cell]


Lay = Callable[[int, int, int], Cells]  # the same cells for both halves: elements of each, how many up and down


def count_for(fragment_count: int, size: int) -> int:
    """How many fragments can be on their way each way, if this is the size of the largest."""
    return max(COUNT_MIN, min(fragment_count, CELLS_BYTES // (FLOAT_BYTES * size)))


@dataclass
class Box:
    """A cell for values of any kind, where both halves are in one thread."""

    values: Any = None
    number: int = 0

    def store(self, values: Array, *less: Array) -> None:
        for each in less:
            values = values - each
        self.values = values

    def load(self, size: int) -> Array:
        return self.values

    def less(self, base: Array) -> Array:
        return self.values - base

    def mark(self, number: int) -> None:
        self.number = number

    def is_marked(self, number: int) -> bool:
        return self.number == number


class Boxes:
    """Lays the same boxes for both halves."""

    def __init__(self) -> None:
        self._cells: Cells | None = None

    def __call__(self, size: int, up_count: int, down_count: int) -> Cells:
        if self._cells is None:
            self._cells = Cells([Box() for _ in range(up_count)], [Box() for _ in range(down_count)])
        return self._cells


@dataclass
class FloatCell:
    """A cell of float32 values in memory that both halves see."""

    values: F32
    word: np.ndarray[Any, np.dtype[np.int64]]
    threads: int = 1  # that its owner has for one pass
    arrays: Arrays = field(default_factory=Arrays)

    def store(self, values: F32, *less: F32) -> None:
        out = self.values[: values.size]
        if less:
            drift.difference(values, less, out, self.threads)
        else:
            out[:] = values

    def load(self, size: int) -> F32:
        return self.values[:size]

    def less(self, base: F32) -> F32:
        out = self.arrays.take(base.size, np.float32)
        return drift.difference(self.values[: base.size], (base,), out, self.threads)

    def mark(self, number: int) -> None:
        self.word[0] = number

    def is_marked(self, number: int) -> bool:
        return bool(self.word[0] == number)


def memory_bytes(size: int, count: int) -> int:
    """Of so many cells of so many elements, with their marks before them."""
    return _marks_bytes(count) + count * _cell_bytes(size)


def float_cells(memory: Any, size: int, up_count: int, down_count: int, threads: int = 1) -> Cells:
    """The cells in a piece of memory of `memory_bytes`, which begins as zeros."""
    count, arrays = up_count + down_count, Arrays()
    marks = np.frombuffer(memory, np.int64, count)
    begin, stride = _marks_bytes(count), _cell_bytes(size)
    places = [np.frombuffer(memory, np.float32, size, begin + k * stride) for k in range(count)]
    cells = [FloatCell(values, marks[k : k + 1], threads, arrays) for k, values in enumerate(places)]
    return Cells(cells[:up_count], cells[up_count:])


def _marks_bytes(count: int) -> int:
    return -(-count * MARK_BYTES // PAGE) * PAGE


def _cell_bytes(size: int) -> int:
    return -(-size * FLOAT_BYTES // PAGE) * PAGE
