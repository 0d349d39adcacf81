"""What a learner's buffers must be before a run keeps them: some of the run's own, of the same shape, and finite.

A learner may have the model in another dtype, so one float is as good as another if the run's dtype can hold its
values: they are averaged in float64 anyway. They come by value, not as drift: a running variance that is rounded, or
changed by a late drift, could become negative. What a file has beside them is named and not kept.

A learner may say anything, so what it says is looked at once, and far more names than the run has buffers are not: a
hundred thousand take seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from skerry.algo.contents import Contents, Fixed

FLOATS = ("F64", "F32", "F16", "BF16")  # that stand for each other
# The largest number of those that are narrower than what a learner may have them as.
LARGEST = {"F32": float(np.finfo(np.float32).max), "F16": 65504.0, "BF16": 2.0**128 - 2.0**120}

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

NAMES_SPARE = 256  # that the run does not know


class Given(NamedTuple):
    """A buffer as a learner has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Gift(NamedTuple):
    """What came of a learner's buffers."""

    data: bytes  # a safetensors file of those that are kept; empty if none is
    flaw: str = ""  # why none is
    strange: str = ""  # which are no buffers of the run's model, as one phrase


def looked_at(data: bytes, contents: Contents) -> Gift:
    known, names = _known(contents), _names_in(data)
    if names > len(known) + NAMES_SPARE:
        return Gift(b"", f"they are {names} or so, and the run's model has {len(known)}")
    try:
        given = _read(data)
    except SafetensorError as error:
        return Gift(b"", f"they cannot be read ({error})")
    ours = _ours(given, known)
    for name, each in ours.items():
        if flaw := flaw_in(each, known[name]):
            return Gift(b"", f"{name} holds values that are {flaw}")
    strange = _strange(given, ours, known)
    return Gift(_written(ours), strange=strange) if ours else Gift(b"", strange or "there are none")


def of_the_run(data: bytes, contents: Contents) -> dict[str, Given]:
    """By name, those that are buffers of the run's model, and that its dtypes can hold."""
    known = _known(contents)
    return {name: each for name, each in _ours(_read(data), known).items() if not flaw_in(each, known[name])}


def _known(contents: Contents) -> dict[str, Fixed]:
    return {fixed.name: fixed for fixed in contents.fixed if fixed.kind == "buffer"}


def _ours(given: list[tuple[str, Given]], known: Mapping[str, Fixed]) -> dict[str, Given]:
    return {name: each for name, each in given if name in known and _stands_for(each, known[name])}


def _strange(given: list[tuple[str, Given]], ours: Mapping[str, Given], known: Mapping[str, Fixed]) -> str:
    strange = sorted((name, each.dtype, each.shape) for name, each in given if name not in ours)
    if not strange:
        return ""
    (name, dtype, shape), more = strange[0], f", and {len(strange) - 1} more are none" if strange[1:] else ""
    told = f"{name} ({dtype} of shape {shape}) is no buffer of the run's model"
    if (there := known.get(name)) is not None:
        told = f"{name} is {dtype} of shape {shape}, and {there.dtype} of shape {there.shape} in the run's model"
    return told + more


def _stands_for(each: Given, there: Fixed) -> bool:
    is_alike = each.dtype == there.dtype or (each.dtype in FLOATS and there.dtype in FLOATS)
    return is_alike and each.shape == there.shape


def _read(data: bytes) -> list[tuple[str, Given]]:
    told = deserialize(data)  # type: ignore[no-untyped-call]
    return [(name, Given(about["dtype"], tuple(about["shape"]), bytes(about["data"]))) for name, about in told]


def _written(buffers: Mapping[str, Given]) -> bytes:
    """A safetensors file of these; the widest come first, which keeps what follows aligned."""
    head: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0
    for name, each in sorted(buffers.items(), key=lambda item: (-_width(item[1]), item[0])):
        head[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [end, end + len(each.data)]}
        parts.append(each.data)
        end += len(each.data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _width(each: Given) -> int:
    """Bytes of an element."""
    return len(each.data) // max(1, math.prod(each.shape))


def _names_in(data: bytes) -> int:
    """At most, without reading them: each has an entry of its own, and who has a brace in its name counts twice."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")].count(b"{") - 1


def flaw_in(each: Given, there: Fixed) -> str:
    """What a buffer's values are that none of the run's may be; empty if they are fine."""
    if each.dtype in _NOT_FINITE:
        unsigned, mask, bits = _NOT_FINITE[each.dtype]
        if ((np.frombuffer(each.data, unsigned) & mask) == bits).any():
            return "not finite"
    most = LARGEST.get(there.dtype, math.inf)
    if each.dtype in FLOATS and LARGEST.get(each.dtype, math.inf) > most and each.data:
        largest = float(np.abs(as_float64(each)).max())
        if largest > most:
            return f"larger ({largest:.3g}) than {there.dtype} can hold, its dtype in the run's model"
    return ""


def as_float64(each: Given) -> npt.NDArray[np.float64]:
    """The values of one that is a float."""
    if each.dtype == "BF16":
        return (np.frombuffer(each.data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    dtype = {"F64": np.float64, "F32": np.float32, "F16": np.float16}[each.dtype]
    return np.frombuffer(each.data, dtype).astype(np.float64)
