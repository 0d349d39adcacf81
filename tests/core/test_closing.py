"""The end by itself: a view goes in, orders come out."""

from __future__ import annotations

from core.hand import Desk, config_of, of
from core.views import contribution, holding, member, roster_of, view
from skerry.core.closing import Closing
from skerry.core.events import Hold
from skerry.core.look import GivenUp, Want

CLOSING = Closing(since=0.0, timeout_s=10.0)


def test_everyone_is_told_to_stop_until_they_have():
    a, b, done = member("a", step=4), member("b", step=4), member("c", step=4, state="stopped")
    b.told_stop_at = 0.0
    assert CLOSING.whom_to_stop(view(a, b, done, now=1.0)) == [a]
    assert CLOSING.whom_to_stop(view(a, b, done, now=3.0)) == [a, b]


def test_who_has_stopped_is_asked_losslessly_or_has_given_up():
    owing = member("a", step=4, state="stopped")
    gave_up = member("b", step=4, marks=(4, 4), state="stopped")
    held, stepping = member("c", step=4, state="stopped"), member("d", step=4)
    seen = view(owing, gave_up, held, stepping, held=holding(contribution("c")))
    assert CLOSING.settle(0, seen) == [Want(owing, 0, lossless=True), GivenUp(gave_up, 0)]


def test_the_last_work_waits_for_everyone_who_owes_some():
    a, b = member("a", step=4, state="stopped"), member("b", step=4, state="stopped")
    only_a = holding(contribution("a"))
    assert CLOSING.close(0, view(a, b)) is None, "nothing is held"
    assert CLOSING.close(0, view(a, b, held=only_a, now=9.0)) is None
    close = CLOSING.close(0, view(a, b, held=holding(contribution("a"), contribution("b"))))
    assert close is not None and (close.reason, close.quorum, close.ready) == ("the last work", 1, 2)
    assert CLOSING.close(0, view(a, b, held=only_a, now=10.5)) is not None, "the time is over"


def test_what_stands_in_the_way_waits_for_those_present_and_for_half_of_the_time():
    a, b = member("a", step=8, state="stopped"), member("b", step=4, state="stopped")
    not_the_last = holding(contribution("a", to=4))
    assert CLOSING.close(0, view(a, b, held=not_the_last, now=4.0)) is None
    assert CLOSING.close(0, view(a, b, held=not_the_last, now=5.0)) is not None
    b.disconnect()
    assert CLOSING.close(0, view(a, b, held=not_the_last, now=0.0)) is not None


def test_so_does_what_leaves_no_room():
    a, b = member("a", step=4, state="stopped"), member("b", step=4, state="stopped")
    b.disconnect()
    assert CLOSING.close(0, view(a, b, held=holding(contribution("a")))) is None
    assert CLOSING.close(0, view(a, b, held=holding(contribution("a"), bytes_max=15))) is not None


def test_it_is_over_when_nobody_owes_or_the_time_is():
    a, idle = member("a", step=4, state="stopped"), member("b", state="stopped")
    seen = view(a, idle, held=holding(contribution("a")))
    assert CLOSING.unsettled(seen) == ["a"]
    assert not CLOSING.is_over(["a"], now=10.0) and CLOSING.is_over(["a"], now=10.5)
    assert CLOSING.unsettled(view(idle)) == [] and CLOSING.is_over([], now=0.0)


def test_a_life_that_was_not_heard_of_since_the_restart_is_awaited():
    seen = view(member("a"))
    assert CLOSING.unsettled(type(seen)(**(vars(seen) | {"roster": roster_of()}))) == ["a"]


def test_what_comes_when_the_time_is_over_is_not_held():
    """One that goes on contributing would keep merges under way, and the run open, for as long as it likes."""
    desk = Desk(config_of({"learners": 1, "steps": 10}, close_timeout_s=5.0))
    desk.ready("a")
    desk.report("a", 20)
    assert desk.machine.state.phase == "closing"
    desk.now += 4.0
    assert of(desk.arrive(desk.contribution("a", 0, to=10)), Hold)
    desk.machine.rounds.merging.add(1)  # a merge that takes its time
    desk.now += 2.0
    desk.peers["a"].marks[0] = 10
    assert not of(desk.arrive(desk.contribution("a", 0, to=15)), Hold)
    assert desk.machine.refused["closed"] == 1
    desk.machine.rounds.merging.discard(1)
    desk.wait(1.0)
    assert desk.machine.state.phase == "closed"


def test_who_left_before_this_process_began_keeps_nobody():
    """Its last word is on the tape; of one that was lost nobody knows whether it comes back."""
    for last_word, waits_for in (("left", []), ("training", ["a"])):
        desk = Desk(config_of({"steps": 10**6}))
        desk.ready("a", "b")
        desk.report("a", 0, last_word)
        desk.start()
        desk.ready("b")
        assert CLOSING.unsettled(desk.machine._view()) == [*waits_for, "b"]
