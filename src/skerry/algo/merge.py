"""Merges the held contributions to one fragment into one delta: mean, radial-directional (RDA) or consensus.

Rules that hold here: contributions come in learner-id order and are added in that order; coefficients are
computed in float64 and rounded once; sums are float32, a product rounded before it is added. So the result
depends neither on the order of arrival nor on the number of threads. Deltas are drifts (θ − Θ), minus the
paper's outer gradients. Knows nothing of who contributed or why: quorum and trust are settled before.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skerry.algo import codecs, kernels
from skerry.algo.codecs import F64, U8
from skerry.algo.fragments import F32, I64, ROW, Fragment
from skerry.algo.kernels import Array, check_flat, frozen, over_rows

TOGETHER = 8  # contributions that one call of a kernel adds
ROWS_AT_ONCE = 2**20 // (4 * ROW)  # 1 MiB of accumulator, kept in cache while all are added to it
NORM_MIN = 1e-30  # a shorter vector has no direction: its inverse norm would not fit a float32
DIRECTION_MIN = 1e-6  # directions whose mean is shorter have cancelled: what is left is rounding


class Held(NamedTuple):
    """One contribution as it is held: encoded, verified, its norms taken on arrival."""

    codec: str
    payload: Array  # uint8
    weight: float
    norms: F64  # per slot, from codecs.inspect


# (fragment, held, out, threads): fills out, and returns what each slot of it is still to be multiplied by
Rule = Callable[[Fragment, Sequence[Held], F32, int], F64]


def merge(
    rule: str,
    fragment: Fragment,
    held: Sequence[Held],
    codec: str = "fp32",
    gain: float = 1.0,
    threads: int = 1,
    scratch: F32 | None = None,
    out: U8 | None = None,
) -> U8:
    """The payload of gain · the merged delta of contributions in learner-id order, whose padding is left out.

    `scratch` is an array to work in, of the fragment's size, that nobody reads meanwhile; `out` is for the payload.
    """
    assert held, "a merge needs at least one contribution"
    if rule not in RULES:
        raise ValueError(f"unknown merge rule {rule!r}, known are {', '.join(RULES)}")
    total = np.empty(fragment.size, np.float32) if scratch is None else scratch
    check_flat(fragment.size, total)
    factors = RULES[rule](fragment, held, total, threads)
    for slot in fragment.slots:
        total[slot.offset + slot.size : slot.padded_stop] = 0.0
    payload = np.empty(codecs.payload_bytes(codec, fragment.size), np.uint8) if out is None else out
    _encode(codec, fragment, gain, factors, total, codecs.writable(codec, payload, fragment.size), threads)
    return payload


def weighted_mean(fragment: Fragment, held: Sequence[Held], out: F32, threads: int = 1) -> F64:
    """Δ = Σ w v / Σ w."""
    _add_up(fragment, held, _shares(held), out, threads)
    return np.ones(len(fragment.slots))


def radial_directional(fragment: Fragment, held: Sequence[Held], out: F32, threads: int = 1) -> F64:
    """Δ = (Σ w ‖v‖ / Σ w) · φ(Σ w φ(v) / Σ w) per slot, φ(v) = v / ‖v‖, φ(0) = 0 (paper, section D.2).

    Embeddings are averaged, for their deltas are not near orthogonal. So is a tensor whose directions cancel:
    nothing but rounding would be left to point the way.
    """
    shares, norms = _shares(held), _norms(held)
    squares = np.empty(fragment.row_count, np.float64)

    inverse = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > NORM_MIN)
    inverse[:, _averaged(fragment)] = 1.0
    _add_up(fragment, held, shares * inverse, out, threads, squares)
    return _stretch(fragment, held, squares, _radii(shares, norms), DIRECTION_MIN, out, threads)


def consensus(fragment: Fragment, held: Sequence[Held], out: F32, threads: int = 1) -> F64:
    """Δ = RDA's radius · φ(a · m) per slot: the mean m, each element by the learners' agreement a on it.

    a = |Σ w v| / Σ w |v|, from 0 where they cancel to 1 where all signs are the same. Embeddings are averaged, and so
    is a tensor on which nobody agrees with anybody.
    """
    opened = _opened(fragment, held)
    shares = _shares(held)
    radii = _radii(shares, _norms(held))
    rows = (frozen(~_averaged(fragment)), fragment.row_start, fragment.row_stop, fragment.row_slot)
    squares = np.empty(fragment.row_count, np.float64)

    def work(row_lo: int, row_hi: int) -> None:
        for lo in range(row_lo, row_hi, ROWS_AT_ONCE):
            hi = min(lo + ROWS_AT_ONCE, row_hi)
            start, stop = int(fragment.row_start[lo]), int(fragment.row_stop[hi - 1])
            mean = out[start:stop]
            mean[:] = 0.0
            mass, decoded = np.zeros_like(mean), np.empty_like(mean)
            for (codec, payload), share in zip(opened, shares[:, 0].astype(np.float32), strict=True):
                kernels.decode(codec, payload, fragment.size, start, decoded)
                kernels.add_both(share, frozen(decoded), mean, mass)
            kernels.weigh_by_agreement(*rows, frozen(mass), out, lo, hi)
            kernels.squares_of_rows(frozen(out), fragment.row_start, fragment.row_stop, squares, lo, hi)

    over_rows(work, fragment.row_count, threads)
    return _stretch(fragment, held, squares, radii, np.maximum(DIRECTION_MIN * radii, NORM_MIN), out, threads)


RULES: dict[str, Rule] = {"rda": radial_directional, "mean": weighted_mean, "consensus": consensus}


def _averaged(fragment: Fragment) -> npt.NDArray[np.bool_]:
    return np.array([slot.kind == "embedding" for slot in fragment.slots])


def _norms(held: Sequence[Held]) -> F64:
    """‖v‖, float64[learners, slots]."""
    return np.array([contribution.norms for contribution in held])


def _radii(shares: F64, norms: F64) -> F64:
    """Σ w ‖v‖ / Σ w of each slot."""
    radii: F64 = np.add.accumulate(shares * norms, axis=0)[-1]  # adds in learner order, sum need not
    return radii


def _stretch(
    fragment: Fragment, held: Sequence[Held], squares: F64, radii: F64, shortest: F64 | float, out: F32, threads: int
) -> F64:
    """What gives each tensor of out the mean length of what was contributed; one below `shortest` becomes the mean."""
    lengths, averaged = codecs.slot_norms(fragment, squares), _averaged(fragment)
    cancelled = ~averaged & (lengths < shortest)
    for slot in np.flatnonzero(cancelled):
        _add_up(fragment, held, _shares(held), out, threads, rows=np.flatnonzero(fragment.row_slot == slot))
    factors = radii / np.maximum(lengths, shortest)
    factors[averaged | cancelled] = 1.0
    return factors


def _shares(held: Sequence[Held]) -> F64:
    """w / Σ w of each contribution, float64[learners, 1]."""
    weights = [contribution.weight for contribution in held]
    total = math.fsum(weights)
    assert 0 < total < math.inf and min(weights) >= 0, f"no mean over weights {weights}"
    return np.array(weights)[:, None] / total


def _add_up(
    fragment: Fragment,
    held: Sequence[Held],
    coefficients: F64,
    out: F32,
    threads: int,
    squares: F64 | None = None,
    rows: I64 | None = None,
) -> None:
    """out ← Σ coefficients[learner, slot] · decoded, over all rows or a run of them; one column is for every slot.

    `squares`, if handed in, gets each row's Σ x² while the row is still in cache.
    """
    groups = [_group(fragment, held[at : at + TOGETHER]) for at in range(0, len(held), TOGETHER)]
    rounded = np.empty((len(held), len(fragment.slots)), np.float32)
    rounded[:] = coefficients
    extents = (fragment.row_start, fragment.row_stop, fragment.row_slot)
    first, count = (0, fragment.row_count) if rows is None else (int(rows[0]), len(rows))
    none = np.empty(0, np.float64)

    def work(row_lo: int, row_hi: int) -> None:
        step = row_hi - row_lo if len(groups) == 1 else ROWS_AT_ONCE
        for lo in range(first + row_lo, first + row_hi, step):
            hi = min(lo + step, first + row_hi)
            for at, (numbers, payloads) in enumerate(groups):
                coef = frozen(rounded[at * TOGETHER : (at + 1) * TOGETHER])
                is_last = at == len(groups) - 1
                last = squares if is_last and squares is not None else none
                kernels.accumulate(numbers, payloads, len(coef), *extents, coef, at == 0, out, last, lo, hi)

    over_rows(work, count, threads)


def _group(fragment: Fragment, held: Sequence[Held]) -> tuple[I64, tuple[U8, ...]]:
    """Contributions as a kernel takes them in one call: always so many payloads, for they are part of its signature."""
    opened = _opened(fragment, held)
    numbers = frozen(np.array([codec for codec, _ in opened], np.int64))
    payloads = tuple(payload for _, payload in opened)
    return numbers, payloads + (payloads[0],) * (TOGETHER - len(payloads))


def _opened(fragment: Fragment, held: Sequence[Held]) -> list[tuple[int, U8]]:
    """Each contribution's codec and payload as kernels take them."""
    return [(codecs.number(c.codec), codecs.readable(c.codec, c.payload, fragment.size)) for c in held]


def _encode(codec: str, fragment: Fragment, gain: float, factors: F64, x: F32, payload: U8, threads: int) -> None:
    """payload ← gain · (factors[slot] · x)."""
    scales = (np.float32(gain), frozen(factors.astype(np.float32)))
    rows = (fragment.row_start, fragment.row_stop, fragment.row_slot)

    def work(row_lo: int, row_hi: int) -> None:
        kernels.encode_scaled(codecs.number(codec), *scales, *rows, frozen(x), payload, row_lo, row_hi)

    over_rows(work, fragment.row_count, threads)
