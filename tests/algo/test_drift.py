"""A learner's passes have the bits of one operation of numpy after the other, for any number of threads."""

from functools import cache

import numpy as np
import pytest

from skerry.algo.codecs import CODECS, decode, encode, payload_bytes
from skerry.algo.digests import digest
from skerry.algo.drift import difference, say, unsaid
from skerry.algo.fragments import BLOCK, ROW
from skerry.algo.kernels import ROWS_PER_THREAD_MIN
from skerry.algo.outer import adopt

every_codec = pytest.mark.parametrize("codec", CODECS)
any_threads = pytest.mark.parametrize("threads", [1, 2, 5])
SIZE = 5 * ROWS_PER_THREAD_MIN * ROW + BLOCK  # with less, five threads would not all have something to do


@cache
def noise(seed):
    return np.random.default_rng(seed).standard_normal(SIZE, np.float32)


def gaussian(seed, scale=1.0):
    return noise(seed) * np.float32(scale)


def fresh():
    return np.full(SIZE, np.nan, np.float32)


def said(codec, drift, residual, threads=1):
    payload = np.full(payload_bytes(codec, SIZE), 255, np.uint8)
    return payload if say(codec, drift, residual, payload, threads) else None


@any_threads
def test_a_difference_of_two_and_of_three(threads):
    x, y, z = gaussian(0), gaussian(1), gaussian(2, 1e-3)
    assert difference(x, (y,), fresh(), threads).tobytes() == (x - y).tobytes()
    assert difference(x, (y, z), fresh(), threads).tobytes() == ((x - y) - z).tobytes()


@any_threads
@every_codec
def test_what_is_said_and_what_is_left_of_drift_and_residual(codec, threads):
    drift, residual = gaussian(0, 1e-2), gaussian(1, 1e-3)
    drift[: ROW // 2] = -0.0  # a zero keeps its sign where nothing is added to it
    for before, u in ((None, drift), (residual, drift + residual)):
        payload = said(codec, drift, before, threads)
        assert payload.tobytes() == encode(codec, u).tobytes()
        left = unsaid(codec, payload, drift, before, fresh(), threads)
        assert left.tobytes() == (u - decode(codec, payload)).tobytes()


@any_threads
@every_codec
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, SIZE // 2, SIZE - 1])
def test_what_is_not_finite_is_not_said(codec, threads, poison, at):
    drift, residual = gaussian(0), gaussian(1)
    assert said(codec, drift, residual, threads) is not None
    residual[at] = poison
    assert said(codec, drift, residual, threads) is None
    assert said(codec, residual, None, threads) is None


def test_a_sum_that_overflows_is_not_said():
    drift, residual = gaussian(0), gaussian(1)
    drift[7] = residual[7] = 3e38
    assert said("bf16", drift, None) is not None and said("bf16", drift, residual) is None


@any_threads
@every_codec
def test_a_version_is_adopted_with_its_digest_and_whether_it_is_finite(codec, threads):
    theta, payload = gaussian(0), encode(codec, gaussian(1, 1e-2))
    for before, expected in ((theta, theta + decode(codec, payload)), (None, decode(codec, payload))):
        adopted = adopt(codec, payload, before, threads)
        assert adopted.theta.tobytes() == expected.tobytes()
        assert adopted.digest == digest(expected) and adopted.finite
    theta[SIZE - 1] = np.inf
    assert not adopt(codec, payload, theta, threads).finite


def test_arrays_of_another_length_or_kind_are_refused():
    x = gaussian(0)
    with pytest.raises(AssertionError, match="expected contiguous float32"):
        difference(x, (x[:-1],), fresh())
    with pytest.raises(AssertionError, match="expected contiguous float32"):
        unsaid("int4", encode("int4", x), x, x[: BLOCK // 2], fresh())
    with pytest.raises(ValueError, match="payload of"):
        say("int4", x, None, encode("int8", x))
