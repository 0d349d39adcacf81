"""The inner loops, compiled: codec blocks, scaled sums, row norms, the outer step and digests.

Rules that hold here, so that the same bytes give the same bits on every machine and for any thread count:
- every product is rounded before it is added (no fastmath, hence no fused multiply-add);
- a sum that crosses elements runs in LANES fixed float64 lanes, never in lanes of the CPU's own width, or in integers;
- kernels take contiguous arrays, inputs read-only (`frozen`), so that each is compiled for one signature;
- kernels are serial and release the GIL; threads come from `over_rows` (numba's own cannot be entered twice);
- arrays are cut into blocks by another shape, made once for all rows (`_blocks`, `_halves`): an index like x[lo + j]
  keeps a loop from being vectorised, and a slice for each block takes several times as long as what is done to it;
- numba's integers become 64 bits wide in sums and differences, so what is done to codes is cast back at once: else a
  vector holds half as many.
All kernels live in this one file: numba's disk cache does not notice a change in a callee elsewhere.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from skerry.algo.fragments import BLOCK, ROW
from skerry.compiled import kernel

Array = npt.NDArray[Any]

HALF = BLOCK // 2
LANES = HALF  # float64 partial sums
QUARTER = BLOCK // 4
ROWS_TOGETHER = 16  # that learners are added to in turn
ROWS_PER_THREAD_MIN = 64  # 150 microseconds of work; another thread costs 100

SIGN_OFF = np.uint32(0x7FFFFFFF)
INFINITY_BITS = np.uint32(0x7F800000)
NOTHING = np.float32(0)
SCALE_MIN = np.float32(2.0**-126)  # smallest normal float32: below it 1 / scale overflows
ROUNDER = np.float32(1.5 * 2.0**23)  # adding and subtracting it rounds to the nearest integer, ties to even

# int2, in units of the RMS: the levels with the least error on a Gaussian (Max 1960) and the middle between them
LOW, HIGH, MIDDLE = np.float32(0.4528), np.float32(1.5104), np.float32(0.9816)  # four levels: ±LOW, ±HIGH
HIGH_OF_3, MIDDLE_OF_3 = np.float32(1.2240), np.float32(0.6120)  # three levels: 0, ±HIGH_OF_3

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's step: 2⁶⁴ over the golden ratio, made odd

FP32, BF16, INT8, INT4, INT2 = range(5)  # the codecs' numbers, as kernels know them

assert LANES == 64 and ROW % BLOCK == 0, "other sums are other norms"


_THREADS = ThreadPoolExecutor(os.cpu_count(), "skerry-rows")  # kept: to start one takes as long as a million elements


def over_rows(work: Callable[[int, int], None], row_count: int, threads: int) -> None:
    """Call work(lo, hi) on ranges that cover [0, row_count); on this very thread when one is enough."""
    parts = max(1, min(threads, row_count // ROWS_PER_THREAD_MIN))
    if parts == 1:
        return work(0, row_count)
    edges = [row_count * part // parts for part in range(parts + 1)]
    first, *others = pairwise(edges)
    futures = [_THREADS.submit(work, *part) for part in others]
    work(*first)
    for future in futures:
        future.result()


def frozen(array: Array) -> Array:
    """A read-only view: to numba a writable and a read-only array are different types."""
    view = array.view()
    view.flags.writeable = False
    return view


NONE = frozen(np.empty(0, np.float32))  # to kernels, an array that is not there


def check_flat(size: int, *arrays: Array) -> None:
    """Kernels do not check bounds or types, so that these arrays are float32[size] is checked before them."""
    for x in arrays:
        fits = x.dtype == np.float32 and x.shape == (size,) and x.flags.c_contiguous
        assert fits, f"expected contiguous float32[{size}], not {x.dtype}{list(x.shape)}"


@kernel
def _blocks(x: Array, width: int) -> Array:
    """[block, element of it]; all of an array whose size is a multiple of this width."""
    return x.reshape((x.size // width, width))


@kernel
def _halves(x: Array) -> Array:
    """[block, half of it, element of that]."""
    return x.reshape((x.size // BLOCK, 2, HALF))


# Encoders and decoders: x and out hold len(codes) elements, a whole number of blocks.


@kernel
def _encode_bf16(x: Array, codes: Array) -> None:
    """Upper half of the float32 bits, rounded to nearest even; a NaN stays a (quiet) NaN."""
    bits = x.view(np.uint32)
    if _top_bits(bits) > INFINITY_BITS:  # seldom, and to ask for each element takes twice as long
        return _encode_bf16_with_nan(bits, codes)
    for j in range(codes.size):
        codes[j] = _rounded_half(bits[j])


@kernel
def _encode_bf16_with_nan(bits: Array, codes: Array) -> None:
    for j in range(codes.size):
        quiet = np.uint32(np.uint32(bits[j] >> np.uint32(16)) | np.uint32(0x40))
        is_nan = np.uint32(bits[j] & SIGN_OFF) > INFINITY_BITS
        codes[j] = np.uint16(quiet) if is_nan else _rounded_half(bits[j])


@kernel
def _rounded_half(word: np.uint32) -> np.uint16:
    odd = np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(word + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@kernel
def _decode_bf16(codes: Array, out: Array) -> None:
    """The sixteen bits followed by sixteen zeros."""
    bits = out.view(np.uint32)
    for j in range(codes.size):
        bits[j] = np.uint32(codes[j]) << np.uint32(16)


@kernel
def _encode_int8(x: Array, scales: Array, codes: Array) -> None:
    """scale = max|x| / 127, code = round(x / scale)."""
    values, bits, numbers = _blocks(x, BLOCK), _blocks(x.view(np.uint32), BLOCK), _blocks(codes, BLOCK)
    for b in range(scales.size):
        scale, inverse = _block_scale(_top_of_block(bits, b), np.float32(127))
        scales[b] = scale
        if inverse == 0:
            numbers[b] = 0
            continue
        for j in range(BLOCK):
            numbers[b, j] = np.int8(np.int32(_rounded(values[b, j], inverse)))


@kernel
def _decode_int8(scales: Array, codes: Array, out: Array) -> None:
    """x = scale · code."""
    values, numbers = _blocks(out, BLOCK), _blocks(codes, BLOCK)
    for b in range(scales.size):
        scale = scales[b]
        for j in range(BLOCK):
            values[b, j] = scale * np.float32(numbers[b, j])


@kernel
def _encode_int4(x: Array, scales: Array, codes: Array) -> None:
    """scale = max|x| / 7, code = round(x / scale) + 8; byte j holds elements j (low) and j + 64 (high)."""
    halves, bits, pairs = _halves(x), _blocks(x.view(np.uint32), BLOCK), _blocks(codes, HALF)
    for b in range(scales.size):
        scale, inverse = _block_scale(_top_of_block(bits, b), np.float32(7))
        scales[b] = scale
        if inverse == 0:
            pairs[b] = 0x88
            continue
        for j in range(HALF):
            pairs[b, j] = _int4_pair(_rounded(halves[b, 0, j], inverse), _rounded(halves[b, 1, j], inverse))


@kernel
def _rounded(value: np.float32, inverse: np.float32) -> np.float32:
    return np.float32((value * inverse + ROUNDER) - ROUNDER)


@kernel
def _int4_pair(low: np.float32, high: np.float32) -> np.uint8:
    return np.uint8(np.int32(np.int32(np.int32(high) * np.int32(16)) + np.int32(low)) + np.int32(0x88))


@kernel
def _decode_int4(scales: Array, codes: Array, out: Array) -> None:
    """x = scale · (code − 8)."""
    halves, pairs = _halves(out), _blocks(codes, HALF)
    for b in range(scales.size):
        scale = scales[b]
        for j in range(HALF):
            halves[b, 0, j] = scale * _low(pairs[b, j])
        for j in range(HALF):
            halves[b, 1, j] = scale * _high(pairs[b, j])


@kernel
def _encode_int2(x: Array, scales: Array, codes: Array) -> None:
    """scale = RMS of what is not zero, code = large + 2 · negative; byte j holds elements j, j + 32, j + 64, j + 96.

    Four levels have no zero among them, but zeros must stay zeros, for what lies between tensors is zero. So a block
    with a zero in it has three levels, and says so by a negative scale.
    """
    lanes, halves, bits = np.empty(LANES, np.float64), _halves(x), _blocks(x.view(np.uint32), BLOCK)
    quarters, fours = x.reshape((scales.size, 4, QUARTER)), _blocks(codes, QUARTER)
    for b in range(scales.size):
        rms, zeros = _rms(halves, bits, b, lanes)
        scales[b] = rms
        if not rms > 0:  # nothing to say, or a NaN says it
            fours[b] = 0
            continue
        if zeros:
            scales[b] = -rms
        middle = rms * (MIDDLE_OF_3 if zeros else MIDDLE)
        for j in range(QUARTER):
            one, two = _int2_code(quarters[b, 0, j], middle), _int2_code(quarters[b, 1, j], middle)
            three, four = _int2_code(quarters[b, 2, j], middle), _int2_code(quarters[b, 3, j], middle)
            fours[b, j] = np.uint8(one + 4 * two + 16 * three + 64 * four)


@kernel
def _int2_code(value: np.float32, middle: np.float32) -> np.uint8:
    """large + 2 · negative."""
    return np.uint8(np.uint8(abs(value) >= middle) + np.uint8(2) * np.uint8(value < 0))


@kernel
def _decode_int2(scales: Array, codes: Array, out: Array) -> None:
    """x = ± scale · (LOW or HIGH); under a negative scale, 0 or ± |scale| · HIGH_OF_3."""
    quarters, fours = out.reshape((scales.size, 4, QUARTER)), _blocks(codes, QUARTER)
    for b in range(scales.size):
        scale = scales[b]
        low = -scale * np.float32(0) if scale < 0 else scale * LOW
        high = -scale * HIGH_OF_3 if scale < 0 else scale * HIGH
        for quarter in range(4):
            for j in range(QUARTER):
                code = np.uint8(fours[b, j] >> np.uint8(2 * quarter))
                size = high if code & np.uint8(1) else low
                quarters[b, quarter, j] = -size if code & np.uint8(2) else size


@kernel
def _rms(halves: Array, bits: Array, b: int, lanes: Array) -> tuple[np.float32, int]:
    """(RMS of what is not zero in a block, how many zeros); NaN if one is not finite, 0 if it has no scale."""
    top, zeros = np.uint32(0), 0
    for j in range(BLOCK):
        magnitude = np.uint32(bits[b, j] & SIGN_OFF)
        top = max(top, magnitude)
        zeros += magnitude == 0
    if top >= INFINITY_BITS:
        return np.float32(np.nan), 0
    rms = np.float32(np.sqrt(_sum_of_squares(halves, b, b + 1, lanes) / max(BLOCK - zeros, 1)))
    return (np.float32(0) if rms < SCALE_MIN else rms), zeros


@kernel
def _block_scale(top: np.uint32, levels: np.float32) -> tuple[np.float32, np.float32]:
    """(scale, 1 / scale) of a block with these largest bits; the inverse is 0 where no scale will do: codes are zero.

    Comparing the bits as integers gives the same order as comparing magnitudes, puts NaN above infinity, and
    (unlike a float maximum) can be vectorised without changing its meaning.
    """
    if top >= INFINITY_BITS:
        return np.float32(np.nan), np.float32(0)
    scale = np.uint32(top).view(np.float32) / levels
    if scale < SCALE_MIN:
        return np.float32(0), np.float32(0)
    return scale, np.float32(1) / scale


# Any payload, by its codec's number and the elements [start, start + count) that are meant, whole blocks of it. The
# branch is taken once for many elements, so one compiled pass serves every codec.


@kernel
def encode(codec: int, x: Array, payload: Array, size: int, start: int) -> None:
    """Elements [start, start + x.size) of a payload of `size` elements."""
    stop = start + x.size
    if codec == FP32:
        payload[4 * start : 4 * stop].view(np.float32)[:] = x
    elif codec == BF16:
        _encode_bf16(x, payload[2 * start : 2 * stop].view(np.uint16))
    else:
        codes = 4 * (size // BLOCK)
        scales = payload[4 * (start // BLOCK) : 4 * (stop // BLOCK)].view(np.float32)
        if codec == INT8:
            _encode_int8(x, scales, payload[codes + start : codes + stop].view(np.int8))
        elif codec == INT4:
            _encode_int4(x, scales, payload[codes + start // 2 : codes + stop // 2])
        else:
            _encode_int2(x, scales, payload[codes + start // 4 : codes + stop // 4])


@kernel
def decode(codec: int, payload: Array, size: int, start: int, out: Array) -> None:
    """Elements [start, start + out.size) of a payload of `size` elements."""
    stop = start + out.size
    if codec == FP32:
        out[:] = payload[4 * start : 4 * stop].view(np.float32)
    elif codec == BF16:
        _decode_bf16(payload[2 * start : 2 * stop].view(np.uint16), out)
    else:
        codes = 4 * (size // BLOCK)
        scales = payload[4 * (start // BLOCK) : 4 * (stop // BLOCK)].view(np.float32)
        if codec == INT8:
            _decode_int8(scales, payload[codes + start : codes + stop].view(np.int8), out)
        elif codec == INT4:
            _decode_int4(scales, payload[codes + start // 2 : codes + stop // 2], out)
        else:
            _decode_int2(scales, payload[codes + start // 4 : codes + stop // 4], out)


# Passes over rows [row_lo, row_hi) of a fragment. Each row is decoded into a scratch that stays in the first-level
# cache.


@kernel
def accumulate(
    codecs: Array,
    payloads: tuple[Array, ...],
    count: int,
    row_start: Array,
    row_stop: Array,
    row_slot: Array,
    coef: Array,
    begins: bool,
    acc: Array,
    squares: Array,
    row_lo: int,
    row_hi: int,
) -> None:
    """acc ← acc + Σ coef[learner, slot] · decoded over the first `count` payloads, in order; from zero if it `begins`.

    Where there are `squares`, each row's Σ acc² goes there. All of it in one call: a thread that comes back from a
    kernel waits for the GIL, and with a call for each learner a merge waited longer than it worked. A few rows at a
    time: they stay in the second-level cache, and what it costs to hand on arrays is spent once for all of them.
    """
    extents, lanes, halves = (row_start, row_stop, row_slot), np.empty(LANES, np.float64), _halves(acc)
    for lo in range(row_lo, row_hi, ROWS_TOGETHER):
        hi = min(lo + ROWS_TOGETHER, row_hi)
        k = 0
        while k < count:
            k += _add_next(codecs, payloads, count, k, coef, extents, begins and k == 0, acc, lo, hi)
        if squares.size > 0:
            for r in range(lo, hi):
                squares[r] = _sum_of_squares(halves, row_start[r] // BLOCK, row_stop[r] // BLOCK, lanes)


@kernel
def _add_next(
    codecs: Array,
    payloads: tuple[Array, ...],
    count: int,
    k: int,
    coef: Array,
    extents: tuple[Array, Array, Array],
    begins: bool,
    acc: Array,
    row_lo: int,
    row_hi: int,
) -> int:
    """Add payload k, and the next three with it if all are int4, to nothing if this `begins` the sum; how many."""
    if codecs[k] != INT4:
        _add_decoded(codecs[k], payloads[k], coef[k], extents, begins, acc, row_lo, row_hi)
        return 1
    if k + 4 <= count and codecs[k + 1] == INT4 and codecs[k + 2] == INT4 and codecs[k + 3] == INT4:
        four = (payloads[k], payloads[k + 1], payloads[k + 2], payloads[k + 3])
        _add_four_int4(four, coef[k : k + 4], extents, begins, acc, row_lo, row_hi)
        return 4
    _add_int4(payloads[k], coef[k], extents, begins, acc, row_lo, row_hi)
    return 1


@kernel
def _add_decoded(
    codec: int,
    payload: Array,
    coef: Array,
    extents: tuple[Array, Array, Array],
    begins: bool,
    acc: Array,
    row_lo: int,
    row_hi: int,
) -> None:
    row_start, row_stop, row_slot = extents
    scratch = np.empty(ROW, np.float32)
    for r in range(row_lo, row_hi):
        row, total = scratch[: row_stop[r] - row_start[r]], acc[row_start[r] : row_stop[r]]
        decode(codec, payload, acc.size, row_start[r], row)
        coefficient = coef[row_slot[r]]
        for j in range(row.size):
            total[j] = (NOTHING if begins else total[j]) + coefficient * row[j]


# int4 is added from the codes themselves: what most learners send need not go through the scratch. A block has one
# factor, coefficient · scale, so that an element takes one product.


@kernel
def _add_int4(
    payload: Array, coef: Array, extents: tuple[Array, Array, Array], begins: bool, acc: Array, row_lo: int, row_hi: int
) -> None:
    row_start, row_stop, row_slot = extents
    halves, (scales, pairs) = _halves(acc), _int4_of(payload, acc.size, 0, acc.size)
    for r in range(row_lo, row_hi):
        coefficient = coef[row_slot[r]]
        for b in range(row_start[r] // BLOCK, row_stop[r] // BLOCK):
            factor = coefficient * scales[b]
            for j in range(HALF):
                halves[b, 0, j] = (NOTHING if begins else halves[b, 0, j]) + factor * _low(pairs[b, j])
            for j in range(HALF):
                halves[b, 1, j] = (NOTHING if begins else halves[b, 1, j]) + factor * _high(pairs[b, j])


@kernel
def _add_four_int4(
    payloads: tuple[Array, ...],
    coef: Array,
    extents: tuple[Array, Array, Array],
    begins: bool,
    acc: Array,
    row_lo: int,
    row_hi: int,
) -> None:
    """One after the other, but the sums are loaded and stored once for all four: a third less time."""
    row_start, row_stop, row_slot = extents
    halves, (scales0, pairs0) = _halves(acc), _int4_of(payloads[0], acc.size, 0, acc.size)
    scales1, pairs1 = _int4_of(payloads[1], acc.size, 0, acc.size)
    scales2, pairs2 = _int4_of(payloads[2], acc.size, 0, acc.size)
    scales3, pairs3 = _int4_of(payloads[3], acc.size, 0, acc.size)
    for r in range(row_lo, row_hi):
        c0, c1, c2, c3 = coef[0, row_slot[r]], coef[1, row_slot[r]], coef[2, row_slot[r]], coef[3, row_slot[r]]
        for b in range(row_start[r] // BLOCK, row_stop[r] // BLOCK):
            f0, f1, f2, f3 = c0 * scales0[b], c1 * scales1[b], c2 * scales2[b], c3 * scales3[b]
            for j in range(HALF):
                low = (NOTHING if begins else halves[b, 0, j]) + f0 * _low(pairs0[b, j])
                low = (low + f1 * _low(pairs1[b, j])) + f2 * _low(pairs2[b, j])
                halves[b, 0, j] = low + f3 * _low(pairs3[b, j])
            for j in range(HALF):
                high = (NOTHING if begins else halves[b, 1, j]) + f0 * _high(pairs0[b, j])
                high = (high + f1 * _high(pairs1[b, j])) + f2 * _high(pairs2[b, j])
                halves[b, 1, j] = high + f3 * _high(pairs3[b, j])


@kernel
def _int4_of(payload: Array, size: int, start: int, stop: int) -> tuple[Array, Array]:
    """Scales of elements [start, stop), and their codes by block, two in a byte."""
    first = 4 * (size // BLOCK)
    scales = payload[4 * (start // BLOCK) : 4 * (stop // BLOCK)].view(np.float32)
    return scales, _blocks(payload[first + start // 2 : first + stop // 2], HALF)


@kernel
def _low(byte: np.uint8) -> np.float32:
    return np.float32(np.int32(np.int32(byte & np.uint8(15)) - np.int32(8)))


@kernel
def _high(byte: np.uint8) -> np.float32:
    return np.float32(np.int32(np.int32(byte >> np.uint8(4)) - np.int32(8)))


@kernel
def add_both(coefficient: np.float32, x: Array, acc: Array, mass: Array) -> None:
    """acc ← acc + c · x, mass ← mass + c · |x|."""
    for j in range(acc.size):
        term = coefficient * x[j]
        acc[j] += term
        mass[j] += abs(term)


@kernel
def weigh_by_agreement(
    is_weighed: Array,
    row_start: Array,
    row_stop: Array,
    row_slot: Array,
    mass: Array,
    acc: Array,
    row_lo: int,
    row_hi: int,
) -> None:
    """acc ← (|acc| / mass) · acc on rows [row_lo, row_hi) of weighed slots, 0 without mass; mass begins at row_lo."""
    start = row_start[row_lo]
    for r in range(row_lo, row_hi):
        if is_weighed[row_slot[r]]:
            row = acc[row_start[r] : row_stop[r]]
            weight = mass[row_start[r] - start : row_stop[r] - start]
            for j in range(row.size):
                agreement = abs(row[j]) / weight[j] if weight[j] > 0 else np.float32(0)
                row[j] = agreement * row[j]


@kernel
def inspect(
    codec: int,
    payload: Array,
    size: int,
    row_start: Array,
    row_stop: Array,
    squares: Array,
    row_lo: int,
    row_hi: int,
) -> np.uint32:
    """squares[row] ← Σ x²; the largest magnitude seen, as bits (INFINITY_BITS or more: not all is finite)."""
    if codec == INT4:
        return _inspect_int4(payload, size, row_start, row_stop, squares, row_lo, row_hi)
    lanes, scratch = np.empty(LANES, np.float64), np.empty(ROW, np.float32)
    halves, top = _halves(scratch), np.uint32(0)
    for r in range(row_lo, row_hi):
        row = scratch[: row_stop[r] - row_start[r]]
        decode(codec, payload, size, row_start[r], row)
        squares[r] = _sum_of_squares(halves, 0, row.size // BLOCK, lanes)
        top = max(top, _top_bits(row.view(np.uint32)))
    return top


@kernel
def _inspect_int4(
    payload: Array, size: int, row_start: Array, row_stop: Array, squares: Array, row_lo: int, row_hi: int
) -> np.uint32:
    """The same from the codes: Σ x² = Σ scale² · Σ (code − 8)², a block's codes in integers.

    Eight learners' int4 are most of what a syncer looks at. Two bytes at a time, for bytes would have to be widened
    first. It leaves out how scale · code is rounded, about 1e-8 of the sum.
    """
    scales, pairs = _int4_of(payload, size, 0, size)
    words, top = pairs.view(np.uint16), np.uint32(0)
    for r in range(row_lo, row_hi):
        total = 0.0
        for b in range(row_start[r] // BLOCK, row_stop[r] // BLOCK):
            scale, square = scales[b], np.int16(0)  # at most 128 · 8²; wider integers take twice as long
            for j in range(QUARTER):
                one, two = _less_8(words[b, j]), _less_8(words[b, j] >> np.uint16(4))
                three, four = _less_8(words[b, j] >> np.uint16(8)), _less_8(words[b, j] >> np.uint16(12))
                square = np.int16(square + np.int16(_squared(one, two) + _squared(three, four)))
            total += np.float64(scale) * np.float64(scale) * np.float64(square)
            if _magnitude(scale * np.float32(8)) > top:  # seldom, once a large block was seen
                top = max(top, _magnitude(scale * _largest_code(words, b)))
        squares[r] = total
    return top


@kernel
def _less_8(word: np.uint16) -> np.int16:
    """The code in the lowest four bits, less 8."""
    return np.int16(np.int16(word & np.uint16(15)) - np.int16(8))


@kernel
def _squared(one: np.int16, two: np.int16) -> np.int16:
    return np.int16(np.int16(one * one) + np.int16(two * two))


@kernel
def _largest_code(words: Array, b: int) -> np.float32:
    """The largest |code − 8| of a block."""
    largest = np.int16(0)
    for j in range(QUARTER):
        one, two = abs(_less_8(words[b, j])), abs(_less_8(words[b, j] >> np.uint16(4)))
        three, four = abs(_less_8(words[b, j] >> np.uint16(8))), abs(_less_8(words[b, j] >> np.uint16(12)))
        largest = max(largest, np.int16(max(max(one, two), max(three, four))))
    return np.float32(largest)


@kernel
def _magnitude(value: np.float32) -> np.uint32:
    """As bits, which have the order of magnitudes, with NaN above infinity."""
    return np.uint32(np.float32(value).view(np.uint32) & SIGN_OFF)


@kernel
def squares_of_rows(x: Array, row_start: Array, row_stop: Array, squares: Array, row_lo: int, row_hi: int) -> None:
    """squares[row] ← Σ x²."""
    lanes, halves = np.empty(LANES, np.float64), _halves(x)
    for r in range(row_lo, row_hi):
        squares[r] = _sum_of_squares(halves, row_start[r] // BLOCK, row_stop[r] // BLOCK, lanes)


@kernel
def encode_scaled(
    codec: int,
    gain: np.float32,
    factors: Array,
    row_start: Array,
    row_stop: Array,
    row_slot: Array,
    x: Array,
    payload: Array,
    row_lo: int,
    row_hi: int,
) -> None:
    """The payload of gain · (factors[slot] · x)."""
    scratch = np.empty(ROW, np.float32)
    for r in range(row_lo, row_hi):
        lo, hi = row_start[r], row_stop[r]
        row, values, factor = scratch[: hi - lo], x[lo:hi], factors[row_slot[r]]
        for j in range(row.size):
            row[j] = gain * (factor * values[j])
        encode(codec, row, payload, x.size, lo)


@kernel
def _sum_of_squares(halves: Array, first: int, stop: int, lanes: Array) -> float:
    """Σ x² of blocks [first, stop) in float64: lane k has elements k and k + LANES of each; then lanes in order."""
    lanes[:] = 0.0
    for b in range(first, stop):  # both halves at a time, for the lanes lie in memory
        for k in range(LANES):
            one, two = np.float64(halves[b, 0, k]), np.float64(halves[b, 1, k])
            lanes[k] = (lanes[k] + one * one) + two * two
    total = 0.0
    for k in range(LANES):
        total += lanes[k]
    return total


@kernel
def _top_of_block(bits: Array, b: int) -> np.uint32:
    top = np.uint32(0)
    for j in range(BLOCK):
        top = max(top, np.uint32(bits[b, j] & SIGN_OFF))
    return top


@kernel
def _top_bits(bits: Array) -> np.uint32:
    top = np.uint32(0)
    for j in range(bits.size):
        top = max(top, np.uint32(bits[j] & SIGN_OFF))
    return top


# The outer step and what it publishes, over rows [row_lo, row_hi). All that is made on the way stays in cache.


@kernel
def advance(
    rates: Array,
    delta_codec: int,
    delta: Array,
    theta: Array,
    error: Array,
    velocity: Array,
    codec: int,
    payload: Array,
    theta_new: Array,
    error_new: Array,
    velocity_new: Array,
    factors: Array,
    sums: Array,
    row_lo: int,
    row_hi: int,
) -> np.uint32:
    """x, b = step(Θ + e, b, Δ);  d = Q(x − Θ), Θ' = Θ + d, e' = x − Θ'; the largest bits of e'.

    Rows [row_lo, row_hi) of ROW elements. Their share in the digests of Θ', b' and e' is added to `sums`.
    """
    old, new = (theta, velocity, error), (theta_new, velocity_new, error_new)
    if codec == INT4:
        return _advance_int4(rates, delta_codec, delta, old, payload, new, factors, sums, row_lo, row_hi)
    scratch, top = np.empty((3, ROW), np.float32), np.uint32(0)
    words = (theta_new.view(np.uint32), velocity_new.view(np.uint32), error_new.view(np.uint32))
    for r in range(row_lo, row_hi):
        at = slice(r * ROW, min((r + 1) * ROW, theta.size))
        count = at.stop - at.start
        step, x, published = scratch[0, :count], scratch[1, :count], scratch[2, :count]
        decode(delta_codec, delta, theta.size, at.start, step)
        _outer_step(rates, (theta[at], velocity[at], error[at]), step, x, velocity_new[at])
        _subtract(x, theta[at], published)
        encode(codec, published, payload, theta.size, at.start)
        decode(codec, payload, theta.size, at.start, published)
        _settle(x, theta[at], published, theta_new[at], error_new[at])
        top = max(top, _top_bits(words[2][at]))
        for k in range(3):
            sums[k] += _mixed_row(_row_sum(words[k][at], factors[:count]), r)
    return top


@kernel
def adopt(
    codec: int, payload: Array, theta: Array, theta_new: Array, factors: Array, row_lo: int, row_hi: int
) -> tuple[np.uint64, np.uint32]:
    """Θ' = Θ + d, or d where Θ is not there, on rows [row_lo, row_hi); their share of its digest, its largest bits."""
    scratch, total, top = np.empty(ROW, np.float32), np.uint64(0), np.uint32(0)
    for r in range(row_lo, row_hi):
        at = slice(r * ROW, min((r + 1) * ROW, theta_new.size))
        row, published = theta_new[at], scratch[: at.stop - at.start]
        decode(codec, payload, theta_new.size, at.start, published)
        _sum(published, theta[at], row)
        words = row.view(np.uint32)
        total += _mixed_row(_row_sum(words, factors[: words.size]), r)
        top = max(top, _top_bits(words))
    return total, top


@kernel
def _outer_step(rates: Array, old: tuple[Array, ...], delta: Array, x: Array, velocity_new: Array) -> None:
    """b = decay · b + share · Δ;  x = (Θ + e) + η (Δ + push · b);  b ← keep · b.  `old` is Θ, b, e."""
    lr, decay, share, push, keep = rates[0], rates[1], rates[2], rates[3], rates[4]
    theta, velocity, error = old
    for j in range(x.size):
        b = decay * velocity[j] + share * delta[j]
        velocity_new[j] = keep * b + np.float32(0)  # never −0, which would be something to store
        x[j] = (theta[j] + error[j]) + lr * (delta[j] + push * b)


@kernel
def _subtract(x: Array, y: Array, out: Array) -> None:
    for j in range(out.size):
        out[j] = x[j] - y[j]


@kernel
def _add(x: Array, y: Array, out: Array) -> None:
    for j in range(out.size):
        out[j] = x[j] + y[j]


@kernel
def _settle(x: Array, theta: Array, published: Array, theta_new: Array, error_new: Array) -> None:
    """Θ' = Θ + d, e' = x − Θ', which is not finite where Θ' is not."""
    for j in range(x.size):
        theta_new[j] = theta[j] + published[j]
        error_new[j] = x[j] - theta_new[j]


@kernel
def _advance_int4(
    rates: Array,
    delta_codec: int,
    delta: Array,
    old: tuple[Array, ...],
    payload: Array,
    new: tuple[Array, ...],
    factors: Array,
    sums: Array,
    row_lo: int,
    row_hi: int,
) -> np.uint32:
    """All of `advance`, published in int4: a block at a time, which stays in the first-level cache.

    `old` and `new` are Θ, b and e.
    """
    lr, decay, share, push, keep = rates[0], rates[1], rates[2], rates[3], rates[4]
    size, (scales, pairs), factor = old[0].size, _int4_of(payload, old[0].size, 0, old[0].size), _blocks(factors, BLOCK)
    theta, velocity, error = _blocks(old[0], BLOCK), _blocks(old[1], BLOCK), _blocks(old[2], BLOCK)
    theta_new, velocity_new, error_new = _blocks(new[0], BLOCK), _blocks(new[1], BLOCK), _blocks(new[2], BLOCK)
    theta_bits, velocity_bits = theta_new.view(np.uint32), velocity_new.view(np.uint32)
    error_bits, x = error_new.view(np.uint32), np.empty(BLOCK, np.float32)
    row, steps = np.empty(ROW, np.float32), np.empty((1, BLOCK), np.float32)
    moved, step_bits, halves, top = _blocks(row, BLOCK), steps.view(np.uint32), _halves(steps), np.uint32(0)
    for r in range(row_lo, row_hi):
        first, stop = r * (ROW // BLOCK), min((r + 1) * (ROW // BLOCK), scales.size)
        decode(delta_codec, delta, size, r * ROW, row[: (stop - first) * BLOCK])
        theta_sum, velocity_sum, error_sum = np.uint64(0), np.uint64(0), np.uint64(0)
        for n in range(first, stop):
            m = n - first
            for j in range(BLOCK):
                b = decay * velocity[n, j] + share * moved[m, j]
                velocity_new[n, j] = keep * b + np.float32(0)
                x[j] = (theta[n, j] + error[n, j]) + lr * (moved[m, j] + push * b)
                steps[0, j] = x[j] - theta[n, j]

            scale, inverse = _block_scale(_top_of_block(step_bits, 0), np.float32(7))
            scales[n] = scale
            if inverse == 0:
                steps[:] = 0.0  # a NaN would have no code
            for j in range(BLOCK):
                steps[0, j] = _rounded(steps[0, j], inverse)
            for j in range(HALF):
                pairs[n, j] = _int4_pair(halves[0, 0, j], halves[0, 1, j])
            for j in range(BLOCK):
                theta_new[n, j] = theta[n, j] + scale * steps[0, j]
                error_new[n, j] = x[j] - theta_new[n, j]

            for j in range(BLOCK):
                theta_sum += np.uint64(theta_bits[n, j]) * np.uint64(factor[m, j])
                velocity_sum += np.uint64(velocity_bits[n, j]) * np.uint64(factor[m, j])
                error_sum += np.uint64(error_bits[n, j]) * np.uint64(factor[m, j])
            top = max(top, _top_of_block(error_bits, n))
        sums[0] += _mixed_row(theta_sum, r)
        sums[1] += _mixed_row(velocity_sum, r)
        sums[2] += _mixed_row(error_sum, r)
    return top


# Digests (`algo/digests.py` says what one is).


@kernel
def digest_of_rows(x: Array, factors: Array, row_lo: int, row_hi: int) -> np.uint64:
    """Σ mixed row sums of rows [row_lo, row_hi), each of ROW elements but the last, which may be shorter; mod 2⁶⁴."""
    total = np.uint64(0)
    for r in range(row_lo, row_hi):
        row = x[r * ROW : min((r + 1) * ROW, x.size)].view(np.uint32)
        total += _mixed_row(_row_sum(row, factors[: row.size]), r)
    return total


@kernel
def _row_sum(words: Array, factors: Array) -> np.uint64:
    """Σ word · factor mod 2⁶⁴."""
    total = np.uint64(0)
    for j in range(words.size):
        total += np.uint64(words[j]) * np.uint64(factors[j])
    return total


@kernel
def _mixed_row(row_sum: np.uint64, row: int) -> np.uint64:
    return np.uint64(_mix(np.uint64(row_sum + np.uint64(row + 1) * GOLDEN)))


def mix(words: Any) -> Any:
    """The finalizer of splitmix64, for one uint64 or an array of them: one to one, and each bit tells on all."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


_mix = kernel(mix)


# A learner's passes (`algo/drift.py`), over elements [lo, hi) where it is not over all. An array that is not there is
# an empty one.


@kernel
def difference(x: Array, y: Array, z: Array, out: Array) -> None:
    """(x − y) − z, or x − y."""
    if z.size == 0:
        return _subtract(x, y, out)
    for j in range(out.size):
        out[j] = (x[j] - y[j]) - z[j]


@kernel
def say(codec: int, drift: Array, residual: Array, payload: Array, lo: int, hi: int) -> np.uint32:
    """d = Q(u), u = drift + residual; the largest bits of u."""
    scratch, top = np.empty(ROW, np.float32), np.uint32(0)
    for start in range(lo, hi, ROW):
        at = slice(start, min(start + ROW, hi))
        u = scratch[: at.stop - start]
        _sum(drift[at], residual[at], u)
        encode(codec, u, payload, drift.size, start)
        top = max(top, _top_bits(u.view(np.uint32)))
    return top


@kernel
def unsaid(codec: int, payload: Array, drift: Array, residual: Array, out: Array, lo: int, hi: int) -> None:
    """u − d, u = drift + residual."""
    scratch = np.empty(ROW, np.float32)
    for start in range(lo, hi, ROW):
        at = slice(start, min(start + ROW, hi))
        said = scratch[: at.stop - start]
        decode(codec, payload, drift.size, start, said)
        _less(drift[at], residual[at], said, out[at])


@kernel
def _less(drift: Array, residual: Array, said: Array, out: Array) -> None:
    if residual.size == 0:
        return _subtract(drift, said, out)
    for j in range(out.size):
        out[j] = (drift[j] + residual[j]) - said[j]


@kernel
def _sum(drift: Array, residual: Array, u: Array) -> None:
    if residual.size == 0:
        u[:] = drift
    else:
        _add(drift, residual, u)
