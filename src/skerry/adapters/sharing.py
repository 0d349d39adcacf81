"""Which tensors share memory, numpy's or PyTorch's: what a run has twice can be set to one value only.

Ranges of memory tell most of them apart. Where ranges meet, numpy decides by the strides, for columns of one matrix lie
among each other and share nothing. No memory is read, so it may be a device's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WORK_MAX = 100_000  # steps of numpy's search: some milliseconds; what takes more is said to be shared
NEAR = 64  # tensors whose ranges meet are compared with so many before them


@dataclass(frozen=True)
class Memory:
    """Where the elements of a dense tensor lie."""

    device: str
    first: int  # address of element (0, 0, ...)
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    width: int  # bytes of an element

    @property
    def begin(self) -> int:
        return self.first + sum(min(0, (size - 1) * step) for size, step in zip(self.shape, self.strides, strict=True))

    @property
    def end(self) -> int:
        far = sum(max(0, (size - 1) * step) for size, step in zip(self.shape, self.strides, strict=True))
        return self.first + far + self.width

    @property
    def __array_interface__(self) -> dict[str, Any]:
        about = {"shape": self.shape, "strides": self.strides, "typestr": f"|V{self.width}"}
        return about | {"data": (self.first, True), "version": 3}

    @property
    def is_folded(self) -> bool:
        """Two of its elements are one."""
        reach = self.width
        for step, size in sorted((abs(step), size) for step, size in zip(self.strides, self.shape, strict=True)):
            if size > 1 and step < reach:
                return _is_folded(np.asarray(self))
            reach += (size - 1) * step
        return False


def memory_of(tensor: Any) -> Memory | None:
    """Of a numpy array, or of a PyTorch tensor what is here; None where there is none."""
    if isinstance(tensor, np.ndarray):
        at = ("cpu", tensor.ctypes.data, tensor.shape, tensor.strides, tensor.itemsize)
        return Memory(*at) if tensor.size else None
    if not hasattr(tensor, "data_ptr") or tensor.is_meta:
        return None
    here = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor
    width = here.element_size()
    strides = tuple(step * width for step in here.stride())
    return Memory(str(here.device), here.data_ptr(), tuple(here.shape), strides, width) if here.numel() else None


def shared(tensors: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of two of these tensors that share an element, or of one that has one twice; empty if there are none.

    Of those alone that have memory: neither sparse nor without a shape.
    """
    found = {name: memory for name, tensor in tensors.items() if (memory := memory_of(tensor)) is not None}
    for name, memory in found.items():
        if memory.is_folded:
            return (name,)
    names = list(found)
    return next(((names[min(pair)], names[max(pair)]) for pair in pairs(list(found.values()))), ())


def sharing(kind: str, tensors: Mapping[str, Any]) -> str:
    """Which of these share memory, in words; empty if none do."""
    match shared(tensors):
        case (name,):
            return f"{kind} {name} has elements that share memory, as if it were expanded"
        case (one, other):
            return f"{kind}s {one} and {other} share memory"
    return ""


def pairs(memories: Sequence[Memory]) -> Iterator[tuple[int, int]]:
    """The places in the sequence of two that share an element; of many at one place not every pair is found."""
    spans = sorted((m.device, m.begin, m.end, place) for place, m in enumerate(memories))
    near: list[tuple[str, int, int, int]] = []  # those before, whose ranges are not over
    for span in spans:
        device, begin, _, place = span
        near = [other for other in near if other[0] == device and other[2] > begin][-NEAR:]
        for other in near:
            if _share(np.asarray(memories[other[3]]), np.asarray(memories[place])):
                yield other[3], place
        near.append(span)


def _share(one: Any, other: Any) -> bool:
    try:
        return bool(np.shares_memory(one, other, max_work=WORK_MAX))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _is_folded(seen: Any) -> bool:
    """Its halves share an element, or the larger of them, which looks like the smaller, is folded itself."""
    if seen.size <= 1:
        return False
    axis = next(axis for axis, size in enumerate(seen.shape) if size > 1)
    head, tail = np.split(seen, [seen.shape[axis] // 2], axis)
    return _share(head, tail) or _is_folded(tail)
