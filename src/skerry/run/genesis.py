"""Genesis: the first values of a run, from a safetensors file, and the record that begins a tape.

The values never come from whoever happens to be alive. What is stored has been looked at, whatever becomes of the file.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from skerry import config as configs
from skerry.algo.fragments import (
    F32,
    Fragment,
    Layout,
    Tensor,
    decode_fragments,
    encode_fragments,
    encode_layout,
    layout_of,
    split,
)
from skerry.core.facts import RULES, RunCreated
from skerry.errors import ModelError
from skerry.node.algebra import FLOAT32, Algebra, Array, Values
from skerry.store.journal import JOURNAL
from skerry.store.store import RECORD, Store

AT_ONCE = 1 << 22  # values that are looked at together
GENESIS = "genesis.safetensors"  # in the directory of a local run
Show = Callable[[int, int], None]  # (fragments written, of how many)
METADATA = "skerry"  # the one metadata key of our safetensors; several would be written in random order

log = logging.getLogger("skerry.store")


class GenesisFile(Mapping[str, F32]):
    """The tensors of a safetensors file, which stay there until they are asked for.

    It is read and never mapped: a file that somebody cuts short would end this process. What is given out is finite,
    and the file was not written to since it was opened, or `ModelError` is raised.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.layout = path, layout
        self._file = path.open("rb")
        self._first = self._stamp()
        begins = 8 + int.from_bytes(self._read(0, 8), "little")
        told = json.loads(self._read(8, begins - 8))
        self._places = {tensor.name: begins + told[tensor.name]["data_offsets"][0] for tensor in layout.tensors}
        self._shapes = {tensor.name: tensor.shape for tensor in layout.tensors}

    def __getitem__(self, name: str) -> F32:
        shape = self._shapes[name]
        return self._values(name, 0, math.prod(shape)).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def fragment(self, fragment: Fragment) -> F32:
        """What the fragment holds, as one flat vector with zeros between the slots."""
        flat = np.zeros(fragment.size, np.float32)
        for slot in fragment.slots:
            flat[slot.offset : slot.offset + slot.size] = self._values(slot.name, slot.start, slot.size)
        return flat

    def check(self) -> None:
        """Go through all of it, a piece at a time."""
        for name, shape in self._shapes.items():
            count = math.prod(shape)
            for start in range(0, count, AT_ONCE):
                self._values(name, start, min(AT_ONCE, count - start))

    def _values(self, name: str, start: int, count: int) -> F32:
        """So many values of a tensor, from this one on."""
        values = np.frombuffer(self._read(self._places[name] + 4 * start, 4 * count), np.float32)
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: parameter {name} holds values that are not finite")
        return values

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        data = self._file.read(size)
        if len(data) < size or self._stamp() != self._first:
            raise ModelError(f"{self.path}: was changed while it was read: begin again when nobody writes to it")
        return data

    def _stamp(self) -> tuple[int, int]:
        about = os.fstat(self._file.fileno())
        return about.st_size, about.st_mtime_ns


def read_genesis(path: Path) -> tuple[Layout, GenesisFile]:
    """A safetensors file as layout and values, which have been looked at and stay in the file until they are used."""
    layout, values = open_genesis(path)
    values.check()
    return layout, values


def open_genesis(path: Path) -> tuple[Layout, GenesisFile]:
    """The same by its header alone: values are looked at when they are asked for."""
    with _opened(path) as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        layout = _layout(path, file, {name: tuple(file.get_slice(name).get_shape()) for name in kinds})
    for name, kind in kinds.items():
        if kind != "F32":
            raise ModelError(f"{path}: parameter {name} is {kind}; a genesis holds float32 (F32)")
    return layout, GenesisFile(path, layout)


def read_layout(path: Path) -> Layout:
    """The layout of a genesis file alone, from its header."""
    with _opened(path) as file:
        return _layout(path, file, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if path.is_dir():
        raise ModelError(f"{path}: is a directory; name the safetensors file in it")
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; write one with skerry.save_genesis(model, path)") from None
    except (OSError, SafetensorError, TypeError) as error:
        raise ModelError(f"{path}: is not a readable safetensors file ({error})") from None


def _layout(path: Path, file: Any, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Embeddings by the file's metadata, else by 'emb' in the name."""
    said = (file.metadata() or {}).get(METADATA)
    try:
        named = set(json.loads(said)["embeddings"]) if said else None
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"{path}: its metadata {METADATA!r} names no embeddings: leave it out") from None
    embeddings = {name for name in shapes if "emb" in name.lower()} if named is None else named
    try:
        return layout_of(Tensor(n, dims, "embedding" if n in embeddings else "other") for n, dims in shapes.items())
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None


def is_from(path: Path, layout: Layout, created: RunCreated) -> bool:
    """Whether a run began with the values of this file, by those of its smallest fragment; its layout is the run's."""
    about = zip(decode_fragments(created.fragments, layout), created.thetas, strict=True)
    fragment, theta = min(about, key=lambda each: each[0].size)
    try:
        return FLOAT32.sha256(GenesisFile(path, layout).fragment(fragment)) == theta
    except ModelError:  # values that no run begins with
        return False


def create_run(
    store: Store, config: configs.Config, layout: Layout, first: GenesisFile, show: Show = lambda done, total: None
) -> RunCreated:
    """Begin a run with the values of a file, in place of what a creation that was broken off has left."""
    was_run = any(any((store.root / folder).iterdir()) for folder in (JOURNAL, RECORD))  # and has lost its tape
    if not was_run and (stale := store.collect(())):
        log.info("%s: removed %d files of a creation that was broken off", store.root, stale)
    return begin(store, config, layout, first.fragment, show=show)


def begin(
    store: Store,
    config: configs.Config,
    layout: Layout,
    first: Callable[[Fragment], Array],
    algebra: Algebra = FLOAT32,
    show: Show = lambda done, total: None,
) -> RunCreated:
    """Split the model, write version 0 of every fragment, whose values `first` gives, and begin the tape."""
    fragments = split(layout, config.sync.num_fragments, config.sync.cut_tensors)
    files, digests, states, thetas = [], [], [], []
    for theta in map(first, fragments):
        zero = theta - theta
        values = Values(theta, zero, zero)
        files.append(store.put(algebra.parts(values)))
        digests.append(algebra.digest(theta))
        states.append(algebra.state_digest(values))
        thetas.append(algebra.sha256(theta))
        show(len(files), len(fragments))
    fact = RunCreated(
        run=config.run.name,
        rules=RULES,
        config=configs.encode(config),
        layout=encode_layout(layout),
        fragments=encode_fragments(fragments),
        files=tuple(files),
        digests=tuple(digests),
        states=tuple(states),
        thetas=tuple(thetas),
    )
    store.commit([msgspec.msgpack.encode(fact)], files)
    return fact
