"""Learners that come at about the same time begin together: see `core.gathering`."""

import pytest

from core.hand import Desk, config_of, of
from skerry.core.events import Publish


def desk_of(gather_s=10.0, learners=3, **sync):
    return Desk(config_of(run={"learners": learners, "gather_s": gather_s}, **sync))


def arrives(desk, name):
    """Join, adopt what comes, and say so; what was published to anybody meanwhile."""
    actions = [*desk.join(name), *desk.report(name, 0), *desk.report(name, 0)]
    return [(a.learner, a.fragment) for a in of(actions, Publish)]


def test_nobody_has_the_last_fragment_before_all_are_there_and_then_everybody_at_once():
    desk = desk_of()
    assert arrives(desk, "a") == [("a", 0)]
    assert arrives(desk, "b") == [("b", 0)]
    assert "2 of 3 are here" in desk.machine.waiting
    assert arrives(desk, "c") == [("c", 0), ("a", 1), ("b", 1), ("c", 1)]
    assert desk.machine.gathering is None


def test_those_who_are_there_begin_when_nobody_has_come_for_so_long():
    desk = desk_of(gather_s=10.0)
    arrives(desk, "a")
    assert not of(desk.wait(9.0), Publish)
    arrives(desk, "b")
    assert not of(desk.wait(9.0), Publish), "the time runs from the last that came"
    assert [(a.learner, a.fragment) for a in of(desk.wait(1.5), Publish)] == [("a", 1), ("b", 1)]
    assert arrives(desk, "c") == [("c", 0), ("c", 1)], "who comes later begins at once"


def test_one_that_went_away_is_not_counted_and_not_waited_for_anew():
    desk = desk_of(gather_s=10.0)
    arrives(desk, "a")
    arrives(desk, "b")
    desk.depart("b")
    desk.wait(5.0)
    arrives(desk, "b")
    assert of(desk.wait(5.5), Publish), "two were there ten seconds ago, and nobody else has come"


def test_where_one_fragment_is_all_it_is_held_back():
    desk = desk_of(num_fragments=1, learners=2)
    assert arrives(desk, "a") == []
    assert arrives(desk, "b") == [("a", 0), ("b", 0)]


def test_somebody_who_has_begun_is_followed_at_once():
    """A syncer that begins again meets learners that it had let go before it heard of a step."""
    desk = desk_of(learners=2)
    arrives(desk, "a")
    arrives(desk, "b")
    desk.start()
    desk.join("a", "a1", 1)
    assert desk.machine.gathering is not None
    actions = desk.report("a", 1)
    assert desk.machine.gathering is None
    assert not of(actions, Publish), "it lacks nothing"


@pytest.mark.parametrize("gather_s", [0.0, 10.0])
def test_a_run_that_has_begun_waits_for_nobody(gather_s):
    desk = desk_of(gather_s, learners=1)
    desk.ready("a")
    desk.report("a", 1)
    desk.start()
    assert desk.machine.gathering is None
