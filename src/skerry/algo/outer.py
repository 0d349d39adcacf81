"""The outer step on one fragment, and the published delta that carries its result to every learner.

Rules that hold here: Δ is the merged drift (θ − Θ), minus the paper's outer gradient, so it is added. The
master value is Θ + e: Θ is what every learner holds, bit for bit, and e what the codec could not say so far.
Every product is rounded before it is added, so `adopt` on a learner repeats `advance` exactly, and `advance` done
again with the same encoded Δ gives the same version. Inputs are never changed; `out` hands in arrays to fill
(touching fresh memory costs about as much as the arithmetic), apart from them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skerry.algo import codecs, digests, kernels
from skerry.algo.codecs import U8
from skerry.algo.fragments import F32, ROW
from skerry.algo.kernels import NONE, Array, check_flat, frozen, over_rows

OUTER_RULES = ("nesterov", "sgd", "delayed")


class OuterStep(NamedTuple):
    """An outer step as it is decided: Nesterov b' = μ b + Δ, x = (Θ + e) + η (Δ + μ b'); SGD x = (Θ + e) + η Δ, b' = 0.

    Delayed Nesterov (arXiv 2401.09135) is SGD, and at each version that is a multiple of `delay` a Nesterov step with
    the mean of the Δ since the last. Its velocity is μ b and what of that mean is known so far. At a multiple of
    `restart` (0: never) the velocity is forgotten before the step (arXiv 2605.28585).
    """

    rule: str
    lr: float  # η
    momentum: float  # μ
    version: int = 0  # that the step makes
    delay: int = 1
    restart: int = 0


class Advanced(NamedTuple):
    """The next version with its digests, and the delta that carries it to learners; of no use unless `finite`."""

    theta: F32
    velocity: F32
    error: F32
    payload: U8
    finite: bool
    digests: tuple[bytes, bytes, bytes]  # of theta, velocity and error


class Adopted(NamedTuple):
    """A version as it came; it is the one that was meant if its digest is that one's."""

    theta: F32
    digest: bytes
    finite: bool


def advance(
    step: OuterStep,
    theta: F32,
    velocity: F32,
    error: F32,
    delta_codec: str,
    delta: Array,
    codec: str,
    threads: int = 1,
    out: tuple[F32, F32, F32, U8] | None = None,
) -> Advanced:
    """The next version: x, b' = step(Θ + e, b, decoded Δ), d = Q(x − Θ), Θ' = Θ + decode(d), e' = x − Θ'.

    One pass over memory; `out` is for Θ', b', e' and the payload d.
    """
    theta_new, velocity_new, error_new, payload = out or _fresh(codec, theta.size)
    check_flat(theta.size, theta, velocity, error, theta_new, velocity_new, error_new)
    payload = codecs.writable(codec, payload, theta.size)
    source = codecs.readable(delta_codec, delta, theta.size)
    rates = frozen(_rates(step))
    before = np.zeros_like(velocity) if is_multiple(step.version, step.restart) else velocity
    tops: list[int] = []  # appended to from any thread
    sums: list[npt.NDArray[np.uint64]] = []

    def work(row_lo: int, row_hi: int) -> None:
        mine = np.zeros(3, np.uint64)
        top = kernels.advance(
            rates,
            codecs.number(delta_codec),
            source,
            frozen(theta),
            frozen(error),
            frozen(before),
            codecs.number(codec),
            payload,
            theta_new,
            error_new,
            velocity_new,
            digests.FACTORS,
            mine,
            row_lo,
            row_hi,
        )
        tops.append(int(top))
        sums.append(mine)

    over_rows(work, -(-theta.size // ROW), threads)
    is_finite = max(tops) < int(kernels.INFINITY_BITS)
    made = [digests.as_bytes(sum(int(one[k]) for one in sums)) for k in range(3)]
    return Advanced(theta_new, velocity_new, error_new, payload, is_finite, (made[0], made[1], made[2]))


def _fresh(codec: str, size: int) -> tuple[F32, F32, F32, U8]:
    theta, velocity, error = (np.empty(size, np.float32) for _ in range(3))
    return theta, velocity, error, np.empty(codecs.payload_bytes(codec, size), np.uint8)


def adopt(codec: str, payload: Array, theta_old: F32 | None, threads: int = 1, out: F32 | None = None) -> Adopted:
    """Θ' = Θ + decode(d), the bits that `advance` kept; without a Θ the payload is all of it.

    Digest and finiteness are found on the way, while a row is in cache.
    """
    size = codecs.size_of(codec, payload) if theta_old is None else theta_old.size
    theta_new = np.empty(size, np.float32) if out is None else out
    source = (codecs.number(codec), codecs.readable(codec, payload, size))
    check_flat(size, theta_new, *(() if theta_old is None else (theta_old,)))
    before = NONE if theta_old is None else frozen(theta_old)
    found: list[tuple[np.uint64, np.uint32]] = []  # appended to from any thread

    def work(row_lo: int, row_hi: int) -> None:
        found.append(kernels.adopt(*source, before, theta_new, digests.FACTORS, row_lo, row_hi))

    over_rows(work, -(-size // ROW), threads)
    totals, tops = zip(*found, strict=True)
    return Adopted(theta_new, digests.as_bytes(sum(map(int, totals))), max(tops) < kernels.INFINITY_BITS)


def is_multiple(version: int, period: int) -> bool:
    """Whether something done every `period` versions is done at this one; a period of 0 is never."""
    return period > 0 and version % period == 0


def _rates(step: OuterStep) -> F32:
    """η, decay, share, push and keep: b = decay · b + share · Δ, x = (Θ + e) + η (Δ + push · b), b' = keep · b."""
    if step.rule == "sgd":
        return np.array([step.lr, 0, 0, 0, 0], np.float32)
    if step.rule == "nesterov":
        return np.array([step.lr, step.momentum, 1, step.momentum, 1], np.float32)
    if step.rule == "delayed":
        push, keep = (step.momentum, step.momentum) if is_multiple(step.version, step.delay) else (0, 1)
        return np.array([step.lr, 1, 1 / step.delay, push, keep], np.float32)
    raise ValueError(f"unknown outer rule {step.rule!r}, known are {', '.join(OUTER_RULES)}")
