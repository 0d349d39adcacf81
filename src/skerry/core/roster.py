"""Everyone that was heard of, and who of them can do what now: kept up member by member, as each changes.

With hundreds of learners and dozens of fragments a look at all of them would cost more than what it decides. So nothing
here is found out by going through everybody. Whoever changes a member says so (`update`, or `refresh` where it is about
one fragment), and what time alone brings about is found when that time has come (`pass_time`).

    ready       learners that K counts
    idle        learners that are asked like those, and that K does not count: they step and bring nothing, or say that
                they did more than can be
    leaving     learners that want to go and may still hand over
    askable     for each fragment, who of the two could be asked for it: has work on it, knows what is settled, is not
                asked already, and nothing of it is held
    awaited     for each fragment, who is asked for it, by a pull or an order, and has not answered

A report costs the fragments it speaks of, a merge the learners that are in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from skerry.core.held import Held
from skerry.core.membership import Member
from skerry.core.schedule import pace_s, steps_due

NEWCOMERS_TRUSTED = 8  # names that stepped and never brought anything: then nobody new counts before it has
SLACK_S = 1e-6  # by which a moment is looked at early: sums of times are not exact, the member itself decides
NEVER = float("inf")


class _Counted(NamedTuple):
    """What was counted of a ready learner, to be taken back when it changes; nothing but None of another."""

    unsettled: list[int | None]  # by fragment
    step_s: float | None
    round_steps: float | None


class Roster:
    """Members by learner, in their current lives, and what follows from them; only `Member` says who is what."""

    def __init__(self, held: Held, stall_s: float, counts_idle: bool = False) -> None:
        self.members: dict[str, Member] = {}
        self.ready: dict[str, Member] = {}
        self.idle: dict[str, Member] = {}
        self.counts_idle = counts_idle  # K is a number, which nothing lowers: who is idle is ready too
        self._never_gave: set[str] = set()  # names that were idle and of which nothing was ever held
        self.leaving: dict[str, Member] = {}
        self.askable: list[set[str]] = [set() for _ in held]
        self.awaited: list[set[str]] = [set() for _ in held]
        self.stall_s = stall_s
        self._held = held
        self._counted: dict[str, _Counted] = {}  # of each that is ready
        self._nothing = _Counted([None for _ in held], None, None)
        self._unsettled: list[dict[int, int]] = [{} for _ in held]  # unsettled steps -> how many of the ready have them
        self._steps_s: list[float] = []  # step times of the ready, as far as measured, in order
        self._rounds: list[float] = []  # steps that a round takes each of the ready, as far as measured, in order
        self._stall_by = NEVER  # no ready learner stalls before this
        self._pace: tuple[int, float | None] | None = None  # K, and the pace with it, until a step time changes
        self._steps_due: list[tuple[int, float] | None] = [None for _ in held]  # likewise, until steps change

    def __repr__(self) -> str:
        return f"<roster of {len(self.members)}, {len(self.ready)} ready, {len(self.leaving)} leaving>"

    def __iter__(self) -> Iterator[Member]:
        """All members, by learner id."""
        return iter(member for _, member in sorted(self.members.items()))

    # ------------------------------------------------------------------------------------------ what has changed

    def update(self, member: Member, now: float) -> None:
        """Something about the member may have changed."""
        learner = member.learner
        self.members[learner] = member
        is_ready = member.is_ready(now, self.stall_s)
        is_idle = is_ready and (self._is_idle(member) or member.is_beyond_belief)
        _put(self.idle, member, is_idle)
        _put(self.ready, member, is_ready and (self.counts_idle or not is_idle))
        if is_ready:
            self._stall_by = min(self._stall_by, member.stalls_at(self.stall_s))
        if member.connected and member.is_leaving:
            self.leaving[learner] = member
        else:
            self.leaving.pop(learner, None)
        self._count(member)
        for p in range(len(self.askable)):
            self._sort_in(member, p)

    def reconfigure(self, stall_s: float, counts_idle: bool, now: float) -> None:
        """From now on so much silence is a stall, and whether who is idle counts."""
        self.stall_s, self.counts_idle, self._stall_by = stall_s, counts_idle, NEVER
        for member in list(self.members.values()):
            self.update(member, now)

    def refresh(self, member: Member, p: int) -> None:
        """Something about the member's fragment may have changed: what is settled, held or asked of it."""
        if (counted := self._counted.get(member.learner)) is not None:
            before, counted.unsettled[p] = counted.unsettled[p], member.unsettled(p)
            self._count_steps(p, before, counted.unsettled[p])
        self._sort_in(member, p)

    def asked(self, member: Member, p: int, now: float, order: int = 0, version: int = 0) -> None:
        """It is asked for its work on the fragment, and not again until a report of its own says that it is lost."""
        member.ask(p, now, order, version)
        self._sort_in(member, p)

    def answered(self, member: Member, p: int, now: float, step: int) -> None:
        """Its work on the fragment, up to this step, is here; if it was asked for it, so long it takes to answer."""
        member.came(p, now)
        if p in member.asked:
            member.answered(p, now)
        self._never_gave.discard(member.learner)
        if step > member.stepped or member.learner in self.idle:
            member.stepped = max(member.stepped, step)
            self.update(member, now)
        else:
            self.refresh(member, p)

    def forget(self, member: Member, p: int) -> None:
        """Whatever it was asked for on the fragment, it will not bring it by itself."""
        member.asked.pop(p, None)
        self._sort_in(member, p)

    def remove(self, learner: str) -> None:
        """Nobody knows it any more."""
        member = self.members.pop(learner, None)
        if member is not None:
            for group in (self.ready, self.idle, self.leaving):
                group.pop(learner, None)
            self._count(member)
            for learners in (*self.askable, *self.awaited):
                learners.discard(learner)

    def pass_time(self, now: float) -> None:
        """Who has stalled is not ready any more."""
        if now + SLACK_S >= self._stall_by:
            self._stall_by = NEVER
            for member in [*self.ready.values(), *self.idle.values()]:
                if member.is_stalled(now, self.stall_s):
                    self.update(member, now)
                else:
                    self._stall_by = min(self._stall_by, member.stalls_at(self.stall_s))

    def _is_idle(self, member: Member) -> bool:
        """It brings nothing; where many have come under new names and done so, newcomers have to bring something first.

        A name that was idle stays so until something of it is held, whatever process has it.
        """
        if not member.is_idle(self.stall_s):
            return not member.has_given and len(self._never_gave) >= NEWCOMERS_TRUSTED
        if not member.has_given and len(self._never_gave) < NEWCOMERS_TRUSTED:
            self._never_gave.add(member.learner)
        return True

    # ------------------------------------------------------------------------------------------ what follows

    @property
    def there(self) -> Mapping[str, Member]:
        """Those who can be asked for a round."""
        return self.ready | self.idle if self.idle else self.ready

    def steps_due(self, p: int, quorum: int) -> float:
        """The steps that H counts on the fragment (core/schedule.py)."""
        known = self._steps_due[p]
        if known is None or known[0] != quorum:
            known = self._steps_due[p] = (quorum, steps_due(self._unsettled[p], quorum))
        return known[1]

    def pace_s(self, quorum: int) -> float | None:
        """Seconds in which those steps grow by one, once K learners' steps were measured."""
        if self._pace is None or self._pace[0] != quorum:
            self._pace = (quorum, pace_s(self._steps_s, quorum))
        return self._pace[1]

    def kth_step_s(self, quorum: int) -> float | None:
        """The K-th fastest ready learner's step time, once K were measured."""
        return self._steps_s[quorum - 1] if len(self._steps_s) >= quorum else None

    def round_steps(self, quorum: int) -> float | None:
        """Steps that a round takes the K quickest at it, from snapshot to adoption, as far as measured.

        Who was in no round yet is taken for one of the quickest: else the first that says how long its rounds take, and
        says too much, would put off the rounds by which the others are measured.
        """
        place = quorum - 1 - (len(self._counted) - len(self._rounds))
        return self._rounds[place] if 0 <= place < len(self._rounds) else None

    # ------------------------------------------------------------------------------------------ helpers

    def _sort_in(self, member: Member, p: int) -> None:
        """Whether it is awaited on the fragment, and whether it could be asked."""
        learner = member.learner
        if p in member.asked:
            self.awaited[p].add(learner)
            self.askable[p].discard(learner)
            return
        self.awaited[p].discard(learner)
        is_there = learner in self.ready or learner in self.idle or learner in self.leaving
        if is_there and learner not in self._held[p] and member.may_be_asked(p):
            self.askable[p].add(learner)
        else:
            self.askable[p].discard(learner)

    def _count(self, member: Member) -> None:
        """All that sums and orders are made of, if the learner is ready; what it was before is taken back."""
        learner = member.learner
        before, after = self._counted.pop(learner, self._nothing), self._nothing
        if learner in self.ready and not member.is_beyond_belief:
            steps: list[int | None] = [member.unsettled(p) for p in range(len(self.askable))]
            after = self._counted[learner] = _Counted(steps, member.step_s, member.round_steps)
        for p, (was, is_now) in enumerate(zip(before.unsettled, after.unsettled, strict=True)):
            self._count_steps(p, was, is_now)
        if before.step_s != after.step_s:
            _move(self._steps_s, before.step_s, after.step_s)
            self._pace = None
        _move(self._rounds, before.round_steps, after.round_steps)

    def _count_steps(self, p: int, before: int | None, after: int | None) -> None:
        if before == after:
            return
        counts = self._unsettled[p]
        if before is not None:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
        if after is not None:
            counts[after] = counts.get(after, 0) + 1
        self._steps_due[p] = None


def _put(group: dict[str, Member], member: Member, belongs: bool) -> None:
    if belongs:
        group[member.learner] = member
    else:
        group.pop(member.learner, None)


def _move(ordered: list[float], before: float | None, after: float | None) -> None:
    """One of the numbers has changed; none and 0 were never measured."""
    if before:
        del ordered[bisect_left(ordered, before)]
    if after:
        insort(ordered, after)
