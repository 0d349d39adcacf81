"""What a study found: means, intervals, paired differences, and what is said when something is missing."""

import math
import statistics

import pytest

from proof.lab.fake import result_of, study_of
from skerry.proof.lab.comparison import table_of
from skerry.proof.lab.results import Results
from skerry.stats import T, half_width


@pytest.fixture
def keep(tmp_path):
    """`keep(study, variant=[losses by seed])`: a results file with these losses; None leaves a seed out."""

    def keep(study, results=None, /, **losses):
        results = results or Results(tmp_path / "results.jsonl")
        for job in study.jobs:
            loss = losses.get(job.variant, [None] * 3)[job.seed]
            if loss is not None:
                results.append(result_of(job, loss=loss, diverged=math.isnan(loss)))
        return results

    return keep


def row_of(table, variant):
    return next(row for row in table.variants if row.variant == variant)


def test_the_quantiles_are_students():
    """The density, summed up to each of them, gives 97.5 %."""
    for freedom, quantile in enumerate(T, 1):
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
        steps = 2000
        width = quantile / steps
        heights = [(1 + (n * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for n in range(steps + 1)]
        simpson = width / 3 * sum(h * (1 if n in (0, steps) else 4 if n % 2 else 2) for n, h in enumerate(heights))
        assert 0.5 + scale * simpson == pytest.approx(0.975, abs=5e-5), freedom


def test_an_interval_needs_two_numbers():
    assert half_width([]) is None and half_width([2.0]) is None
    assert half_width([1.0, 2.0, 4.0]) == pytest.approx(4.303 * statistics.stdev([1, 2, 4]) / math.sqrt(3))
    assert half_width([0.0, 1.0] * 50) == pytest.approx(2.042 * statistics.stdev([0, 1] * 50) / 10)


def test_variants_are_compared_seed_by_seed(tmp_path, keep):
    """Every seed is exactly 2 % worse: no doubt about that, however far the seeds lie from each other."""
    study = study_of(tmp_path, "base", "tried", baseline="base")
    table = table_of(study, keep(study, base=[1.0, 2.0, 3.0], tried=[1.02, 2.04, 3.06]))
    tried, base = row_of(table, "tried"), row_of(table, "base")
    assert tried.against == pytest.approx(0.02) and tried.against_interval == pytest.approx(0, abs=1e-12)
    assert tried.loss == pytest.approx(2.04) and tried.interval == pytest.approx(4.303 * 1.02 / math.sqrt(3))
    assert base.against is None and base.loss == 2.0 and table.missing == ()


def test_only_seeds_that_both_have_are_compared_and_what_is_missing_is_told(tmp_path, keep):
    study = study_of(tmp_path, "base", "tried", baseline="base")
    table = table_of(study, keep(study, base=[None, 2.0, None], tried=[1.5, 2.1, None]))
    tried = row_of(table, "tried")
    assert tried.seeds == (0, 1) and tried.losses == (1.5, 2.1) and tried.loss == pytest.approx(1.8)
    assert tried.against == pytest.approx(0.05) and tried.against_interval is None and tried.against_seeds == 1
    assert [(m.variant, m.seed) for m in table.missing] == [("base", 0), ("base", 2), ("tried", 2)]


def test_a_run_that_diverged_is_told_and_in_no_mean(tmp_path, keep):
    study = study_of(tmp_path, "base", "tried", "wild", baseline="base")
    nan = math.nan
    table = table_of(study, keep(study, base=[nan, 2.0, 2.0], tried=[2.0, 2.1, nan], wild=[nan, nan, nan]))
    tried, wild = row_of(table, "tried"), row_of(table, "wild")
    assert tried.diverged == 1 and tried.loss == pytest.approx(2.05) and math.isnan(tried.losses[2])
    assert tried.against == pytest.approx(0.05) and tried.against_seeds == 1
    assert wild.diverged == 3 and wild.loss is None and wild.against is None and wild.seconds is None


def test_traffic_is_per_learner_and_what_was_discarded_a_share(tmp_path, keep):
    study = study_of(tmp_path, "base")
    (row,) = table_of(study, keep(study, base=[1.0, 1.0, 1.0])).variants
    assert row.megabytes == pytest.approx(0.05)  # 200,000 bytes up and down, 4 learners
    assert row.bytes_per_parameter == pytest.approx(50)
    assert row.discarded == pytest.approx(0.1) and row.contributors == 3.5 and row.seconds == 12


def test_a_baseline_can_be_another_studys(tmp_path, keep):
    first = study_of(tmp_path, "base", name="first")
    second = study_of(tmp_path, "tried", name="second", baseline="first:base")
    results = keep(first, base=[2.0, 2.0, None])
    table = table_of(second, keep(second, results, tried=[2.2, 2.4, 2.0]))
    (tried,) = table.variants
    assert tried.against == pytest.approx(0.15) and tried.against_seeds == 2
    assert [(m.variant, m.seed) for m in table.missing] == [("first:base", 2)]


def test_chosen_variants_are_still_held_against_the_baseline(tmp_path, keep):
    study = study_of(tmp_path, "base", "tried", "other", baseline="base")
    results = keep(study, base=[2.0, 2.0, 2.0], tried=[2.2, 2.2, 2.2])
    table = table_of(study.narrowed(["tried"], [1, 2]), results)
    (tried,) = table.variants
    assert tried.seeds == (1, 2) and tried.against == pytest.approx(0.1) and table.missing == ()


def test_what_makes_losses_hard_to_compare_is_noted(tmp_path):
    study = study_of(tmp_path, "base", "tried", baseline="base")
    results = Results(tmp_path / "results.jsonl")
    for job in study.jobs:
        found = {"tokens": 800, "versions": {"python": "3.12.1", "torch": "2.6.0"}, "device": "slate"}
        results.append(result_of(job, **found if job.variant == "tried" else {}))
    notes = table_of(study, results).notes
    assert "results come from python 3.11.7 and 3.12.1 (and the standard library is the text)" in notes
    assert "results come from several devices: pencil, slate" in notes
    assert "tried kept 800 tokens, base 900" in notes
