"""The order of a pack's windows is a permutation in every epoch, dealt out without overlap, and known at any number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.data.order import GOLDEN, ROUNDS, WORD, permuted, window_numbers

totals = st.integers(1, 3000)
seeds = st.integers(0, 2**70)


@given(total=totals, seed=seeds, epoch=st.integers(0, 2**40))
def test_an_epoch_has_every_window_once(total, seed, epoch):
    assert sorted(permuted(np.arange(total), total, seed, epoch)) == list(range(total))


def slow_permuted(place, total, seed, epoch):
    """The same, one number at a time, as docs/DATA.md has it."""

    def mix(x):
        x = (x + GOLDEN) % WORD
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
        return x ^ (x >> 31)

    half = max(1, ((total - 1).bit_length() + 1) // 2)
    key = mix((mix(seed % WORD) + epoch) % WORD)
    while True:
        left, right = place >> half, place % (1 << half)
        for number in range(ROUNDS):
            left, right = right, left ^ (mix(right ^ mix((key + number) % WORD)) % (1 << half))
        place = (left << half) | right
        if place < total:
            return place


@given(total=st.integers(1, 10**12), seed=seeds, epoch=st.integers(0, 2**40), data=st.data())
def test_it_is_what_the_document_says(total, seed, epoch, data):
    place = data.draw(st.integers(0, total - 1))
    assert permuted(np.array([place]), total, seed, epoch) == [slow_permuted(place, total, seed, epoch)]


def test_it_is_the_same_for_ever():
    """A run that is resumed by another version, on another machine, goes on where it was."""
    assert window_numbers(1000, 1, 4, seed=7, first=248, count=5).tolist() == PINNED


@given(total=totals, seed=seeds, epoch=st.integers(0, 5), data=st.data())
def test_learners_share_no_window_of_an_epoch(total, seed, epoch, data):
    learners = data.draw(st.integers(1, min(total, 9)))
    each = total // learners
    lanes = [window_numbers(total, i, learners, seed, epoch * each, each) for i in range(learners)]
    drawn = np.concatenate(lanes)
    assert len(set(drawn.tolist())) == len(drawn) == each * learners


@given(total=totals, seed=seeds, learner=st.integers(0, 40), first=st.integers(0, 10**6), data=st.data())
def test_a_draw_is_known_without_those_before_it(total, seed, learner, first, data):
    learners = data.draw(st.integers(1, min(total, 9)))
    together = window_numbers(total, learner, learners, seed, first, 12)
    alone = [int(window_numbers(total, learner, learners, seed, first + k, 1)[0]) for k in range(12)]
    assert together.tolist() == alone


def test_seed_epoch_and_learner_each_change_the_order():
    def order(learner=0, seed=0, first=0):
        return window_numbers(1000, learner, 4, seed, first, 20).tolist()

    assert len({tuple(some) for some in (order(), order(learner=1), order(seed=1), order(first=250))}) == 4


def test_who_takes_the_place_of_another_has_its_lane_and_begins_elsewhere():
    first, second = (window_numbers(1000, learner, 4, 0, 0, 250).tolist() for learner in (1, 5))
    assert set(first) == set(second)
    assert first[0] != second[0]


@pytest.mark.parametrize("epoch", [0, 1])
def test_neighbours_are_scattered(epoch):
    """Consecutive draws are as far apart as those of a random order: a third of the whole, on average."""
    apart = np.abs(np.diff(permuted(np.arange(10_000), 10_000, 0, epoch))).mean()
    assert 3200 < apart < 3470


PINNED = [225, 383, 564, 400, 279]
