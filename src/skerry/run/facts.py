"""What a run's tape says, read in one way by everybody."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from skerry.algo.fragments import Fragment, decode_fragments, decode_layout
from skerry.core.facts import Fact, Pruned, RunCreated
from skerry.core.state import RunState, decode_fact
from skerry.errors import FileMissing, TapeDamaged, TapeUnknown
from skerry.run.last_words import open_to_read
from skerry.run.sense import fact_of
from skerry.store.store import Store
from skerry.store.tape import Record

Said = TypeVar("Said", covariant=True)
Made = TypeVar("Made")

READINGS_MAX = 5


class Stamped(NamedTuple, Generic[Said]):
    """A fact, and when it was committed, in seconds of the wall clock."""

    at: float
    fact: Said


def read_run(root: Path, read: Callable[[Store], Made]) -> Made:
    """What `read` makes of a run that somebody may be serving meanwhile.

    A file that the tape named when it was opened may be collected before it is read, and its first segments pruned. So
    where one is missing and the tape has gone on since, or begins later, the tape is opened and read again.
    """
    for reading in range(1, READINGS_MAX + 1):
        with open_to_read(root) as store:
            try:
                return read(store)
            except FileMissing:
                if reading == READINGS_MAX or not _has_gone_on(store):
                    raise
            except TapeDamaged:
                if reading == READINGS_MAX or not begins_later(store):
                    raise
    raise AssertionError("the last reading has returned or raised")


def _has_gone_on(store: Store) -> bool:
    with Store.open(store.root, readonly=True) as now:
        return now.tape.head != store.tape.head


def begins_later(store: Store) -> bool:
    """Whether its tape was pruned since it was opened."""
    with Store.open(store.root, readonly=True) as now:
        return first_segment(now) > first_segment(store)


def first_segment(store: Store) -> int:
    """With which the run's tape begins: 1, or where it was pruned."""
    first = 1
    for body in store.records:
        with contextlib.suppress(TapeUnknown):  # whoever reads on from there says where
            fact = decode_fact(body)
            if isinstance(fact, RunState):
                first = fact.first_segment
            elif isinstance(fact, Pruned):
                first = fact.segment
    return first


def history_of(store: Store) -> Iterator[Record]:
    """Every record from where the tape begins, folds too, in order, the whole chain verified."""
    return store.history(first_segment(store))


def entries_of(store: Store) -> Iterator[Stamped[Fact | RunState]]:
    """The same, as what they say; the first is the run's creation, or a fold where the tape was pruned."""
    for record in history_of(store):
        yield Stamped(record.at, fact_of(store.root, record))


def facts_of(store: Store) -> Iterator[Stamped[Fact]]:
    """Every fact on the tape, in order, the whole chain verified."""
    for at, fact in entries_of(store):
        if not isinstance(fact, RunState):
            yield Stamped(at, fact)


def fragments_of(created: RunCreated) -> tuple[Fragment, ...]:
    """The run's own fragments, from the table it was created with."""
    try:
        return decode_fragments(created.fragments, decode_layout(created.layout))
    except (msgspec.DecodeError, ValueError) as error:
        raise TapeDamaged(f"the fragments of run {created.run} cannot be read ({error}): restore the tape") from None
