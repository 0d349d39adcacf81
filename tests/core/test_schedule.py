"""What is due, and how many rounds may open: offsets, leaders, the cap and the pacer, over all small settings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skerry import config as configs
from skerry.core.schedule import STEADY, WARM, Pacer, first_due, overdue, phase_at, rounds_open_max, sync_every_at

counts = st.integers(1, 30)


@given(counts, counts)
def test_first_offsets_are_spread_over_one_interval(fragments, every):
    """All within (0, H], in order, no more on one step than must be."""
    due = [first_due(p, fragments, every) for p in range(fragments)]
    assert due == sorted(due) and due[0] >= 1 and due[-1] == every
    assert max(due.count(step) for step in due) <= -(-fragments // every)


@given(st.lists(st.integers(0, 100), max_size=6), st.integers(1, 6), st.integers(1, 30))
def test_due_when_k_have_h_or_the_leader_has_2h(unsettled, quorum, every):
    enough = sum(steps >= every for steps in unsettled) >= quorum
    led = max(unsettled, default=0) >= 2 * every and sum(steps >= 1 for steps in unsettled) >= quorum
    assert (overdue(unsettled, quorum, every) >= 1) == (enough or led)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 6))
def test_more_steps_are_never_less_due(unsettled, who, quorum):
    more = list(unsettled)
    more[who % len(more)] += 1
    assert overdue(more, quorum, 8) >= overdue(unsettled, quorum, 8)


@given(st.integers(1, 10), counts, counts)
def test_open_rounds_fit_under_the_delay(delay, fragments, every):
    most = rounds_open_max(delay, fragments, every)
    assert (most - 1) * every >= delay * fragments > (most - 2) * every


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 2)), max_size=60), counts, counts)
def test_openings_never_outrun_the_pace(turns, fragments, every):
    """In any stretch: at most a burst of 2 max(1, P/H), and P/H per step taken."""
    pacer, rate, now, steps, opened = Pacer(), fragments / every, 0.0, 0.0, 0
    pacer.grow(now, None, rate)
    for pause, step_s in turns:
        now, steps = now + pause, steps + pause / step_s
        pacer.grow(now, step_s, rate)
        while pacer.take():
            opened += 1
        assert opened <= 1 + steps * rate + 1e-6
        assert pacer.allowance < 1


def test_an_outage_leaves_a_bounded_burst():
    pacer = Pacer()
    pacer.grow(0.0, 1.0, 0.25)
    pacer.grow(1e6, 1.0, 0.25)
    assert [pacer.take() for _ in range(3)] == [True, True, False]


def test_nothing_grows_before_a_step_was_measured():
    pacer = Pacer()
    assert pacer.take()
    pacer.grow(0.0, None, 1.0)
    pacer.grow(100.0, None, 1.0)
    assert not pacer.take()


@given(st.floats(0, 1), st.floats(0, 1))
def test_h_only_grows_with_progress(one, other):
    sync = configs.Sync(policy="warm", warm_share=0.2, warm_every=4, ramp_share=0.3, sync_every=24)
    low, high = sorted([one, other])
    assert 4 <= sync_every_at(sync, low) <= sync_every_at(sync, high) <= 24
    assert (phase_at(sync, low), phase_at(sync, high)) != (STEADY, WARM)


@given(st.floats(0, 1))
def test_fixed_is_fixed(progress):
    sync = configs.Sync(policy="fixed", sync_every=24)
    assert (sync_every_at(sync, progress), phase_at(sync, progress)) == (24, STEADY)
