"""What is held: one of a learner and fragment, a sum of bytes that is always right, and room for the oldest round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.views import FRAGMENTS, contribution, holding
from skerry.core.held import Held

places = st.tuples(st.sampled_from("abc"), st.integers(0, FRAGMENTS - 1))


@given(st.lists(st.tuples(places, st.integers(1, 100))))
def test_the_running_sum_is_the_sum(moves):
    """Each move adds at a place where nothing is held, and drops where something is."""
    held, sizes = Held(FRAGMENTS, 1000), {}
    for (name, p), size in moves:
        if (name, p) in sizes:
            held.drop(name, p)
            del sizes[name, p]
        else:
            held.add(contribution(name, p), size)
            sizes[name, p] = size
        assert held.bytes == sum(sizes.values())
        assert {(name, p) for p, there in enumerate(held) for name in there} == sizes.keys()


def test_a_second_contribution_of_a_learner_is_our_own_mistake():
    with pytest.raises(AssertionError):
        holding(contribution("a"), contribution("a"))


def test_they_are_summed_in_the_order_of_learners():
    assert [c.learner for c in holding(contribution("b"), contribution("c"), contribution("a")).in_order(0)] == [*"abc"]


def test_beyond_the_bound_only_the_oldest_round_is_let_in():
    held = holding(contribution("a", 0), contribution("a", 1), bytes_max=25)
    assert held.is_full
    assert [held.has_room(p, oldest=1) for p in range(2)] == [False, True]


def test_with_no_open_round_the_first_fragment_of_which_something_is_held_is_let_in():
    held = holding(contribution("a", 1), bytes_max=15)
    held.expect(0, 10)
    assert [held.has_room(p, oldest=None) for p in range(2)] == [False, True]


def test_a_contribution_is_wanted_once_and_only_where_it_fits():
    held = holding(contribution("a", 0), contribution("a", 1), bytes_max=25)
    assert held.has_room(0, oldest=0) and not held.has_room(1, oldest=0)
    held.drop("a", 1)
    assert held.has_room(1, oldest=0) and not held.is_full
    assert repr(held) == "<held [['a'], []] 10 of 25 bytes>"
