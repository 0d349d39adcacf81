"""A run's model out of its directory: named, hashed, and loadable without Skerry.

A fragment at a time: its newest version comes from a checkpoint and the journal (`node/versions.py`), that of a kept
version is a checkpoint by itself, and it goes to its places in the file. So the header is written here and not by the
library of safetensors, which wants the whole model at once; the bytes are the same (tested).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from skerry.algo.fragments import F32, Fragment, decode_layout, scatter
from skerry.core.state import KeptVersion, RunState
from skerry.node import versions
from skerry.run.facts import fragments_of
from skerry.run.genesis import GENESIS, METADATA
from skerry.store.journal import JOURNAL
from skerry.store.lock import LOCK, SUPERVISOR
from skerry.store.store import FILES, RECORD, Store

# What a run directory is made of, but for its exported models.
PARTS = (
    "tape", JOURNAL, FILES, RECORD, LOCK, SUPERVISOR, GENESIS,
    "status.json", "summary.json", "local.json", "evaluations.jsonl", "logs", "paces",
)  # fmt: skip


def read_model(
    store: Store, state: RunState, before_close: bool = False, kept: KeptVersion | None = None
) -> dict[str, F32]:
    """The master values by parameter name; `before_close` gives those before the run's last merge."""
    arrays = {t.name: np.empty(t.shape, np.float32) for t in decode_layout(state.created.layout).tensors}
    for fragment, master in _masters(store, state, state.before_close if before_close else (), kept):
        scatter(fragment, master, arrays)
    return arrays


def write_model(store: Store, state: RunState, path: Path, kept: KeptVersion | None = None) -> str:
    """Write the master, the newest or a kept one, as one file, whole or not at all; its sha256 in hex.

    It is durable on return. The name that it has until then is this process's own: another may be exporting too.
    """
    head, places = _header(state, {} if kept is None else {"versions": list(kept.versions), "kept": kept.number})
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w+b") as file:
            file.write(head)
            for fragment, master in _masters(store, state, kept=kept):
                for slot in fragment.slots:
                    file.seek(len(head) + places[slot.name] + 4 * slot.start)
                    file.write(master[slot.offset : slot.offset + slot.size].data)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return digest


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


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def packed(arrays: Mapping[str, F32], state: RunState, more: Mapping[str, Any] | None = None) -> bytes:
    """The same file of other values."""
    head, places = _header(state, more or {})
    return b"".join([head, *(np.asarray(arrays[name], order="C").tobytes() for name in places)])


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


def _header(state: RunState, more: Mapping[str, Any]) -> tuple[bytes, dict[str, int]]:
    """What a safetensors file of this run begins with, and where each tensor lies behind it, in their order."""
    layout = decode_layout(state.created.layout)
    about = {
        "run": state.created.run,
        "versions": [f.version for f in state.fragments],
        "embeddings": [t.name for t in layout.tensors if t.kind == "embedding"],
        **more,
        "config": json.loads(state.created.config),
    }
    told: dict[str, Any] = {"__metadata__": {METADATA: json.dumps(about)}}
    places, end = {}, 0
    for tensor in layout.tensors:
        places[tensor.name], end = end, end + 4 * tensor.size
        told[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [places[tensor.name], end]}
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places
