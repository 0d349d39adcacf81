"""What a run's tape says, read in one way by everybody."""

from __future__ import annotations

from collections.abc import Iterator

from skerry.core.facts import Fact
from skerry.core.state import RunState, decode_fact
from skerry.store.store import Store


def facts_of(store: Store) -> Iterator[Fact]:
    """Every fact ever committed, in order, the whole chain verified; folds are left out."""
    for record in store.history():
        fact = decode_fact(record.body)
        if not isinstance(fact, RunState):
            yield fact
