"""Fragment <-> payload: fp32, bf16, int8, int4 and int2, and the passes made over a payload in its encoded form.

A payload is raw little-endian bytes whose length follows from (codec, size) alone. Integers share one float32
scale per BLOCK elements: all scales come first, then all codes. Sizes are whole numbers of blocks, as every
fragment's is. A zero stays a zero, and so what lies between tensors. Knows nothing of messages, of who sent a
payload, or whether to trust it.

    codec  element                       bytes per element
    fp32   as it is                      4
    bf16   rounded to nearest even       2
    int8   scale · [−127, 127]           1.03
    int4   scale · [−7, 7]               0.53
    int2   RMS · (±0.45, ±1.51)          0.28
"""

import math
import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skerry.algo import kernels
from skerry.algo.fragments import BLOCK, F32, ROW, Fragment
from skerry.algo.kernels import Array, check_flat, frozen, over_rows

U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]

assert sys.byteorder == "little", "payloads are used in place as little-endian arrays"


class Inspection(NamedTuple):
    """What one pass over a payload shows; a payload with `finite` False must not be merged."""

    norms: F64  # L2 norm of each slot's decoded values
    finite: bool
    max_abs: float


class _Codec(NamedTuple):
    number: int  # by which the kernels know it
    block_bytes: int


_TABLE = {
    "fp32": _Codec(kernels.FP32, 4 * BLOCK),
    "bf16": _Codec(kernels.BF16, 2 * BLOCK),
    "int8": _Codec(kernels.INT8, 4 + BLOCK),
    "int4": _Codec(kernels.INT4, 4 + BLOCK // 2),
    "int2": _Codec(kernels.INT2, 4 + BLOCK // 4),
}
CODECS: tuple[str, ...] = tuple(_TABLE)


def payload_bytes(codec: str, size: int) -> int:
    """Exact payload length of `size` elements."""
    if size < 0 or size % BLOCK:
        raise ValueError(f"size {size} is not a whole number of blocks of {BLOCK}")
    return _codec(codec).block_bytes * (size // BLOCK)


def size_of(codec: str, payload: Array) -> int:
    """Elements that a payload of its length has, if any number of them has that length."""
    return payload.size // _codec(codec).block_bytes * BLOCK


def number(codec: str) -> int:
    """By which the kernels know it."""
    return _codec(codec).number


def encode(codec: str, x: F32, decoded: F32 | None = None, out: U8 | None = None, threads: int = 1) -> U8:
    """The payload of x; `decoded`, if handed in, is filled with exactly what `decode` will give.

    A NaN or infinity decodes to something that is not finite, so `inspect` finds it at the other end. A block
    of integers too small for a normal float32 scale (max|x| below about 1e-36) is sent as zeros.
    """
    payload = writable(codec, np.empty(payload_bytes(codec, x.size), np.uint8) if out is None else out, x.size)
    check_flat(x.size, x, *(() if decoded is None else (decoded,)))

    def work(row_lo: int, row_hi: int) -> None:
        at = slice(row_lo * ROW, row_hi * ROW)
        kernels.encode(number(codec), frozen(x[at]), payload, x.size, at.start)
        if decoded is not None:
            kernels.decode(number(codec), frozen(payload), x.size, at.start, decoded[at])

    over_rows(work, -(-x.size // ROW), threads)
    return payload


def decode(codec: str, payload: Array, out: F32 | None = None, threads: int = 1) -> F32:
    """The float32 values of a payload; the size is that of `out`, or follows from the payload's length."""
    size = size_of(codec, payload) if out is None else out.size
    source = readable(codec, payload, size)
    values = np.empty(size, np.float32) if out is None else out
    check_flat(size, values)

    def work(row_lo: int, row_hi: int) -> None:
        at = slice(row_lo * ROW, row_hi * ROW)
        kernels.decode(number(codec), source, size, at.start, values[at])

    over_rows(work, -(-size // ROW), threads)
    return values


def inspect(codec: str, payload: Array, fragment: Fragment) -> Inspection:
    """Per-slot norms, finiteness and largest magnitude of what a payload decodes to, in one pass."""
    squares = np.empty(fragment.row_count, np.float64)
    source = readable(codec, payload, fragment.size)
    rows = (fragment.row_start, fragment.row_stop)
    top = kernels.inspect(number(codec), source, fragment.size, *rows, squares, 0, fragment.row_count)
    largest = float(np.uint32(top).view(np.float32))
    return Inspection(slot_norms(fragment, squares), math.isfinite(largest), largest)


def slot_norms(fragment: Fragment, squares: F64) -> F64:
    """sqrt(Σ of a slot's rows), rows added in order (bincount adds one by one)."""
    return np.sqrt(np.bincount(fragment.row_slot, weights=squares, minlength=len(fragment.slots)))


def readable(codec: str, payload: Array, size: int) -> U8:
    """A payload as kernels read it; ValueError if its length is not the one `size` elements have."""
    _check_length(codec, payload, size)
    # numba compiles unaligned arrays apart, and a payload behind an odd header is rare: copy it
    return frozen(payload if _is_aligned(payload) else payload.copy())


def writable(codec: str, payload: Array, size: int) -> U8:
    """A payload as kernels write it: they check nothing themselves."""
    _check_length(codec, payload, size)
    if not _is_aligned(payload):
        raise ValueError(f"{codec} payload must start at a multiple of 4 bytes in memory")
    return payload


def _check_length(codec: str, payload: Array, size: int) -> None:
    expected = payload_bytes(codec, size)
    if payload.dtype != np.uint8 or payload.ndim != 1 or payload.size != expected:
        got = f"{payload.dtype}{list(payload.shape)}"
        raise ValueError(f"{codec} payload of {size} elements must be uint8[{expected}], not {got}")


def _is_aligned(payload: Array) -> bool:
    """To 4 bytes; to ask for the address itself takes ten times as long, and small fragments have many payloads."""
    return payload.view(np.uint32).flags.aligned


def _codec(name: str) -> _Codec:
    if name not in _TABLE:
        raise ValueError(f"unknown codec {name!r}, known are {', '.join(CODECS)}")
    return _TABLE[name]
