"""What is due, and how many rounds may open: offsets, leaders, the cap and the pacer, over all small settings."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from skerry import config as configs
from skerry.core.facts import Row
from skerry.core.schedule import (
    Pacer,
    first_due,
    gain_of,
    pace_s,
    stage_at,
    steps_due,
    sync_every_in,
    weight_of,
)
from skerry.core.vocabulary import STAGES

counts = st.integers(1, 30)


@given(counts, counts)
def test_first_offsets_are_spread_over_one_interval(fragments, every):
    """All within (0, H], in order, no more on one step than must be."""
    due = [first_due(p, fragments, every) for p in range(fragments)]
    assert due == sorted(due) and due[0] >= 1 and due[-1] == every
    assert max(due.count(step) for step in due) <= -(-fragments // every)


@given(st.lists(st.integers(0, 100), max_size=6), st.integers(1, 6), st.integers(1, 30))
def test_due_when_k_have_h_or_h_plus_1_on_average_or_the_leader_has_2h(unsettled, quorum, every):
    enough = sum(steps >= every for steps in unsettled) >= quorum
    on_average = sum(sorted(unsettled)[-quorum:]) >= quorum * (every + 1)
    led = max(unsettled, default=0) >= 2 * every
    are_there = sum(steps >= 1 for steps in unsettled) >= quorum
    assert (steps_due(Counter(unsettled), quorum) >= every) == (enough or (are_there and (on_average or led)))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 6), st.integers(1000, 5000))
def test_the_pace_is_that_of_the_steps_that_count(step_s, quorum, seconds):
    """After a long time, steps_due stands where the pace says it does."""
    pace = pace_s(step_s, quorum)
    if len(step_s) < quorum:
        assert pace is None
        return
    taken = [int(seconds / each) for each in step_s]
    assert abs(steps_due(Counter(taken), quorum) - seconds / pace) <= 2


def test_h_hardly_stretches_while_one_of_the_fast_is_away():
    """Four fast learners and four slow: with one of the fast dead the fourth fastest is a slow one."""
    fast, half, quarter = [1.0] * 4, [2.0] * 2, [4.0] * 2
    assert pace_s(fast + half + quarter, 4) == 1.0
    assert pace_s(fast[1:] + half + quarter, 4) == 4 / 3.5
    assert pace_s([1.0] + [10.0] * 7, 4) == 2.0  # and one among many slow ones sets half its own


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 6))
def test_more_steps_are_never_less_due(unsettled, who, quorum):
    more = list(unsettled)
    more[who % len(more)] += 1
    assert steps_due(Counter(more), quorum) >= steps_due(Counter(unsettled), quorum)


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


progresses, steps = st.floats(0, 1), st.integers(0, 2000)
AUTO = configs.Config(
    run=configs.Run(learners=2, steps=1000),
    sync=configs.Sync(warm_share=0.2, warm_steps=500, warm_every=4, cool_share=0.1, sync_every=24),
)


@given(progresses, progresses, steps, steps)
def test_phases_and_h_only_go_forward(one, other, few, many):
    before, after = (stage_at(AUTO, *at) for at in zip(sorted([one, other]), sorted([few, many]), strict=True))
    assert STAGES.index(before) <= STAGES.index(after)
    assert 4 <= sync_every_in(AUTO.sync, before) <= sync_every_in(AUTO.sync, after) <= 24


def test_the_warm_phase_ends_by_steps_or_by_share_and_the_cool_one_comes_last():
    assert stage_at(AUTO, 0.0, 0) == stage_at(AUTO, 0.19, 999) == "warm"
    assert stage_at(AUTO, 0.01, 1000) == stage_at(AUTO, 0.2, 10) == stage_at(AUTO, 0.89, 10) == "steady"
    assert stage_at(AUTO, 0.91, 10) == stage_at(AUTO, 1.0, 2000) == "cool"


@given(progresses, steps)
def test_fixed_is_fixed(progress, taken):
    fixed = configs.Config(sync=configs.Sync(policy="fixed", sync_every=24))
    stage = stage_at(fixed, progress, taken)
    assert (sync_every_in(fixed.sync, stage), stage) == (24, "steady")


def row(learner, steps, fate="merged"):
    return Row(learner, 1, 0, 0, 0, steps, 10 * steps, fate, 1)


def test_all_of_a_merge_is_taken_if_each_brings_one_round():
    rows = [row("a", 25), row("b", 25), row("c", 24)]
    assert gain_of(rows, {"a": 6, "b": 6}, version=7, sync_every=24) == 1.0  # and c is new
    stretched = [row("a", 60), row("b", 58)]  # nobody was in a version meanwhile: the syncer was away
    assert gain_of(stretched, {"a": 6, "b": 6}, version=7, sync_every=24) == 1.0


def test_halves_that_take_turns_go_no_further_than_each_of_them_has_gone():
    """Over a link slower than H: a and b are in odd versions, c and d in even ones, each with two rounds of steps."""
    merged_in, gone = {}, 0.0
    for version in range(1, 101):
        learners = "ab" if version % 2 else "cd"
        rows = [row(learner, 8 if learner in merged_in else 4) for learner in learners]
        gone += gain_of(rows, merged_in, version, sync_every=4) * rows[0].steps
        merged_in |= dict.fromkeys(learners, version)
    assert gone == 4 * 100


def test_the_slow_and_the_new_bring_no_more_than_their_due():
    slow = [row("fast", 25), row("slow", 12)]  # was not in the last version, with 6 steps a round
    assert gain_of(slow, {"fast": 6, "slow": 5}, version=7, sync_every=24) == 1.0
    returned = [row("a", 25), row("b", 20), row("b", 300, "fast-forward")]
    assert gain_of(returned, {"a": 99, "b": 3}, version=100, sync_every=24) == 1.0


def test_one_that_missed_a_version_counts_for_one_round():
    rows = [row("a", 24), row("b", 24), row("c", 48)]
    gain = gain_of(rows, {"a": 6, "b": 6, "c": 5}, version=7, sync_every=24)
    assert gain == (240 + 240 + 480 / 2) / (240 + 240 + 480)


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 9)), min_size=1, max_size=8), st.integers(1, 50))
def test_a_gain_is_a_part_and_never_nothing(brought, every):
    rows = [row(str(n), steps) for n, (steps, _) in enumerate(brought)]
    merged_in = {str(n): version for n, (_, version) in enumerate(brought)}
    gain = gain_of(rows, merged_in, 10, every)
    assert min(1.0, every / max(r.steps for r in rows)) - 1e-9 <= gain <= 1.0 + 1e-9


def test_paper_3_2_the_weight_is_quantity_times_quality():
    assert weight_of(tokens=600, steps=3) == 600 * (600 / 3)
    assert weight_of(tokens=0, steps=0) == 0.0
    # with equal tokens a step, weights are in the ratio of the steps
    assert weight_of(50 * 8, 8) / weight_of(50 * 2, 2) == 4
