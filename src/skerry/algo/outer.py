"""The outer step on one fragment, and the published delta that carries its result to every learner.

Rules that hold here: Δ is the merged drift (θ − Θ), minus the paper's outer gradient, so it is added. The
master value is Θ + e: Θ is what every learner holds, bit for bit, and e what the codec could not say so far.
Every product is rounded before it is added, so `adopt` on a learner repeats `publish` exactly. Inputs are never
changed; `out` hands in arrays to fill (touching fresh memory costs more than the arithmetic), apart from them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from skerry.algo import codecs, kernels
from skerry.algo.codecs import U8
from skerry.algo.fragments import F32, ROW
from skerry.algo.kernels import Array, check_flat, frozen, over_rows

OUTER_RULES = ("nesterov", "sgd", "delayed")
PIECE = 16 * ROW  # elements worked on while they stay in cache


class Published(NamedTuple):
    """A version as it is sent (payload) and as it is kept; must be discarded unless `finite`."""

    payload: U8
    theta_new: F32
    error_new: F32
    finite: bool


def outer_step(
    rule: str,
    lr: float,
    momentum: float,
    theta: F32,
    error: F32,
    velocity: F32,
    delta: F32,
    threads: int = 1,
    out: tuple[F32, F32] | None = None,
    version: int = 0,
    delay: int = 1,
    restart: int = 0,
) -> tuple[F32, F32]:
    """(x, b'): Nesterov b' = μ b + Δ, x = (Θ + e) + η (Δ + μ b'); plain SGD x = (Θ + e) + η Δ, b' = 0.

    Delayed Nesterov (arXiv 2401.09135) is SGD, and at each version that is a multiple of `delay` a Nesterov step with
    the mean of the Δ since the last. Its velocity is μ b and what of that mean is known so far. At a multiple of
    `restart` (0: never) the velocity is forgotten before the step (arXiv 2605.28585).
    """
    if rule not in OUTER_RULES:
        raise ValueError(f"unknown outer rule {rule!r}, known are {', '.join(OUTER_RULES)}")
    x, velocity_new = out or (np.empty_like(theta), np.empty_like(theta))
    check_flat(theta.size, theta, error, velocity, delta, x, velocity_new)
    eta, mu = np.float32(lr), np.float32(momentum)
    if is_multiple(version, restart):
        velocity = np.zeros_like(velocity)
    push, keep = (mu, mu) if is_multiple(version, delay) else (np.float32(0), np.float32(1))

    def work(row_lo: int, row_hi: int) -> None:
        at = slice(row_lo * ROW, row_hi * ROW)
        master, step = (frozen(theta[at]), frozen(error[at])), frozen(delta[at])
        if rule == "nesterov":
            kernels.nesterov(eta, mu, *master, frozen(velocity[at]), step, x[at], velocity_new[at])
        elif rule == "delayed":
            rates = (eta, np.float32(1 / delay), push, keep)
            kernels.delayed(*rates, *master, frozen(velocity[at]), step, x[at], velocity_new[at])
        else:
            kernels.sgd(eta, *master, step, x[at])
            velocity_new[at] = 0.0

    over_rows(work, -(-theta.size // ROW), threads)
    return x, velocity_new


def is_multiple(version: int, period: int) -> bool:
    """Whether something done every `period` versions is done at this one; a period of 0 is never."""
    return period > 0 and version % period == 0


def publish(codec: str, x: F32, theta: F32, threads: int = 1, out: tuple[F32, F32] | None = None) -> Published:
    """d = Q(x − Θ), Θ' = Θ + decode(d), e' = x − Θ'; the payload is always fresh, for it outlives the call."""
    theta_new, error_new = out or (np.empty_like(theta), np.empty_like(theta))
    check_flat(theta.size, theta, x, theta_new, error_new)
    payload = np.empty(codecs.payload_bytes(codec, x.size), np.uint8)
    parts = codecs.writable(codec, payload, x.size)
    bad: list[int] = []  # appended to from any thread

    def work(row_lo: int, row_hi: int) -> None:
        for at in _pieces(row_lo, row_hi):
            with np.errstate(over="ignore", invalid="ignore"):  # found below, and not a matter for warnings
                difference = np.subtract(x[at], theta[at], out=error_new[at])
                codecs.encode_piece(codec, difference, parts, at.start)
                _adopt_piece(codec, parts, at, theta, theta_new)
                np.subtract(x[at], theta_new[at], out=error_new[at])
            if not (_is_finite(theta_new[at]) and _is_finite(error_new[at])):
                bad.append(at.start)

    over_rows(work, -(-x.size // ROW), threads)
    return Published(payload, theta_new, error_new, not bad)


def adopt(codec: str, payload: Array, theta_old: F32, threads: int = 1, out: F32 | None = None) -> F32:
    """Θ' = Θ + decode(d), the bits that `publish` kept."""
    theta_new = np.empty_like(theta_old) if out is None else out
    check_flat(theta_old.size, theta_old, theta_new)
    parts = codecs.readable(codec, payload, theta_old.size)

    def work(row_lo: int, row_hi: int) -> None:
        for at in _pieces(row_lo, row_hi):
            _adopt_piece(codec, parts, at, theta_old, theta_new)

    over_rows(work, -(-theta_old.size // ROW), threads)
    return theta_new


def _adopt_piece(codec: str, parts: codecs.Parts, at: slice, theta: F32, theta_new: F32) -> None:
    codecs.decode_piece(codec, parts, at.start, theta_new[at])
    np.add(theta[at], theta_new[at], out=theta_new[at])


def _is_finite(x: F32) -> bool:
    return bool(kernels.top_bits(frozen(x.view(np.uint32))) < kernels.INFINITY_BITS)


def _pieces(row_lo: int, row_hi: int) -> Iterator[slice]:
    stop = row_hi * ROW
    for start in range(row_lo * ROW, stop, PIECE):
        yield slice(start, min(start + PIECE, stop))
