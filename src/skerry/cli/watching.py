"""Looking at a run again and again, over restarts of its syncer, and what changes from one look to the next.

The first look says what is wrong with what was asked for. Later ones wait for a syncer that is away: what was last seen
stays, with why nothing is heard.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

from skerry.errors import SkerryError

EVERY_S = 1.0
WINDOW_S = 10.0  # over which what changes is averaged
COUNTED = ("merges", "bytes_in", "bytes_out")

Record = dict[str, Any]


class Look(NamedTuple):
    """What was last seen of a run, and why there is nothing newer, if there is not."""

    record: Record
    trouble: str = ""

    @property
    def is_over(self) -> bool:
        """The run is closed, and nobody serves it any more: there will be nothing else to see."""
        gone = bool(self.trouble) or self.record.get("serving") != "served"
        return self.record["phase"] == "closed" and gone


class Watching:
    """Looks one after the other, made on a thread of its own: who shows them is not held up by a syncer that is away.

    As an iterator it gives each in its turn, until the run is over.
    """

    def __init__(self, look: Callable[[], Record], every_s: float = EVERY_S) -> None:
        self._look, self._every_s = look, every_s
        self._looks: queue.Queue[Look | BaseException] = queue.Queue(1)
        self._ended = threading.Event()
        self._first = Look(look())  # refused before anything is shown
        self._thread = threading.Thread(target=self._go_on, name="skerry-looks", daemon=True)

    def __enter__(self) -> Self:
        self._looks.put(self._first)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def __iter__(self) -> Iterator[Look]:
        while True:
            if (look := self.next(None)) is not None:
                yield look
                if look.is_over:
                    return

    def next(self, within_s: float | None) -> Look | None:
        """The next look, or None if there is none yet."""
        try:
            found = self._looks.get(timeout=self._every_s if within_s is None else within_s)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        return found

    def _go_on(self) -> None:
        last = self._first.record
        while not self._ended.wait(self._every_s):
            try:
                last = self._look()
                self._put(Look(last))
            except SkerryError as error:
                self._put(Look(last, str(error)))
            except BaseException as error:  # ours: it is raised where somebody sees it
                self._put(error)
                return

    def _put(self, look: Look | BaseException) -> None:
        """The newest is what counts: one that nobody has taken makes way."""
        while not self._ended.is_set():
            try:
                self._looks.put(look, timeout=0)
                return
            except queue.Full:
                try:
                    self._looks.get_nowait()
                except queue.Empty:
                    continue


class Rates:
    """How much a second: merges, bytes and merged tokens, by the syncer's own clock, over the last seconds.

    Bytes are counted from a process's beginning, so another process begins anew.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Any, dict[str, float]]] = deque()

    def take(self, record: Record) -> dict[str, float]:
        """By what is counted; empty until there are two looks at one process."""
        if record.get("serving") != "served":
            self._seen.clear()
            return {}
        at, who = float(record["at"]), record.get("pid")
        if self._seen and (self._seen[-1][1] != who or at < self._seen[-1][0]):
            self._seen.clear()
        counts = {key: float(record.get(key) or 0) for key in COUNTED} | {"tokens": float(record["tokens"]["merged"])}
        if not self._seen or at > self._seen[-1][0]:
            self._seen.append((at, who, counts))
        while len(self._seen) > 2 and at - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        began, _, first = self._seen[0]
        if at <= began:
            return {}
        return {key: max(0.0, counts[key] - first[key]) / (at - began) for key in counts}
