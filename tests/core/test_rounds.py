"""Rounds by themselves: a view goes in, orders come out. The paper's claims about them are in test_paper.py."""

from __future__ import annotations

from msgspec.structs import replace

from core.views import contribution, holding, member, view
from skerry.config import Learner, Sync
from skerry.core.facts import Decision, Row
from skerry.core.rounds import Rounds


def rounds_of(**sync) -> Rounds:
    return Rounds(
        Sync(num_fragments=2, sync_every=4, fragment_sync_delay=2, **({"grace": 0.0} | sync)), Learner(), 1, 2
    )


def opened(*members, **seen) -> Rounds:
    """A round of fragment 0 is open, and everyone was asked."""
    rounds = rounds_of()
    rounds.open_due(view(*members, **seen))
    assert list(rounds.open) == [0]
    asked(rounds.pull(0, view(*members, **seen)), now=0.0)
    return rounds


def asked(wants, now: float) -> None:
    for want in wants:
        want.member.ask(want.fragment, now)


def merged(p: int) -> Decision:
    rows = (Row("a", 1, p, 0, 0, 4, 40, "merged", 1),)
    about = ("mean", "sgd", 1.0, 0.0, 1, 0, 1.0, "fp32", "bf16", 4, 1, "steady", "all in", 1)
    return Decision(1, p, 1, b"", *about, rows, (), (), 0.0, 0.0, 0.0)


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
    a.take_report(replace(a.report, number=2), 3.0)
    assert names(rounds.pull(0, view(a, b, idle, now=3.0))) == [("a", 0), ("b", 0)], "a did not answer for too long"


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
    rounds.merge_ended(merged(0), ["a"], now=1.0)
    rounds.measure_adoption(a, view(a).state.fragments, now=3.0)
    rounds.measure_adoption(a, view(a).state.fragments, now=9.0)
    assert rounds.sync_s == 2.0 and not rounds.merging and rounds.reached == 4.0


def test_an_order_brings_work_in_when_the_next_round_is_due():
    """Steps of 1 s, H = 4, first due at 2 and 4 steps: fragment 1 is due in a second."""
    a, b, slow = member("a", step=3), member("b", step=3), member("c", step=1)
    slow.step_s = 3.0
    rounds = rounds_of()
    everyone = view(a, b, slow, quorum=2)
    assert [rounds.order(m, 1, everyone) for m in (a, b, slow)] == [4, 4, 1]
    b.answer_s = 2.0
    assert [rounds.order(m, 1, everyone) for m in (a, b)] == [4, 2], "it takes b two seconds longer than a round waits"
    rounds.quorum_s = 2.0
    assert rounds.order(b, 1, everyone) == 4, "and not if it is of the quorum"


def test_where_a_version_overwrites_what_is_about_to_be_given_up_brings_no_order_nearer_or_further():
    """Else a quick learner with many such steps is ordered for after the next version, which overwrites again."""
    slow, quick = member("a", step=1), member("b", step=9)
    slow.step_s, quick.step_s = 2.0, 0.5
    rounds = Rounds(
        Sync(num_fragments=2, sync_every=4, fragment_sync_delay=2, grace=0.0), Learner(adopt="overwrite"), 1, 2
    )
    of_two = view(slow, quick, quorum=2)
    pace_s = of_two.roster.pace_s(2)
    assert rounds.order(slow, 1, of_two) == round(4 * pace_s / 2.0)
    assert rounds.order(quick, 1, of_two) == round(4 * pace_s / 0.5)
    quick.answer_s = 100.0
    assert rounds.order(quick, 1, of_two) == 1


def leaving(now: float, *, step_s: float, leave_timeout_s: float, step: int = 0):
    """The rounds that open for one that leaves, beside one whose steps take so long; both fragments are held of it."""
    stays, leaves = member("a", step=step), member("b", step=3, state="leaving")
    stays.step_s = step_s
    held = holding(contribution("b", 0, 3), contribution("b", 1, 3))
    seen, sync = view(stays, leaves, held=held, now=now), Sync(num_fragments=2, sync_every=4, grace=0.0)
    rounds = Rounds(sync, Learner(leave_timeout_s=leave_timeout_s), 1, 2)
    rounds.pacer.allowance = 0.0
    rounds.open_due(seen)
    return sorted(rounds.open)


def test_what_a_leaver_has_handed_over_waits_for_no_round_that_comes_when_it_is_gone():
    """Lying here is not being kept: a syncer that ends has lost it, and nobody could bring it again."""
    assert leaving(1.0, step_s=1.0, leave_timeout_s=4.0) == [0, 1], (
        "due in two and in four seconds, and it waits for one"
    )
    assert leaving(1.0, step_s=1.0, leave_timeout_s=10.0) == [1], "two seconds are time enough"
    assert leaving(1.0, step_s=0.01, leave_timeout_s=4.0) == []
    assert leaving(1.0, step_s=0.0, leave_timeout_s=4.0) == [0, 1], "of who has taken no step nobody knows when"


def test_nobody_has_an_order_while_room_is_scarce():
    rounds, a = rounds_of(), member("a", step=3)
    assert rounds.order(a, 1, view(a, held=holding(contribution("b"), bytes_max=19))) == 0


def test_a_round_waits_for_orders_and_pulls_who_would_come_much_later():
    """Both have an order; a's is due now, b's in three steps, which a pull brings forward."""
    a, b = member("a", step=4), member("b", step=4)
    a.ask(0, 0.0, order=4)
    b.ask(0, 0.0, order=7)
    rounds = rounds_of()
    seen = view(a, b)
    rounds.open_due(seen)
    assert names(rounds.pull(0, seen)) == [("b", 0)]
    b.ask(0, 0.0)
    held = holding(contribution("a"))
    seen = view(a, b, held=held, now=0.5)
    assert rounds.pull(0, seen) == []
    close = rounds.close(0, seen)
    assert close is not None and close.reason == "no grace"


def test_without_slack_a_round_waits_for_those_who_come_sooner_than_the_next():
    """Halves of the learners would alternate: b is a tenth of a step behind a, the next round four steps."""
    a, b = member("a", step=4), member("b", step=4)
    b.answer_s = 0.6
    for m in (a, b):
        m.ask(0, 0.0)
    rounds = rounds_of(grace=0.8)
    rounds.open_due(view(a, b))
    rounds.quorum_s = rounds.sync_s = 9.0
    a_in = holding(contribution("a"))
    assert rounds.close(0, view(a, b, held=a_in, now=0.5)) is None
    assert rounds.open[0].waits == "for b, expected before a next round could be"
    close = rounds.close(0, view(a, b, held=a_in, now=1.7))
    assert close is not None and close.reason == "no grace", "a step behind what was expected: it may never come"


def test_what_the_pacer_put_off_stays_apart():
    """Both fragments are due at once and the allowance is one: the second is due later the next time as well."""
    rounds, a = rounds_of(), member("a", step=9)
    rounds.open_due(view(a))
    assert list(rounds.open) == [0]
    rounds.open_due(view(a, now=1.0))
    rounds.open_due(view(a, now=2.0))
    assert list(rounds.open) == [0, 1]
    rounds.open.clear()
    first, second = (rounds.order(member("a"), p, view(member("a"))) for p in (0, 1))
    assert (first, second) == (2, 6), "due at 2 and at 4 steps, and the second two later"


def test_how_many_merges_are_under_way_is_an_average_that_moves_slowly():
    rounds = rounds_of()
    for _ in range(400):
        rounds.merge_began(0)
        rounds.merge_began(1)
        rounds.merging.clear()
    assert 1.4 < rounds.under_way < 1.6


def test_all_that_can_come_is_reason_enough_to_open():
    rounds, a, b = rounds_of(), member("a", step=1), member("b", step=1)
    rounds.open_due(view(a, b, held=holding(contribution("a", to=1))))
    assert not rounds.open
    rounds.open_due(view(a, b, held=holding(contribution("a", to=1), contribution("b", to=1))))
    assert list(rounds.open) == [0]


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
