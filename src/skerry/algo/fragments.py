"""Splits a model into balanced fragments, and reads and writes one fragment as a flat float32 vector.

Rules that hold here: tensors are known by name and ordered by it; in a flat fragment every tensor starts at a
multiple of BLOCK and what lies between tensors is zero, so no codec block and no kernel row reaches from one
tensor into the next. Knows nothing of codecs, learners or torch.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

BLOCK = 128  # elements that share one codec scale
ROW = 4096  # elements of one kernel row, the first level of a two-level norm

Kind = Literal["embedding", "other"]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class Tensor(msgspec.Struct, frozen=True):
    """One named parameter; `kind` decides how it is merged."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "other"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Layout(msgspec.Struct, frozen=True):
    """Every tensor of a model, strictly ascending by name; equal layouts have equal digests."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("a layout needs at least one tensor")
        for tensor in self.tensors:
            if any(extent <= 0 for extent in tensor.shape):
                raise ValueError(f"{tensor.name}: shape {tensor.shape} has no elements")
        names = [tensor.name for tensor in self.tensors]
        for name, successor in pairwise(names):
            if name == successor:
                raise ValueError(f"{name}: named twice")
            if name > successor:
                raise ValueError(f"{successor}: out of name order")

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def param_count(self) -> int:
        return sum(tensor.size for tensor in self.tensors)


def encode_layout(layout: Layout) -> bytes:
    return msgspec.json.encode(layout)


def decode_layout(data: bytes) -> Layout:
    return msgspec.json.decode(data, type=Layout)


class Slot(msgspec.Struct, frozen=True):
    """Where one tensor lies in its flat fragment: elements [offset, offset + size)."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    offset: int
    size: int

    @property
    def padded_stop(self) -> int:
        return self.offset + padded(self.size)


@dataclass(frozen=True)
class Fragment:
    """Some tensors laid end to end, cut into rows of at most ROW elements that each lie within one slot."""

    index: int
    slots: tuple[Slot, ...]
    size: int  # padded length, a multiple of BLOCK
    row_start: I64 = field(compare=False, repr=False)
    row_stop: I64 = field(compare=False, repr=False)
    row_slot: I64 = field(compare=False, repr=False)

    @property
    def row_count(self) -> int:
        return len(self.row_start)


def layout_of(tensors: Iterable[Tensor]) -> Layout:
    """The layout of these tensors, given in any order."""
    return Layout(tuple(sorted(tensors, key=lambda tensor: tensor.name)))


def first_difference(ours: Layout, theirs: Layout) -> str | None:
    """One phrase about the first parameter, by name, on which two layouts differ; None when they agree."""
    here = {tensor.name: tensor for tensor in ours.tensors}
    there = {tensor.name: tensor for tensor in theirs.tensors}
    for name in sorted(here.keys() | there.keys()):
        if name not in there:
            return f"{name} is missing there"
        if name not in here:
            return f"{name} is missing here"
        if here[name].shape != there[name].shape:
            return f"{name}: shape {here[name].shape} here, {there[name].shape} there"
        if here[name].kind != there[name].kind:
            return f"{name}: kind {here[name].kind} here, {there[name].kind} there"
    return None


def split(layout: Layout, num_fragments: int) -> tuple[Fragment, ...]:
    """Balanced tensor fragmentation (paper, appendix C): largest tensor first, each into the emptiest bin.

    The largest fragment is at most 4/3 of what the best split would give (Graham 1969). Sizes are the padded
    ones, for those travel. There are never more fragments than tensors.
    """
    if num_fragments < 1:
        raise ValueError(f"num_fragments must be at least 1, not {num_fragments}")
    bins: list[list[Tensor]] = [[] for _ in range(min(num_fragments, len(layout.tensors)))]
    sizes = [0] * len(bins)
    for tensor in sorted(layout.tensors, key=lambda tensor: (-padded(tensor.size), tensor.name)):
        emptiest = sizes.index(min(sizes))
        bins[emptiest].append(tensor)
        sizes[emptiest] += padded(tensor.size)
    return tuple(_fragment(index, tensors) for index, tensors in enumerate(bins))


def gather(fragment: Fragment, arrays: Mapping[str, npt.NDArray[Any]], out: F32 | None = None) -> F32:
    """Copy the fragment's tensors into one flat vector, with zeros between them."""
    flat = np.empty(fragment.size, np.float32) if out is None else out
    for slot in fragment.slots:
        array = arrays[slot.name]
        if array.shape != slot.shape:
            raise ValueError(f"{slot.name}: shape {array.shape}, the layout says {slot.shape}")
        stop = slot.offset + slot.size
        np.copyto(flat[slot.offset : stop].reshape(slot.shape), array)
        flat[stop : slot.padded_stop] = 0.0
    return flat


def scatter(fragment: Fragment, flat: F32) -> dict[str, F32]:
    """The fragment's tensors as views into its flat vector."""
    return {slot.name: flat[slot.offset : slot.offset + slot.size].reshape(slot.shape) for slot in fragment.slots}


def padded(size: int) -> int:
    """Smallest multiple of BLOCK that holds `size` elements."""
    return -(-size // BLOCK) * BLOCK


def _fragment(index: int, tensors: list[Tensor]) -> Fragment:
    slots: list[Slot] = []
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        slots.append(Slot(tensor.name, tensor.shape, tensor.kind, offset, tensor.size))
        offset = slots[-1].padded_stop
    starts = [np.arange(slot.offset, slot.padded_stop, ROW, dtype=np.int64) for slot in slots]
    row_slot = np.repeat(np.arange(len(slots), dtype=np.int64), [len(rows) for rows in starts])
    row_start = np.concatenate(starts)
    slot_stop = np.array([slot.padded_stop for slot in slots], np.int64)
    row_stop = np.minimum(row_start + ROW, slot_stop[row_slot])
    for rows in (row_start, row_stop, row_slot):
        rows.flags.writeable = False
    return Fragment(index, tuple(slots), offset, row_start, row_stop, row_slot)
