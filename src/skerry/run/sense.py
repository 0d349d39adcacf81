"""Facts that cannot all be true of one run, on a tape whose chain of hashes is whole: no syncer of Skerry wrote them.

The fold of a syncer that serves asserts, and crashes: there it is a bug. To who only reads a run directory it is damage
like any other, in one line, and other runs are no worse for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skerry.errors import TapeDamaged
from skerry.store.tape import Record

# What a fold raises where a fact speaks of what is not there, or of what cannot come next.
NONSENSE = (ArithmeticError, AssertionError, LookupError, StopIteration, TypeError, ValueError)


@contextmanager
def sensible(place: Callable[[], str]) -> Iterator[None]:
    """What is folded or told of facts inside ends in `TapeDamaged` where they make no sense; `place` says where."""
    try:
        yield
    except NONSENSE as error:
        raise TapeDamaged(
            f"{place()}: cannot be true after what the tape says before it: restore it from a copy; "
            "skerry replay says which rule it breaks"
        ) from error


def place_of(root: Path, record: Record) -> str:
    return f"{root}/tape/{record.segment:06d}.seg record {record.number} at byte {record.offset}"
