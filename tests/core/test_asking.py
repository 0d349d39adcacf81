"""What was asked for and does not come: what is on its way is waited for, what is lost is asked for again.

Only a learner's own report says that something is lost.
"""

from __future__ import annotations

from core.hand import Desk, of, only
from skerry.core.events import Merge
from skerry.core.messages import Pull


def desk_of_one(**sync) -> Desk:
    desk = Desk(num_fragments=1, **sync)
    desk.ready("a")
    return desk


def reports(desk: Desk, seconds: float, **at) -> list[tuple[float, int]]:
    """The learner says every half second where it stands; when it was pulled, and what it was said to owe."""
    began, seen = desk.now, []
    while desk.now < began + seconds:
        desk.wait(0.5)
        seen += [(desk.now - began, p.lacking_seq) for p in of(desk.report("a", desk.peers["a"].step, **at), Pull)]
    return seen


def pulled(answer_s: float | None = None) -> Desk:
    """A round is open, and the learner has been asked for it."""
    desk = desk_of_one()
    desk.machine.members["a"].answer_s = answer_s
    assert only(desk.report("a", 4), Pull).lacking_seq == 0
    return desk


def test_a_pull_without_effect_is_repeated():
    assert reports(pulled(), 3.0) == [(2.5, 0)]


def test_what_is_outstanding_is_waited_for_from_when_that_was_first_said():
    desk = pulled()
    assert reports(desk, 1.5) == []
    assert reports(desk, 2.5, outstanding={0: 1}) == []
    assert reports(desk, 2.5, outstanding={0: 1}) == [(0.5, 1)], "and is asked for by its number"


def test_an_answer_is_given_four_times_as_long_as_it_usually_takes():
    desk = pulled(answer_s=3.0)
    assert reports(desk, 12.5, outstanding={0: 1}) == []
    assert reports(desk, 0.5, outstanding={0: 1}) == [(0.5, 1)]


def test_a_lost_repeat_is_repeated():
    desk = pulled()
    pulls = reports(desk, 9.0, outstanding={0: 1})
    assert len(pulls) == 3 and all(lacking == 1 for _, lacking in pulls)


def test_of_a_learner_that_is_silent_nothing_is_known_to_be_lost():
    desk = pulled()
    assert not of(desk.wait(4.0), Pull)


def test_a_syncer_that_was_away_takes_nothing_for_lost():
    """It wakes up with reports and contributions in line, and the reports may come first."""
    desk = pulled()
    assert reports(desk, 0.5, outstanding={0: 1}) == []
    desk.now += 20.0
    assert reports(desk, 2.0, outstanding={0: 1}) == []
    assert only(desk.contribute("a", 0), Merge)


def test_an_order_that_stands_is_not_lost_however_long_its_steps_take():
    desk = desk_of_one()
    desk.obeys = True
    desk.report("a", 4)
    desk.contribute("a", 0)
    assert desk.peers["a"].orders == [4]
    desk.report("a", 7)
    assert reports(desk, 40.0) == []


def test_an_order_on_its_way_with_its_version_is_not_lost():
    """What its learner calls outstanding meanwhile is settled in that version."""
    desk = desk_of_one()
    desk.obeys, desk.adopts = True, False
    desk.report("a", 4)
    desk.contribute("a", 0)
    assert reports(desk, 20.0, outstanding={0: 1}) == []


def test_a_syncer_that_begins_again_asks_for_what_is_outstanding():
    desk = pulled()
    desk.start()
    desk.join("a", life=1)
    assert only(desk.report("a", 4, outstanding={0: 1}), Pull).lacking_seq == 1
