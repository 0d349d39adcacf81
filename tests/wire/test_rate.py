"""The bound on bytes a second, by its arithmetic on a clock that is handed in; over sockets it is in test_tcp."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.wire.rate import BURST_S, Bucket


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1)), max_size=50), st.floats(1, 1e9))
def test_no_more_leaves_than_the_rate_and_one_burst(moves, bytes_per_s):
    """Whenever it is asked, and however much of what is allowed is then used."""
    now = spent = 0
    bucket = Bucket(bytes_per_s, now)
    for wait_s, share in moves:
        now += wait_s
        count = int(bucket.allowed(now) * share)
        bucket.spend(count)
        spent += count
        assert spent <= max(now, BURST_S) * bytes_per_s + 1


def test_who_always_has_something_to_send_gets_the_whole_rate():
    dice, now, spent = random.Random(1), 100.0, 0
    bucket = Bucket(1e6, now)
    while now < 160.0:
        now += dice.uniform(0.0, BURST_S)
        count = min(100_000, bucket.allowed(now))
        bucket.spend(count)
        spent += count
    assert spent == pytest.approx(60e6, rel=0.002)


def test_a_pause_saves_up_one_burst_and_no_more():
    bucket = Bucket(1e6, 0.0)
    assert bucket.allowed(0.0) == 0 and bucket.allowed(1000.0) == int(1e6 * BURST_S)


def test_a_clock_that_goes_back_gives_nothing():
    bucket = Bucket(1e6, 10.0)
    bucket.spend(bucket.allowed(10.01))
    assert bucket.allowed(5.0) == 0 and bucket.allowed(10.011) <= 1000


def test_a_very_low_rate_still_lets_something_pass():
    bucket = Bucket(0.5, 0.0)
    assert [bucket.allowed(now) for now in (1.0, 2.0)] == [0, 1]
