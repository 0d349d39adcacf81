"""Rounds by themselves: a view goes in, orders come out. The paper's claims about them are in test_paper.py."""

from __future__ import annotations

from core.views import contribution, holding, member, view
from skerry.config import Sync
from skerry.core.rounds import Rounds


def rounds_of(**sync) -> Rounds:
    return Rounds(Sync(num_fragments=2, sync_every=4, fragment_sync_delay=2, **({"grace": 0.0} | sync)), 2)


def opened(*members, **seen) -> Rounds:
    """A round of fragment 0 is open, and everyone was asked."""
    rounds = rounds_of()
    rounds.open_due(view(*members, **seen))
    assert list(rounds.open) == [0]
    asked(rounds.pull(0, view(*members, **seen)), now=0.0)
    return rounds


def asked(wants, now: float) -> None:
    for want in wants:
        want.member.pulled_at[want.fragment] = now


def names(wants) -> list[tuple[str, int]]:
    return [(want.member.learner, want.fragment) for want in wants]


def test_what_is_due_opens_the_most_overdue_first_as_far_as_the_pacer_lets():
    rounds = rounds_of()
    rounds.open_due(view(member("a", step=1)))
    assert not rounds.open, "first rounds are due at 2 and 4 steps"
    rounds.open_due(view(member("a", step=9, marks=(1, 0))))
    assert list(rounds.open) == [0] and not rounds.pacer.has_any, "overdue 8/2 against 9/4, and one allowance"
    assert repr(rounds) == "<rounds open=[0] merging=[] allowance=0.00>"


def test_nothing_opens_below_the_quorum_nor_while_it_merges():
    rounds = rounds_of()
    rounds.open_due(view(member("a", step=4), quorum=2))
    assert not rounds.open and rounds.explain(view(member("a"), quorum=2)) == "for learners: 1 ready, quorum 2"
    rounds.merge_began(0)
    rounds.open_due(view(member("a", step=4)))
    assert list(rounds.open) == [1]


def test_a_round_pulls_the_ready_that_have_work_once():
    a, b, idle = member("a", step=4), member("b", step=4), member("c", step=0)
    rounds = rounds_of()
    rounds.open_due(view(a, b, idle))
    wants = rounds.pull(0, view(a, b, idle, held=holding(contribution("b"))))
    assert names(wants) == [("a", 0)] and not wants[0].lossless
    asked(wants, now=0.0)
    assert rounds.pull(0, view(a, b, idle, held=holding(contribution("b")), now=1.0)) == []
    assert names(rounds.pull(0, view(a, b, idle, now=3.0))) == [("a", 0), ("b", 0)], "a did not answer for too long"
    assert rounds.open[0].awaited == {"a", "b"}


def test_a_round_waits_for_the_quorum_and_closes_when_all_are_in():
    a, b = member("a", step=4), member("b", step=4)
    rounds = opened(a, b, quorum=2)
    assert rounds.close(0, view(a, b, held=holding(contribution("a")), now=1.0, quorum=2)) is None
    assert rounds.explain(view(a, b, quorum=2)) == "fragment 0: 1 of quorum 2"
    both = view(a, b, held=holding(contribution("a"), contribution("b")), now=3.0, quorum=2)
    close = rounds.close(0, both)
    assert close is not None and (close.fragment, close.quorum, close.ready, close.opened_at) == (0, 2, 2, 0.0)
    assert rounds.quorum_s == 3.0
    assert list(rounds.open) == [0], "it is closed when the merge begins"
    rounds.merge_began(0)
    assert not rounds.open and rounds.merging == {0}


def test_adoption_is_measured_once_from_when_the_version_was_durable():
    rounds, a = rounds_of(), member("a", step=4)
    rounds.merge_began(0)
    rounds.merge_ended(0, ["a"], now=1.0)
    rounds.measure_adoption(a, view(a).state.fragments, now=3.0)
    rounds.measure_adoption(a, view(a).state.fragments, now=9.0)
    assert rounds.sync_s == 2.0 and not rounds.merging


def test_who_would_miss_the_window_is_asked_before_the_round_opens():
    """Steps of 1 s, H = 4, first due at 2 and 4 steps: fragment 1 is due in a second, which b needs twice."""
    a, b = member("a", step=3), member("b", step=3)
    a.answer_s, b.answer_s = 0.0, 2.0
    rounds = rounds_of()
    assert rounds.ask_ahead(view(a, b)) == [], "nothing was measured yet"
    rounds.quorum_s = rounds.sync_s = 0.0
    rounds.open_due(view(a, b))
    assert names(rounds.ask_ahead(view(a, b))) == [("b", 1)]


def test_who_leaves_hands_over_and_where_all_leave_it_merges_at_once():
    a, b = member("a", step=3, state="leaving"), member("b", step=3)
    rounds = rounds_of()
    assert names(rounds.hand_over(0, view(a, b))) == [("a", 0)]
    a_in = holding(contribution("a", to=3))
    assert rounds.close_behind(0, view(a, b, held=a_in)) is None, "b goes on: its next round takes it"
    assert rounds.close_behind(0, view(a)) is None, "it has not handed over"
    close = rounds.close_behind(0, view(a, held=a_in, now=5.0))
    assert close is not None and (close.reason, close.ready, close.opened_at) == ("everyone is leaving", 0, 5.0)


def test_the_oldest_round_is_by_opening_then_by_fragment():
    rounds = rounds_of()
    assert rounds.oldest is None
    for p, now in ((1, 0.0), (0, 5.0)):
        rounds.pacer.allowance = 1.0
        rounds.merging = {0, 1} - {p}
        rounds.open_due(view(member("a", step=8), now=now))
    assert rounds.oldest == 1
    rounds.abandon()
    assert rounds.oldest is None
