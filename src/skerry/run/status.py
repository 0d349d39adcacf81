"""Where the run in a directory stands: as the process that serves it says, or else as its tape does.

A status file outlives its writer, so it is believed only while the process that wrote it holds the run. It reads, and
changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from skerry.core.facts import Checkpointed, Evaluated, Ordered, Paused, PhaseChanged, Pruned, RolledBack
from skerry.core.state import decode_fact
from skerry.errors import StoreError, StoreInUse
from skerry.node import telemetry
from skerry.node.record import fitted, legible
from skerry.run import evaluations
from skerry.run.export import lineage_of
from skerry.run.last_words import STATUS, cut_off, open_to_read, state_in, strange
from skerry.run.room import free_disk
from skerry.run.sense import sensible
from skerry.store.files import contents
from skerry.store.lock import LOCK, SUPERVISOR, Holder, holder_of
from skerry.store.store import Store
from skerry.text import size

FULL_BYTES = 1 << 20  # free: with less no syncer goes on
Serving = Literal["served", "starting", "away", "new", "paused", "died", "closed"]
"""Of a run: a process serves it; one holds it and does not serve it yet; its supervisor is bringing the syncer back; or
nobody does, because nobody ever did, the syncer was ended in order, it died, or the run is closed."""


def status_of(root: Path) -> dict[str, Any]:
    """The record of `node.telemetry`, with who serves the run, how old that is, and if nobody does, the whole curve."""
    syncer, supervisor = holders_of(root)
    record = _last_status(root)
    if syncer is not None and record.get("pid") == syncer.pid:
        return record | _about("served", syncer, supervisor, record["at"])
    with open_to_read(root) as store, sensible(lambda: f"{root}/tape"):
        state = state_in(store)
        is_paused = _is_paused(store.records)
        said_at = _closed_at(store) if state.phase == "closed" else _last_at(store, is_paused)
        warning = cut_off(store, state) or strange(root)
        curve = evaluations.curve(root, store.records)
        record, lineage = telemetry.recorded(state, said_at), lineage_of(state.created)
    serving: Serving = "paused" if is_paused else "died" if state.epoch else "new"
    if state.phase == "closed":
        serving = "closed"
    elif syncer is not None:
        serving = "starting"
    elif supervisor is not None:
        serving = "away"
    if lineage:
        record["lineage"] = lineage
    if curve:
        record |= {"evaluated": curve[-1], "curve": curve}
    record = fitted(record) | _about(serving, syncer, supervisor, said_at)
    if serving == "starting":
        record["starting_s"] = max(0.0, time.time() - (root / LOCK).stat().st_mtime)  # its holder wrote its name in it
    if serving == "died":
        record["free_bytes"] = free = free_disk(root)
        if free < FULL_BYTES:  # it may have died of that, and nobody could go on with it
            record["why"] = f"the disk is full ({size(free)} free)"
    return record | ({"warning": warning} if warning else {})


Ending = Literal["closed", "ordered", "unordered"]
"""Of a syncer that is gone: the run is closed; an order over the wire paused it; or neither, whatever ended it."""


def ending_of(root: Path) -> Ending:
    """How the last syncer of the run in this directory ended, as its tape tells."""
    with open_to_read(root) as store:
        if state_in(store).phase == "closed":
            return "closed"
        last = _last_done(store.records)
    return "ordered" if isinstance(last, Paused) and last.by else "unordered"


def is_served(root: Path) -> bool:
    """Whether who holds the run is a syncer that answers."""
    syncer, _ = holders_of(root)
    return syncer is not None and _last_status(root).get("pid") == syncer.pid


def holders_of(root: Path) -> tuple[Holder | None, Holder | None]:
    """Who serves the run in this directory, and who supervises that process."""
    return _holder(root / LOCK), _holder(root / SUPERVISOR)


def _holder(path: Path) -> Holder | None:
    try:
        return holder_of(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror}): check the path and its permissions") from None


def check_unserved(root: Path) -> None:
    """Refuse what may be done to a run only while nobody serves it, nor is about to serve it again."""
    for holder in holders_of(root):
        if holder is not None:
            raise StoreInUse(f"{root} is served by process {holder.pid or 'unknown'}: end it with skerry stop {root}")


def _closed_at(store: Store) -> float:
    """When the run ended: evaluations and prunings may follow on the tape, and a pruning may remove the word of it."""
    for record in store.history(store.tape.number):
        fact = decode_fact(record.body)
        if isinstance(fact, PhaseChanged) and fact.phase == "closed":
            return record.at
    last = _last_status(store.root)
    return float(last["at"]) if last.get("phase") == "closed" else store.tape.committed_at


def _last_at(store: Store, is_paused: bool) -> float:
    """When the run last did something: orders that were given to a paused one on its directory are none of it."""
    if not is_paused:
        return store.tape.committed_at
    paused = (each.at for each in store.history(store.tape.number) if isinstance(decode_fact(each.body), Paused))
    return max(paused, default=store.tape.committed_at)


def _is_paused(records: Sequence[bytes]) -> bool:
    """Whether its operator ended it, or did something to it since: behind that word is nothing it did."""
    return isinstance(_last_done(records), Paused | RolledBack | Pruned)


def _last_done(records: Sequence[bytes]) -> object:
    """What the run did last, or its operator to it: what is measured, kept or ordered behind that is none of it."""
    facts = (decode_fact(record) for record in reversed(records))
    return next(fact for fact in facts if not isinstance(fact, Checkpointed | Evaluated | Ordered))


def _about(serving: Serving, syncer: Holder | None, supervisor: Holder | None, at: float) -> dict[str, Any]:
    return {
        "serving": serving,
        "age_s": max(0.0, time.time() - at),
        "pid": syncer.pid if syncer else None,
        "is_here": syncer.is_here if syncer else None,
        "supervisor": supervisor.pid if supervisor else None,
    }


def _last_status(root: Path) -> dict[str, Any]:
    try:
        return legible(contents(root / STATUS))
    except (OSError, ValueError):
        return {}
