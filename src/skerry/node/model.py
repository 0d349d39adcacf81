"""The model on disk: genesis in, fragment states as files, a named and hashed model out.

A fragment's file holds, as little-endian float32, its published values, the outer velocity and the downstream residual
of one version: they are written and read together, so that after a crash all three are of the same commit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from skerry import config as configs
from skerry.algo.fragments import F32, Fragment, Layout, Tensor, gather, layout_of, scatter, split
from skerry.core.facts import Fact, RunCreated
from skerry.core.state import RunState, fold
from skerry.store.files import StoreError
from skerry.store.store import Store

METADATA = "skerry"  # the one metadata key of our safetensors; several would be written in random order

_facts = msgspec.msgpack.Decoder(Fact | RunState)


class ModelError(Exception):
    """A model file nobody can start from: one line."""


class Values(NamedTuple):
    """One version of a fragment: published values, outer velocity, downstream residual (master = theta + error)."""

    theta: F32
    velocity: F32
    error: F32


def parts(values: Values) -> list[memoryview]:
    return [array.data.cast("B") for array in values]


def from_bytes(data: bytes, fragment: Fragment) -> Values:
    if len(data) != 12 * fragment.size:
        raise StoreError(f"fragment {fragment.index}: its file has {len(data)} bytes, expected {12 * fragment.size}")
    flat = np.frombuffer(data, np.float32).reshape(3, fragment.size)
    return Values(flat[0], flat[1], flat[2])


def digest_of(theta: F32) -> bytes:
    """What a learner checks after adopting: sha256 of the published values."""
    return hashlib.sha256(theta.data.cast("B")).digest()


# ---------------------------------------------------------------------------------------------- genesis


def read_genesis(path: Path) -> tuple[Layout, dict[str, npt.NDArray[Any]]]:
    """A safetensors file as layout and values; embeddings by its metadata, else by 'emb' in the name."""
    try:
        with safe_open(path, framework="numpy") as file:
            said = (file.metadata() or {}).get(METADATA)
            # order="C", not ascontiguousarray, which makes a scalar a vector of one
            arrays = {name: np.asarray(file.get_tensor(name), order="C") for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; write one with skerry.save_genesis(model, path)") from None
    except (OSError, SafetensorError, TypeError) as error:
        raise ModelError(f"{path}: is not a readable safetensors file ({error})") from None
    for name, array in arrays.items():
        if array.dtype != np.float32:
            raise ModelError(f"{path}: parameter {name} is {array.dtype}; a genesis holds float32")
        if not np.isfinite(array).all():
            raise ModelError(f"{path}: parameter {name} holds values that are not finite")
    embeddings = set(json.loads(said)["embeddings"]) if said else {n for n in arrays if "emb" in n.lower()}
    tensors = [Tensor(n, a.shape, "embedding" if n in embeddings else "other") for n, a in arrays.items()]
    try:
        return layout_of(tensors), arrays
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None


def create_run(
    store: Store, config: configs.Config, layout: Layout, arrays: Mapping[str, npt.NDArray[Any]], at: float
) -> None:
    """Write version 0 of every fragment and the run's first record."""
    files, digests = [], []
    for fragment in split(layout, config.sync.num_fragments):
        theta = gather(fragment, arrays)
        zero = np.zeros_like(theta)
        files.append(store.put(parts(Values(theta, zero, zero))))
        digests.append(digest_of(theta))
    fact = RunCreated(
        config.run.name, configs.encode(config), msgspec.json.encode(layout), tuple(files), tuple(digests), at
    )
    store.commit([msgspec.msgpack.encode(fact)])


# ---------------------------------------------------------------------------------------------- reading a run


def decode_fact(record: bytes) -> Fact | RunState:
    fact: Fact | RunState = _facts.decode(record)
    return fact


def state_of(store: Store) -> RunState:
    return fold(decode_fact(record) for record in store.records)


def layout_in(state: RunState) -> Layout:
    return msgspec.json.decode(state.created.layout, type=Layout)


def read_model(store: Store, state: RunState, before_close: bool = False) -> dict[str, F32]:
    """The master values by parameter name; `before_close` gives those before the run's last merge."""
    files = [fragment.file for fragment in state.fragments]
    if before_close and state.before_close:
        files = list(state.before_close)
    arrays: dict[str, F32] = {}
    for fragment, file in zip(split(layout_in(state), len(files)), files, strict=True):
        values = from_bytes(store.get(file), fragment)
        arrays |= scatter(fragment, values.theta + values.error)
    return arrays


def export(store: Store, state: RunState, path: Path) -> str:
    """Write the master as safetensors, loadable without Skerry; the file's sha256 in hex."""
    arrays = {name: np.asarray(array, order="C") for name, array in sorted(read_model(store, state).items())}
    embeddings = [t.name for t in layout_in(state).tensors if t.kind == "embedding"]
    versions = [f.version for f in state.fragments]
    about = {"run": state.created.run, "versions": versions, "embeddings": embeddings}
    metadata = json.dumps(about | {"config": json.loads(state.created.config)})
    temporary = path.with_name(path.name + ".tmp")
    save_file(arrays, temporary, {METADATA: metadata})
    temporary.replace(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()
