"""The rounds of training: which fragment's to open, whom to pull, whom to ask ahead, when to close.

A fragment has at most one open round, and none while it is merging. A contribution belongs to no round: what comes late
is held and merged in the next. The measured times are of this process and are lost with it; nothing depends on them but
how long a round waits for the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skerry.config import Sync
from skerry.core.look import Close, View, Want
from skerry.core.membership import Member, ema
from skerry.core.quorum import decide, grace_s
from skerry.core.schedule import Pacer, due_at, rounds_open_max
from skerry.core.state import FragmentState
from skerry.core.vocabulary import Stage


@dataclass
class Round:
    """An open round of one fragment: whom it waits for, when the quorum was reached, why it still waits."""

    opened_at: float
    stage: Stage  # at its opening: what its merge does follows from it
    awaited: set[str]  # learners that were asked and, when last looked, were not in
    quorum_at: float | None = None
    waits: str = "opened"


class Rounds:
    """Open rounds and merges under way, how fast rounds may open, and how long their parts take."""

    def __init__(self, sync: Sync, fragment_count: int) -> None:
        self.sync = sync
        self.fragment_count = fragment_count
        self.open: dict[int, Round] = {}
        self.merging: set[int] = set()
        self.pacer = Pacer()
        self.quorum_s: float | None = None  # from opening to quorum
        self.sync_s: float | None = None  # from closing to a learner's adoption
        self._closed_at: dict[int, float] = {}  # fragment -> when its last merge ended
        self._adopting: dict[int, set[str]] = {}  # fragment -> learners that have not yet reported its version

    def __repr__(self) -> str:
        return f"<rounds open={sorted(self.open)} merging={sorted(self.merging)} allowance={self.pacer.allowance:.2f}>"

    @property
    def oldest(self) -> int | None:
        """The fragment whose round has been open longest."""
        return min(self.open, key=lambda p: (self.open[p].opened_at, p), default=None)

    # ------------------------------------------------------------------------------------------ decisions of a look

    def open_due(self, view: View) -> None:
        """Open what is due, the most overdue first, as far as the pacer and the bound on open rounds let."""
        self.pacer.grow(view.now, view.roster.pace_s(view.quorum), self.fragment_count / view.sync_every)
        if len(view.ready) < view.quorum:
            return
        room = rounds_open_max(self.sync.fragment_sync_delay, self.fragment_count, view.sync_every) - len(self.open)
        if room <= 0 or not self.pacer.has_any:
            return  # nothing could be opened: spare the look at every fragment
        overdue = {p: view.roster.steps_due(p, view.quorum) / self._due_at(p, view) for p in self._idle()}
        for _, p in sorted((-by, p) for p, by in overdue.items() if by >= 1)[:room]:
            if not self.pacer.take():
                break
            asked = {learner for learner, member in view.ready.items() if p in member.pulled_at}
            self.open[p] = Round(view.now, view.stage, asked)

    def pull(self, p: int, view: View) -> list[Want]:
        """Whom to ask now for an open round; the round waits for everyone who was asked."""
        askable = view.roster.askable[p]
        if not askable or not view.held.has_room(p, self.oldest):
            return []
        wants = [Want(view.ready[learner], p) for learner in sorted(askable) if learner in view.ready]
        self.open[p].awaited.update(want.member.learner for want in wants)
        return wants

    def close(self, p: int, view: View) -> Close | None:
        """Whether an open round has waited long enough."""
        round_, held = self.open[p], view.held[p]
        if len(held) >= view.quorum and round_.quorum_at is None:
            round_.quorum_at = view.now
            self.quorum_s = ema(self.quorum_s, view.now - round_.opened_at)
        missing = self._missing(p, view) if len(held) >= view.quorum else {}
        verdict = decide(len(held), view.quorum, missing, round_.quorum_at, self._grace_s(view), view.now)
        round_.waits = verdict.waits
        if verdict.closes is None:
            return None
        return Close(p, round_.stage, verdict.closes, view.quorum, len(view.ready), round_.opened_at)

    def _missing(self, p: int, view: View) -> dict[str, float]:
        """Learners that a round still waits for, and when each is expected."""
        round_ = self.open[p]
        round_.awaited = {learner for learner in round_.awaited if learner not in view.held[p]}
        there = [view.ready[learner] for learner in round_.awaited if learner in view.ready]
        return {m.learner: m.pulled_at.get(p, view.now) + (m.answer_s or 0.0) for m in there}

    def ask_ahead(self, view: View) -> list[Want]:
        """Ask those who would miss a round's window before it opens, by as much as they would miss it.

        A contribution belongs to no round, so a slow learner's can lie ready when the round opens. Asked only at the
        opening it would be late, held for the next round, and so be in every other merge at best.
        """
        roster, step_s = view.roster, view.roster.pace_s(view.quorum)
        if len(view.ready) < view.quorum or step_s is None or self.quorum_s is None:
            return []
        window_s = self.quorum_s + self._grace_s(view)
        slow = roster.slower_than(window_s)
        late_s_max = slow[-1][0] - window_s if slow else 0.0
        wants: list[Want] = []
        for p in self._idle() if slow else ():
            due_s = (self._due_at(p, view) - roster.steps_due(p, view.quorum)) * step_s
            if due_s <= late_s_max and roster.askable[p] and view.held.has_room(p, self.oldest):
                late = [learner for answers_in_s, learner in slow if due_s <= answers_in_s - window_s]
                wants += [Want(view.ready[learner], p) for learner in sorted(roster.askable[p].intersection(late))]
        return wants

    def hand_over(self, p: int, view: View) -> list[Want]:
        """Learners that want to leave hand over at once; their work merges in the next rounds."""
        is_room = view.held.has_room(p, self.oldest)
        return [Want(m, p) for m in view.leaving if is_room and m.learner in view.roster.askable[p]]

    def close_behind(self, p: int, view: View) -> Close | None:
        """Where everyone is leaving there is no next round: what is held merges once all have handed over."""
        if view.ready or not view.leaving or len(view.held[p]) < view.quorum or p in self.merging:
            return None
        if not all(m.learner in view.held[p] or m.unsettled(p) <= 0 for m in view.leaving):
            return None
        return Close(p, view.stage, "everyone is leaving", view.quorum, 0, view.now)

    def explain(self, view: View) -> str:
        """Why nothing merges right now."""
        if len(view.ready) < view.quorum:
            ahead = f", {view.ahead} ahead of this tape" if view.ahead else ""
            return f"for learners: {len(view.ready)} ready{ahead}, quorum {view.quorum}"
        if self.oldest is not None:
            return f"fragment {self.oldest}: {self.open[self.oldest].waits}"
        return f"for steps: no fragment is due (H = {view.sync_every})"

    # ------------------------------------------------------------------------------------------ what has happened

    def merge_began(self, p: int) -> None:
        self.open.pop(p, None)
        self.merging.add(p)

    def merge_ended(self, p: int, ready: Iterable[str], now: float) -> None:
        """There is a new version; those who are ready are expected to adopt it."""
        self.merging.discard(p)
        self._closed_at[p] = now
        self._adopting[p] = set(ready)

    def has_become_ready(self, member: Member) -> None:
        """Open rounds wait for it where it was asked before."""
        for p, round_ in self.open.items():
            if p in member.pulled_at:
                round_.awaited.add(member.learner)

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

    def _due_at(self, p: int, view: View) -> int:
        return due_at(p, self.fragment_count, view.sync_every, view.state.fragments[p].sync_every)

    def _grace_s(self, view: View) -> float:
        kth_s = view.roster.kth_step_s(view.quorum)
        return grace_s(self.sync.grace, self.sync.fragment_sync_delay, kth_s, self.quorum_s, self.sync_s)
