"""What a run's tape says, read in one way by everybody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

import msgspec

from skerry.algo.fragments import Fragment, decode_fragments, decode_layout
from skerry.core.facts import Fact, RunCreated
from skerry.core.state import RunState, decode_fact
from skerry.errors import TapeDamaged
from skerry.store.store import Store

Said = TypeVar("Said", covariant=True)


class Stamped(NamedTuple, Generic[Said]):
    """A fact, and when it was committed, in seconds of the wall clock."""

    at: float
    fact: Said


def entries_of(store: Store) -> Iterator[Stamped[Fact | RunState]]:
    """Everything ever committed, folds too, in order, the whole chain verified."""
    for record in store.history():
        yield Stamped(record.at, decode_fact(record.body))


def facts_of(store: Store) -> Iterator[Stamped[Fact]]:
    """Every fact ever committed, in order, the whole chain verified."""
    for at, fact in entries_of(store):
        if not isinstance(fact, RunState):
            yield Stamped(at, fact)


def fragments_of(created: RunCreated) -> tuple[Fragment, ...]:
    """The run's own fragments, from the table it was created with."""
    try:
        return decode_fragments(created.fragments, decode_layout(created.layout))
    except (msgspec.DecodeError, ValueError) as error:
        raise TapeDamaged(f"the fragments of run {created.run} cannot be read ({error}): restore the tape") from None
