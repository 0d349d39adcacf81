"""The books of a run, and the orders that stand behind each entry.

Facts and orders come out in one list, because a fact is on the disk before anything that follows from it may leave this
process: what is ordered after a record is carried out after it. A fact is applied to the state when its record is
ordered, so the tape has the order in which the machine applied.

`state` is the fold of the tape. The one thing of the books that the tape lacks is how far lives have come since they
were last written down: reports come too often to be written one by one, so the next fact that tells it carries them
(`unwritten`). What is lost of that in a crash is reported again.
"""

from __future__ import annotations

from collections.abc import Iterable

from skerry.core.clock import Clock
from skerry.core.events import BuffersStored, Record, Send, SyncerAction
from skerry.core.facts import (
    Buffered,
    Committed,
    Discarded,
    Fact,
    Paused,
    PhaseChanged,
    Row,
    Sample,
    Sampled,
    Seen,
    Witnessed,
)
from skerry.core.held import Held
from skerry.core.membership import Member
from skerry.core.messages import Done, Pull, Rejected, Stop, Welcome
from skerry.core.roster import Roster
from skerry.core.state import RunState
from skerry.core.vocabulary import Fate, Sight


class Books:
    """Applies and records facts, and collects orders; `held` and `roster` say what is not to be booked, and to whom."""

    def __init__(self, state: RunState, clock: Clock, held: Held, roster: Roster) -> None:
        self.state = state
        self.clock = clock
        self.held = held
        self.roster = roster
        self._unwritten: set[tuple[str, int]] = set()  # lives of which more was seen than the tape says
        self._actions: list[SyncerAction] = []

    def __repr__(self) -> str:
        return f"<books of {len(self.state.lives)} names, {len(self._unwritten)} unwritten>"

    # ------------------------------------------------------------------------------------------ what comes out

    def record(self, fact: Fact) -> None:
        """It is so from here on, and whatever is ordered next leaves behind its record."""
        self.state.apply(fact)
        match fact:
            case Discarded():
                self.settle(fact.rows)
            case Committed():
                self._written(fact.decision.seen)
            case PhaseChanged() | Paused():
                self._written(fact.seen)
        self.order(Record(fact))

    def send(self, member: Member, message: Welcome | Pull | Rejected | Stop | Done) -> None:
        self.order(Send(member.learner, member.life, message))

    def order(self, action: SyncerAction) -> None:
        self._actions.append(action)

    def take_orders(self) -> list[SyncerAction]:
        """All since the last time, as they are to be carried out."""
        actions, self._actions = self._actions, []
        return actions

    # ------------------------------------------------------------------------------------------ fates

    def discard(self, learner: str, life: int, fate: Fate) -> None:
        """Book what a life has pending and nobody holds or is merging."""
        rows: list[Row] = []
        for p, held in enumerate(self.held):
            if learner not in held or held[learner].life != life:
                rows += self.state.ledger.rest(learner, life, p, fate)
        if rows:
            seen = (self.state.ledger.seen(learner, life),)
            self.record(Discarded(tuple(rows), seen, self.clock.elapsed_s))

    def settle(self, rows: Iterable[Row]) -> None:
        """Rows were booked: members know up to where their work is settled."""
        for row in rows:
            member = self.roster.members.get(row.learner)
            if member is not None and member.life == row.life:
                member.settled[row.fragment] = row.to_step
                self.roster.refresh(member, row.fragment)

    # ------------------------------------------------------------------------------------------ what was seen

    def witness(self, learner: str, life: int, what: Sight) -> None:
        if self.state.phase != "closed":
            self.record(Witnessed(learner, life, what, self.clock.elapsed_s))

    def sample(self, samples: tuple[Sample, ...]) -> None:
        if samples:
            self.record(Sampled(samples, self.clock.elapsed_s))

    def name_buffers(self, event: BuffersStored) -> None:
        """The newest of this life; a file that no record names is nobody's."""
        known, before = self.state.lives.get(event.learner), self.state.buffers.get(event.learner)
        is_newest = before is None or (before.life, before.step) < (event.life, event.step)
        is_wanted = bool(event.file) and is_newest and self.state.phase != "closed"
        if is_wanted and known is not None and known.life == event.life:
            at = (event.learner, event.life, event.step, event.tokens)
            self.record(Buffered(*at, event.file, self.clock.elapsed_s))

    def begin_life(self, learner: str, life: int) -> None:
        """The tape says nothing yet of how far it has come."""
        self._unwritten.add((learner, life))

    def see(self, seen: Seen) -> None:
        """A life has come so far; once the run is closed so are the books: what comes then was never produced."""
        if self.state.phase != "closed" and self.state.ledger.see(seen):
            self._unwritten.add((seen.learner, seen.life))

    def unwritten(self) -> tuple[Seen, ...]:
        """The positions that no fact on the tape holds; a merge under way may end behind another, or be dropped."""
        return tuple(self.state.ledger.seen(learner, life) for learner, life in sorted(self._unwritten))

    def _written(self, seen: Iterable[Seen]) -> None:
        """A fact on the tape holds these; of some lives more may have been seen since it was decided."""
        ledger = self.state.ledger
        self._unwritten -= {(at.learner, at.life) for at in seen if ledger.seen(at.learner, at.life) == at}

    def fold_lives(self, learner: str, life: int) -> tuple[int, tuple[Seen, ...]]:
        """The earlier lives that nothing more can come of, up to which one, and what the tape does not know of them.

        The last one before this has its fate yet to come.
        """
        ledger, first = self.state.ledger, self.state.ledger.lives_folded(learner) + 1
        upto = first - 1
        while upto + 1 < life - 1 and ledger.is_settled(learner, upto + 1):
            upto += 1
        unwritten = [n for n in range(first, upto + 1) if (learner, n) in self._unwritten]
        seen = tuple(ledger.seen(learner, n) for n in unwritten)
        self._unwritten.difference_update((learner, n) for n in unwritten)
        return upto, seen

    def forget(self, learner: str) -> None:
        """It has no work that anybody could ask for."""
        self._unwritten = {(name, life) for name, life in self._unwritten if name != learner}
