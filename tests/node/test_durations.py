"""Counts by length say how long things took, within a quarter, and of any stretch of time."""

import random

import pytest

from skerry.node.durations import FINEST_S, RATIO, Durations, between, quantile


@pytest.mark.parametrize("share", [0.5, 0.99, 1.0])
def test_a_quantile_is_within_a_bin_of_the_true_one(share):
    source, turns = random.Random(7), Durations()
    lengths = sorted(source.lognormvariate(-7.0, 1.5) for _ in range(1000))
    for length in lengths:
        turns.add(length)
    true = lengths[int(share * len(lengths)) - 1]
    assert true <= quantile(turns.counts, share) * (1 + 1e-9) and quantile(turns.counts, share) <= RATIO * true


def test_a_stretch_is_the_difference_of_two_looks():
    turns = Durations()
    turns.add(1.0)
    before = dict(turns.counts)
    for _ in range(10):
        turns.add(0.001)
    assert quantile(between(before, turns.counts), 1.0) < 0.0013
    assert between(turns.counts, turns.counts) == {}


def test_no_length_is_too_short_or_too_long_for_a_bin():
    turns = Durations()
    for length in (0.0, -1.0, 1e9):
        turns.add(length)
    assert sum(turns.counts.values()) == 3 and quantile(turns.counts, 0.5) == FINEST_S
