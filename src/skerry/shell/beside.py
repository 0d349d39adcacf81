"""What runs beside a training loop: the node half of its learner, in a thread of the same process."""

from __future__ import annotations

import logging
import mmap
import threading
from typing import Protocol

from skerry.node.cells import Cells, Lay, float_cells, memory_bytes
from skerry.node.mailbox import Mailbox, mailbox
from skerry.shell.node import LAST_TURN_S, NodeLoop, Who

log = logging.getLogger("skerry.learner")


class Beside(Protocol):
    """The node half, as the training half has it: an end of a mailbox, cells, and whether anybody is there."""

    post: Mailbox
    lay: Lay

    def wake(self) -> None:
        """Something was said; never waits."""

    @property
    def obituary(self) -> str:
        """Why it is there no more; empty while it is."""

    def end(self) -> None:
        """Nothing is left to do."""


class NodeThread:
    """In a thread. Every moment of its Python is one that the training loop waits for the interpreter."""

    def __init__(self, who: Who) -> None:
        self.post, theirs = mailbox()
        self.lay = Heap()
        self.loop = NodeLoop(who, theirs, self.lay)
        self.failure: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="skerry-node", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self.loop.wake()

    @property
    def obituary(self) -> str:
        return "" if self.failure is None else "the learner's node thread died"

    def end(self) -> None:
        self._is_over = True
        self.wake()
        self._thread.join(timeout=LAST_TURN_S)
        self.loop.close()

    def _run(self) -> None:
        try:
            self.loop.run(lambda: self._is_over)
        except BaseException as error:
            self.failure = error
            log.exception("the learner's node thread died")


class Heap:
    """Lays cells in this process's own memory, the same for both halves."""

    def __init__(self) -> None:
        self._cells: Cells | None = None

    def __call__(self, size: int, up_count: int, down_count: int) -> Cells:
        if self._cells is None:
            memory = mmap.mmap(-1, memory_bytes(size, up_count + down_count))
            self._cells = float_cells(memory, size, up_count, down_count)
        return self._cells
