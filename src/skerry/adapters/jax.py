"""JAX: a learner around a pytree of parameters.

    learner = skerry.jax.Learner(params)
    params = learner.params
    while learner.is_running:
        params, state, loss = train_step(params, state, batch)
        params = learner.step(params, tokens=batch.size)
        if learner.was_reset:
            state = optimizer.init(params)

Arrays are immutable there, so a step takes parameters and gives parameters. Leaves are known by their path, with dots
between its parts. They are float32, on this process's devices, sharded as they please: what is read goes to the host a
shard at a time, and what comes back has the sharding of what it is added to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from skerry.adapters.arrays import ByElements, changed, save_arrays
from skerry.adapters.learner import BaseLearner, Options
from skerry.algo.fragments import F32, Layout, Slot, Tensor, layout_of, parts
from skerry.errors import ModelError
from skerry.shell.learner import node_kind

PyTree = Any


class JaxElements:
    """The leaves of the newest parameters by name; a change makes another array in place of the one there was."""

    def __init__(self, params: PyTree) -> None:
        self.leaves: dict[str, jax.Array] = {}
        self.was_reset = False
        self._attached = {name: array.shape for name, array in named(params).items()}
        self.hold(params)

    def hold(self, params: PyTree) -> None:
        """The parameters as the loop has them now."""
        self.leaves, self._tree = named(params), jax.tree.structure(params)
        if self._attached.keys() != self.leaves.keys():
            name = min(self._attached.keys() ^ self.leaves.keys())
            is_gone = name in self._attached
            what = "gone" if is_gone else "there"
            raise ModelError(
                f"parameter {name} is {what} since the parameters were attached: step with the same pytree"
            )

    @property
    def params(self) -> PyTree:
        return jax.tree.unflatten(self._tree, list(self.leaves.values()))

    def prepare(self, names: Iterable[str]) -> None:
        for name in names:
            array = self.leaves[name]
            if why := changed(array.shape, self._attached[name]) or _unfit(array):
                raise ModelError(
                    f"parameter {name} {why}, which it was not when it was attached: step with the same pytree"
                )

    def read(self, name: str, start: int, out: F32) -> None:
        array = self.leaves[name]
        whole = np.empty(array.shape, np.float32)  # on the host; only what the stretch needs is filled
        for index, shard in _shards(array, start, start + out.size):
            whole[index] = np.asarray(shard)
        for part, at in _parts(name, start, out.size, whole):
            np.copyto(out[at].reshape(part.shape), part)

    def add(self, name: str, start: int, values: F32) -> None:
        self.leaves[name] = self.leaves[name] + self._placed(name, start, values)

    def write(self, name: str, start: int, values: F32) -> None:
        array = self.leaves[name]
        if values.size == array.size:
            self.leaves[name] = self._placed(name, start, values)
        else:
            is_within = self._placed(name, start, np.ones_like(values)) != 0
            self.leaves[name] = jnp.where(is_within, self._placed(name, start, values), array)

    def reset_optimizer(self) -> None:
        self.was_reset = True

    def _placed(self, name: str, start: int, values: F32) -> jax.Array:
        """The values where they belong in an array like this one, with zeros around them."""
        array = self.leaves[name]
        whole = np.zeros(array.shape, np.float32)
        for part, at in _parts(name, start, values.size, whole):
            np.copyto(part, values[at].reshape(part.shape))
        return jax.device_put(whole, array.sharding)


class Learner(BaseLearner):
    """Makes a JAX loop a learner of a shared run; without a syncer's address it does nothing.

    `params` is a pytree of float32 arrays. After joining `learner.params` is the run's model. Embeddings, which are
    averaged and not merged by direction, are leaves whose path has "embed" in it, or those named in `embeddings`.
    `node`, `syncer` and the options are those of every learner: see `skerry.adapters.learner.BaseLearner`.
    """

    def __init__(
        self,
        params: PyTree,
        syncer: str | None = None,
        *,
        embeddings: Iterable[str] | None = None,
        node: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(syncer, **options)
        self._params = params
        self._elements: JaxElements | None = None
        if self._has_syncer:
            layout = layout_of_params(params, embeddings)
            self._elements = JaxElements(params)
            self._join(layout, ByElements(self._elements), node_kind(node))

    @property
    def params(self) -> PyTree:
        """The parameters as they are now: after joining the run's, after a step what the step gave."""
        return self._params if self._elements is None else self._elements.params

    @property
    def was_reset(self) -> bool:
        """At the last step the model was set to what it did not learn itself: begin the optimizer's state anew."""
        return self._elements is not None and self._elements.was_reset

    def step(  # type: ignore[override]
        self, params: PyTree, tokens: int, loss: float = 0.0, grad_norm: float = 0.0
    ) -> PyTree:
        """Call after each step, with its parameters; go on with what it returns, while `is_running`."""
        self._params = params
        if self._elements is not None:
            self._elements.hold(params)
            self._elements.was_reset = False
        super().step(tokens, loss, grad_norm)
        return self.params


def layout_of_params(params: PyTree, embeddings: Iterable[str] | None = None) -> Layout:
    leaves = named(params)
    averaged = {name for name in leaves if "embed" in name.lower()} if embeddings is None else set(embeddings)
    if unknown := sorted(averaged - leaves.keys()):
        raise ModelError(f"embeddings: there is no parameter {unknown[0]}")
    if not leaves:
        raise ModelError("the pytree has no leaf: nothing to synchronise")
    for name, array in leaves.items():
        if why := _unfit(array):
            raise ModelError(f"parameter {name} {why}")
    return layout_of(
        Tensor(name, tuple(array.shape), "embedding" if name in averaged else "other") for name, array in leaves.items()
    )


def named(params: PyTree) -> dict[str, jax.Array]:
    """The leaves by their paths, like "layers.0.kernel", in the tree's order."""
    found: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = ".".join(_word(key) for key in path) or "params"
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"{name} is a {type(leaf).__name__}: give arrays of JAX, with jnp.asarray")
        if name in found:
            raise ModelError(f"two parameters are called {name}: name them apart")
        found[name] = leaf
    return found


def save_genesis(params: PyTree, path: str | Path, embeddings: Iterable[str] | None = None) -> None:
    """Write these parameters as the first version of a run: `skerry syncer --genesis PATH`."""
    layout = layout_of_params(params, embeddings)
    averaged = [tensor.name for tensor in layout.tensors if tensor.kind == "embedding"]
    save_arrays({name: np.array(array) for name, array in named(params).items()}, path, averaged)


def _word(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _unfit(array: jax.Array) -> str:
    if array.dtype != jnp.float32:
        return f"is {array.dtype}: keep parameters in float32, and compute in bfloat16"
    if not array.size:
        return f"is empty, of shape {array.shape}: leave it out"
    if not array.is_fully_addressable:
        return "is spread over several processes: a learner is one process of JAX, with any number of devices"
    return ""


def _parts(name: str, start: int, count: int, whole: F32) -> Iterator[tuple[Any, slice]]:
    return parts(Slot(name, whole.shape, "other", start, 0, count), whole)


def _shards(array: jax.Array, start: int, stop: int) -> Iterator[tuple[Any, jax.Array]]:
    """What the devices hold of it, each element once, as far as elements [start, stop) may lie in it."""
    row = array.size // array.shape[0] if array.ndim else 1
    for shard in array.addressable_shards:
        rows = shard.index[0] if array.ndim else slice(None)
        first, last, _ = rows.indices(array.shape[0] if array.ndim else 1)
        if shard.replica_id == 0 and first * row < stop and start < last * row:
            yield shard.index, shard.data
