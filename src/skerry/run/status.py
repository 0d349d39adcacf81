"""Where the run in a directory stands: as the process that serves it says, or else as its tape does.

A status file outlives its writer, so it is believed only while the process that wrote it holds the run. It reads, and
changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from skerry.core.facts import Checkpointed, Evaluated, Paused, PhaseChanged, Pruned, RolledBack
from skerry.core.state import decode_fact
from skerry.errors import StoreError, StoreInUse
from skerry.node import telemetry
from skerry.run import evaluations
from skerry.run.last_words import STATUS, cut_off, open_to_read, state_in
from skerry.store.lock import LOCK, SUPERVISOR, Holder, holder_of
from skerry.store.store import Store

Serving = Literal["served", "starting", "away", "new", "paused", "died", "closed"]
"""Of a run: a process serves it; one holds it and does not serve it yet; its supervisor is bringing the syncer back; or
nobody does, because nobody ever did, the syncer was ended in order, it died, or the run is closed."""


def status_of(root: Path) -> dict[str, Any]:
    """The record of `node.telemetry`, with who serves the run, how old that is, and if nobody does, the whole curve."""
    syncer, supervisor = holders_of(root)
    record = _last_status(root)
    if syncer is not None and record.get("pid") == syncer.pid:
        return record | _about("served", syncer, supervisor, record["at"])
    with open_to_read(root) as store:
        state = state_in(store)
        said_at = _closed_at(store) if state.phase == "closed" else store.tape.committed_at
        is_paused = _is_paused(store.records)
        warning = cut_off(store, state)
        curve = evaluations.curve(root, store.records)
    serving: Serving = "paused" if is_paused else "died" if state.epoch else "new"
    if state.phase == "closed":
        serving = "closed"
    elif syncer is not None:
        serving = "starting"
    elif supervisor is not None:
        serving = "away"
    record = telemetry.recorded(state, said_at) | _about(serving, syncer, supervisor, said_at)
    if serving == "starting":
        record["starting_s"] = max(0.0, time.time() - (root / LOCK).stat().st_mtime)  # its holder wrote its name in it
    if curve:
        record |= {"evaluated": curve[-1], "curve": curve}
    return record | ({"warning": warning} if warning else {})


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


def _is_paused(records: Sequence[bytes]) -> bool:
    """Whether its operator ended it, or did something to it since: behind that word is nothing it did."""
    facts = (decode_fact(record) for record in reversed(records))
    last = next(fact for fact in facts if not isinstance(fact, Checkpointed | Evaluated))
    return isinstance(last, Paused | RolledBack | Pruned)


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
        record = msgspec.json.decode((root / STATUS).read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return record if isinstance(record, dict) and "at" in record else {}
