"""The paper's tables from our model, and the open record of how its constants were fitted."""

from dataclasses import asdict, replace

import pytest

from skerry.plan.fleet import fit, paper
from skerry.plan.fleet.fleet import Costs
from skerry.plan.fleet.rounds import simulate_rounds


def test_all_sixty_cells_lie_within_three_points_and_one_on_average():
    cells = paper.table_1()
    largest, mean = paper.deviations(cells)
    assert len(cells) == 60 and largest <= 3.0 and mean <= 1.0


def test_the_record_of_the_fit_is_of_the_constants_in_use():
    """Whoever changes the model or its constants fits again: `python -m skerry.plan.fleet.fit`."""
    record = fit.read_record()
    assert record["constants"] == asdict(Costs()) and set(record["sensitivity"]) == set(asdict(Costs()))
    for cell, kept in zip(paper.table_1(), record["residuals"], strict=True):
        assert cell.deviation == pytest.approx(kept["deviation"], abs=0.02), kept
    sizes = [abs(kept["deviation"]) for kept in record["residuals"]]
    assert record["deviation_max"] == max(sizes) <= 3


def test_the_fit_moves_towards_the_table():
    start = replace(Costs(), restart_s=88.0, reconfigure_s=12.0)

    def quickly(costs):
        return paper.table_1(costs, days=0.25, trials=3)

    found = fit.fit(start, rounds=1, told=lambda text: None, compute=quickly)
    assert fit.misfit(quickly(found)) < 0.8 * fit.misfit(quickly(start))


def test_a_night_of_twelve_hours_is_simulated_beside_the_reading_that_is_an_identity():
    for one in paper.table_4():
        x = one["extra"]
        assert one["ours_12h"] == pytest.approx(1 / (1 + x / 2), abs=0.003)
        assert one["night_s"] == pytest.approx(86_400 / (2 + x))
        assert one["ours"] == pytest.approx(1 / 2 + 1 / 2 / (1 + x), abs=0.003)  # whatever the paper says
        assert one["ours"] == pytest.approx(one["paper"], abs=0.01)


def test_a_full_quorum_waits_and_a_quorum_of_one_does_not():
    full, alone, graceful = paper.table_5()
    assert full["ours"] == pytest.approx(full["paper"], abs=2) and full["contributors"] == 8
    assert alone["ours"] == graceful["ours"] == 100
    assert alone["contributors"] == 1 and graceful["contributors"] > 6  # what the window is for


def test_equal_learners_never_wait():
    assert simulate_rounds((1.0,) * 4, 0.0, 4, 0.0).useful == pytest.approx(1.0)


def test_speeds_are_relative():
    slow, fast = (simulate_rounds((pace, 0.5 * pace), 0.0, 2, 0.0) for pace in (0.002, 500.0))
    assert slow == fast == simulate_rounds((1.0, 0.5), 0.0, 2, 0.0)


def test_many_learners_take_steps_not_steps_times_learners():
    """Quadratic, this would take minutes."""
    found = simulate_rounds((1.0,) * 512, 0.0, 512, 0.0)
    assert found.useful == pytest.approx(1.0) and found.contributors == 512


def test_who_waits_for_all_goes_at_the_pace_of_the_slowest():
    assert simulate_rounds((1.0, 0.5), 0.0, 2, 0.0).useful == pytest.approx(1.0 / 1.5, abs=0.01)
