"""A run's model out of its directory: named, hashed, and loadable without Skerry.

A fragment at a time: its newest version comes from a checkpoint and the journal (`node/versions.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from skerry.algo.fragments import F32, decode_layout, scatter
from skerry.core.state import RunState
from skerry.node import versions
from skerry.run.facts import fragments_of
from skerry.run.genesis import METADATA
from skerry.store.store import Store


def read_model(store: Store, state: RunState, before_close: bool = False) -> dict[str, F32]:
    """The master values by parameter name; `before_close` gives those before the run's last merge."""
    wanted = [fragment.version for fragment in state.fragments]
    if before_close and state.before_close:
        wanted = list(state.before_close)
    arrays = {t.name: np.empty(t.shape, np.float32) for t in decode_layout(state.created.layout).tensors}
    for fragment, at, version in zip(fragments_of(state.created), state.fragments, wanted, strict=True):
        values = versions.load(store, fragment, at, version=version)
        scatter(fragment, values.theta + values.error, arrays)
    return arrays


def packed(arrays: Mapping[str, F32], state: RunState, more: Mapping[str, Any] | None = None) -> bytes:
    """The model as a safetensors file, loadable without Skerry."""
    tensors = {name: np.asarray(array, order="C") for name, array in sorted(arrays.items())}
    embeddings = [t.name for t in decode_layout(state.created.layout).tensors if t.kind == "embedding"]
    versions = [f.version for f in state.fragments]
    about = {"run": state.created.run, "versions": versions, "embeddings": embeddings} | dict(more or {})
    return save(tensors, {METADATA: json.dumps(about | {"config": json.loads(state.created.config)})})


def write_model(store: Store, state: RunState, path: Path) -> str:
    """Write the master as one file, whole or not at all; its sha256 in hex."""
    data = packed(read_model(store, state), state)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
    return hashlib.sha256(data).hexdigest()
