"""Splits a model into balanced fragments, and reads and writes one fragment as a flat float32 vector.

A fragment holds whole tensors and slices of tensors, each in a *slot*. A slice is a run of a tensor's elements in C
order: whole rows wherever a row is small against a fragment.

Rules that hold here: tensors are known by name and ordered by it; in a flat fragment every slot starts at a multiple of
BLOCK and what lies between slots is zero, so no codec block and no kernel row reaches from one slot into the next.
Knows nothing of codecs or learners; arrays of any kind that can be indexed are cut alike, torch's too.
"""

import hashlib
import heapq
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

BLOCK = 128  # elements that share one codec scale
ROW = 4096  # elements of one kernel row, the first level of a two-level norm
EVEN = 1.1  # largest fragment over the mean, at most, where tensors may be cut and the mean is 64k elements or more
FINE = 1 / 64  # of a fragment: rows up to this size stay whole where a tensor is cut
BY_SIZE = (24, 12, 6)  # how many fragments, where that follows from the model's size
DIMENSIONS_MAX = 64  # of a tensor, as numpy and PyTorch have it
LARGE = 1 << 19  # parameters: half of what it costs a syncer to merge a smaller fragment is no arithmetic

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
            check_dimensions(tensor.name, tensor.shape)
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


def check_dimensions(name: str, shape: tuple[int, ...]) -> None:
    """Of any tensor of a model, be it trained or not."""
    if len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"{name}: has {len(shape)} dimensions, and at most {DIMENSIONS_MAX} can be")


def encode_layout(layout: Layout) -> bytes:
    return msgspec.json.encode(layout)


def decode_layout(data: bytes) -> Layout:
    return msgspec.json.decode(data, type=Layout)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A slot as a run's fragment table has it: elements [start, start + size) of a tensor lie at `offset`."""

    tensor: str
    start: int
    size: int
    offset: int


class Slot(msgspec.Struct, frozen=True):
    """Where elements [start, start + size) of a tensor lie in their flat fragment: at [offset, offset + size).

    Name, shape and kind are the whole tensor's.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    start: int
    offset: int
    size: int

    @property
    def padded_stop(self) -> int:
        return self.offset + padded(self.size)


@dataclass(frozen=True)
class Fragment:
    """Some slots laid end to end, cut into rows of at most ROW elements that each lie within one slot."""

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


def first_difference(
    ours: Layout, theirs: Layout, frozen_here: Container[str] = (), frozen_there: Container[str] = ()
) -> str | None:
    """One phrase about the first parameter, by name, on which two layouts differ; None when they agree.

    A layout has what is trained alone: what else a side is known to have, it has not lost but frozen.
    """
    here = {tensor.name: tensor for tensor in ours.tensors}
    there = {tensor.name: tensor for tensor in theirs.tensors}
    for name in sorted(here.keys() | there.keys()):
        if name not in there:
            return f"{name} is trained here, and frozen there" if name in frozen_there else f"{name} is missing there"
        if name not in here:
            return f"{name} is frozen here, and trained there" if name in frozen_here else f"{name} is missing here"
        if here[name].shape != there[name].shape:
            return f"{name}: shape {here[name].shape} here, {there[name].shape} there"
        if here[name].kind != there[name].kind:
            return f"{name}: kind {here[name].kind} here, {there[name].kind} there"
    return None


def split(layout: Layout, num_fragments: int, cut: bool = True) -> tuple[Fragment, ...]:
    """Balanced tensor fragmentation (paper, appendix C): largest first, each into the emptiest fragment.

    With `cut`, what would make a fragment larger than it may be is cut, and nothing else is. A tensor that is too large
    for any fragment gives slices of a fragment's size and a rest, which is placed like a tensor; what fits into no
    fragment any more is spread over the fewest that have room for it. Without, tensors stay whole, as in the paper, and
    there are never more fragments than tensors.

    Sizes are the padded ones, for those travel. A run is split once, at its genesis, and keeps the table on its tape:
    another way to split changes no run that has begun.
    """
    count = fragment_count(layout, num_fragments, cut)
    wholes = [Slice(tensor, 0, tensor.size) for tensor in layout.tensors]
    if not cut:
        filled = _filled(wholes, count, math.inf, 0.0)
    else:
        mean = sum(padded(tensor.size) for tensor in layout.tensors) / count
        most = max((EVEN - 2 * FINE) * mean, padded(math.ceil(mean)))  # whole rows may make what is cut a little larger
        filled = _filled(_no_larger(wholes, count, mean, most), count, most, FINE * mean)
    return tuple(_fragment(index, _laid_out(slices)) for index, slices in enumerate(filled))


def fragment_count(layout: Layout, num_fragments: int, cut: bool = True) -> int:
    """How many fragments a model is split into."""
    return min(fragments_wanted(layout.param_count, num_fragments), fragments_max(layout, cut))


def fragments_wanted(parameters: float, num_fragments: int) -> int:
    """The number asked for; for 0 the first BY_SIZE with LARGE fragments, or else the last."""
    if num_fragments < 0:
        raise ValueError(f"num_fragments must be 0, which is by size, or more, not {num_fragments}")
    return num_fragments or next((count for count in BY_SIZE if parameters >= count * LARGE), BY_SIZE[-1])


def fragments_max(layout: Layout, cut: bool = True) -> int:
    """How many fragments a model can be split into."""
    return sum(padded(tensor.size) for tensor in layout.tensors) // BLOCK if cut else len(layout.tensors)


def encode_fragments(fragments: Iterable[Fragment]) -> bytes:
    """The fragment table of a run."""
    return msgspec.json.encode([[Place(s.name, s.start, s.size, s.offset) for s in f.slots] for f in fragments])


def decode_table(data: bytes) -> tuple[tuple[Place, ...], ...]:
    return msgspec.json.decode(data, type=tuple[tuple[Place, ...], ...])


def decode_fragments(data: bytes, layout: Layout) -> tuple[Fragment, ...]:
    """The fragments of a table; ValueError unless it holds every element of this layout once."""
    table = decode_table(data)
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    _check_whole(tensors, [place for places in table for place in places])
    return tuple(
        _fragment(index, [_slot(tensors[p.tensor], p.start, p.size, p.offset) for p in places])
        for index, places in enumerate(table)
    )


def gather(fragment: Fragment, arrays: Mapping[str, npt.NDArray[Any]], out: F32 | None = None) -> F32:
    """Copy what the fragment holds of these tensors into one flat vector, with zeros between the slots."""
    flat = np.empty(fragment.size, np.float32) if out is None else out
    for slot in fragment.slots:
        for part, at in _parts_checked(slot, arrays):
            np.copyto(flat[at].reshape(part.shape), part)
        flat[slot.offset + slot.size : slot.padded_stop] = 0.0
    return flat


def scatter(fragment: Fragment, flat: F32, arrays: Mapping[str, F32]) -> None:
    """Copy a flat vector to where its elements belong in these whole tensors."""
    for slot in fragment.slots:
        for part, at in _parts_checked(slot, arrays):
            np.copyto(part, flat[at].reshape(part.shape))


def parts(slot: Slot, tensor: Any) -> Iterator[tuple[Any, slice]]:
    """Views of a tensor, numpy's or torch's, that are what the slot holds, each with its place in the flat fragment."""
    at = slot.offset
    for view in _views(tensor, slot.start, slot.start + slot.size):
        stop = at + math.prod(view.shape)
        yield view, slice(at, stop)
        at = stop


def padded(size: int) -> int:
    """Smallest multiple of BLOCK that holds `size` elements."""
    return -(-size // BLOCK) * BLOCK


# ---------------------------------------------------------------------------------------------- arrays


def _parts_checked(slot: Slot, arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[Any, slice]]:
    array = arrays[slot.name]
    if array.shape != slot.shape:
        raise ValueError(f"{slot.name}: shape {array.shape}, the layout says {slot.shape}")
    return parts(slot, array)


def _views(array: Any, start: int, stop: int) -> Iterator[Any]:
    """Views that hold elements [start, stop) in order, whether they lie together in memory or not.

    One where the run is of whole rows; where it is not, a part of a row before them and one behind.
    """
    if stop - start == math.prod(array.shape):
        yield array
    elif len(array.shape) == 1:
        yield array[start:stop]
    else:
        row = math.prod(array.shape[1:])
        first, last = -(-start // row), stop // row  # the whole rows
        if last < first:
            yield from _views(array[last], start - last * row, stop - last * row)
            return
        if start < first * row:
            yield from _views(array[first - 1], start - (first - 1) * row, row)
        if first < last:
            yield array[first:last]
        if last * row < stop:
            yield from _views(array[last], 0, stop - last * row)


# ---------------------------------------------------------------------------------------------- splitting


class Slice(NamedTuple):
    """Elements [start, start + size) of a tensor."""

    tensor: Tensor
    start: int
    size: int


def _no_larger(wholes: Iterable[Slice], count: int, mean: float, most: float) -> list[Slice]:
    """None larger than `most`, and no fewer than `count`, so that no fragment is left empty."""
    slices: list[Slice] = []
    for whole in wholes:
        full = max(0, math.ceil((padded(whole.size) - most) / mean))
        pieces = _cut(whole, [mean] * full + [padded(whole.size) - full * mean], FINE * mean)
        slices += [piece for piece in pieces if piece.size]
    slices.sort(key=_largest_first)
    missing = max(0, count - len(slices))
    return [half for each in slices[:missing] for half in _cut(each, [1, 1], FINE * mean)] + slices[missing:]


def _filled(slices: Iterable[Slice], count: int, most: float, fine: float) -> list[list[Slice]]:
    """Each into the emptiest fragment, or, where that has no room, over the fewest that have, to the same level."""
    filled: list[list[Slice]] = [[] for _ in range(count)]
    emptiest = [(0, index) for index in range(count)]  # a heap of sizes
    for each in sorted(slices, key=_largest_first):
        taken = [heapq.heappop(emptiest)]
        room = most - taken[0][0]
        while room < padded(each.size) and emptiest:
            taken.append(heapq.heappop(emptiest))
            room += most - taken[-1][0]
        level = (each.size + sum(size for size, _ in taken)) / len(taken)
        pieces = _cut(each, [max(0.0, level - size) for size, _ in taken], fine)
        for (size, index), piece in zip(taken, pieces, strict=True):
            if piece.size:
                filled[index].append(piece)
            heapq.heappush(emptiest, (size + padded(piece.size), index))
    return filled


def _largest_first(each: Slice) -> tuple[int, str, int]:
    return -padded(each.size), each.tensor.name, each.start


def _cut(each: Slice, shares: Sequence[float], fine: float) -> list[Slice]:
    """As many slices as shares, in these proportions as far as the tensor's grain allows; some may be empty."""
    stop, grain = each.start + each.size, _grain(each.tensor, fine)
    unit = each.size / sum(shares)
    ends = [each.start + unit * share for share in accumulate(shares[:-1])]
    edges = [each.start, *(min(stop, max(each.start, math.floor(end / grain + 0.5) * grain)) for end in ends), stop]
    return [Slice(each.tensor, low, high - low) for low, high in pairwise(edges)]


def _grain(tensor: Tensor, fine: float) -> int:
    """What is not cut apart: a row of the first dimension whose rows are no larger than `fine`, or else a block."""
    rows = (math.prod(tensor.shape[axis:]) for axis in range(1, len(tensor.shape)))
    return next((row for row in rows if row <= fine), BLOCK)


def _laid_out(slices: Iterable[Slice]) -> list[Slot]:
    """Slots for the slices, end to end, by name."""
    slots: list[Slot] = []
    offset = 0
    for tensor, start, size in sorted(slices, key=lambda each: (each.tensor.name, each.start)):
        slots.append(_slot(tensor, start, size, offset))
        offset = slots[-1].padded_stop
    return slots


def _slot(tensor: Tensor, start: int, size: int, offset: int) -> Slot:
    return Slot(tensor.name, tensor.shape, tensor.kind, start, offset, size)


def _check_whole(tensors: Mapping[str, Tensor], places: Iterable[Place]) -> None:
    """The places of each tensor follow each other without a gap, from its first element to its last."""
    ends = dict.fromkeys(tensors, 0)
    for place in sorted(places, key=lambda place: (place.tensor, place.start)):
        if place.tensor not in tensors:
            raise ValueError(f"{place.tensor}: is in the fragment table, but not in the layout")
        if place.size < 1 or place.start != ends[place.tensor]:
            stop = place.start + place.size
            raise ValueError(f"{place.tensor}: elements {place.start} to {stop} follow the first {ends[place.tensor]}")
        ends[place.tensor] += place.size
    for name, tensor in tensors.items():
        if ends[name] != tensor.size:
            raise ValueError(f"{name}: the fragment table holds {ends[name]} of its {tensor.size} elements")


def _fragment(index: int, slots: list[Slot]) -> Fragment:
    """The slots follow each other without a gap, each on a block of its own."""
    stops = [0, *(slot.padded_stop for slot in slots)]
    if not slots or [slot.offset for slot in slots] != stops[:-1]:
        raise ValueError(f"fragment {index}: its slots do not lie end to end")
    starts = [np.arange(slot.offset, slot.padded_stop, ROW, dtype=np.int64) for slot in slots]
    row_slot = np.repeat(np.arange(len(slots), dtype=np.int64), [len(rows) for rows in starts])
    row_start = np.concatenate(starts)
    slot_stop = np.array([slot.padded_stop for slot in slots], np.int64)
    row_stop = np.minimum(row_start + ROW, slot_stop[row_slot])
    for rows in (row_start, row_stop, row_slot):
        rows.flags.writeable = False
    return Fragment(index, tuple(slots), stops[-1], row_start, row_stop, row_slot)
