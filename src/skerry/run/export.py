"""A run's model out of its directory: named, hashed, and loadable without Skerry.

A fragment at a time: its newest version comes from a checkpoint and the journal (`node/versions.py`), that of a kept
version is a checkpoint by itself, and it goes to its places in the file. What is not trained is copied from the run's
own file, and must have the digests on the tape. Which tensors the file has is said in `run/outputs.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from skerry.algo.contents import decode_contents
from skerry.algo.fragments import F32, Fragment, decode_layout, scatter
from skerry.core.facts import RunCreated
from skerry.core.state import KeptVersion, RunState
from skerry.errors import FileDamaged, one_line
from skerry.node import versions
from skerry.run.buffers import of_learners
from skerry.run.facts import fragments_of
from skerry.run.genesis import FIXED, GENESIS, METADATA
from skerry.run.outputs import Output, fixed_file, said_of, ways_out, whole
from skerry.run.tensors import WIDTHS, WORDS, Entry, head_of, narrowed, overflows, widened, written
from skerry.store.journal import JOURNAL
from skerry.store.lock import LOCK, SUPERVISOR
from skerry.store.store import FILES, RECORD, Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("skerry.store")

# What a run directory is made of, but for its exported models.
PARTS = (
    "tape", JOURNAL, FILES, RECORD, LOCK, SUPERVISOR, GENESIS, FIXED,
    "status.json", "summary.json", "local.json", "evaluations.jsonl", "commands.jsonl", "logs", "paces",
)  # fmt: skip


def read_model(
    store: Store, state: RunState, before_close: bool = False, kept: KeptVersion | None = None
) -> dict[str, npt.NDArray[Any]]:
    """The whole state_dict: the master values by parameter name, as float32, and what is not trained as it is.

    `before_close` gives those before the run's last merge.
    """
    arrays: dict[str, Any] = {**trained(store, state, kept, state.before_close if before_close else ())}
    if state.created.fixed:
        file, given = fixed_file(store.root, state.created), of_learners(store.root, state) if kept is None else {}
        arrays |= {name: file.array(name, given.get(name)) for name in file.entries}
    aliases = decode_contents(state.created.contents).aliases
    return arrays | {alias: arrays[name].copy() for alias, name in aliases.items()}


def trained(
    store: Store, state: RunState, kept: KeptVersion | None = None, wanted: tuple[int, ...] = ()
) -> dict[str, F32]:
    """The master values of what is trained, by name: the newest, of a kept version, or the wanted ones."""
    arrays = {t.name: np.empty(t.shape, np.float32) for t in decode_layout(state.created.layout).tensors}
    for fragment, master in _masters(store, state, wanted, kept):
        scatter(fragment, master, arrays)
    return arrays


def write_model(
    store: Store,
    state: RunState,
    path: Path,
    kept: KeptVersion | None = None,
    outputs: Sequence[Output] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write the master, the newest or a kept one, as one file, whole or not at all; its sha256 in hex.

    It is durable on return. `outputs` are the tensors that it has, in their order, if that is not the state_dict;
    `metadata` comes on top of ours.
    """
    wanted = whole(store.root, state.created) if outputs is None else outputs
    more = {} if kept is None else {"versions": list(kept.versions), "kept": kept.number}
    head, placed = head_of(
        (output.entry for output in wanted), {**(metadata or {}), **_about(state, more)}, outputs is not None
    )
    places = _by_source(Output(placed[output.entry.name], output.source) for output in wanted)
    infinite = set[str]()
    with written(path) as file:
        file.write(head)
        for fragment, master in _masters(store, state, kept=kept):
            for slot in fragment.slots:
                for entry in places.get(slot.name, ()):
                    file.seek(len(head) + entry.start + WIDTHS[entry.dtype] * slot.start)
                    file.write(_narrowed(master[slot.offset : slot.offset + slot.size], entry, infinite))
        for piece in fixed_pieces(store.root, state, places, is_newest=kept is None):
            for entry in places[piece.of.name]:
                values = _as(piece.data, piece.of.dtype, entry, infinite)
                file.seek(len(head) + entry.start + piece.start * len(values) // len(piece.data))
                file.write(values)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if infinite:
        _warn(path, [entry for name, entry in placed.items() if name in infinite])
    return digest


def _warn(path: Path, infinite: Sequence[Entry]) -> None:
    first, more = infinite[0], f" and of {len(infinite) - 1} more" if infinite[1:] else ""
    told = f"{path}: numbers of {first.name}{more} are too large for {WORDS[first.dtype]} and infinite there"
    log.warning("%s", one_line(f"{told}: --like of a file in float32 keeps them"))


class Piece(NamedTuple):
    """Some bytes of a tensor that is not trained, from its byte `start` on."""

    of: Entry
    start: int
    data: bytes


def fixed_pieces(root: Path, state: RunState, names: Container[str], is_newest: bool = True) -> Iterator[Piece]:
    """What is not trained and has these names; `FileDamaged` at the end of a tensor that is not as it was.

    It lies in the run's own file, but for buffers of the newest version, which come from learners.
    """
    created = state.created
    wanted = [fixed for fixed in decode_contents(created.contents).fixed if fixed.name in names]
    if not wanted:
        return
    file, given = fixed_file(root, created), of_learners(root, state) if is_newest else {}
    for fixed in wanted:
        if data := given.get(fixed.name):  # an empty tensor has no pieces, wherever it comes from
            yield Piece(file.entries[fixed.name], 0, data)
            continue
        digest, start = xxhash.xxh3_128(), 0
        for data in file.pieces(fixed.name):
            digest.update(data)
            yield Piece(file.entries[fixed.name], start, data)
            start += len(data)
        if digest.digest() != fixed.digest:
            raise FileDamaged(f"{root / FIXED}: {fixed.name} is not what was written: {ways_out(root)}")


def _as(data: bytes, dtype: str, wanted: Entry, infinite: set[str]) -> bytes | memoryview:
    return data if dtype == wanted.dtype else _narrowed(widened(data, dtype), wanted, infinite)


def _narrowed(values: F32, wanted: Entry, infinite: set[str]) -> memoryview:
    """Their bytes; the tensor is noted if numbers of it become infinite."""
    if overflows(values, wanted.dtype):
        infinite.add(wanted.name)
    return narrowed(values, wanted.dtype)


def _by_source(outputs: Iterable[Output]) -> dict[str, list[Entry]]:
    """By the run's tensor, all that it is written as."""
    found: dict[str, list[Entry]] = {}
    for entry, source in outputs:
        found.setdefault(source, []).append(entry)
    return found


def part_at(root: Path, path: Path) -> Path | None:
    """The part of a run that writing this file would spoil, by whatever links it is named: of the run here, or another.

    Another run is any folder above the file that has a tape.
    """
    places = {_real(path), _real(path.parent) / path.name}
    others = (folder for place in sorted(places) for folder in place.parents if os.path.isdir(folder / "tape"))
    parts = (run / part for run in (root, *others) for part in PARTS)
    return next((part for part in parts if any(place.is_relative_to(_real(part)) for place in places)), None)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def streamed(root: Path, state: RunState, arrays: Mapping[str, F32], more: Mapping[str, Any]) -> Iterator[Buffer]:
    """The bytes of the same file of other values."""
    outputs = {output.entry.name: output.source for output in whole(root, state.created)}
    head, placed = head_of((output.entry for output in whole(root, state.created)), _about(state, more))
    yield head
    for name, entry in placed.items():
        source = outputs[name]
        if source in arrays:
            yield narrowed(np.ravel(arrays[source]), entry.dtype)
        else:
            yield from (piece.data for piece in fixed_pieces(root, state, {source}))


def _masters(
    store: Store, state: RunState, wanted: tuple[int, ...] = (), kept: KeptVersion | None = None
) -> Iterator[tuple[Fragment, F32]]:
    """The master of each fragment's newest version, of the wanted ones or of a kept version, one after the other."""
    wanted = wanted or tuple(at.version for at in state.fragments)
    for fragment, at, version in zip(fragments_of(state.created), state.fragments, wanted, strict=True):
        if kept is not None:
            values = versions.whole(store, fragment, kept.checkpoints[fragment.index])
        else:
            values = versions.load(store, fragment, at, version=version)
        yield fragment, values.theta + values.error


def lineage_of(created: RunCreated) -> dict[str, Any] | None:
    """From which run a fork began, as numbers and words; None of a run that is no fork."""
    if (lineage := created.lineage) is None:
        return None
    return {
        "run": lineage.run,
        "commit": lineage.head.hex(),
        "version": lineage.kept,
        "fragment_versions": list(lineage.versions),
    }


def _about(state: RunState, more: Mapping[str, Any]) -> dict[str, str]:
    """Our metadata."""
    about = {
        "run": state.created.run,
        "versions": [f.version for f in state.fragments],
        **said_of(state.created),
        **more,
        **({"lineage": lineage} if (lineage := lineage_of(state.created)) else {}),
        "config": json.loads(state.config),
    }
    return {METADATA: json.dumps(about)}
