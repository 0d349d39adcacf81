"""What a report says of a run, as numbers: its history, the audit of its tape, its configuration, what worked on it.

It reads the run directory, whoever serves it meanwhile, and changes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from skerry.core.audit import INVARIANTS, Audit
from skerry.core.facts import Committed, Evaluated, Fact
from skerry.core.state import RunState
from skerry.errors import StoreError
from skerry.run import evaluations, provenance
from skerry.run.facts import Stamped, first_segment
from skerry.run.history import History
from skerry.run.last_words import SUMMARY, no_run, open_to_read
from skerry.run.sense import fact_of, sensible
from skerry.run.status import status_of
from skerry.store.files import UNREADABLE, contents
from skerry.store.store import Store

Show = Callable[[int, int], None]  # how many bytes of the tape are read, and how many there are
SHOWN_EVERY = 256  # facts
HELD_OUT = {
    "val_loss_start": "at the start",
    "val_loss_before_close": "before the last merge",
    "val_loss_end": "at the end",
}


def numbers_of(root: Path, show: Show = lambda done, total: None) -> dict[str, Any]:
    """All of it, ready for JSON; `show` is told now and then how many bytes of the tape are read."""
    history, audit, merges, left_out = _read(root, show)
    assert history.state is not None
    # of a tape that cannot be, no other reader would make a state
    status = {"serving": "broken"} if audit.violations else status_of(root)
    return {
        "run_dir": str(root),
        "serving": status["serving"],
        "warning": status.get("warning", "")
        or ("" if status["serving"] == "served" else left_out),  # else it is under way
        "history": history.record(),
        "held_out": _held_out(root),
        "config": _flat(msgspec.json.decode(history.state.created.config)),  # that it began with,
        "config_ordered": _ordered(history.state),  # and those of its keys that orders have left with another value
        "audit": {
            "checks": audit.checks,
            "merges": merges,
            "violations": audit.violations,
            "invariants": INVARIANTS,
        },
        "commands": [_command(each) for each in provenance.commands_of(root)],
        "made_with": provenance.versions(),
    }


def _command(started: provenance.Started) -> dict[str, Any]:
    """Without the folder where it was typed, which is nothing to who reads a report."""
    return {"at": started.at, "command": started.command, "versions": started.versions}


def _read(root: Path, show: Show) -> tuple[History, Audit, int, str]:
    """One walk over the tape for both folds."""
    history, audit, merges = History(), Audit(), 0
    with open_to_read(root) as store, sensible(lambda: f"{root}/tape"):
        if not store.records:
            raise StoreError(no_run(store))
        on_tape = []
        for at, fact in _told(store, show):
            if history.state is None:
                history.take(at, fact)  # first: the audit goes on with the fold that it is given
                audit.take(fact)
                continue
            audit.take(fact)
            if audit.violations:
                break  # what follows would be told of books that are wrong
            if not isinstance(fact, RunState):
                history.take(at, fact)
            merges += isinstance(fact, Committed)
            on_tape += [fact] if isinstance(fact, Evaluated) else []
        left_out = store.left_out
    for found in _waiting(root):
        if found not in on_tape:
            history.take(found.at, found)
    return history, audit, merges, left_out


def _told(store: Store, show: Show) -> Iterator[Stamped[Fact | RunState]]:
    """What `entries_of` gives, with a word now and then of how far that is."""
    first = first_segment(store)
    names = [name for name in sorted(os.listdir(store.root / "tape")) if re.fullmatch(r"[0-9]{6,}\.seg", name)]
    sizes = {int(name.removesuffix(".seg")): (store.root / "tape" / name).stat().st_size for name in names}
    total = sum(size for number, size in sizes.items() if number >= first)
    before = {number: sum(size for each, size in sizes.items() if first <= each < number) for number in sizes}
    for count, record in enumerate(store.history(first)):
        yield Stamped(record.at, fact_of(store.root, record))
        if count % SHOWN_EVERY == 0:
            show(before.get(record.segment, total) + record.offset, total)


def _waiting(root: Path) -> Sequence[Evaluated]:
    try:
        return evaluations.waiting(root)
    except StoreError:  # whoever evaluates says so
        return ()


def _held_out(root: Path) -> dict[str, float]:
    """The built-in trainer's, if it has ended."""
    try:
        summary = msgspec.json.decode(contents(root / SUMMARY))
        said = summary if isinstance(summary, dict) else {}
        return {name: float(said[name]) for name in HELD_OUT if isinstance(said.get(name), int | float)}
    except UNREADABLE:
        return {}


def _ordered(state: RunState) -> dict[str, Any]:
    begun, left = (_flat(msgspec.json.decode(config)) for config in (state.created.config, state.config))
    return {key: value for key, value in left.items() if key not in begun or begun[key] != value}


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """`sync.quorum` and its like, as people write them."""
    flat: dict[str, Any] = {}
    for table, keys in tables.items():
        flat |= {f"{table}.{key}": value for key, value in keys.items()} if isinstance(keys, Mapping) else {table: keys}
    return flat
