"""The roster against the slow obvious version: whatever happens to members, it says what a look at everybody would."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.hand import Desk
from core.views import FRAGMENTS, contribution, holding
from skerry.core.membership import Member
from skerry.core.messages import FULL, FragmentPosition, Report
from skerry.core.roster import Roster
from skerry.core.schedule import pace_s, steps_due

STALL_S = 5.0
NAMES = ("a", "b", "c", "d")

fragments = st.integers(0, FRAGMENTS - 1)
happenings = st.one_of(
    st.tuples(st.just("report"), st.integers(0, 3), st.sampled_from(["training", "training", "leaving", "left"])),
    st.tuples(st.just("ask"), fragments),
    st.tuples(st.just("order"), fragments, st.integers(1, 4)),
    st.tuples(st.just("answer"), fragments),
    st.tuples(st.just("full"), fragments),
    st.tuples(st.just("merge"), fragments),
    st.tuples(st.just("lose")),
    st.tuples(st.just("link")),
)


class Hand:
    """What the machine does to members, and tells the roster."""

    def __init__(self) -> None:
        self.now = 0.0
        self.held = holding()
        self.roster = Roster(self.held, STALL_S)
        for name in NAMES:
            self.link(Member(name, 1, [0] * FRAGMENTS))

    def link(self, member: Member) -> None:
        member.connect(self.now)
        self.roster.update(member, self.now)

    def lose(self, member: Member) -> None:
        member.disconnect()
        self.roster.update(member, self.now)

    def report(self, member: Member, steps: int, state: str) -> None:
        if member.connected:
            number, step = (member.report.number + 1, member.report.step + steps) if member.report else (1, steps)
            base = 0 if member.report else FULL  # it says what it lacks first
            asked = [member.asked.get(p) for p in range(FRAGMENTS)]
            orders = [one.order if one and number % 3 else 0 for one in asked]  # now and then one is lost
            positions = tuple(
                FragmentPosition(base, settled, 0, 0, False, order)
                for settled, order in zip(member.settled, orders, strict=True)
            )
            report = Report(member.learner, 1, number, step, step, step / 4, state, positions, round_steps=step % 3)
            member.take_report(report, self.now)
            self.roster.update(member, self.now)

    def ask(self, member: Member, p: int) -> None:
        if member.learner in self.roster.askable[p]:
            self.roster.asked(member, p, self.now)

    def order(self, member: Member, p: int, steps: int) -> None:
        if member.report is not None and p not in member.asked:
            self.roster.asked(member, p, self.now, steps, 0)

    def answer(self, member: Member, p: int) -> None:
        if member.learner not in self.held[p] and member.report is not None:
            self.held.add(contribution(member.learner, p), 1)
            self.roster.answered(member, p, self.now, member.step + 1)

    def full(self, member: Member, p: int) -> None:
        self.roster.forget(member, p)

    def merge(self, member: Member, p: int) -> None:
        if member.learner in self.held[p]:
            self.held.drop(member.learner, p)
            member.settled[p] = max(member.settled[p], member.step - 1)
            self.roster.refresh(member, p)


def check(roster: Roster, held, now: float) -> None:
    ready = [m for m in roster if m.is_ready(now, STALL_S)]
    leaving = [m for m in roster if m.connected and m.is_leaving]
    assert sorted(roster.ready) == [m.learner for m in ready]
    assert sorted(roster.leaving) == [m.learner for m in leaving]
    steps_s = [m.step_s for m in ready if m.step_s]
    for p in range(FRAGMENTS):
        may = {m.learner for m in [*ready, *leaving] if m.learner not in held[p] and m.may_be_asked(p)}
        assert roster.askable[p] == may, (p, now)
        assert roster.awaited[p] == {m.learner for m in roster if p in m.asked}
    for quorum in (1, 2, 4):
        for p in range(FRAGMENTS):
            assert roster.steps_due(p, quorum) == steps_due(Counter(m.unsettled(p) for m in ready), quorum)
        assert roster.pace_s(quorum) == pace_s(steps_s, quorum)
        assert roster.kth_step_s(quorum) == (sorted(steps_s)[quorum - 1] if len(steps_s) >= quorum else None)
        rounds = sorted(m.round_steps for m in ready if m.round_steps)
        as_quick = [0] * (len(ready) - len(rounds)) + rounds  # who was not measured
        assert roster.round_steps(quorum) == ((as_quick + [0] * quorum)[quorum - 1] or None)


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from([0.0, 0.25, 1.0, 2.0, 3.0]), happenings), max_size=60)
)
def test_it_says_what_a_look_at_everybody_would(story):
    hand = Hand()
    for name, passes_s, (what, *about) in story:
        hand.now += passes_s
        hand.roster.pass_time(hand.now)
        check(hand.roster, hand.held, hand.now)
        getattr(hand, what)(hand.roster.members[name], *about)
        check(hand.roster, hand.held, hand.now)


def with_one_training() -> tuple[Hand, Member]:
    hand = Hand()
    a = hand.roster.members["a"]
    for _ in range(2):
        hand.report(a, 3, "training")
    return hand, a


def test_an_order_is_expected_by_steps_and_a_lost_one_is_known_from_the_next_report():
    """Steps of 3/4 s at first: two more steps lie before its order."""
    hand, a = with_one_training()
    hand.order(a, 0, 8)
    assert hand.roster.awaited[0] == {"a"} and not hand.roster.askable[0]
    assert a.expected_at(0) == 2 * a.step_s
    hand.report(a, 0, "training")
    assert hand.roster.awaited[0] == set() and hand.roster.askable[0] == {"a"}, "it knows of no order"


def test_what_it_takes_to_answer_counts_from_the_step_that_was_ordered():
    hand, a = with_one_training()
    hand.order(a, 0, 8)
    hand.now = 2 * a.step_s + 0.5
    hand.answer(a, 0)
    assert a.answer_s == pytest.approx(0.5) and a.stepped == 7, "and the contribution says up to which step it is"


def test_a_pause_of_the_loop_is_no_slow_step_but_slower_steps_are_believed():
    desk = Desk()
    desk.ready("a")
    member = desk.machine.roster.members["a"]

    def after(*steps_s):
        for step_s in steps_s:
            desk.report("a", desk.peers["a"].step + 1, step_s=step_s)
        return member.step_s

    usual_s = after(*[0.1] * 40)
    assert usual_s == pytest.approx(0.1, rel=0.01)
    assert after(60.0) < 1.5 * usual_s, "an evaluation, a checkpoint"
    assert after(*[0.1] * 5) < 1.2 * usual_s
    assert after(*[5.0] * 40) == pytest.approx(5.0, rel=0.01)
