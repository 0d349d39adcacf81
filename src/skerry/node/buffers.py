"""What a learner's buffers must be before a run keeps them: some of the run's own, in the same form, and finite.

They come by value, not as drift: a running variance that is rounded, or changed by a late drift, could become negative.
What a file has beside them is named, and nobody reads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from skerry.algo.contents import Contents

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


def flaw_of(data: bytes, contents: Contents) -> str:
    """Why a learner's buffers are not kept; empty if they are."""
    try:
        ours = of_the_run(data, contents)
    except SafetensorError as error:
        return f"they cannot be read ({error})"
    for name, values in ours.items():
        if not _is_finite(_forms(contents)[name][0], values):
            return f"{name} holds values that are not finite"
    return "" if ours else strange_in(data, contents)


def of_the_run(data: bytes, contents: Contents) -> dict[str, bytes]:
    """By name, the bytes of those that are buffers of the run's model."""
    known = _forms(contents)
    return {name: bytes(about["data"]) for name, about in _read(data) if known.get(name) == _form(about)}


def strange_in(data: bytes, contents: Contents) -> str:
    """Which are no buffers of the run's model, as one phrase; empty if all of them are."""
    known = _forms(contents)
    strange = sorted((name, *_form(about)) for name, about in _read(data) if known.get(name) != _form(about))
    if not strange:
        return ""
    name, dtype, shape = strange[0]
    more = f", and {len(strange) - 1} more are none" if strange[1:] else ""
    return f"{name} ({dtype} of shape {shape}) is no buffer of the run's model{more}"


def _read(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    return deserialize(data)  # type: ignore[no-untyped-call, no-any-return]


def _forms(contents: Contents) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {fixed.name: (fixed.dtype, fixed.shape) for fixed in contents.fixed if fixed.kind == "buffer"}


def _form(about: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    return about["dtype"], tuple(about["shape"])


def _is_finite(dtype: str, data: bytes) -> bool:
    if dtype not in _NOT_FINITE:
        return True
    unsigned, mask, bits = _NOT_FINITE[dtype]
    return not ((np.frombuffer(data, unsigned) & mask) == bits).any()
