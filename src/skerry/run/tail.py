"""The tape of a run, read on while somebody writes it: every fact once, in order, from where the tape begins.

    for one in tail(root):  # None: all that there is was read
        ...

It locks nothing and asks nobody. A tape that is pruned meanwhile is read on from its new beginning, and what was
evaluated beside the run is told when it is found. What the facts come to is for who reads them (`run/history.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from skerry.core.facts import Evaluated, Fact
from skerry.core.state import RunState
from skerry.errors import FileMissing, StoreError
from skerry.run import evaluations
from skerry.run.facts import Stamped, first_segment
from skerry.run.last_words import open_to_read
from skerry.run.sense import fact_of, place_of


def tail(root: Path) -> Tail:
    """What a run's tape says from its beginning on, and then what is written to it, by whomever; it never ends.

    None is given whenever all that there is was read: look again a little later. Only whole commits are read, nothing
    is locked, and a look at a tape that has not grown reads 32 bytes. What was evaluated beside the run comes too,
    once. The first is the run's creation, or a fold where the tape was pruned; one that was pruned before it was read
    goes on with a later fold.
    """
    return Tail(root)


class Tail:
    """What a tape says, and then what is written to it; `place` is that of the fact that was given last."""

    def __init__(self, root: Path) -> None:
        self.place = f"{root}/tape"
        self._entries = self._read(root)

    def __repr__(self) -> str:
        return f"<tail after {self.place}>"

    def __iter__(self) -> Iterator[Stamped[Fact | RunState] | None]:
        return self

    def __next__(self) -> Stamped[Fact | RunState] | None:
        return next(self._entries)

    def _read(self, root: Path) -> Iterator[Stamped[Fact | RunState] | None]:
        first, given = 0, _Given()
        while True:
            with open_to_read(root) as store:
                begins = first_segment(store)
                if begins <= first:
                    raise StoreError(f"{root}/tape: a segment is gone that no prune took: restore it from a copy")
                first = begins
                try:
                    for record in store.follow(first):
                        if record is None:
                            yield from given.fresh(root)
                            yield None
                        elif not record.is_fold or (record.segment, record.number) == (first, 0):
                            fact = fact_of(root, record)
                            self.place = place_of(root, record)
                            if not isinstance(fact, Evaluated) or given.is_fresh(fact):
                                yield Stamped(record.at, fact)
                except FileMissing:
                    continue


class _Given:
    """Evaluations lie in a file until the run has closed, and then on its tape: each is told once."""

    def __init__(self) -> None:
        self._known: set[tuple[float, tuple[int, ...]]] = set()
        self._looked: tuple[int, int] | None = None

    def is_fresh(self, fact: Evaluated) -> bool:
        key = (fact.at, fact.versions)
        is_known = key in self._known
        self._known.add(key)
        return not is_known

    def fresh(self, root: Path) -> Iterator[Stamped[Fact | RunState]]:
        try:
            found = (root / evaluations.EVALUATIONS).stat()
        except OSError:
            return
        if self._looked != (looked := (found.st_mtime_ns, found.st_size)):
            self._looked = looked
            try:
                waiting = evaluations.waiting(root)
            except StoreError:  # whoever evaluates says so
                return
            yield from (Stamped(one.at, one) for one in waiting if self.is_fresh(one))
