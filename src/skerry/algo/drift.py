"""A learner's passes over a fragment: its drift, what a contribution says of it, and the way to the next version.

    drift      θ − Θ                   increment   (Θ' − Θ) − (what settled contributions take out)
    say        d = Q(u),  u = drift + residual, or the drift alone where there is no residual yet
    unsaid     u − decode(d), the next residual

Each is one pass over memory, and every operation is rounded as if it were alone, so the bits are those of one operation
after the other, for any number of threads. Arrays to fill are handed in, apart from the inputs: fresh memory costs as
much as the arithmetic.
"""

from skerry.algo import codecs, kernels
from skerry.algo.codecs import U8
from skerry.algo.fragments import F32, ROW
from skerry.algo.kernels import NONE, Array, check_flat, frozen, over_rows


def difference(x: F32, less: tuple[F32, ...], out: F32, threads: int = 1) -> F32:
    """x, less one array or two, one after the other."""
    check_flat(out.size, x, *less, out)
    y, z = (*less, NONE) if len(less) == 1 else less

    def work(row_lo: int, row_hi: int) -> None:
        at = slice(row_lo * ROW, row_hi * ROW)
        kernels.difference(frozen(x[at]), frozen(y[at]), frozen(z[at]), out[at])

    over_rows(work, -(-out.size // ROW), threads)
    return out


def say(codec: str, drift: F32, residual: F32 | None, out: U8, threads: int = 1) -> bool:
    """Fill in the payload of u; whether u is finite, without which nobody must see it."""
    payload, before = codecs.writable(codec, out, drift.size), _checked(drift, residual)
    bad: list[int] = []  # appended to from any thread

    def work(row_lo: int, row_hi: int) -> None:
        part = (row_lo * ROW, min(row_hi * ROW, drift.size))
        if kernels.say(codecs.number(codec), frozen(drift), before, payload, *part) >= kernels.INFINITY_BITS:
            bad.append(row_lo)

    over_rows(work, -(-drift.size // ROW), threads)
    return not bad


def unsaid(codec: str, payload: Array, drift: F32, residual: F32 | None, out: F32, threads: int = 1) -> F32:
    """What the payload that `say` made leaves for the next."""
    source, before = codecs.readable(codec, payload, drift.size), _checked(drift, residual)
    check_flat(drift.size, out)

    def work(row_lo: int, row_hi: int) -> None:
        part = (row_lo * ROW, min(row_hi * ROW, drift.size))
        kernels.unsaid(codecs.number(codec), source, frozen(drift), before, out, *part)

    over_rows(work, -(-drift.size // ROW), threads)
    return out


def _checked(drift: F32, residual: F32 | None) -> F32:
    """The residual as kernels have it."""
    check_flat(drift.size, drift, *(() if residual is None else (residual,)))
    return NONE if residual is None else frozen(residual)
