"""A model as named arrays: the least that a framework has to give, and a learner of numpy arrays built on it.

Whoever writes an adapter gives `Elements`, three ways to get at a stretch of one tensor, as float32 on the host; the
rest follows from it. `skerry.proof.conformance` checks such an adapter. PyTorch has a way of its own
(`adapters/torch.py`), because there copies to and from a device must not be waited for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

import numpy as np
import numpy.typing as npt

from skerry.adapters.learner import BaseLearner, Options
from skerry.adapters.sharing import sharing
from skerry.algo.fragments import F32, Fragment, Layout, Slot, Tensor, layout_of, parts
from skerry.errors import ModelError
from skerry.node.cells import Cell
from skerry.run.genesis import METADATA
from skerry.run.tensors import entry_of, head_of, written
from skerry.shell.learner import node_kind


class Elements(Protocol):
    """A model's tensors by name; a stretch of one is so many of its elements from `start` on, in C order."""

    def prepare(self, names: Iterable[str]) -> None:
        """These are about to be read or changed; `ModelError` where they are not what was attached."""

    def read(self, name: str, start: int, out: F32) -> None: ...
    def add(self, name: str, start: int, values: F32) -> None: ...
    def write(self, name: str, start: int, values: F32) -> None: ...
    def reset_optimizer(self) -> None:
        """The model was set to what it did not learn itself: whatever an optimizer remembers is of another model."""


class ByElements:
    """Carries fragments between such a model and cells, at once."""

    def __init__(self, elements: Elements) -> None:
        self.elements = elements
        self.reset_optimizer = elements.reset_optimizer

    def prepare(self, fragments: Sequence[Fragment]) -> None:
        self.elements.prepare({slot.name: None for fragment in fragments for slot in fragment.slots})

    def let_go(self) -> str:
        return ""

    def read(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        self._read(fragment, cell.load(fragment.size))
        cell.mark(mark)

    def add(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        flat = cell.load(fragment.size)
        for slot in fragment.slots:
            self.elements.add(slot.name, slot.start, _within(flat, slot))
        cell.mark(mark)

    def write(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        self._write(fragment, cell.load(fragment.size))
        cell.mark(mark)

    def blend(self, fragment: Fragment, cell: Cell, alpha: float, mark: int) -> None:
        towards, live = cell.load(fragment.size), np.empty(fragment.size, np.float32)
        self._read(fragment, live)
        live += np.float32(1 - alpha) * (towards - live)
        self._write(fragment, live)
        cell.mark(mark)

    def _read(self, fragment: Fragment, flat: F32) -> None:
        for slot in fragment.slots:
            self.elements.read(slot.name, slot.start, _within(flat, slot))
            flat[slot.offset + slot.size : slot.padded_stop] = 0.0

    def _write(self, fragment: Fragment, flat: F32) -> None:
        for slot in fragment.slots:
            self.elements.write(slot.name, slot.start, _within(flat, slot))


def _within(flat: F32, slot: Slot) -> F32:
    return flat[slot.offset : slot.offset + slot.size]


class NumpyElements:
    """Float32 arrays that are changed in place; the mapping may be given other arrays of the same names and shapes."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], on_reset: Callable[[], object] | None = None) -> None:
        self._arrays, self._on_reset = arrays, on_reset
        self._shapes = {name: array.shape for name, array in arrays.items()}
        self._seen = dict(arrays)

    def prepare(self, names: Iterable[str]) -> None:
        for name in names:
            array = self._arrays.get(name)
            if array is None:
                raise ModelError(f"array {name} is gone since the arrays were attached: put it back")
            if not isinstance(array, np.ndarray):
                raise ModelError(f"array {name} is a {type(array).__name__} by now: put a numpy array there")
            if why := changed(array.shape, self._shapes[name]) or unfit(array):
                raise ModelError(f"array {name} {why}, which it was not when it was attached: set values in place")
            if array is not self._seen[name]:
                self._look_well()

    def _look_well(self) -> None:
        """Some are others than they were, which must not share memory."""
        if why := sharing("array", self._arrays):
            raise ModelError(f"{why} since the arrays were attached: set values in place")
        self._seen = dict(self._arrays)

    def read(self, name: str, start: int, out: F32) -> None:
        for part, at in self._parts(name, start, out):
            np.copyto(out[at].reshape(part.shape), part)

    def add(self, name: str, start: int, values: F32) -> None:
        for part, at in self._parts(name, start, values):
            np.add(part, values[at].reshape(part.shape), out=part)

    def write(self, name: str, start: int, values: F32) -> None:
        for part, at in self._parts(name, start, values):
            np.copyto(part, values[at].reshape(part.shape))

    def reset_optimizer(self) -> None:
        if self._on_reset is not None:
            self._on_reset()

    def _parts(self, name: str, start: int, flat: F32) -> Iterable[tuple[Any, slice]]:
        array = np.asarray(self._arrays[name])  # a matrix's rows are matrices, and of a masked array all counts
        return parts(Slot(name, array.shape, "other", start, 0, flat.size), array)


class ArrayLearner(BaseLearner):
    """Makes a loop that trains numpy arrays a learner of a shared run; without a syncer's address it does nothing.

    The arrays are float32 and are changed in place, at `step` and while it joins. Those named in `embeddings` are
    averaged and not merged by direction. `on_reset` is called where an optimizer should forget its state, because the
    model was set to what it did not learn itself. `node`, `syncer` and the options are those of every learner.
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        syncer: str | None = None,
        *,
        embeddings: Iterable[str] = (),
        on_reset: Callable[[], object] | None = None,
        node: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(syncer, **options)
        if self._has_syncer:
            layout = layout_of_arrays(arrays, embeddings)
            with self._claimed(arrays):
                self._join(layout, ByElements(NumpyElements(arrays, on_reset)), node_kind(node))


def layout_of_arrays(arrays: Mapping[str, Any], embeddings: Iterable[str] = ()) -> Layout:
    """Of numpy arrays; what cannot take part is refused by name."""
    if not isinstance(arrays, Mapping):
        raise TypeError(f"arrays is a {type(arrays).__name__}: give a dict of numpy arrays by their names")
    averaged = set(embeddings)
    if unknown := sorted(averaged - arrays.keys()):
        raise ModelError(f"embeddings: there is no array {unknown[0]}")
    if not arrays:
        raise ModelError("there is no array: nothing to synchronise")
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"an array is named {name!r}: names are strings")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is a {type(array).__name__}: give a numpy array")
        if why := unfit(array):
            raise ModelError(f"array {name} {why}")
    if why := sharing("array", arrays):
        raise ModelError(f"{why}: give each a copy of its own")
    return layout_of(
        Tensor(name, tuple(array.shape), "embedding" if name in averaged else "other") for name, array in arrays.items()
    )


def changed(now: tuple[int, ...], then: tuple[int, ...]) -> str:
    """How the shape is another than it was; empty if it is not."""
    return "" if now == then else f"is of shape {now} instead of {then}"


def unfit(array: npt.NDArray[Any]) -> str:
    """Why no such array can take part; empty if it can."""
    if array.dtype != np.float32:
        return f"is {array.dtype}: make it float32"
    if not array.size:
        return f"is empty, of shape {array.shape}: leave it out"
    return "" if array.flags.writeable else "is read-only: give a copy of it"


def save_arrays(arrays: Mapping[str, npt.NDArray[Any]], path: str | Path, embeddings: Iterable[str] = ()) -> None:
    """Write these values as the first version of a run: `skerry syncer --genesis PATH`."""
    named = list(embeddings)
    layout_of_arrays(arrays, named)
    for name, array in arrays.items():
        if not np.isfinite(np.asarray(array)).all():
            raise ValueError(f"array {name} holds values that are not finite: no run begins with those")
    entries = [entry_of(name, "F32", array.shape) for name, array in arrays.items()]
    head, placed = head_of(entries, {METADATA: json.dumps({"embeddings": sorted(named)})})
    with written(Path(path)) as file:
        file.write(head)
        for name in placed:
            file.write(np.ascontiguousarray(arrays[name]).data)
