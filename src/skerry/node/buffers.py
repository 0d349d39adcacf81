"""What a learner's buffers must be before a run keeps them: some of the run's own, of the same shape, and finite.

A learner may have the model in another dtype, so one float is as good as another: they are averaged in float64 anyway.
They come by value, not as drift: a running variance that is rounded, or changed by a late drift, could become negative.
What a file has beside them is named, and nobody reads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, deserialize

from skerry.algo.contents import Contents, Fixed

# A number is not finite where its bits, under this mask, are these; of every dtype of safetensors that has such ones.
_NOT_FINITE: dict[str, tuple[Any, int, int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000, 0x7F80_0000),
    "C64": (np.uint32, 0x7F80_0000, 0x7F80_0000),  # two float32
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),  # it has no infinity,
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),  # nor have those that follow
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
}

FLOATS = ("F64", "F32", "F16", "BF16")  # that stand for each other


class Given(NamedTuple):
    """A buffer as a learner has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def flaw_of(data: bytes, contents: Contents) -> str:
    """Why a learner's buffers are not kept; empty if they are."""
    try:
        ours = of_the_run(data, contents)
    except SafetensorError as error:
        return f"they cannot be read ({error})"
    for name, each in ours.items():
        if not _is_finite(each.dtype, each.data):
            return f"{name} holds values that are not finite"
    return "" if ours else strange_in(data, contents)


def of_the_run(data: bytes, contents: Contents) -> dict[str, Given]:
    """By name, those that are buffers of the run's model."""
    known = _known(contents)
    return {name: each for name, each in _read(data) if name in known and _stands_for(each, known[name])}


def strange_in(data: bytes, contents: Contents) -> str:
    """Which are no buffers of the run's model, as one phrase; empty if all of them are."""
    ours = of_the_run(data, contents)
    strange = sorted((name, each.dtype, each.shape) for name, each in _read(data) if name not in ours)
    if not strange:
        return ""
    (name, dtype, shape), more = strange[0], f", and {len(strange) - 1} more are none" if strange[1:] else ""
    told = f"{name} ({dtype} of shape {shape}) is no buffer of the run's model"
    if (there := _known(contents).get(name)) is not None:
        told = f"{name} is {dtype} of shape {shape}, and {there.dtype} of shape {there.shape} in the run's model"
    return told + more


def _stands_for(each: Given, there: Fixed) -> bool:
    is_alike = each.dtype == there.dtype or (each.dtype in FLOATS and there.dtype in FLOATS)
    return is_alike and each.shape == there.shape


def _known(contents: Contents) -> dict[str, Fixed]:
    return {fixed.name: fixed for fixed in contents.fixed if fixed.kind == "buffer"}


def _read(data: bytes) -> list[tuple[str, Given]]:
    told = deserialize(data)  # type: ignore[no-untyped-call]
    return [(name, Given(about["dtype"], tuple(about["shape"]), bytes(about["data"]))) for name, about in told]


def _is_finite(dtype: str, data: bytes) -> bool:
    if dtype not in _NOT_FINITE:
        return True
    unsigned, mask, bits = _NOT_FINITE[dtype]
    return not ((np.frombuffer(data, unsigned) & mask) == bits).any()
