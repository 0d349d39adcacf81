"""The syncer's side of the protocol: who is there, rounds, settlement, publication, the end.

    actions = machine.take(event, now)      for each of some events
    actions = machine.look(now)             then once
    actions = machine.step(event, now)      both, for who has one event

Theory of operation. The machine is told *events*, which are past facts (a learner said hello, a report or a whole
contribution came, a merge has ended, time has passed), and answers with *actions*, which are orders (record, send,
hold, publish, merge). It holds no payload and no array: contributions are named, their bytes are the node's. It reads
no clock either: time is what `now` says, less what the process slept (`core/clock.py`).

Events are *taken* in one by one, and what follows from one alone is ordered at once: a welcome, a hold or a rejection,
publications. Then comes a *look* at where things stand, because what is due may follow from any event and from time
alone. One look does for however many events came before it, and costs what they changed: what it is decided from is
kept up as it changes (`core/roster.py`). Only the closing goes through everybody. A look goes, in this order:

    progress    how much of the budget is spent, so which stage it is and how long H
    samples     measurements, to the tape now and then
    open        rounds that are due, as far as the pacer lets            core/rounds.py
    pull, close each open round, by fragment                             core/rounds.py
    let go      learners that want to leave hand over                    core/rounds.py
    or, once the budget is spent:
    stop, settle, merge, end                                             core/closing.py
    and before the first step of all:
    begin       when all are there                                       core/gathering.py

What decides owns its own state and nothing else: `Held` what is held, `Roster` who can do what, `Rounds` the open
rounds and measured times, `Gathering` who is there before the first step, `Closing` when the end began, `Checkpoints`
what is being written whole, `Forgone` what a rollback made useless, `Member` what one learner said and was told. Each
decides from a frozen `View` (`core/look.py`) or the state, and returns orders as plain values. The machine carries each
out before the next decision that could depend on it. Who comes and who goes touches nothing of a look, so `Door` has
that from the hello to the last entry.

Facts and actions come out of `Books` alone, in one list. `state` is the fold of the tape. A fact is applied when its
record is ordered, a merge's once the machine is told that the merge has ended; so the tape has the order in which the
machine applied, whatever order merges end in. Whatever follows from a fact is ordered behind its record, and leaves
this process after it is kept. Everything else here is lost in a crash, and is measured or reported anew.

Invariants, and who keeps them:

    a fragment has at most one open round and one merge under way                              Rounds
    at most one contribution is held per learner and fragment                                  Held, admission.verdict
    a contribution starts at or after what is settled, and is merged once                      admission.verdict
    what a dead life has pending is booked once, and not while a contribution of it is held    Books.discard
    of a learner that was turned out nothing is held but what is being merged                  Door
    a publication is of a durable version, one per fragment and learner on its way             _publish
    what is on its way to a learner fits the window, or is one fragment a stream               core/flow.py
    every message about a fragment carries that learner's cumulative settled_seq               _pull, _send_newest
    a closed run has nothing pending                                                           _end
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from skerry import config as configs
from skerry.config import Config
from skerry.core import admission, orders
from skerry.core.books import Books
from skerry.core.checkpoints import Checkpoints
from skerry.core.clock import Clock
from skerry.core.closing import Closing
from skerry.core.credit import Credit
from skerry.core.decision import decision_of
from skerry.core.door import Ahead, Door
from skerry.core.events import (
    Arrived,
    BuffersStored,
    Checkpoint,
    CheckpointDone,
    Departed,
    Expelled,
    Finish,
    Hold,
    Interrupted,
    Joined,
    Merge,
    MergeDone,
    OrderGiven,
    PublicationSent,
    Publish,
    Readmitted,
    Reply,
    Reported,
    Started,
    SyncerAction,
    SyncerEvent,
    Ticked,
)
from skerry.core.facts import Checkpointed, Discarded, Ordered, Paused, PhaseChanged, Row, Seen
from skerry.core.flow import Window
from skerry.core.forgone import Forgone
from skerry.core.gathering import Gathering
from skerry.core.held import Held
from skerry.core.ledger import MERGED
from skerry.core.look import Close, View, Want
from skerry.core.membership import RESEND_S, Member
from skerry.core.messages import Contribution, Done, PauseRun, Pull, Rejected, Report, Stop
from skerry.core.quorum import quorum_size
from skerry.core.roster import Roster
from skerry.core.rounds import Rounds
from skerry.core.samples import Samples
from skerry.core.schedule import spent_at, stage_of, sync_every_in
from skerry.core.state import RunState
from skerry.core.vocabulary import Ending, Refusal, Stage

ENDING = "this syncer is ending: give the order again when another serves the run, or to its directory"


class SyncerMachine:
    """Decides for the syncer; `state` is the fold of the tape, the rest is lost in a crash and measured anew."""

    def __init__(self, config: Config, state: RunState, now: float, window: Window) -> None:
        count = len(state.fragments)
        self.config = config
        self.state = state
        self.clock = Clock(now, state.elapsed_s)
        self.held = Held(count, config.wire.held_bytes_max)
        self.roster = Roster(self.held, config.sync.stall_s, isinstance(config.sync.quorum, int))
        self.rounds = Rounds(config.sync, config.learner, config.merge.threads, count)
        self.window = window
        is_waited = state.phase == "created" and config.run.gather_s > 0
        self.gathering = Gathering(config.run.learners, config.run.gather_s, count) if is_waited else None
        self.closing = Closing(now, config.sync.close_timeout_s) if state.phase == "closing" else None
        self.waiting = "for learners"  # why nothing merges right now
        self.refused: dict[Refusal, int] = {}
        self.samples = Samples(now)
        self.checkpoints = Checkpoints(config.store)
        self.forgone = Forgone()
        self.credit = Credit(state, now)
        self.books = Books(state, self.clock, self.held, self.roster)
        self.door = Door(config.run.learners, self.books, self.samples)
        self._ending: Ending | None = None  # why this process is to end, once everything has its checkpoint

    def __repr__(self) -> str:
        return (
            f"<syncer {self.state.phase} merges={self.state.merges} ready={len(self.roster.ready)} "
            f"open={sorted(self.rounds.open)} waiting {self.waiting}>"
        )

    @property
    def is_interrupted(self) -> bool:
        """Nothing follows from anything any more: this process is about to end, and the run goes on later."""
        return self._ending == "interrupted"

    @property
    def members(self) -> dict[str, Member]:
        """By learner; all that were heard of since this process began."""
        return self.roster.members

    @property
    def ahead(self) -> Mapping[str, Ahead]:
        """By learner; those that hold something which this tape lacks."""
        return self.door.ahead

    def step(self, event: SyncerEvent, now: float) -> list[SyncerAction]:
        """Take one event in and look, if it can move a round; the orders come out as they are to be carried out."""
        actions = self.take(event, now)
        return actions if isinstance(event, PublicationSent | Interrupted) else actions + self.look(now)

    def take(self, event: SyncerEvent, now: float) -> list[SyncerAction]:
        """Take one event in; what follows from it alone comes out, in the order in which it is to be carried out."""
        self._pass_time(now)
        if self.is_interrupted and isinstance(event, OrderGiven):
            self.books.order(Reply(event.ticket, orders.refused(ENDING).outcome))
            return self.books.take_orders()
        if self.is_interrupted and not isinstance(event, CheckpointDone):
            return []  # whatever it is, nothing follows from it any more
        match event:
            case Started():
                self.door.open()
            case Joined():
                self.door.join(event)
            case Expelled():
                self.door.expel(event)
            case Readmitted():
                self.door.readmit(event)
            case Departed():
                self.door.depart(event)
            case Reported():
                self._report(event.report)
            case Arrived():
                self._arrive(event)
            case PublicationSent():
                self._publication_sent(event)
            case MergeDone():
                self._merged(event)
            case CheckpointDone():
                self._checkpointed(event.fact)
            case BuffersStored() if event.learner not in self.door.expelled:
                self.books.name_buffers(event)
            case Interrupted() if self._ending:
                pass  # the run is closed, and this process ends as soon as it can
            case Interrupted():
                self._pause(event.by)
            case OrderGiven():
                self._obey(event)
            case BuffersStored() | Ticked():
                pass  # of a learner that is kept out nothing is named
        return self.books.take_orders()

    def look(self, now: float) -> list[SyncerAction]:
        """Whatever follows from where things stand: open, pull, close, end."""
        self._pass_time(now)
        if self._ending or self.state.phase == "closed":
            return self.books.take_orders()
        self._measure_progress()
        self.books.sample(self.samples.take_due(self.clock.now))
        if self.closing is not None:
            self._advance_closing(self.closing)
        elif self.progress >= 1 or self.state.is_finishing:
            self._begin_closing()
        else:
            self._advance_rounds(self._view())
        if self.gathering is not None:
            self._gather(self.gathering)
        return self.books.take_orders()

    def _pass_time(self, now: float) -> None:
        """If this process itself was away, the learners were not heard, which is not the same as stalled or lost."""
        passed_s = self.clock.advance(now)
        if passed_s > RESEND_S:
            for member in self.members.values():
                member.forgive(passed_s)
        self.roster.pass_time(self.clock.now)

    # ------------------------------------------------------------------------------------------ what is ordered

    def _obey(self, event: OrderGiven) -> None:
        """Carry an order out; its answer leaves behind what it changes."""
        carried = orders.carry_out(event.order, self.state, event.by, self.elapsed_s)
        if carried.fact is not None:
            self.books.record(carried.fact)
            self._take_in(carried.fact)
        self.books.order(Reply(event.ticket, carried.outcome))
        if carried.outcome.is_done and isinstance(event.order, PauseRun) and not self._ending:
            self._pause(event.by)

    def _take_in(self, fact: Ordered) -> None:
        """What follows from an order at once; the look does the rest."""
        match fact.verb:
            case "drop":
                self.door.drop(fact.learner)
            case "readmit":
                self.door.let_in(fact.learner)
            case "set" | "extend":
                self._reconfigure(fact)

    def _reconfigure(self, fact: Ordered) -> None:
        """Everything here goes by the configuration in force; rounds that are open keep the stage they began in."""
        self.config = config = configs.decode(fact.config)
        self.rounds.sync = config.sync
        self.roster.reconfigure(config.sync.stall_s, isinstance(config.sync.quorum, int), self.clock.now)
        scale = fact.progress / fact.progress_before if fact.progress_before else 1.0
        self.checkpoints.reconfigure(config.store, scale)

    def _pause(self, by: str = "") -> None:
        self.books.record(Paused(self.books.unwritten(), self.elapsed_s, by))
        self._begin_ending("interrupted")

    # ------------------------------------------------------------------------------------------ what learners say

    def _report(self, report: Report) -> None:
        member = self.members.get(report.learner)
        if member is None or member.life != report.life or not member.connected:
            return
        held = [at.base_version for at in report.positions]
        if why := admission.ahead(report.learner, held, [f.version for f in self.state.fragments]):
            self.door.turn_away(member, why)
            return
        was_stepping = member.is_stepping
        if not member.take_report(report, self.clock.now):
            return
        self.samples.reported(report)
        if member.is_stepping and not was_stepping:
            self.books.witness(member.learner, member.life, "stepping")
        self.credit.measure(self.roster, member, self.clock.now)
        age_s = self._age_s(report.learner)
        member.is_beyond_belief = not self.credit.believes(member, self.state.ledger, age_s, self.clock.now)
        if not member.is_beyond_belief:
            self.books.see(_seen_in(report))
            if self.state.is_rolled_back:
                self.forgone.note(report, self.state.fragments)
        if report.step > 0:
            self._begin_training()
        self.rounds.measure_adoption(member, self.state.fragments, self.clock.now)
        fragments = range(len(self.held))
        member.heal(fragments, self.clock.now)
        self._publish(member, fragments)
        if report.state == "left":
            self._take_leave(member)
        self.roster.update(member, self.clock.now)

    def _take_leave(self, member: Member) -> None:
        """Its process ends. One that could wait no longer has work left that nobody will bring: it is lost."""
        self._book_given_up(member)
        is_settled = all(member.unsettled(p) <= 0 for p in range(len(self.held)))
        self.door.part(member, "left" if is_settled else "lost")

    def _book_given_up(self, member: Member) -> None:
        """What one that has left gave up by itself has its fate now: no contribution of it will say so."""
        rows: list[Row] = []
        for p, held in enumerate(self.held):
            if member.learner not in held and member.unsettled(p) <= 0:
                rows += self.state.ledger.rest(member.learner, member.life, p, "fast-forward")
        if rows:
            seen = (self.state.ledger.seen(member.learner, member.life),)
            self.books.record(Discarded(tuple(rows), seen, self.elapsed_s))

    def _age_s(self, learner: str) -> float:
        """Of its newest life, in the run's own time."""
        return self.elapsed_s - self.state.lives[learner].since

    # ------------------------------------------------------------------------------------------ contributions

    def _arrive(self, event: Arrived) -> None:
        c = event.contribution
        member = self.members.get(c.learner)
        is_late = self.closing is not None and self.closing.share(self.clock.now) > 1
        if self.state.phase == "closed" or is_late:  # what is held by then is merged, and then the run ends
            self._count("closed")
            return
        if c.learner in self.door.expelled:
            self._count("expelled")
            return
        if member is None or c.life != member.life:
            self._count("old life")
            return
        self.held.expect(c.fragment, event.payload_bytes)
        reason, harmful = self._verdict(event, c)
        if reason is None:
            self._hold(member, c, event.payload_bytes)
            self.samples.arrived(c.learner, c.life, event.payload_bytes, event.payload_s)
            return
        if reason == "full":
            self.roster.forget(member, c.fragment)  # asked again: there will be room
            member.owed_s = 0.0  # it has brought it
        self._count(reason)
        if reason != "duplicate":
            self.books.send(member, Rejected(self.state.epoch, c.life, c.fragment, c.seq, reason, harmful))

    def _verdict(self, event: Arrived, c: Contribution) -> tuple[Refusal | None, bool]:
        """Why it is not held, and whether its learner must fast-forward; last of all whether there is room for it."""
        held, at = self.held[c.fragment].get(c.learner), self.state.fragments[c.fragment]
        settled = self.state.ledger.settled(c.learner, c.life, c.fragment)
        most = admission.work_max(self.config.run.learners, len(self.held))
        wrong = admission.contradiction(c.learner, c.life, c.to_step, c.to_tokens, self.state.ledger, most)
        reason, harmful = admission.verdict(c, event.flaw, settled, held, at.version, at.since, bool(wrong))
        if reason is not None:
            return reason, harmful
        if not (self.held.fits(c.fragment) or self.held.has_room(c.fragment, self.rounds.oldest)):
            return "full", False
        return (None if self.credit.is_plausible(c, self._age_s(c.learner), self.clock.now) else "implausible"), False

    def _hold(self, member: Member, c: Contribution, payload_bytes: int) -> None:
        self._begin_training()
        self.books.see(Seen(c.learner, c.life, c.to_step, c.to_tokens, 0, 0, 0.0))
        self.held.add(c, payload_bytes)
        self.books.order(Hold(c.learner, c.fragment, c.seq))
        self.roster.answered(member, c.fragment, self.clock.now, c.to_step)

    def _count(self, reason: Refusal) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    # ------------------------------------------------------------------------------------------ the look

    def _view(self) -> View:
        stage, quorum = self.stage, self.quorum
        return View(
            now=self.clock.now,
            elapsed_s=self.clock.elapsed_s,
            stage=stage,
            sync_every=self._sync_every(stage, quorum),
            quorum=quorum,
            roster=self.roster,
            ahead=len(self.door.ahead),
            held=self.held,
            state=self.state,
            expelled=self.door.expelled.keys(),
        )

    def _advance_rounds(self, view: View) -> None:
        self.rounds.open_due(view)
        for p in sorted(self.rounds.open):
            self._pull(self.rounds.pull(p, view))
            self._merge(self.rounds.close(p, view), view)
        for p in range(len(self.held)) if view.leaving else ():
            self._pull(self.rounds.hand_over(p, view))
            self._merge(self.rounds.close_behind(p, view), view)
        self.waiting = self.rounds.explain(view)

    def _pull(self, wants: Iterable[Want]) -> None:
        for member, p, lossless in wants:
            self.roster.asked(member, p, self.clock.now)
            seq, lacking = self.state.ledger.settled(member.learner, member.life, p).seq, member.outstanding_seq(p)
            pull = Pull(self.state.epoch, member.life, p, seq, lossless, self.progress, lacking, self.state.budgets)
            self.books.send(member, pull)

    def _merge(self, close: Close | None, view: View) -> None:
        """Order the merge of what is held, if a round is to be closed."""
        if close is not None:
            p, held = close.fragment, view.held.in_order(close.fragment)
            self.rounds.merge_began(p)
            self.held.merge(p)
            for member in [self.members[c.learner] for c in held if c.learner in self.members]:
                member.merge_began(p, self.clock.now)
            self.books.order(Merge(decision_of(close, view, self.config, self.books.unwritten()), held))

    def _merged(self, event: MergeDone) -> None:
        decision = event.fact.decision
        p = decision.fragment
        self.books.record(event.fact)
        for row in decision.rows:
            held = self.held[p].get(row.learner)
            if row.fate == MERGED and held is not None and held.seq == row.seq and held.life == row.life:
                self.held.drop(row.learner, p)
                if row.learner in self.door.expelled:
                    self.books.discard(row.learner, row.life, "expelled")
                elif row.life != self.state.lives[row.learner].life:
                    self.books.discard(row.learner, row.life, "died")  # the rest of a life that is over
                elif (member := self.members.get(row.learner)) is not None and member.has_left:
                    self._book_given_up(member)
        self.books.settle(decision.rows)
        self.rounds.merge_ended(decision, self.roster.ready, self.clock.now)
        view = self._view()
        for member in self.roster:
            self._publish(member, [p], view)
        self._advance_checkpoints()

    # ------------------------------------------------------------------------------------------ checkpoints

    def _advance_checkpoints(self) -> None:
        """Once the run closes, no further version is kept: the last one is the model."""
        if self.closing is None and (kept := self.checkpoints.keep(self.state, self.elapsed_s)):
            self.books.record(kept)
        self._checkpoint(self.checkpoints.next(self.state))

    def _checkpoint(self, fragments: Iterable[int]) -> None:
        for p in fragments:
            self.books.order(Checkpoint(p))

    def _checkpointed(self, fact: Checkpointed) -> None:
        self.checkpoints.under_way.remove(fact.fragment)
        self.books.record(fact)
        if self._ending:
            self._end_once_whole(self._ending)
        else:
            self._advance_checkpoints()

    def _begin_ending(self, why: Ending) -> None:
        """Nothing is left to do for this process but to write what makes the next start quick."""
        self._ending = why
        self._end_once_whole(why)

    def _end_once_whole(self, why: Ending) -> None:
        self._checkpoint(self.checkpoints.last(self.state))
        if not self.checkpoints.under_way:
            self.books.order(Finish(why))

    # ------------------------------------------------------------------------------------------ publication

    def _publish(self, member: Member, fragments: Iterable[int], view: View | None = None) -> None:
        """Bring a learner up to date on these: one publication per fragment on its way, and no more than the window.

        A version is for all learners at once: they are handed the same view, which would cost as much as the rest.
        """
        for p in fragments:
            is_held_back = self.gathering is not None and p == self.gathering.held_back
            if member.lacks(p, self.state.fragments[p].version) and not is_held_back:
                member.waiting.setdefault(p)
        for p in self.window.admitted(member.sending, member.waiting) if member.waiting else ():
            self._send_newest(member, p, view or self._view())

    def _send_newest(self, member: Member, p: int, view: View) -> None:
        """The newest version, and what is settled in it: read together, and not before its turn has come.

        A position read earlier or later than the version speaks of another merge: the learner would keep work that the
        version has in it, or take out work that it has not.
        """
        sent, version = member.sent[p], self.state.fragments[p].version
        assert sent is not None and member.lacks(p, version), (member, p, version)
        del member.waiting[p]
        member.sending.add(p)
        at = self.state.ledger.settled(member.learner, member.life, p)
        order = self._order(member, p, version, view)
        lay_s = member.lay_s.get(p, 0.0)
        told = (self.progress, order, lay_s, self.state.budgets)
        self.books.order(Publish(member.learner, member.life, p, sent, version, at.seq, at.step, *told))

    def _order(self, member: Member, p: int, version: int, view: View) -> int:
        """When its next contribution is due goes out with the version; one that is on its way comes first."""
        if self.closing is not None or not member.is_training:
            return 0
        order = self.rounds.order(member, p, view)
        is_coming = member.learner in self.held[p] or (p in member.asked and member.has_begun(p))
        if order and not is_coming:
            self.roster.asked(member, p, self.clock.now, order, version)
        return order

    def all_have(self, p: int, version: int) -> bool:
        """Nobody whose link is up still has to go through this version of a fragment, as far as reports tell."""
        connected = (member for member in self.members.values() if member.connected)
        return not any(member.is_before(p, version) for member in connected)

    def _publication_sent(self, event: PublicationSent) -> None:
        member = self.members.get(event.learner)
        if member is None or member.life != event.life or event.fragment not in member.sending:
            return
        member.sending.discard(event.fragment)
        member.hand_over(event.fragment, event.version, self.clock.now)
        member.heal([event.fragment], self.clock.now)
        self._publish(member, [event.fragment])

    # ------------------------------------------------------------------------------------------ beginning and end

    def _gather(self, gathering: Gathering) -> None:
        """Let everyone begin, if all are there or nobody else comes, or somebody has begun."""
        gathering.look(self.roster, self.clock.now)
        self.waiting = gathering.explain(self.clock.now)
        if gathering.is_over(self.clock.now) or self.state.phase != "created":
            self.gathering = None
            for member in self.roster:
                self._publish(member, [gathering.held_back])

    def _begin_training(self) -> None:
        """A step was taken, as a report says or a contribution that overtook it."""
        if not self.clock.is_running:
            self.clock.start()
            if self.state.phase == "created":
                self.books.record(PhaseChanged("training", (), (), 0.0))

    def _begin_closing(self) -> None:
        """The budget is spent: no further rounds, everyone stops, then all that is left is contributed losslessly."""
        self.closing = Closing(self.clock.now, self.config.sync.close_timeout_s)
        self.rounds.abandon()
        for member in self.roster:
            for p in [p for p, asked in member.asked.items() if asked.order]:
                self.roster.forget(member, p)  # the last work is asked for, losslessly
        versions = tuple(f.version for f in self.state.fragments)
        self.books.record(PhaseChanged("closing", versions, self.books.unwritten(), self.elapsed_s))
        self._advance_closing(self.closing)

    def _advance_closing(self, closing: Closing) -> None:
        view = self._view()
        for member in closing.whom_to_stop(view):
            member.told_stop_at = view.now
            self.books.send(member, Stop(self.state.epoch, member.life))
        for p in range(len(self.held)):
            if p not in self.rounds.merging:
                self._close_out(closing, p, view)
        unsettled = closing.unsettled(view)
        self.waiting = f"for the last work of {', '.join(unsettled)}" if unsettled else "to end"
        if not self.rounds.merging and closing.is_over(unsettled, view.now):
            self._end()

    def _close_out(self, closing: Closing, p: int, view: View) -> None:
        for order in closing.settle(p, view):
            if isinstance(order, Want):
                self._pull([order])
            elif rest := self.state.ledger.rest(order.member.learner, order.member.life, p, "fast-forward"):
                self.books.record(Discarded(tuple(rest), (), self.elapsed_s))
        self._merge(closing.close(p, view), view)

    def _end(self) -> None:
        for learner, life in sorted((k, v.life) for k, v in self.state.lives.items()):
            self.books.discard(learner, life, "absent at close")
        self.books.sample(self.samples.take())
        self.books.record(PhaseChanged("closed", (), self.books.unwritten(), self.elapsed_s))
        self.state.ledger.check()
        assert self.state.ledger.totals().pending == 0, self.state.ledger.totals()
        for member in self.roster:
            if member.connected:
                self.books.send(member, Done(self.state.epoch, member.life))
        self.waiting = "for nothing: the run is closed"
        self._begin_ending("closed")

    # ------------------------------------------------------------------------------------------ how far the run is

    @property
    def elapsed_s(self) -> float:
        return self.clock.elapsed_s

    @property
    def progress(self) -> float:
        """Share of the budget that is spent, never going back while that is the budget."""
        return self.state.progress

    def _measure_progress(self) -> None:
        given_up = self.forgone.work(self.state.ledger)
        spent = spent_at(self.config.run, self.state.ledger, self.elapsed_s, given_up)
        self.state.progress = max(self.state.progress, min(1.0, spent))

    @property
    def stage(self) -> Stage:
        """Of training, now."""
        return stage_of(self.config, self.state)

    @property
    def sync_every(self) -> int:
        """H now."""
        return self._sync_every(self.stage, self.quorum)

    def _sync_every(self, stage: Stage, quorum: int) -> int:
        """Merges of the closing are of no stage, wherever the run was when it was ended."""
        return self.rounds.sync_every(stage if self.closing is None else None, quorum, self.roster)

    @property
    def sync_every_configured(self) -> int:
        """H of this stage."""
        return sync_every_in(self.config.sync, self.stage)

    @property
    def quorum(self) -> int:
        """K now."""
        return quorum_size(self.config.sync.quorum, len(self.roster.ready))


def _seen_in(r: Report) -> Seen:
    return Seen(r.learner, r.life, r.step, r.tokens, r.bytes_up, r.bytes_down, r.step_gap_s_max, r.alone)
