"""The syncer's door: who is let in, in which life, who is sent away and why, who is turned out.

A process says hello with a name, and with the life it believes to be in if it has one. It is welcomed back into its
life, begins the next life of its name, or is told in one line why not (`core/admission.py` has the words and the
numbers). A new process is a new life: what the one before had pending, and nobody holds, is lost and booked so.

An operator turns a learner out by an order, which is on the tape, or by withdrawing its key, which is not: the syncer
hears of it again when it is started. While either is so, the learner stays out.

    a run has so many places, and its books room for so many names; a name begins so many lives in a while
    a name that is in use is another process's, unless that one can prove that the name is its own
    who holds what this tape lacks is not merged with it, as long as this process lasts
    of a learner that was turned out nothing is held but what is being merged

The door owns what it remembers of those it sent away. It knows nothing of rounds, publications or the end.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from skerry.core import admission
from skerry.core.books import Books
from skerry.core.events import Departed, Dismiss, Drop, Expelled, Joined, Readmitted
from skerry.core.facts import LifeStarted
from skerry.core.membership import Member
from skerry.core.messages import Done, Welcome
from skerry.core.samples import Samples
from skerry.core.state import LifeState, RunState
from skerry.core.vocabulary import Dismissal

AHEAD_MAX = 1024  # learners of which it is remembered that they are ahead of this tape, beside those that joined


class Ahead(NamedTuple):
    """A process holds something that this tape lacks: what, in one line."""

    process: str
    why: str


class Door:
    """Answers hellos and ends links; `learners` are those that the run expects."""

    def __init__(self, learners: int, books: Books, samples: Samples) -> None:
        self.learners = learners
        self.books = books
        self.state, self.clock, self.held, self.roster = books.state, books.clock, books.held, books.roster
        self.samples = samples
        self.ahead: dict[str, Ahead] = {}  # by learner
        self.expelled = {learner: _dropped(learner) for learner in self.state.dropped}  # turned out -> why, in one line
        self._keyless: dict[str, str] = {}  # those of them that lost their key since this process began
        self._booked: dict[str, float] = {}  # learner -> up to when its lives last, if they last as they should

    def __repr__(self) -> str:
        return f"<door ahead={sorted(self.ahead)} expelled={sorted(self.expelled)}>"

    def open(self) -> None:
        """What earlier processes left: lives that are over, and work of those who are kept out."""
        for learner, known in sorted(self.state.lives.items()):
            self._bury(learner, known.life)
        for learner in sorted(self.state.dropped):
            if self.state.phase != "closed":
                self._drop_held(learner)

    # ------------------------------------------------------------------------------------------ who comes

    def join(self, event: Joined) -> None:
        """A process says hello."""
        learner, known = event.learner, self.state.lives.get(event.learner)
        newest = known.life if known else 0
        if learner in self.expelled:
            self._send_away(learner, "expelled", self.expelled[learner])
        elif self._is_full(learner):
            self._send_away(learner, "full", admission.full(learner, admission.places(self.learners)))
        elif known is not None and event.process == known.process:
            self._let_back(event, known)
        elif self.state.phase == "closed":
            self._send_away(learner, "closed", admission.CLOSED)
        elif event.life > newest:
            self._send_away(learner, "ahead", self._lacks_life(event, newest))
        elif event.life > 0:
            self._send_away(learner, "taken over", admission.superseded(learner, event.life, newest))
        elif known is None and len(self.state.lives) >= admission.names_max(self.learners):
            self._join_instead(event)
        elif self._is_in_use(learner) and not event.has_key:
            self._send_away(learner, "in use", admission.in_use(learner))
        elif (booked := admission.life_booked(self._booked.get(learner, 0.0), self.clock.now)) is None:
            self._send_away(learner, "full", admission.too_many_lives(learner))
        else:
            self._booked[learner] = booked
            self._begin_life(event)

    def _let_back(self, event: Joined, known: LifeState) -> None:
        """Into the life that it has, unless that was turned out or holds what this tape lacks.

        Once the run is closed it may be done, in whichever life.
        """
        ahead, is_closed = self.ahead.get(event.learner), self.state.phase == "closed"
        if known.is_over and not is_closed:
            self._send_away(event.learner, "expelled", admission.over(event.learner))
        elif ahead is not None and ahead.process == event.process and not is_closed:
            self._send_away(event.learner, "ahead", ahead.why)
        else:
            member = self._welcome(event.learner, known.life)
            if is_closed:
                self.books.send(member, Done(self.state.epoch, known.life))

    def _join_instead(self, event: Joined) -> None:
        """In the place of a name that is not there and never did anything; there is none in the books else."""
        for name, known in self.state.lives.items():
            is_nobody = admission.is_forgettable(known, self.state.ledger, name, self.clock.elapsed_s)
            if is_nobody and not self._is_in_use(name) and name not in self.expelled:
                self._begin_life(event, (name,))
                return
        self._send_away(event.learner, "full", admission.too_many_names(event.learner, len(self.state.lives)))

    def _begin_life(self, event: Joined, forgotten: tuple[str, ...] = ()) -> None:
        """A new process is a new life; what the old one had pending, and nobody holds, died with it.

        If the old one is there, the new one has proved that the name is its own.
        """
        known = self.state.lives.get(event.learner)
        life = known.life + 1 if known else 1
        self.ahead.pop(event.learner, None)
        index = known.index if known else 1 + max((at.index for at in self.state.lives.values()), default=-1)
        member = self.roster.members.get(event.learner)
        if member is not None and member.connected:
            why = admission.superseded(event.learner, member.life, life)
            self._send_away(event.learner, "taken over", why, member.life)
        for name in forgotten:
            self._forget(name)
        folded, seen = self.books.fold_lives(event.learner, life)
        at = (index, self.clock.elapsed_s, folded, seen, forgotten)
        self.books.record(LifeStarted(event.learner, life, event.process, *at))
        self.samples.forget(event.learner)
        self._bury(event.learner, life)
        self._welcome(event.learner, life)

    def _welcome(self, learner: str, life: int) -> Member:
        member = self.roster.members.get(learner)
        if member is None or member.life != life:
            settled, other = [at.step for at in self.state.ledger.account(learner, life).settled], member
            member = Member(learner, life, settled)
            if other is not None:
                member.follow(other)
        member.connect(self.clock.now)
        self.roster.update(member, self.clock.now)
        self.books.begin_life(learner, life)
        self.books.send(member, _welcome_to(self.state, learner, life))
        return member

    def _is_full(self, learner: str) -> bool:
        """All places are taken; who has work in the model is let in beyond them, within as many again."""
        if self._is_in_use(learner) or self.state.phase == "closed":
            return False
        places = admission.places(self.learners)
        has_merged = any(learner in at.merged_in for at in self.state.fragments)
        return sum(m.connected for m in self.roster.members.values()) >= (2 * places if has_merged else places)

    def _is_in_use(self, learner: str) -> bool:
        """A process of this name is there, as far as its link knows, which gives up whoever is silent."""
        member = self.roster.members.get(learner)
        return member is not None and member.connected

    def _lacks_life(self, event: Joined, newest: int) -> str:
        """Anybody could say so: it is nothing that the process which has the name could be turned away for."""
        why = admission.unknown_life(event.learner, event.life, newest)
        if not self._is_in_use(event.learner) and len(self.ahead) < AHEAD_MAX:
            self.ahead.setdefault(event.learner, Ahead(event.process, why))
        return why

    # ------------------------------------------------------------------------------------------ who goes

    def depart(self, event: Departed) -> None:
        """Its link is gone."""
        member = self.roster.members.get(event.learner)
        if member is not None and member.life == event.life and member.connected:
            self.part(member, "lost")

    def part(self, member: Member, how: Literal["left", "lost"]) -> None:
        """It is gone: its link ended, or its last report says that it leaves, which comes before that."""
        self._disconnect(member)
        self.books.witness(member.learner, member.life, how)

    def turn_away(self, member: Member, why: str) -> None:
        """It is this syncer that lost something, so the learner may come again; it is not merged with what it lacks.

        Once for all of this process: were it let in when others have made as many versions, it would stand on one of
        the same number that is not the same.
        """
        self._disconnect(member)
        self.ahead[member.learner] = Ahead(self.state.lives[member.learner].process, why)
        self._send_away(member.learner, "ahead", why, member.life)

    def _disconnect(self, member: Member) -> None:
        member.disconnect()
        self.roster.update(member, self.clock.now)

    def _send_away(self, learner: str, why: Dismissal, text: str, life: int = 0) -> None:
        self.books.order(Dismiss(learner, life, why, text))

    # ------------------------------------------------------------------------------------------ who is kept out

    def expel(self, event: Expelled) -> None:
        """It has no key any more."""
        why = self._keyless[event.learner] = admission.expelled(event.learner, event.why)
        self._turn_out(event.learner, why)

    def readmit(self, event: Readmitted) -> None:
        """It has a key again; an order may keep it out yet."""
        self._keyless.pop(event.learner, None)
        self.let_in(event.learner)

    def drop(self, learner: str) -> None:
        """An order keeps it out."""
        self._turn_out(learner, _dropped(learner))

    def let_in(self, learner: str) -> None:
        """Unless it is out for another reason as well."""
        if learner in self.state.dropped:
            self.expelled[learner] = _dropped(learner)
        elif learner in self._keyless:
            self.expelled[learner] = self._keyless[learner]
        else:
            self.expelled.pop(learner, None)
            if (member := self.roster.members.get(learner)) is not None:
                member.is_expelled = False

    def _turn_out(self, learner: str, why: str) -> None:
        """Its link ends, and whatever it has pending is booked, but for what is being merged, until that has ended."""
        member, known = self.roster.members.get(learner), self.state.lives.get(learner)
        self.expelled[learner] = why
        self.ahead.pop(learner, None)
        if known is not None and self.state.phase != "closed":
            self.books.witness(learner, known.life, "expelled")
            self._drop_held(learner)
        if member is not None:
            member.is_expelled = True
            if member.connected:
                self._disconnect(member)
                self._send_away(learner, "expelled", why, member.life)

    # ------------------------------------------------------------------------------------------ what they leave

    def _drop_held(self, learner: str) -> None:
        """What is held of it will not be merged, and none of its work any more."""
        lives = {self.state.lives[learner].life}
        for p, held in enumerate(self.held):
            if learner in held and not self.held.is_merging(learner, p):
                lives.add(held[learner].life)
                self.held.drop(learner, p)
                self.books.order(Drop(learner, p))
        for life in sorted(lives):
            self.books.discard(learner, life, "expelled")

    def _bury(self, learner: str, life: int) -> None:
        """Lives before this one are over: what they have pending, and nobody holds, died with them."""
        for past in range(self.state.ledger.lives_folded(learner) + 1, life):
            self.books.discard(learner, past, "died")

    def _forget(self, learner: str) -> None:
        """Another has its place in the books: it has no work that anybody could ask for."""
        self.roster.remove(learner)
        self.samples.forget(learner)
        self._booked.pop(learner, None)
        self.books.forget(learner)


def _welcome_to(state: RunState, learner: str, life: int) -> Welcome:
    before = state.ledger.before(learner, life)
    return Welcome(
        run=state.created.run,
        epoch=state.epoch,
        learner=learner,
        life=life,
        index=state.lives[learner].index,
        config=state.config,
        fragments=state.created.fragments,
        prior_steps=before.steps,
        prior_tokens=before.tokens,
        progress=state.progress,
        budget=state.budgets,
        since=tuple(at.since for at in state.fragments),
    )


def _dropped(learner: str) -> str:
    return admission.expelled(learner, "it was dropped with skerry drop, whose --readmit lets it in again")
