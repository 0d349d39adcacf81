"""The roster against the slow obvious version: whatever happens to members, it says what a look at everybody would."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from core.views import FRAGMENTS, contribution, holding
from skerry.core.membership import Member, ema
from skerry.core.messages import FULL, FragmentPosition, Report
from skerry.core.roster import Roster
from skerry.core.schedule import pace_s, steps_due

STALL_S = 5.0
NAMES = ("a", "b", "c", "d")

fragments = st.integers(0, FRAGMENTS - 1)
happenings = st.one_of(
    st.tuples(st.just("report"), st.integers(0, 3), st.sampled_from(["training", "training", "leaving", "left"])),
    st.tuples(st.just("ask"), fragments),
    st.tuples(st.just("answer"), fragments),
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
            positions = tuple(FragmentPosition(base, settled, 0, 0) for settled in member.settled)
            member.take_report(Report(member.learner, 1, number, step, step, step / 4, state, positions), self.now)
            self.roster.update(member, self.now)

    def ask(self, member: Member, p: int) -> None:
        if member.learner in self.roster.askable[p]:
            self.roster.asked(member, p, self.now)

    def answer(self, member: Member, p: int) -> None:
        if member.learner not in self.held[p]:
            self.held.add(contribution(member.learner, p), 1)
            self.roster.answered(member, p, self.now)

    def merge(self, member: Member, p: int) -> None:
        if member.learner in self.held[p]:
            self.held.drop(member.learner, p)
            member.settled[p] = max(member.settled[p], member.step - 1)
            self.roster.refresh(member, p, self.now)


def check(roster: Roster, held, now: float) -> None:
    ready = [m for m in roster if m.is_ready(now, STALL_S)]
    leaving = [m for m in roster if m.connected and m.is_leaving]
    assert sorted(roster.ready) == [m.learner for m in ready]
    assert sorted(roster.leaving) == [m.learner for m in leaving]
    steps_s = [m.step_s for m in ready if m.step_s]
    for p in range(FRAGMENTS):
        may = {m.learner for m in [*ready, *leaving] if m.learner not in held[p] and m.may_be_asked(p, now)}
        assert roster.askable[p] == may, (p, now)
    for quorum in (1, 2, 4):
        for p in range(FRAGMENTS):
            assert roster.steps_due(p, quorum) == steps_due(Counter(m.unsettled(p) for m in ready), quorum)
        assert roster.pace_s(quorum) == pace_s(steps_s, quorum)
        assert roster.kth_step_s(quorum) == (sorted(steps_s)[quorum - 1] if len(steps_s) >= quorum else None)
    answers = {m.learner: m.answers_in_s for m in ready if m.answers_in_s is not None}
    for seconds in (0.0, 1.0, 4.0):
        slow = [learner for _, learner in roster.slower_than(seconds)]
        assert sorted(slow) == sorted(learner for learner, takes_s in answers.items() if takes_s > seconds)
        assert slow == sorted(slow, key=lambda learner: (answers[learner], learner))


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


def test_a_learner_that_becomes_slower_is_given_more_time_and_a_quicker_one_less():
    hand = Hand()
    a = hand.roster.members["a"]
    for _ in range(2):
        hand.report(a, 3, "training")
    a.answer_s = 4.0
    hand.ask(a, 0)
    hand.ask(a, 1)
    hand.now = 10.0
    hand.roster.pass_time(hand.now)
    assert not hand.roster.askable[0], "16 s are waited for one that takes 4 s"
    a.pulled_at[1] = hand.now
    hand.answer(a, 1)
    assert a.answer_s == ema(4.0, 0.0)
    hand.now = 13.0
    hand.roster.pass_time(hand.now)
    assert not hand.roster.ready, "it has stalled"
    hand.report(a, 1, "training")
    assert hand.roster.askable[0] == {"a"}, "12.8 s are, now that it takes 3.2 s"
