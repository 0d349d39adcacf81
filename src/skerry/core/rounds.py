"""The rounds of training: when a learner's next contribution is due, which round to open, whom to pull, when to close.

A fragment has at most one open round, and none while it is merging. A contribution belongs to no round: what comes late
is held and merged in the next.

Nobody is asked in the usual case. A version carries to each learner the *order* for its next contribution to the
fragment, reckoned so that all lie here when the next round is due: by the pace of the K fastest, the learner's own, and
how long its work takes to come. Arrivals then open a round and close it. A pull is for who has no order, or one that
this round would have to wait for.

The measured times are of this process and are lost with it; nothing depends on them but when contributions are due and
how long a round waits for the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skerry.config import Learner, Sync
from skerry.core.facts import Decision
from skerry.core.ledger import MERGED
from skerry.core.look import Close, View, Want
from skerry.core.membership import Member, ema
from skerry.core.quorum import Verdict, decide, grace_s
from skerry.core.roster import Roster
from skerry.core.schedule import Pacer, due_at, sync_every_in
from skerry.core.state import FragmentState
from skerry.core.vocabulary import Stage

IDLE_NAMED = 3  # learners that bring nothing and are called by name
LEAVE_SHARE = 0.25  # of the time that a learner takes to leave at most: its round and its merge take some too
CROWD_WEIGHT = 0.02  # of one more merge in the average: slow, because H follows from it, and it from H


@dataclass
class Round:
    """An open round of one fragment: when the quorum was reached, why it still waits."""

    opened_at: float
    stage: Stage  # at its opening: what its merge does follows from it
    sync_every: int  # H then
    quorum_at: float | None = None
    waits: str = "opened"


class Rounds:
    """Open rounds and merges under way, how fast rounds may open, and how long their parts take."""

    def __init__(self, sync: Sync, learner: Learner, merge_threads: int, fragment_count: int) -> None:
        self.sync = sync
        self.overwrites = learner.adopt == "overwrite"  # a version leaves nothing unsettled of who adopts it
        self.leave_s = LEAVE_SHARE * learner.leave_timeout_s  # that what a leaver brought may wait for a round
        self.merge_threads = merge_threads
        self.fragment_count = fragment_count
        self.open: dict[int, Round] = {}
        self.merging: set[int] = set()
        self.pacer = Pacer()
        self.quorum_s: float | None = None  # from opening to quorum
        self.sync_s: float | None = None  # from closing to a learner's adoption
        self.under_way = 0.0  # merges, on average, when another begins
        self.reached: float | None = None  # H as it turns out: steps of the fastest in a merge
        self._put_off: dict[int, float] = {}  # fragment -> steps by which the pacer kept its last round waiting
        self._ripe_at: dict[int, float] = {}  # fragment -> since when the pacer keeps its next one waiting
        self._closed_at: dict[int, float] = {}  # fragment -> when its last merge ended
        self._adopting: dict[int, set[str]] = {}  # fragment -> learners that have not yet reported its version

    def __repr__(self) -> str:
        return f"<rounds open={sorted(self.open)} merging={sorted(self.merging)} allowance={self.pacer.allowance:.2f}>"

    @property
    def oldest(self) -> int | None:
        """The fragment whose round has been open longest."""
        return min(self.open, key=lambda p: (self.open[p].opened_at, p), default=None)

    def sync_every(self, stage: Stage | None, quorum: int, roster: Roster) -> int:
        """H: what the configuration says for a stage, or for the closing (None); where a round takes the K quickest
        longer than that, as long as it takes them.

        Asked for sooner, contributions would lie waiting, and those who can keep up would leave the others behind.
        Longer still where merges wait for each other: a little more work in each costs less than the age of work that
        stands in line.
        """
        configured, taken = sync_every_in(self.sync, stage), roster.round_steps(quorum)
        if taken is None:
            return configured
        crowd = max(1.0, self.under_way / self.merge_threads)
        return max(configured, math.ceil(taken * crowd))

    # ------------------------------------------------------------------------------------------ decisions of a look

    def open_due(self, view: View) -> None:
        """Open what is due, the most overdue first, as far as the pacer lets."""
        pace_s = view.roster.pace_s(view.quorum)
        self.pacer.grow(view.now, pace_s, self.fragment_count / view.sync_every)
        if len(view.roster.there) < view.quorum:
            return
        for p in [p for p in self._idle() if self._keeps_a_leaver(p, view)] if view.roster.leaving else ():
            self.open[p] = Round(view.now, view.stage, view.sync_every)
        ripe_at = {}
        for _, p in sorted((-by, p) for p, by in self._overdue(view).items()):
            if self.pacer.take():
                waited_s = view.now - self._ripe_at.get(p, view.now)
                self._put_off[p] = min(waited_s / pace_s, view.sync_every) if pace_s else 0.0
                self.open[p] = Round(view.now, view.stage, view.sync_every)
            else:
                ripe_at[p] = self._ripe_at.get(p, view.now)
        self._ripe_at = ripe_at

    def _keeps_a_leaver(self, p: int, view: View) -> bool:
        """One that is leaving has handed over its work on the fragment, and would have gone before that is due.

        What lies here is not on the tape: if this process ends, it is lost, and nobody could bring it again. So the
        others are asked sooner, whatever the pacer says: it is one round, and learners seldom leave.
        """
        if not view.roster.leaving.keys() & view.held[p].keys():
            return False
        lacking, pace_s = self._due_at(p, view) - view.roster.steps_due(p, view.quorum), view.roster.pace_s(view.quorum)
        return pace_s is None or lacking * pace_s > self.leave_s

    def _overdue(self, view: View) -> dict[int, float]:
        """Fragments that are due, each with its steps over those at which it is; or all that can come is here."""
        found, ready = {}, view.ready
        for p in self._idle():
            share, held = view.roster.steps_due(p, view.quorum) / self._due_at(p, view), view.held[p]
            if share >= 1 or (len(held) >= len(ready) and held.keys() >= ready.keys()):
                found[p] = max(share, 1.0)
        return found

    def order(self, member: Member, p: int, view: View) -> int:
        """Unsettled steps at which a learner is to contribute to the fragment next; 0: it is pulled when it is wanted.

        So many that its work is here when the next round is due. One whose work takes longer to come than a round waits
        is due earlier, by as much as it would be late. Where the steps of a round pass sooner than the version with the
        order arrives, the order is overdue then: each learner contributes as soon as it has adopted, and all are in
        phase however long the links are.

        Where the version overwrites what was done meanwhile, all of them begin anew with it: work that is about to be
        given up counts for nothing. If it did, a quick learner beside a slow quorum would never be there in time.
        """
        if view.held.is_scarce:
            return 0  # an order cannot be taken back, a pull is sent when there is room
        due, pace_s = self._due_at(p, view), view.roster.pace_s(view.quorum)
        if pace_s is None or not member.step_s:
            return math.ceil(due)
        late_s = max(0.0, (member.answer_s or 0.0) - (self.quorum_s or 0.0) - self._grace_s(view))
        if self.overwrites:
            return max(1, round((due * pace_s - late_s) / member.step_s))
        due_s = (due - view.roster.steps_due(p, view.quorum)) * pace_s - late_s
        return max(1, member.unsettled(p) + round(due_s / member.step_s))

    def pull(self, p: int, view: View) -> list[Want]:
        """Whom to ask now for an open round: who has no order, and when it opens who has one that is far off."""
        is_opening = self.open[p].opened_at == view.now
        if not is_opening and not view.roster.askable[p]:
            return []
        there = view.roster.there
        askable = view.roster.askable[p] & there.keys()
        if is_opening:
            awaited = view.roster.awaited[p] & there.keys()
            askable |= {learner for learner in awaited if there[learner].may_come_sooner(p, view.now)}
        if not askable or not view.held.has_room(p, self.oldest):
            return []
        return [Want(there[learner], p) for learner in sorted(askable)]

    def close(self, p: int, view: View) -> Close | None:
        """Whether an open round has waited long enough."""
        round_, held = self.open[p], view.held[p]
        if len(held) >= view.quorum and round_.quorum_at is None:
            round_.quorum_at = view.now
            self.quorum_s = ema(self.quorum_s, view.now - round_.opened_at)
        missing = self._missing(p, view) if len(held) >= view.quorum else {}
        verdict = decide(len(held), view.quorum, missing, round_.quorum_at, self._grace_s(view), view.now)
        if verdict.closes and (rest := self._worth_waiting_for(round_, missing, view)):
            verdict = Verdict(None, f"for {', '.join(rest)}, expected before a next round could be")
        round_.waits = verdict.waits
        if verdict.closes is None:
            return None
        return Close(p, round_.stage, round_.sync_every, verdict.closes, view.quorum, len(view.ready), round_.opened_at)

    def _missing(self, p: int, view: View) -> dict[str, float]:
        """Learners that a round still waits for, and when each is expected."""
        there = (view.roster.awaited[p] & view.ready.keys()) - view.held[p].keys()
        return {learner: view.ready[learner].expected_at(p) for learner in there}

    def _worth_waiting_for(self, round_: Round, missing: Mapping[str, float], view: View) -> list[str]:
        """Those missing for whom the others had better wait, although there is no slack for it.

        Closed without them a round leaves them to the next, and where rounds follow each other without a pause, the
        first half of the learners is in one and the other half in the next, for ever: each merge is of half of them and
        of two rounds' drift. To wait costs everyone that long, not to wait costs the missing a round. So a round waits
        as long as that is less in sum, but for no more than a step or an eighth of itself, and for nobody who is a
        step behind what was expected. Where the configuration has no grace it waits for nobody.
        """
        step_s, pace_s = view.roster.kth_step_s(view.quorum), view.roster.pace_s(view.quorum)
        if step_s is None or pace_s is None or round_.quorum_at is None or not self.sync.grace:
            return []
        every_s = round_.sync_every * pace_s
        if view.now >= round_.quorum_at + max(step_s, every_s / 8):
            return []
        coming = {learner: at for learner, at in missing.items() if view.now < at + step_s}
        by = view.now + every_s * len(coming) / len(view.ready)
        return sorted(learner for learner, at in coming.items() if at <= by)

    def hand_over(self, p: int, view: View) -> list[Want]:
        """Learners that want to leave hand over at once; their work merges in the next rounds, which come in time."""
        is_room = view.held.has_room(p, self.oldest)
        return [Want(m, p) for m in view.leaving if is_room and m.learner in view.roster.askable[p]]

    def close_behind(self, p: int, view: View) -> Close | None:
        """Where everyone is leaving there is no next round: what is held merges once all have handed over."""
        if view.ready or not view.leaving or len(view.held[p]) < view.quorum or p in self.merging:
            return None
        if not all(m.learner in view.held[p] or m.unsettled(p) <= 0 for m in view.leaving):
            return None
        return Close(p, view.stage, view.sync_every, "everyone is leaving", view.quorum, 0, view.now)

    def explain(self, view: View) -> str:
        """Why nothing merges right now, and who steps and brings nothing."""
        return self._why(view) + _idle_words(view.roster)

    def _why(self, view: View) -> str:
        if len(view.roster.there) < view.quorum:
            ahead = f", {view.ahead} ahead of this tape" if view.ahead else ""
            return f"for learners: {len(view.ready)} ready{ahead}, quorum {view.quorum}"
        if (oldest := self.oldest) is not None:
            return f"fragment {oldest}: {self.open[oldest].waits}"
        return f"for steps: no fragment is due (H = {view.sync_every})"

    # ------------------------------------------------------------------------------------------ what has happened

    def merge_began(self, p: int) -> None:
        self.open.pop(p, None)
        self.merging.add(p)
        self.under_way += CROWD_WEIGHT * (len(self.merging) - self.under_way)

    def merge_ended(self, decision: Decision, ready: Iterable[str], now: float) -> None:
        """There is a new version; those who are ready are expected to adopt it."""
        p, spans = decision.fragment, [row.steps for row in decision.rows if row.fate == MERGED]
        self.reached = ema(self.reached, max(spans))
        self.merging.discard(p)
        self._closed_at[p] = now
        self._adopting[p] = set(ready)

    def measure_adoption(self, member: Member, fragments: Sequence[FragmentState], now: float) -> None:
        """A report came: how long did the versions take that it has adopted?"""
        assert member.report is not None
        for p, waiting in self._adopting.items():
            if member.learner in waiting and member.report.positions[p].base_version >= fragments[p].version:
                waiting.discard(member.learner)
                self.sync_s = ema(self.sync_s, now - self._closed_at[p])

    def abandon(self) -> None:
        """No round closes any more; what is held for it stays held."""
        self.open.clear()

    # ------------------------------------------------------------------------------------------ helpers

    def _idle(self) -> list[int]:
        """Fragments of which no round is open and no merge under way."""
        return [p for p in range(self.fragment_count) if p not in self.open and p not in self.merging]

    def _due_at(self, p: int, view: View) -> float:
        """Unsettled steps at which it is due: later by what the pacer put its last round off, so they stay apart."""
        before = view.state.fragments[p].sync_every
        return due_at(p, self.fragment_count, view.sync_every, before) + self._put_off.get(p, 0.0)

    def _grace_s(self, view: View) -> float:
        kth_s = view.roster.kth_step_s(view.quorum)
        return grace_s(self.sync.grace, self.sync.fragment_sync_delay, kth_s, self.quorum_s, self.sync_s)


def _idle_words(roster: Roster) -> str:
    liars = sorted(name for name, member in roster.idle.items() if member.is_beyond_belief)
    silent = sorted(roster.idle.keys() - set(liars))
    counted = "" if roster.counts_idle else ", not counted"
    words = f"; nothing comes from {_named(silent)}{counted}" if silent else ""
    return words + (f"; more than can be is claimed by {_named(liars)}{counted}" if liars else "")


def _named(names: Sequence[str]) -> str:
    more = len(names) - IDLE_NAMED
    return ", ".join(names[:IDLE_NAMED]) + (f" and {more} more" if more > 0 else "")
