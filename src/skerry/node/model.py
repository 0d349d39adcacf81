"""The model on disk: genesis in, fragment states as files, a named and hashed model out.

A fragment's file holds, as little-endian float32, its published values, the outer velocity and the downstream residual
of one version: they are written and read together, so that after a crash all three are of the same commit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from skerry import config as configs
from skerry.algo.fragments import F32, Layout, Tensor, gather, layout_of, scatter, split
from skerry.core.facts import Fact, RunCreated
from skerry.core.state import RunState, fold
from skerry.node.algebra import FLOAT32, Values
from skerry.store.store import Store

METADATA = "skerry"  # the one metadata key of our safetensors; several would be written in random order

_facts = msgspec.msgpack.Decoder(Fact | RunState)


class ModelError(Exception):
    """A model file nobody can start from: one line."""


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
        files.append(store.put(FLOAT32.parts(Values(theta, zero, zero))))
        digests.append(FLOAT32.digest(theta))
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
        values = FLOAT32.load(store.get(file), fragment)
        arrays |= scatter(fragment, values.theta + values.error)
    return arrays


def packed(arrays: Mapping[str, F32], state: RunState, more: Mapping[str, Any] | None = None) -> bytes:
    """The model as a safetensors file, loadable without Skerry."""
    tensors = {name: np.asarray(array, order="C") for name, array in sorted(arrays.items())}
    embeddings = [t.name for t in layout_in(state).tensors if t.kind == "embedding"]
    versions = [f.version for f in state.fragments]
    about = {"run": state.created.run, "versions": versions, "embeddings": embeddings} | dict(more or {})
    return save(tensors, {METADATA: json.dumps(about | {"config": json.loads(state.created.config)})})


def export(store: Store, state: RunState, path: Path) -> str:
    """Write the master as one file, whole or not at all; its sha256 in hex."""
    data = packed(read_model(store, state), state)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
    return hashlib.sha256(data).hexdigest()
