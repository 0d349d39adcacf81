"""The window: what may be on its way to a learner, in which order, and that it moves on as things leave."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.hand import Desk
from skerry.core.events import PublicationSent, Publish
from skerry.core.flow import Window

SIZES = (10, 20, 30, 40, 50, 60)
fragments = st.lists(st.integers(0, len(SIZES) - 1), unique=True)


def test_the_longest_waiting_come_first_as_far_as_they_fit():
    window = Window(SIZES, streams=1, bytes_max=60)
    assert window.admitted([], [2, 1, 0]) == [2, 1, 0]
    assert window.admitted([3], [1, 0, 2]) == [1], "what waits behind one that does not fit does not overtake it"


def test_a_fragment_larger_than_the_window_leaves_alone():
    window = Window(SIZES, streams=1, bytes_max=5)
    assert window.admitted([], [4, 0]) == [4]
    assert window.admitted([4], [0]) == []


def test_every_stream_has_a_fragment_on_its_way():
    window = Window(SIZES, streams=3, bytes_max=5)
    assert window.admitted([], [0, 3, 1, 4, 2, 5]) == [0, 1, 2]
    assert window.admitted([0, 2], [3, 4, 5]) == [4]


@given(fragments, st.integers(1, 4), st.integers(0, 200))
def test_no_more_than_the_window_and_one_a_stream_is_on_its_way_and_everything_gets_there(waiting, streams, bytes_max):
    window = Window(SIZES, streams, bytes_max)
    sending, left = [], list(waiting)
    while left or sending:
        admitted = window.admitted(sending, left)
        left = [p for p in left if p not in admitted]
        sending += admitted
        assert sum(SIZES[p] for p in sending) <= bytes_max + streams * max(SIZES)
        assert {p % streams for p in left} <= {p % streams for p in sending}, "no stream is idle while its own wait"
        sending.pop(len(sending) // 2)


def test_a_joiner_gets_the_model_through_the_window():
    desk = joining(fragments=3)
    assert handed_over(desk.report("a", 0)) == [0]
    assert handed_over(desk.step(PublicationSent("a", 1, 0, 0))) == [1]
    assert handed_over(desk.step(PublicationSent("a", 1, 1, 0))) == [2]
    assert handed_over(desk.step(PublicationSent("a", 1, 2, 0))) == []


def test_what_waits_is_forgotten_with_the_link_and_begins_anew_on_the_next():
    desk = joining(fragments=3)
    desk.report("a", 0)
    desk.depart("a")
    assert handed_over(desk.step(PublicationSent("a", 1, 0, 0))) == []
    desk.join("a", life=1)
    assert handed_over(desk.report("a", 0, versions=[0, -1, -1])) == [1]


def joining(fragments: int) -> Desk:
    """Learner a has said hello, over a window for one fragment; what is ordered is not carried out."""
    desk = Desk(num_fragments=fragments)
    desk.join("a")
    desk.machine.window.bytes_max = 1
    desk.step = lambda event: desk.machine.step(event, desk.now)
    return desk


def handed_over(actions: list[object]) -> list[int]:
    return [action.fragment for action in actions if isinstance(action, Publish)]
