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


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A slot as a run's fragment table has it: elements [start, start + size) of a tensor lie at `offset`.

    Every tensor lies in one slot, whole. That a place has a `start` lets a later version cut one into several.
    """

    tensor: str
    start: int
    size: int
    offset: int


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
    ones, for those travel. There are never more fragments than tensors. A run is split once, at its genesis, and
    keeps the table on its tape: another way to split, some day, changes no run that has begun.
    """
    if num_fragments < 1:
        raise ValueError(f"num_fragments must be at least 1, not {num_fragments}")
    bins: list[list[Tensor]] = [[] for _ in range(min(num_fragments, len(layout.tensors)))]
    sizes = [0] * len(bins)
    for tensor in sorted(layout.tensors, key=lambda tensor: (-padded(tensor.size), tensor.name)):
        emptiest = sizes.index(min(sizes))
        bins[emptiest].append(tensor)
        sizes[emptiest] += padded(tensor.size)
    return tuple(_fragment(index, _laid_out(tensors)) for index, tensors in enumerate(bins))


def encode_fragments(fragments: Iterable[Fragment]) -> bytes:
    """The fragment table of a run."""
    return msgspec.json.encode([[Place(s.name, 0, s.size, s.offset) for s in f.slots] for f in fragments])


def decode_fragments(data: bytes, layout: Layout) -> tuple[Fragment, ...]:
    """The fragments of a table; ValueError if it is not one of this layout."""
    table = msgspec.json.decode(data, type=tuple[tuple[Place, ...], ...])
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    if sorted(place.tensor for places in table for place in places) != list(tensors):
        raise ValueError("the fragment table does not hold every tensor of the layout once")
    return tuple(
        _fragment(index, [_slot(tensors[place.tensor], place) for place in places])
        for index, places in enumerate(table)
    )


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


def _laid_out(tensors: list[Tensor]) -> list[Slot]:
    """The tensors end to end, by name."""
    slots: list[Slot] = []
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        slots.append(Slot(tensor.name, tensor.shape, tensor.kind, offset, tensor.size))
        offset = slots[-1].padded_stop
    return slots


def _slot(tensor: Tensor, place: Place) -> Slot:
    if (place.start, place.size) != (0, tensor.size):
        raise ValueError(f"{tensor.name}: elements {place.start} to {place.start + place.size} of {tensor.size}")
    return Slot(tensor.name, tensor.shape, tensor.kind, place.offset, tensor.size)


def _fragment(index: int, slots: list[Slot]) -> Fragment:
    """The slots follow each other without a gap, each on a block of its own."""
    stops = [0, *(slot.padded_stop for slot in slots)]
    if not slots or [slot.offset for slot in slots] != stops[:-1]:
        raise ValueError(f"fragment {index}: its tensors do not lie end to end")
    starts = [np.arange(slot.offset, slot.padded_stop, ROW, dtype=np.int64) for slot in slots]
    row_slot = np.repeat(np.arange(len(slots), dtype=np.int64), [len(rows) for rows in starts])
    row_start = np.concatenate(starts)
    slot_stop = np.array([slot.padded_stop for slot in slots], np.int64)
    row_stop = np.minimum(row_start + ROW, slot_stop[row_slot])
    for rows in (row_start, row_stop, row_slot):
        rows.flags.writeable = False
    return Fragment(index, tuple(slots), stops[-1], row_start, row_stop, row_slot)
