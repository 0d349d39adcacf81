"""Genesis: the first values of a run, from a safetensors file, and the record that begins a tape.

The values never come from whoever happens to be alive.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from skerry import config as configs
from skerry.algo.fragments import Fragment, Layout, Tensor, encode_fragments, encode_layout, gather, layout_of, split
from skerry.core.facts import RULES, RunCreated
from skerry.errors import ModelError
from skerry.node.algebra import FLOAT32, Algebra, Array, Values
from skerry.store.store import Store

AT_ONCE = 1 << 22  # values that are looked at together
METADATA = "skerry"  # the one metadata key of our safetensors; several would be written in random order


def read_genesis(path: Path) -> tuple[Layout, dict[str, npt.NDArray[Any]]]:
    """A safetensors file as layout and values, which stay in the file until they are used."""
    with _opened(path) as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        layout = _layout(path, file, {name: tuple(file.get_slice(name).get_shape()) for name in kinds})
    for name, kind in kinds.items():
        if kind != "F32":
            raise ModelError(f"{path}: parameter {name} is {kind}; a genesis holds float32 (F32)")
    arrays = _mapped(path, layout)
    for name, array in arrays.items():
        flat = array.reshape(-1)
        if not all(np.isfinite(flat[at : at + AT_ONCE]).all() for at in range(0, flat.size, AT_ONCE)):
            raise ModelError(f"{path}: parameter {name} holds values that are not finite")
    return layout, arrays


def _mapped(path: Path, layout: Layout) -> dict[str, npt.NDArray[Any]]:
    """Views of the file; the library of safetensors, which has checked it, would copy each tensor."""
    whole = np.memmap(path, np.uint8, mode="r")
    begins = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    told = json.loads(whole[8:begins].tobytes())
    return {
        tensor.name: whole[begins + told[tensor.name]["data_offsets"][0] :][: 4 * tensor.size]
        .view(np.float32)
        .reshape(tensor.shape)
        for tensor in layout.tensors
    }


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


def create_run(
    store: Store, config: configs.Config, layout: Layout, arrays: Mapping[str, npt.NDArray[Any]]
) -> RunCreated:
    """Begin a run with these values."""
    return begin(store, config, layout, lambda fragment: gather(fragment, arrays))


def begin(
    store: Store,
    config: configs.Config,
    layout: Layout,
    first: Callable[[Fragment], Array],
    algebra: Algebra = FLOAT32,
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
