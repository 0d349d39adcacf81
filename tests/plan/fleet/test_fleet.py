"""The goodput model: against a slow one that asks every chip, against what can be computed by hand, and on its own."""

import math
from dataclasses import replace

import numpy as np
import pytest

from plan.fleet.slow import simulate_slowly
from skerry.plan.fleet import fleet
from skerry.plan.fleet.fleet import DAY_S, Costs, Fleet, even_fleet, interval, needs, rounds_s, simulate

COSTS = Costs(step_s=5.0, restart_s=60.0, reconfigure_s=20.0, repair_s=900.0)
MTBI_S = 12 * 3600.0  # so that a few chips fail often


def small(learners, **more):
    return even_fleet(learners * 128, learners, 16.0, MTBI_S, costs=COSTS, **more)


def weibull(count, seed=0):
    """Delays as the fast simulator draws them, from the formula instead of its table."""
    shares = np.random.default_rng(seed).random(count)
    delays = (-np.log1p(-(shares ** (1 / fleet.REPAIR_POWER)))) ** (1 / fleet.REPAIR_SHAPE)
    return COSTS.repair_s * delays / delays.mean()


@pytest.mark.slow
@pytest.mark.parametrize(("learners", "rigid"), [(1, False), (2, False), (1, True)])
def test_a_simulator_that_asks_every_chip_in_every_step_agrees_within_the_interval(learners, rigid):
    trials, total_s = 20, 0.25 * DAY_S
    pause_s = COSTS.restart_s if rigid else COSTS.reconfigure_s
    repairs_s = np.zeros(1) if rigid else weibull(100_000)
    slow = np.array([
        simulate_slowly(learners, 8, 16, MTBI_S, COSTS.step_s, pause_s, repairs_s, total_s, seed, rigid)
        for seed in range(trials)
    ])  # fmt: skip
    fast = simulate(small(learners, is_rigid=rigid), total_s / DAY_S, 400, seed=3)
    for found, expected in ((fast.goodput, slow[:, 0]), (fast.uptime, slow[:, 1])):
        one, other = interval(found), interval(expected)
        # two intervals, each right 19 times in 20, and half a step of difference in when a return is seen
        assert one.low - 0.006 <= other.high and other.low <= one.high + 0.006, (one, other)
        assert other.high - other.low < 0.05, "too wide to say anything"


def test_rigid_goodput_is_what_a_renewal_argument_says():
    fleet = even_fleet(300e3, 1, is_rigid=True, costs=COSTS)
    rate = 300e3 / fleet.mtbi_s[0]
    stops = -math.expm1(-rate * COSTS.step_s)  # a step
    expected = COSTS.step_s / (COSTS.step_s + stops * COSTS.restart_s)
    found = simulate(fleet, 20, 20)
    assert found.goodput.mean() == pytest.approx(expected, abs=0.003)
    assert found.goodput == pytest.approx(found.uptime)


def test_missing_slices_are_failure_rate_times_repair():
    """With nothing else to pay, goodput is the share of slices that are there."""
    fleet = even_fleet(64e3, 2, costs=replace(COSTS, reconfigure_s=0.0, repair_s=5 * 3600.0))
    x = 256 * 5 * 3600.0 / fleet.mtbi_s[0]
    found = simulate(fleet, 60, 20)
    assert 1 - found.goodput.mean() == pytest.approx(x / (1 + x), rel=0.03) and found.uptime.min() == 1.0


def test_a_checkpoint_costs_half_its_interval_a_failure():
    costs = Costs(step_s=1.0, restart_s=0.0)
    fleet = even_fleet(2560, 1, mtbi_s=2560 * 4 * 3600.0, is_rigid=True, costs=costs)
    found = simulate(replace(fleet, checkpoint_s=600.0), 30, 30)
    assert 1 - found.goodput.mean() == pytest.approx(300 / (4 * 3600), rel=0.05) and found.uptime.min() == 1.0


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    first, again, other = (simulate(even_fleet(150e3, 4), 2, 3, seed) for seed in (7, 7, 8))
    assert np.array_equal(first.goodput, again.goodput) and not np.array_equal(first.goodput, other.goodput)


def test_twice_the_chips_on_twice_the_learners_is_the_same():
    """The paper's rule of thumb."""
    one, two = simulate(even_fleet(300e3, 2), 10, 10), simulate(even_fleet(600e3, 4), 10, 10)
    assert one.goodput.mean() == pytest.approx(two.goodput.mean(), abs=0.003)


def never_fails(learners, **more):
    return Fleet((256.0,) * learners, (256.0,) * learners, (math.inf,) * learners, (1.0,) * learners,
                 costs=replace(COSTS, reconfigure_s=0.0), **more)  # fmt: skip


def test_capacity_at_night_shortens_the_time_by_what_it_adds():
    found = simulate(never_fails(6, at_night=2, night_s=DAY_S / 2), 10, 2)
    assert found.relative_time.mean() == pytest.approx(4 / 5) and found.goodput.mean() == pytest.approx(1.0)


def test_a_region_takes_all_of_its_learners_and_a_quorum_stops_the_rest():
    calm = {"regions": 2, "region_mtbi_s": 2 * DAY_S, "region_repair_s": DAY_S}
    alone = simulate(never_fails(4, **calm), 200, 40)
    assert alone.goodput.mean() == pytest.approx(2 / 3, abs=0.02)  # of the time a region is there
    assert alone.uptime.mean() == pytest.approx(1 - 1 / 9, abs=0.02)  # one of two is
    both = simulate(never_fails(4, quorum=3, **calm), 200, 40)
    assert both.uptime.mean() == pytest.approx(4 / 9, abs=0.02)  # both are
    assert both.goodput.mean() == pytest.approx(4 / 9, abs=0.02)


def test_unequal_learners_count_by_what_they_can_do():
    """A fast learner that never fails and a slow one that is almost always gone."""
    fleet = Fleet(
        (256.0, 256.0), (256.0, 256.0), (math.inf, 256 * 60.0), (3.0, 1.0), costs=replace(COSTS, repair_s=1e6)
    )
    found = simulate(fleet, 10, 10)
    assert found.goodput.mean() == pytest.approx(0.75, abs=0.01) and found.uptime.min() == 1.0


def test_cost_grows_with_failures_not_with_time_or_chips():
    """A century of a fleet that fails once a year takes no time at all: the heart of the thing is event-driven."""
    fleet = even_fleet(2.4e6, 8, mtbi_s=2.4e6 * 365.25 * DAY_S)
    found = simulate(fleet, 36525, 50)
    assert found.failures.mean() == pytest.approx(100, rel=0.05)


def test_room_is_for_what_can_fail_not_for_all_slices():
    """10^10 slices for a minute and a half: 80 GB, were there room for each."""
    found = simulate(even_fleet(1e10, 1, 1.0), 0.001, 2)
    assert found.failures.mean() == pytest.approx(1e10 / 365.25 * 0.001, rel=0.05)


def test_there_is_room_for_every_stop_of_a_learner_that_hardly_steps():
    """Failures by the second, one slice to lose, long and short pauses: stops are bounded by time, not by failures."""
    for pause_s, repair_s, mtbi_s in ((0.0, 0.5, 4.0), (0.2, 0.5, 4.0), (0.2, 5.0, 0.01), (30.0, 0.1, 0.01)):
        costs = Costs(step_s=1.0, reconfigure_s=pause_s, restart_s=pause_s, repair_s=repair_s)
        for rigid in (False, True):
            fleet = even_fleet(4.0, 2, 2.0, mtbi_s, is_rigid=rigid, costs=costs)
            night = replace(fleet, at_night=1, night_s=DAY_S / 2, regions=2, region_mtbi_s=600.0, region_repair_s=60.0)
            for one in (fleet, night):
                assert 0 <= simulate(one, 0.1, 3).goodput.min() <= 1  # the simulator itself counts its room


def test_what_a_simulation_needs_grows_with_what_is_asked():
    base = even_fleet(1.2e6, 8)
    seconds, room = needs(base, 30, 50)
    assert needs(base, 30, 100)[0] == pytest.approx(2 * seconds) and 0 < seconds < 10 and room < 1e9
    assert needs(even_fleet(2.4e6, 8), 30, 50)[0] > 1.9 * seconds
    assert needs(replace(base, quorum=8), 30, 50)[1] > 2 * room
    assert needs(replace(base, regions=8, region_mtbi_s=3600.0), 30000, 2)[0] > needs(base, 30000, 2)[0] + 5
    assert rounds_s(base) == 0 and rounds_s(replace(base, quorum=8)) > 0


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    source = np.random.default_rng(5)
    for trials in (2, 5, 30):
        found = [interval(source.normal(0, 1, trials)) for _ in range(2000)]
        assert np.mean([one.low <= 0 <= one.high for one in found]) == pytest.approx(0.95, abs=0.02)
