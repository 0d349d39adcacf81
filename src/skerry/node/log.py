"""What is on its way to the disk, in order, and what may leave this process only once it is there.

    log.write(records, files, entries)      keep these, behind everything before them
    log.then(call)                          carry this out once everything so far is durable

One piece of writing is under way at a time, on a thread of its own (`pool`); all that came meanwhile is the next, with
one fsync of the journal and one of the tape. Nobody waits for the disk but what must: a slow one makes larger groups.
How much may wait is bounded by others: who merges goes by `waiting_bytes`, and who takes in what learners say, which is
what most records and messages follow from, by `is_full`.

With a pool that works at once everything is durable when `write` returns: tests, simulator and laboratory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from skerry.node.observers import SyncerObserver
from skerry.node.work import AtOnce, Pool
from skerry.store.journal import Place
from skerry.store.store import Store
from skerry.store.tape import GROUP_BYTES_MAX

WAITING_MAX = 1 << 14  # records and messages: several for each fragment of hundreds of learners

Entries = Sequence[tuple[Place, Any]]  # where each lies, and its bytes


class Group(NamedTuple):
    """What is kept together or not at all."""

    records: list[bytes]
    files: list[str]
    entries: list[tuple[Place, Any]]


class Written(NamedTuple):
    """So many pieces are durable; the last commit of them took so long."""

    pieces: int
    commit_s: float


Piece = Group | Callable[[], object]


class Log:
    """Owned by the deciding thread, which alone calls it."""

    def __init__(self, store: Store, clock: Callable[[], float], observer: SyncerObserver) -> None:
        self.store, self.clock, self.observer = store, clock, observer
        self.pool: Pool[Written] = AtOnce()
        self.commit_s = 0.0  # of the last commit
        self.waiting_bytes = 0  # of entries that are not durable yet
        self._waiting: list[Piece] = []
        self._is_writing = False
        self._ordered = self._durable = 0  # pieces
        self._then: deque[tuple[int, Callable[[], object]]] = deque()
        self._bytes: deque[tuple[int, int]] = deque()  # of each group with entries: its number, how many

    def __repr__(self) -> str:
        return f"<log: {self._durable} of {self._ordered} durable, {len(self._then)} wait for them>"

    @property
    def is_durable(self) -> bool:
        """Everything that was ordered is."""
        return self._durable == self._ordered

    @property
    def is_full(self) -> bool:
        """So much waits that nothing further should be taken in from which more would follow."""
        return len(self._waiting) + len(self._then) >= WAITING_MAX

    def write(self, records: Sequence[bytes], files: Sequence[str] = (), entries: Entries = ()) -> None:
        """Keep these together."""
        if size := sum(place.size for place, _ in entries):
            self.waiting_bytes += size
            self._bytes.append((self._ordered + 1, size))
        self._order(Group(list(records), list(files), list(entries)))

    def do(self, call: Callable[[], object]) -> None:
        """Have something else done to the store, behind everything before it and before everything that follows."""
        self._order(call)

    def then(self, call: Callable[[], object]) -> None:
        """Carry this out once everything ordered so far is durable; at once if it is."""
        if self.is_durable:
            call()
        else:
            self._then.append((self._ordered, call))

    def take_ended(self) -> None:
        """Take in what has been written, and carry out what waited for it."""
        if not (ended := self.pool.ended()):
            return
        for written in ended:
            self._is_writing = False
            self._durable += written.pieces
            self.commit_s = written.commit_s
        while self._bytes and self._bytes[0][0] <= self._durable:
            self.waiting_bytes -= self._bytes.popleft()[1]
        while self._then and self._then[0][0] <= self._durable:
            self._then.popleft()[1]()
        self._go_on()

    def _order(self, piece: Piece) -> None:
        self._ordered += 1
        self._waiting.append(piece)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and not self._is_writing:
            pieces, self._waiting = self._waiting, []
            self._is_writing = True
            self.pool.submit(partial(self._carry_out, pieces))
            self.take_ended()

    def _carry_out(self, pieces: Sequence[Piece]) -> Written:
        """On the thread that writes: groups that stand together are one commit."""
        took_s, group, size = 0.0, Group([], [], []), 0
        for piece in pieces:
            if isinstance(piece, Group):
                more = sum(map(len, piece.records))
                if size + more > GROUP_BYTES_MAX // 2:
                    took_s = self._commit(group)
                    group, size = Group([], [], []), 0
                size += more
                group.records.extend(piece.records)
                group.files.extend(piece.files)
                group.entries.extend(piece.entries)
            else:
                took_s = self._commit(group) or took_s
                group, size = Group([], [], []), 0
                piece()
        return Written(len(pieces), self._commit(group) or took_s)

    def _commit(self, group: Group) -> float:
        """How long it took; none if there is nothing to commit."""
        if not group.records:
            return 0.0
        self.observer.committing(group.records)
        began = self.clock()
        self.store.commit(*group)
        took_s = self.clock() - began
        self.observer.committed(group.records)
        return took_s
