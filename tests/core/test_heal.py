"""Publications that have no effect: those still on their way are waited for, those lost are sent again."""

from __future__ import annotations

from core.hand import Desk, of
from skerry.core.events import Publish
from skerry.core.messages import FULL


def desk_of_one() -> Desk:
    desk = Desk(num_fragments=1)
    desk.join("a")
    desk.adopts = False  # what is published is on its way until `report(versions=...)` says that it is there
    assert [p.version for p in of(desk.report("a", 0), Publish)] == [0]
    return desk


def merge(desk: Desk) -> list[Publish]:
    """Four more steps of a learner are merged; what is published to it."""
    peer = desk.peers["a"]
    desk.wait(4.0)  # rounds are paced
    desk.report("a", peer.step + 4)
    published = of(desk.contribute("a", 0), Publish)
    peer.marks[0] = peer.step
    return published


def reports(desk: Desk, seconds: float, **at) -> list[tuple[float, Publish]]:
    """The learner says every half second where it stands; when something was published to it, and what."""
    began, seen = desk.now, []
    while desk.now < began + seconds:
        desk.wait(0.5)
        seen += [(desk.now - began, p) for p in of(desk.report("a", desk.peers["a"].step, **at), Publish)]
    return seen


def on_a_link_of(desk: Desk, adopt_s: float, versions: int = 3) -> None:
    """Some versions were merged, and each was adopted so long after it had left."""
    assert reports(desk, adopt_s) == []
    desk.report("a", 0, versions=[0])
    for version in range(1, versions + 1):
        assert [p.version for p in merge(desk)] == [version]
        assert reports(desk, adopt_s) == []
        desk.report("a", desk.peers["a"].step, versions=[version])


def test_a_publication_on_its_way_over_a_slow_link_is_not_sent_again():
    desk = desk_of_one()
    on_a_link_of(desk, 5.0)
    merge(desk)
    assert reports(desk, 15.0) == []


def test_a_newer_version_follows_the_one_under_way_and_repeats_nothing():
    desk = desk_of_one()
    on_a_link_of(desk, 5.0)
    (first,) = merge(desk)
    assert reports(desk, 3.0) == []
    (second,) = merge(desk)
    assert (second.base_version, second.version) == (first.version, first.version + 1)
    assert reports(desk, 3.0) == []


def test_a_lost_publication_is_sent_again_soon_on_a_fast_link_and_later_on_a_slow_one():
    for adopt_s, soonest_s, latest_s in ((0.5, 2.0, 3.0), (5.0, 15.0, 25.0), (20.0, 30.0, 31.0)):
        desk = desk_of_one()
        on_a_link_of(desk, adopt_s)
        (lost,) = merge(desk)
        at_s, again = reports(desk, latest_s)[0]
        assert soonest_s <= at_s and (again.base_version, again.version) == (lost.base_version, lost.version), adopt_s


def test_a_link_that_becomes_slow_repeats_once_and_learns():
    desk = desk_of_one()
    on_a_link_of(desk, 0.5)
    repeats = []
    for _ in range(6):
        (published,) = merge(desk)
        repeats.append(len(reports(desk, 5.0)))
        desk.report("a", desk.peers["a"].step, versions=[published.version])
    assert repeats[0] > 0 and repeats[-3:] == [0, 0, 0], repeats


def test_the_first_publication_may_take_half_a_minute():
    """Nothing was measured yet, and it is the longest of all."""
    desk = desk_of_one()
    assert reports(desk, 25.0) == []
    _, again = reports(desk, 10.0)[0]
    assert (again.base_version, again.version) == (FULL, 0)


def test_one_that_arrived_and_was_of_no_use_is_sent_whole_at_once_and_then_waited_for():
    desk = desk_of_one()
    on_a_link_of(desk, 5.0)
    merge(desk)
    desk.wait(1.0)
    (whole,) = of(desk.report("a", desk.peers["a"].step, want_full={0}), Publish)
    assert whole.base_version == FULL
    assert reports(desk, 15.0, want_full={0}) == []


def test_after_a_lost_connection_the_first_report_says_what_to_send():
    desk = desk_of_one()
    on_a_link_of(desk, 5.0)
    (lost,) = merge(desk)
    desk.depart("a")
    desk.join("a", life=1)
    (again,) = of(desk.report("a", desk.peers["a"].step), Publish)
    assert (again.base_version, again.version) == (lost.base_version, lost.version)
