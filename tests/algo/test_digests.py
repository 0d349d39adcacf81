"""A digest is the sums that its definition says, whatever the threads, and no single word can change unseen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algo.digests import FACTORS, digest, of_row_sums
from skerry.algo.fragments import BLOCK, ROW
from skerry.algo.kernels import ROWS_PER_THREAD_MIN

small = settings(deadline=None, max_examples=25, derandomize=True)
MOD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    word = state % MOD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % MOD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % MOD
    return word ^ word >> 31


def slow_digest(x: np.ndarray) -> bytes:
    """In Python's integers, a word after the other."""
    factors = [splitmix64((j + 1) * GOLDEN) >> 32 | 1 for j in range(ROW)]
    words = [int(word) for word in np.frombuffer(x.tobytes(), "<u4")]
    total = 0
    for row, start in enumerate(range(0, len(words), ROW)):
        row_sum = sum(word * factor for word, factor in zip(words[start : start + ROW], factors, strict=False))
        total += splitmix64(row_sum + (row + 1) * GOLDEN)
    return (total % MOD).to_bytes(8, "little")


def gaussian(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", [0, 1, BLOCK, ROW - 1, ROW, ROW + 1, 2 * ROW + 77])
def test_it_is_what_its_definition_says(size):
    x = gaussian(size)
    assert digest(x) == slow_digest(x)


@pytest.mark.parametrize("size", [1, ROW, 2 * ROW + 77])
def test_row_sums_of_somebody_else_give_the_same(size):
    x = gaussian(size)
    words = np.zeros(-(-size // ROW) * ROW, np.uint64)
    words[:size] = x.view(np.uint32)
    sums = (words.reshape(-1, ROW) * FACTORS.astype(np.uint64)).sum(axis=1, dtype=np.uint64)
    assert of_row_sums(sums) == digest(x)


def test_its_first_numbers_are_splitmix64s():
    """As its authors give them for seed 0: who computes a digest elsewhere can begin here."""
    assert [int(factor) for factor in FACTORS[:3]] == [0xE220A839, 0x6E789E6B, 0x06C45D19]
    assert (FACTORS % 2 == 1).all() and len(set(FACTORS.tolist())) == ROW


def test_every_bit_pattern_counts_not_every_number():
    zero, minus, nan = (np.full(BLOCK, value, np.float32) for value in (0.0, -0.0, np.nan))
    assert len({digest(zero), digest(minus), digest(nan)}) == 3
    assert all(digest(x) == slow_digest(x) for x in (zero, minus, nan))


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_any_number_of_threads_gives_the_same(threads):
    x = gaussian(threads * ROWS_PER_THREAD_MIN * ROW + 5)  # less would be done on fewer threads
    assert digest(x, threads) == digest(x)


@small
@given(place=st.integers(0, 2 * ROW + 76), flipped=st.integers(1, 2**32 - 1))
def test_a_word_that_differs_shows(place, flipped):
    x = gaussian(2 * ROW + 77)
    other = x.copy()
    other.view(np.uint32)[place] ^= np.uint32(flipped)
    assert digest(other) != digest(x)


@small
@given(places=st.lists(st.integers(0, 3 * ROW - 1), min_size=2, max_size=2, unique=True))
def test_words_and_rows_in_another_order_show(places):
    x = gaussian(3 * ROW)
    other, one, two = x.copy(), *places
    other[[one, two]] = other[[two, one]]
    assert digest(other) != digest(x)
    assert digest(np.roll(x, ROW)) != digest(x)
