"""What encoding and decoding a fragment takes, beside a plain copy of memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct

from skerry import algo
from skerry.algo import codecs
from skerry.algo.fragments import F32, padded
from skerry.proof.bench.reference import ROUNDS, Spread, Tell, check_memory, copy_gb_s, spread, timed

BYTES_NEEDED = 24  # of memory, a parameter: what is drawn, encoded, decoded and copied


class Load(Struct, frozen=True):
    """What is measured: every size with every codec and number of threads."""

    sizes: tuple[int, ...]  # parameters
    codecs: tuple[str, ...]
    threads: tuple[int, ...]


class Row(Struct, frozen=True):
    """GB/s count what is read and what is written."""

    codec: str
    threads: int
    parameters: int
    bytes_per_parameter: float
    encode_gb_s: float
    encode_of_bandwidth: float  # over what as many threads copy
    encode_of_bandwidth_spread: Spread
    decode_gb_s: float
    decode_of_bandwidth: float
    decode_of_bandwidth_spread: Spread


def measure(load: Load, tell: Tell) -> list[Row]:
    check_memory(BYTES_NEEDED * max(load.sizes), "--sizes")
    algo.warm_up()
    rows = []
    for size in load.sizes:
        x = np.random.default_rng(0).standard_normal(padded(size), np.float32)
        for codec in load.codecs:
            tell(f"{size} parameters, {codec}")
            rows += [_row(x, size, codec, threads) for threads in load.threads]
    return rows


def _row(x: F32, size: int, codec: str, threads: int) -> Row:
    payload, out = codecs.encode(codec, x), np.zeros_like(x)
    moved = x.nbytes + payload.size
    encoding = lambda: codecs.encode(codec, x, out=payload, threads=threads)  # noqa: E731
    decoding = lambda: codecs.decode(codec, payload, out=out, threads=threads)  # noqa: E731
    encode, encode_of = _against_a_copy(encoding, moved, x, out, threads)
    decode, decode_of = _against_a_copy(decoding, moved, x, out, threads)
    return Row(
        codec=codec,
        threads=threads,
        parameters=size,
        bytes_per_parameter=payload.size / x.size,
        encode_gb_s=encode.median,
        encode_of_bandwidth=encode_of.median,
        encode_of_bandwidth_spread=encode_of,
        decode_gb_s=decode.median,
        decode_of_bandwidth=decode_of.median,
        decode_of_bandwidth_spread=decode_of,
    )


def _against_a_copy(work: Callable[[], object], moved: int, x: F32, out: F32, threads: int) -> tuple[Spread, Spread]:
    """GB/s, and what that is of a copy's, round by round."""
    parts = list(zip(np.array_split(x, threads), np.array_split(out, threads), strict=True))
    work()
    rates, shares = [], []
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(threads) as pool:
            copied = copy_gb_s(pool, parts)
        rates.append(moved / timed(work) / 1e9)
        shares.append(rates[-1] / copied)
    return spread(rates), spread(shares)
