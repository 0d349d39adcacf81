"""Series: however long a run, as many bins, and every sum as it was."""

from skerry.run.series import Series

WEEK_S = 7 * 86400


def test_a_week_has_as_many_bins_as_an_hour_and_the_same_sums():
    series = Series(64, {"tokens": "sum", "loss": "mean", "version": "last"})
    for t in range(0, WEEK_S, 60):
        series.add(t, tokens=3, loss=float(t), version=t)
    record = series.record()
    assert len(record["t"]) <= 64 and record["t"] == sorted(record["t"])
    assert sum(record["tokens"]) == 3 * len(range(0, WEEK_S, 60))
    assert record["version"][-1] == WEEK_S - 60
    in_first = range(0, int(record["width_s"]), 60)
    assert record["loss"][0] == sum(in_first) / len(in_first)


def test_a_mean_is_by_weight_also_after_bins_were_joined():
    series = Series(2, {"loss": "mean"})
    series.add(0.0, 1, loss=1.0)
    series.add(1.0, 3, loss=5.0)
    assert series.record()["loss"] == [1.0, 5.0]
    series.add(2.5, 1, loss=7.0)
    assert series.record() == {"width_s": 2.0, "t": [0.0, 2.0], "loss": [4.0, 7.0]}


def test_what_nobody_said_is_left_out_or_nothing():
    series = Series(16, {"tokens": "sum", "loss": "mean"})
    series.add(1.0, tokens=2)
    series.add(4.0, tokens=1, loss=3.0)
    assert series.record() == {"width_s": 1.0, "t": [1.0, 4.0], "tokens": [2, 1], "loss": [None, 3.0]}
    dense = series.record(is_dense=True)
    assert (dense["t"], dense["tokens"]) == ([1.0, 2.0, 3.0, 4.0], [2, 0.0, 0.0, 1])
    assert Series(16, {"tokens": "sum"}).record(is_dense=True) == {"width_s": 1.0, "t": [], "tokens": []}


def test_a_clock_that_jumps_by_years_costs_nothing():
    series = Series(64, {"tokens": "sum"})
    series.add(0.0, tokens=1)
    series.add(1e12, tokens=1)
    assert sum(series.record()["tokens"]) == 2 and len(series.record(is_dense=True)["t"]) <= 64
