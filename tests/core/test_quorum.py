"""Quorum and grace as pure functions: bounds, monotony, and a reason with every decision."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skerry.core.quorum import decide, grace_s, quorum_size

seconds = st.floats(0, 100)


@given(st.integers(1, 10), st.integers(0, 10))
def test_a_number_is_a_number(quorum, ready):
    assert quorum_size(quorum, ready) == quorum


@given(st.floats(0.01, 0.99), st.integers(0, 50))
def test_a_share_is_of_the_ready_and_at_least_one(share, ready):
    k = quorum_size(share, ready)
    assert 1 <= k <= max(1, ready)
    assert k >= share * ready
    assert k <= quorum_size(share, ready + 1)


@given(st.floats(0, 1), st.integers(1, 10), seconds, seconds, seconds)
def test_grace_fits_in_a_step_and_in_the_slack(gamma, delay, step_s, quorum_s, sync_s):
    """Quorum, grace and sync together fit in τ steps, or there is no grace."""
    grace = grace_s(gamma, delay, step_s, quorum_s, sync_s)
    assert 0 <= grace <= step_s
    assert grace == 0 or quorum_s + grace + sync_s <= delay * step_s + 1e-9


@given(
    st.integers(0, 5),
    st.integers(1, 5),
    st.dictionaries(st.sampled_from("abc"), seconds),
    st.none() | seconds,
    seconds,
    seconds,
)
def test_a_verdict_follows_the_rules_and_says_why(held, quorum, missing, quorum_at, grace, now):
    closes, waits = decide(held, quorum, missing, quorum_at, grace, now)
    assert (closes is None) == bool(waits)
    if held < quorum or quorum_at is None:
        assert waits == f"{held} of quorum {quorum}"
    elif not missing or now >= quorum_at + grace:
        assert closes in ("all in", "grace over", "no grace")
    else:
        hoped = [name for name, expected in missing.items() if expected <= quorum_at + grace]
        assert closes == (None if hoped else "the rest cannot make it")
        assert all(name in waits for name in hoped)


@given(st.dictionaries(st.sampled_from("abc"), seconds), seconds, seconds)
def test_with_a_quorum_the_wait_ends(missing, quorum_at, grace):
    assert decide(2, 2, missing, quorum_at, grace, quorum_at + grace).closes
