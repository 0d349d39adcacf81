"""What a run's model is worth, measured beside the run: the model is read here, and what was found is kept.

Whoever evaluates takes no part in the run. It reads the directory, also while a syncer serves it, and holds nobody up.
A tape has one writer, so what was found lies in a file beside it, a JSON object a line, until the run is closed and
nobody holds it any more. Then it is put on the tape, and the file goes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy.typing as npt

from skerry.core.facts import Evaluated
from skerry.core.state import KeptVersion, RunState, decode_fact
from skerry.errors import StoreError, one_line
from skerry.run import last_words
from skerry.run.export import read_model
from skerry.run.facts import read_run
from skerry.run.rollback import kept_version
from skerry.store.files import UNREADABLE, contents, put_in_place
from skerry.store.store import Store

EVALUATIONS = "evaluations.jsonl"


class Model(NamedTuple):
    """Values by name, and where the run was when it had them."""

    arrays: dict[str, npt.NDArray[Any]]
    versions: tuple[int, ...]  # by fragment
    progress: float
    tokens: int | None  # merged into it, in tokens x fragments; nobody knows of an earlier one


def read(root: Path, number: int | None = None, before_close: bool = False) -> Model:
    """The newest model, a kept version (0 is the start), or the one before the run's last merge."""
    return read_run(root, lambda store: _read(store, number, before_close))


def fact_of(model: Model, figures: Mapping[str, float]) -> Evaluated:
    """What was found of the newest model, just now."""
    assert model.tokens is not None, "a kept version is on no curve"
    return Evaluated(model.versions, model.progress, model.tokens, finite(figures), time.time())


def finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    """None for what is none: neither JSON nor a comparison has a use for NaN."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def keep(root: Path, found: Evaluated) -> None:
    """Until it can be put on the tape; the file is replaced in one go, so that none is ever broken off."""
    lines = [msgspec.json.encode(one) + b"\n" for one in [*waiting(root), found]]
    put_in_place(root / EVALUATIONS, b"".join(lines))


def waiting(root: Path) -> list[Evaluated]:
    """What was found and is not on the tape yet."""
    path = root / EVALUATIONS
    try:
        return [msgspec.json.decode(line, type=Evaluated) for line in contents(path).splitlines()]
    except FileNotFoundError:
        return []
    except UNREADABLE as error:
        raise StoreError(f"{path}: cannot be read ({one_line(str(error))}): mend it, or take it away") from None


def newest(root: Path) -> dict[str, Any] | None:
    """What was found last and is not on the tape yet, for a status; that it cannot be read is for `waiting` to say."""
    try:
        return shown(msgspec.json.decode(contents(root / EVALUATIONS).splitlines()[-1], type=Evaluated))
    except (*UNREADABLE, IndexError):
        return None


def curve(root: Path, records: Sequence[bytes]) -> list[dict[str, Any]]:
    """All that was found, on the tape or not yet, in order."""
    on_tape = [fact for fact in map(decode_fact, records) if isinstance(fact, Evaluated)]
    try:
        later = [one for one in waiting(root) if one not in on_tape]
    except StoreError:  # as for `newest`
        later = []
    return [shown(one) for one in [*on_tape, *later]]


def shown(found: Evaluated) -> dict[str, Any]:
    """As people count, in whole tokens instead of tokens x fragments. A file may say anything; a syncer outlives it."""
    tokens = round(found.tokens / max(1, len(found.versions)))
    return {"progress": found.progress, "tokens": tokens, "figures": found.figures, "at": found.at}


def put_on_tape(root: Path) -> None:
    """What was found becomes facts, once; nobody may be serving the run."""
    found = [msgspec.msgpack.encode(one) for one in waiting(root)]
    if not found:
        return
    with last_words.open_to_write(root) as store:
        known = set(store.records)  # of an earlier time that came no further than the commit
        if fresh := [record for record in found if record not in known]:
            store.commit(fresh)
    (root / EVALUATIONS).unlink()


def _read(store: Store, number: int | None, before_close: bool) -> Model:
    state = last_words.state_in(store)
    kept = None if number is None else kept_version(state, number)
    arrays = read_model(store, state, before_close, kept)
    return _about_kept(arrays, kept) if kept is not None else _about(arrays, state, before_close)


def _about(arrays: dict[str, npt.NDArray[Any]], state: RunState, before_close: bool) -> Model:
    if before_close:
        return Model(arrays, state.before_close, state.progress, None)
    return Model(arrays, tuple(at.version for at in state.fragments), state.progress, state.ledger.merged)


def _about_kept(arrays: dict[str, npt.NDArray[Any]], kept: KeptVersion) -> Model:
    return Model(arrays, kept.versions, kept.progress, None if kept.number else 0)
