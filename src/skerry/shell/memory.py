"""Where cells lie: in memory of this process, or of a file that two processes have open and no path leads to."""

from __future__ import annotations

import fcntl
import mmap
import os

from skerry.node.cells import Cells, float_cells, memory_bytes


class OwnMemory:
    """Lays the same cells for both halves of a learner in one process."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._cells: Cells | None = None

    def __call__(self, size: int, up_count: int, down_count: int) -> Cells:
        if self._cells is None:
            memory = mmap.mmap(-1, memory_bytes(size, up_count + down_count))
            self._cells = float_cells(memory, size, up_count, down_count, self._threads)
        return self._cells


def shared_file() -> int:
    """An open file without a path, for `SharedMemory`."""
    return os.memfd_create("skerry-cells", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class SharedMemory:
    """Lays cells in an open file; who lays them in it first gives it its length, and nobody can make it shorter then.

    Else any process of the same user could, and whoever touched what is cut off would be ended by SIGBUS.
    """

    def __init__(self, file: int, threads: int = 1) -> None:
        self.file, self._threads = file, threads

    def __call__(self, size: int, up_count: int, down_count: int) -> Cells:
        count_bytes = memory_bytes(size, up_count + down_count)
        if os.fstat(self.file).st_size < count_bytes:
            os.ftruncate(self.file, count_bytes)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return float_cells(mmap.mmap(self.file, count_bytes), size, up_count, down_count, self._threads)

    def close(self) -> None:
        """Cells that were laid stay; once closed it may be closed again."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
