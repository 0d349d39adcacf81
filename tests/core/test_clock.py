"""The syncer's own time: it stands in a sleep, and training time stands until somebody trains."""

from __future__ import annotations

from skerry.core.clock import AWAY_S, Clock


def test_time_passes_as_told_and_never_goes_back():
    clock = Clock(10.0, 0.0)
    assert (clock.advance(12.0), clock.now) == (2.0, 12.0)
    assert (clock.advance(11.0), clock.now) == (0.0, 12.0)


def test_a_sleep_takes_no_time_and_what_follows_does():
    clock = Clock(10.0, 0.0)
    assert (clock.advance(10.0 + 8 * 3600), clock.now) == (0.0, 10.0)
    assert (clock.advance(11.0 + 8 * 3600), clock.now) == (1.0, 11.0)


def test_a_pause_that_is_no_sleep_counts():
    clock = Clock(0.0, 0.0)
    assert clock.advance(AWAY_S) == AWAY_S == clock.now


def test_training_time_goes_on_from_where_it_was_once_somebody_trains():
    clock = Clock(100.0, 50.0)
    clock.advance(130.0)
    assert clock.elapsed_s == 50.0 and not clock.is_running
    clock.start()
    clock.advance(133.0)
    assert clock.elapsed_s == 53.0 and clock.is_running
    assert repr(clock) == "<clock 133.000 elapsed=53.000 runs>"
