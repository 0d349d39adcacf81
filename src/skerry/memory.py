"""Memory that is used again: to touch fresh memory takes about as long as the arithmetic that fills it.

Nobody has to hand an array back. Its memory is used again when nothing refers to it any longer, be it the array, a
slice of it, or a memoryview that waits in a socket's queue: Python counts them all.

An array begins on a page of memory, so that a disk can take it from where it lies (`store/files.py`).
"""

import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096  # of memory, and of files
ROOM = 1 / 8  # more than asked for, so that fragments of nearly the same size can use each other's memory


class Arrays:
    """Gives out arrays of any content, on any thread; in all never more memory than was in use at once.

    Those of one owner should be of about one size, for memory that does not fit the next array is let go. So is what
    lies free beyond `free_max` arrays, if that is given: who once held many need not keep room for as many.
    """

    def __init__(self, free_max: int | None = None) -> None:
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=free_max)
        self._lent: dict[int, tuple[weakref.ref[Any], npt.NDArray[np.uint8]]] = {}  # by the reference's own id

    def take(self, size: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        block = self._block(size * np.dtype(dtype).itemsize)
        # over a memoryview: numpy would have a slice of an array over an array refer to the latter alone
        array = np.frombuffer(block.data, dtype, size)
        watch = weakref.ref(array, self._take_back)
        self._lent[id(watch)] = (watch, block)
        return array

    def _take_back(self, watch: weakref.ref[Any]) -> None:
        """Nothing refers to the array any more; called on whichever thread had the last reference."""
        self._free.append(self._lent.pop(id(watch))[1])

    def _block(self, needed_bytes: int) -> npt.NDArray[np.uint8]:
        """The last that became free, for a cache may hold it; those that do not fit are forgotten."""
        most_bytes = int(needed_bytes * (1 + ROOM) ** 2)
        while True:
            try:
                block = self._free.pop()
            except IndexError:
                return _on_a_page(int(needed_bytes * (1 + ROOM)))
            if needed_bytes <= block.size <= most_bytes:
                return block


def _on_a_page(size_bytes: int) -> npt.NDArray[np.uint8]:
    fresh = np.empty(size_bytes + PAGE_BYTES, np.uint8)
    start = -fresh.ctypes.data % PAGE_BYTES
    return fresh[start : start + size_bytes]
