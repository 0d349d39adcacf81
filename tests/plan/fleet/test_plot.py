"""The picture of a fleet is of that fleet: with its own numbers, and all that was asked of it in every neighbour."""

from dataclasses import replace

import pytest

from skerry.plan.fleet import plot
from skerry.plan.fleet.fleet import Fleet, even_fleet, simulate

UNLIKE = Fleet((1000.0, 200_000.0), (100.0, 100.0), (3e7, 3e7), (1.0, 1.0), is_rigid=True)


def drawn(fleet, days=2.0, trials=3):
    outcome = simulate(fleet, days, trials, 1)
    return outcome, *plot.simulated(fleet, outcome, plot.around(fleet), days, 1)


@pytest.mark.parametrize(
    "fleet",
    [
        even_fleet(150e3, 8), even_fleet(150e3, 8, is_rigid=True), replace(even_fleet(150e3, 8), quorum=8), UNLIKE,
        replace(even_fleet(150e3, 4), regions=2, region_mtbi_s=9e4, region_repair_s=9e3, at_night=1, night_s=4e4),
    ],
)  # fmt: skip
def test_the_asked_fleet_lies_on_its_line_and_in_the_middle_of_its_swings(fleet):
    outcome, points, swing = drawn(fleet)
    for what in ("goodput", "uptime"):
        own = [p.ours for p in points if (p.line, p.chips, p.what) == (_own(fleet), sum(fleet.chips), what)]
        assert own == [100 * getattr(outcome, what).mean()]
    less, more = swing["mtbi_s"]
    assert less < 100 * outcome.goodput.mean() < more


def _own(fleet):
    return f"{fleet.learners} learners"


def test_every_neighbour_keeps_what_was_asked():
    fleet = replace(even_fleet(150e3, 8), quorum=5, grace=0.3, speed_variance=0.2, regions=2, at_night=1, night_s=4e4)
    for like in plot.around(fleet).fleets:
        assert (like.quorum, like.grace, like.speed_variance, like.regions, like.at_night) == (5, 0.3, 0.2, 2, 1)
    for like in plot.around(replace(even_fleet(150e3, 8, is_rigid=True), checkpoint_s=600.0)).fleets:
        assert like.is_rigid and like.checkpoint_s


def test_lines_over_learners_are_drawn_only_where_they_say_something():
    many = {line for line, _, _ in plot.around(even_fleet(150e3, 8, is_rigid=True)).lines}
    assert many == {"1 learner", "2 learners", "4 learners", "8 learners", "16 learners"}
    for fleet in (UNLIKE, replace(even_fleet(150e3, 8), quorum=2), replace(even_fleet(150e3, 8), regions=2)):
        assert {line for line, _, _ in plot.around(fleet).lines} == {_own(fleet)}


def test_only_what_matters_to_a_fleet_is_varied():
    assert set(plot.around(UNLIKE).swings) == {"step_s", "mtbi_s", "restart_s"}
    assert "checkpoint_s" in plot.around(replace(UNLIKE, checkpoint_s=600.0)).swings
    assert "slice_chips" in plot.around(even_fleet(150e3, 8)).swings
    assert "slice_chips" not in plot.around(even_fleet(512.0, 2, 256.0)).swings  # a learner has not one of twice that


def test_ticks_are_round():
    assert [plot._short(n) for n in (150_016, 1_200_128, 25_125, 125, 999_999, 1e10)] == [
        "150k", "1.2M", "25.1k", "125", "1M", "10G",
    ]  # fmt: skip
