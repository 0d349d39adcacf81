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
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from skerry.algo import kernels
from skerry.algo.fragments import BLOCK, F32, ROW, Fragment
from skerry.algo.kernels import Array, check_flat, frozen, over_rows

U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]
Parts = tuple[Array, ...]  # the typed views of one payload: (scales, codes) or (codes,)

assert sys.byteorder == "little", "payloads are used in place as little-endian arrays"


class Inspection(NamedTuple):
    """What one pass over a payload shows; a payload with `finite` False must not be merged."""

    norms: F64  # L2 norm of each slot's decoded values
    finite: bool
    max_abs: float


class _Codec(NamedTuple):
    fields: tuple[tuple[Any, int], ...]  # (dtype, elements per block) of each part, in payload order
    encode: Callable[..., None]  # (x, *parts)
    decode: Callable[..., None]  # (*parts, out)
    accumulate: Callable[..., None]  # (*parts, row_start, row_stop, row_slot, coefficients, acc, lo, hi)
    inspect: Callable[..., np.uint32]  # (*parts, row_start, row_stop, squares, lo, hi) -> largest bits

    @property
    def block_bytes(self) -> int:
        return sum(np.dtype(dtype).itemsize * per_block for dtype, per_block in self.fields)


def _copy(source: Array, target: Array) -> None:
    np.copyto(target, source)


_TABLE = {
    "fp32": _Codec(
        ((np.float32, BLOCK),),
        _copy,
        _copy,
        kernels.accumulate_fp32,
        kernels.inspect_fp32,
    ),
    "bf16": _Codec(
        ((np.uint16, BLOCK),),
        kernels.encode_bf16,
        kernels.decode_bf16,
        kernels.accumulate_bf16,
        kernels.inspect_bf16,
    ),
    "int8": _Codec(
        ((np.float32, 1), (np.int8, BLOCK)),
        kernels.encode_int8,
        kernels.decode_int8,
        kernels.accumulate_int8,
        kernels.inspect_int8,
    ),
    "int4": _Codec(
        ((np.float32, 1), (np.uint8, BLOCK // 2)),
        kernels.encode_int4,
        kernels.decode_int4,
        kernels.accumulate_int4,
        kernels.inspect_int4,
    ),
    "int2": _Codec(
        ((np.float32, 1), (np.uint8, BLOCK // 4)),
        kernels.encode_int2,
        kernels.decode_int2,
        kernels.accumulate_int2,
        kernels.inspect_int2,
    ),
}
CODECS: tuple[str, ...] = tuple(_TABLE)


def payload_bytes(codec: str, size: int) -> int:
    """Exact payload length of `size` elements."""
    if size < 0 or size % BLOCK:
        raise ValueError(f"size {size} is not a whole number of blocks of {BLOCK}")
    return _codec(codec).block_bytes * (size // BLOCK)


def encode(codec: str, x: F32, decoded: F32 | None = None, out: U8 | None = None, threads: int = 1) -> U8:
    """The payload of x; `decoded`, if handed in, is filled with exactly what `decode` will give.

    A NaN or infinity decodes to something that is not finite, so `inspect` finds it at the other end. A block
    of integers too small for a normal float32 scale (max|x| below about 1e-36) is sent as zeros.
    """
    payload = np.empty(payload_bytes(codec, x.size), np.uint8) if out is None else out
    parts = writable(codec, payload, x.size)
    check_flat(x.size, x, *(() if decoded is None else (decoded,)))

    def work(row_lo: int, row_hi: int) -> None:
        piece = slice(row_lo * ROW, row_hi * ROW)
        encode_piece(codec, x[piece], parts, piece.start)
        if decoded is not None:
            decode_piece(codec, parts, piece.start, decoded[piece])

    over_rows(work, -(-x.size // ROW), threads)
    return payload


def decode(codec: str, payload: Array, out: F32 | None = None, threads: int = 1) -> F32:
    """The float32 values of a payload; the size is that of `out`, or follows from the payload's length."""
    size = payload.size // _codec(codec).block_bytes * BLOCK if out is None else out.size
    parts = readable(codec, payload, size)
    values = np.empty(size, np.float32) if out is None else out
    check_flat(size, values)

    def work(row_lo: int, row_hi: int) -> None:
        piece = slice(row_lo * ROW, row_hi * ROW)
        decode_piece(codec, parts, piece.start, values[piece])

    over_rows(work, -(-size // ROW), threads)
    return values


def inspect(codec: str, payload: Array, fragment: Fragment) -> Inspection:
    """Per-slot norms, finiteness and largest magnitude of what a payload decodes to, in one pass."""
    squares = np.empty(fragment.row_count, np.float64)
    parts = readable(codec, payload, fragment.size)
    top = inspect_parts(codec, parts, fragment, squares, 0, fragment.row_count)
    largest = float(np.uint32(top).view(np.float32))
    return Inspection(slot_norms(fragment, squares), math.isfinite(largest), largest)


def accumulate_parts(
    codec: str, parts: Parts, fragment: Fragment, coefficients: F32, acc: F32, row_lo: int, row_hi: int
) -> None:
    """acc ← acc + coefficients[slot] · decoded on rows [row_lo, row_hi); products rounded, then added."""
    assert 0 <= row_lo <= row_hi <= fragment.row_count
    rows = (fragment.row_start, fragment.row_stop, fragment.row_slot)
    _TABLE[codec].accumulate(*parts, *rows, frozen(coefficients), acc, row_lo, row_hi)


def inspect_parts(codec: str, parts: Parts, fragment: Fragment, squares: F64, row_lo: int, row_hi: int) -> np.uint32:
    """Fill squares[row_lo:row_hi] with each row's Σ x²; returns the largest magnitude as float32 bits."""
    return _TABLE[codec].inspect(*parts, fragment.row_start, fragment.row_stop, squares, row_lo, row_hi)


def slot_norms(fragment: Fragment, squares: F64) -> F64:
    """sqrt(Σ of a slot's rows), rows added in order (bincount adds one by one)."""
    return np.sqrt(np.bincount(fragment.row_slot, weights=squares, minlength=len(fragment.slots)))


def readable(codec: str, payload: Array, size: int) -> Parts:
    """A payload's parts for reading; ValueError if its length is not the one `size` elements have."""
    # numba compiles unaligned arrays apart, and a payload behind an odd header is rare: copy it
    aligned = payload if payload.ctypes.data % 4 == 0 else payload.copy()
    return tuple(frozen(part) for part in writable(codec, aligned, size))


def writable(codec: str, payload: Array, size: int) -> Parts:
    """A payload's parts as views to write through; refuses a payload not aligned to 4 bytes."""
    expected = payload_bytes(codec, size)
    if payload.dtype != np.uint8 or payload.ndim != 1 or payload.size != expected:
        got = f"{payload.dtype}{list(payload.shape)}"
        raise ValueError(f"{codec} payload of {size} elements must be uint8[{expected}], not {got}")
    if payload.ctypes.data % 4:
        raise ValueError(f"{codec} payload must start at a multiple of 4 bytes in memory")
    parts: list[Array] = []
    lo = 0
    for dtype, per_block in _TABLE[codec].fields:
        hi = lo + np.dtype(dtype).itemsize * per_block * (size // BLOCK)
        parts.append(payload[lo:hi].view(dtype))
        lo = hi
    return tuple(parts)


def encode_piece(codec: str, x: F32, parts: Parts, start: int) -> None:
    """Encode x as the elements from `start` (a multiple of BLOCK) on."""
    _TABLE[codec].encode(frozen(x), *_piece(codec, parts, start, x.size))


def decode_piece(codec: str, parts: Parts, start: int, out: F32) -> None:
    """Decode the elements from `start` (a multiple of BLOCK) on, as many as `out` holds."""
    _TABLE[codec].decode(*[frozen(part) for part in _piece(codec, parts, start, out.size)], out)


def _piece(codec: str, parts: Parts, start: int, size: int) -> Parts:
    lo, hi = start // BLOCK, (start + size) // BLOCK
    fields = _TABLE[codec].fields
    return tuple(part[lo * n : hi * n] for part, (_, n) in zip(parts, fields, strict=True))


def _codec(name: str) -> _Codec:
    if name not in _TABLE:
        raise ValueError(f"unknown codec {name!r}, known are {', '.join(CODECS)}")
    return _TABLE[name]
