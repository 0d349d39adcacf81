"""Facts that cannot all be true of one run, on a tape whose chain of hashes is whole: no syncer of Skerry wrote them.

The fold of a syncer that serves asserts, and crashes: there it is a bug. To who only reads a run directory it is damage
like any other, in one line, and other runs are no worse for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from skerry import config as configs
from skerry.algo.contents import decode_contents
from skerry.algo.fragments import decode_layout, decode_table
from skerry.core.facts import (
    Buffered,
    Checkpointed,
    Committed,
    Fact,
    Kept,
    Ordered,
    Restored,
    RunCreated,
    SteppedBack,
)
from skerry.core.state import RunState, decode_fact
from skerry.errors import TapeDamaged, TapeUnknown, one_line
from skerry.store.store import is_digest
from skerry.store.tape import Record

# What a fold raises where a fact speaks of what is not there, or of what cannot come next; and whoever reads what is
# encoded in a fact, where it is of another kind or nested without end.
NONSENSE = (
    ArithmeticError, AssertionError, LookupError, StopIteration, TypeError, ValueError, RecursionError,
    msgspec.MsgspecError,
)  # fmt: skip


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


def fact_of(root: Path, record: Record) -> Fact | RunState:
    """What a record says, whole: nobody meets what cannot be read in it later on, where its place is not known."""
    return whole_fact(record.body, partial(place_of, root, record))


def whole_fact(body: bytes, place: Callable[[], str]) -> Fact | RunState:
    try:
        fact = decode_fact(body)
        _look_inside(fact)
    except TapeUnknown as error:
        raise TapeUnknown(f"{place()}: {error}") from None
    except NONSENSE as error:
        raise TapeDamaged(f"{place()}: cannot be read ({one_line(str(error))}): restore it from a copy") from error
    return fact


def _look_inside(fact: Fact | RunState) -> None:
    """At what is encoded in it once more, and the files that it names."""
    if wrong := next((name for name in _files_of(fact) if not is_digest(name)), ""):
        raise ValueError(f"{wrong[:80]!r} is no file digest")
    match fact:
        case RunCreated():
            configs.decode(fact.config)
            decode_layout(fact.layout)
            decode_table(fact.fragments)
            decode_contents(fact.contents)
        case RunState():
            _look_inside(fact.created)
            configs.decode(fact.config)
        case Ordered() if fact.config:
            configs.decode(fact.config)


def _files_of(fact: Fact | RunState) -> Collection[str]:
    match fact:
        case RunCreated() | RunState() | Kept():
            return fact.files
        case Checkpointed() | SteppedBack() | Restored() | Buffered():
            return (fact.file,)
        case Committed() if fact.result.payloads:
            return (fact.result.payloads,)
    return ()


def place_of(root: Path, record: Record) -> str:
    return f"{root}/tape/{record.segment:06d}.seg record {record.number} at byte {record.offset}"
