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
decides from a frozen `View` (`core/look.py`) or the state, and returns orders as plain values. Only the machine appends
actions and applies facts to the state, each order before the next decision that could depend on it.

`state` is the fold of the tape. The machine applies a fact when it orders its record, a merge's once it is told that
the merge has ended; so the tape has the order in which the machine applied, whatever order merges end in. Whatever
follows from a fact is ordered behind its record, and leaves this process after it is kept. Everything else here is lost
in a crash, and is measured or reported anew.

Invariants, and who keeps them:

    a fragment has at most one open round and one merge under way                              Rounds
    at most one contribution is held per learner and fragment                                  Held, admission.verdict
    a contribution starts at or after what is settled, and is merged once                      admission.verdict
    what a dead life has pending is booked once, and not while a contribution of it is held    _discard
    a publication is of a durable version, one per fragment and learner on its way             _publish
    what is on its way to a learner fits the window, or is one fragment a stream               core/flow.py
    every message about a fragment carries that learner's cumulative settled_seq               _pull, _send_newest
    a closed run has nothing pending                                                           _end
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from skerry.config import Config
from skerry.core import admission
from skerry.core.checkpoints import Checkpoints
from skerry.core.clock import Clock
from skerry.core.closing import Closing
from skerry.core.decision import decision_of
from skerry.core.events import (
    Arrived,
    BuffersStored,
    Checkpoint,
    CheckpointDone,
    Departed,
    Dismiss,
    Finish,
    Hold,
    Interrupted,
    Joined,
    Merge,
    MergeDone,
    PublicationSent,
    Publish,
    Record,
    Reported,
    Send,
    Started,
    SyncerAction,
    SyncerEvent,
    Ticked,
)
from skerry.core.facts import (
    Buffered,
    Checkpointed,
    Committed,
    Discarded,
    Kept,
    LifeStarted,
    Paused,
    PhaseChanged,
    Row,
    Sample,
    Sampled,
    Seen,
    Witnessed,
)
from skerry.core.flow import Window
from skerry.core.forgone import Forgone
from skerry.core.gathering import Gathering
from skerry.core.held import Held
from skerry.core.ledger import MERGED, Settled
from skerry.core.look import Close, View, Want
from skerry.core.membership import RESEND_S, Member
from skerry.core.messages import Contribution, Done, Pull, Refused, Rejected, Report, Stop, Welcome
from skerry.core.quorum import quorum_size
from skerry.core.roster import Roster
from skerry.core.rounds import Rounds
from skerry.core.samples import Samples
from skerry.core.schedule import spent_at, stage_of, sync_every_in
from skerry.core.state import RunState
from skerry.core.vocabulary import Ending, Fate, Refusal, Sight, Stage


class SyncerMachine:
    """Decides for the syncer; `state` is the fold of the tape, the rest is lost in a crash and measured anew."""

    def __init__(self, config: Config, state: RunState, now: float, window: Window) -> None:
        count = len(state.fragments)
        self.config = config
        self.state = state
        self.clock = Clock(now, state.elapsed_s)
        self.held = Held(count, config.wire.held_bytes_max)
        self.roster = Roster(self.held, config.sync.stall_s)
        self.rounds = Rounds(config.sync, count)
        self.window = window
        is_waited = state.phase == "created" and config.run.gather_s > 0
        self.gathering = Gathering(config.run.learners, config.run.gather_s, count) if is_waited else None
        self.closing = Closing(now, config.sync.close_timeout_s) if state.phase == "closing" else None
        self.waiting = "for learners"  # why nothing merges right now
        self.refused: dict[Refusal, int] = {}
        self.ahead: dict[str, str] = {}  # learner -> what it holds that this tape lacks, in one line
        self.samples = Samples(now)
        self.checkpoints = Checkpoints(config.store)
        self.forgone = Forgone()
        self._ending: Ending | None = None  # why this process is to end, once everything has its checkpoint
        self._unwritten: set[tuple[str, int]] = set()  # lives of which more was seen than the tape says
        self._actions: list[SyncerAction] = []

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

    def step(self, event: SyncerEvent, now: float) -> list[SyncerAction]:
        """Take one event in and look, if it can move a round; the orders come out as they are to be carried out."""
        actions = self.take(event, now)
        return actions if isinstance(event, PublicationSent | Interrupted) else actions + self.look(now)

    def take(self, event: SyncerEvent, now: float) -> list[SyncerAction]:
        """Take one event in; what follows from it alone comes out, in the order in which it is to be carried out."""
        self._pass_time(now)
        if self.is_interrupted and not isinstance(event, CheckpointDone):
            return []  # whatever it is, nothing follows from it any more
        match event:
            case Started():
                for learner, known in sorted(self.state.lives.items()):
                    self._bury(learner, known.life)
            case Joined():
                self._join(event)
            case Departed():
                self._depart(event)
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
            case BuffersStored():
                self._buffered(event)
            case Interrupted() if self._ending:
                pass  # the run is closed, and this process ends as soon as it can
            case Interrupted():
                self._record(Paused(self._unwritten_seen(), self.elapsed_s))
                self._begin_ending("interrupted")
            case Ticked():
                pass
        return self._ordered()

    def look(self, now: float) -> list[SyncerAction]:
        """Whatever follows from where things stand: open, pull, close, end."""
        self._pass_time(now)
        if self._ending or self.state.phase == "closed":
            return self._ordered()
        self._measure_progress()
        self._write(self.samples.take_due(self.clock.now))
        if self.closing is not None:
            self._advance_closing(self.closing)
        elif self.progress >= 1:
            self._begin_closing()
        else:
            self._advance_rounds(self._view())
        if self.gathering is not None:
            self._gather(self.gathering)
        return self._ordered()

    def _ordered(self) -> list[SyncerAction]:
        actions, self._actions = self._actions, []
        return actions

    def _pass_time(self, now: float) -> None:
        """If this process itself was away, the learners were not heard, which is not the same as stalled or lost."""
        passed_s = self.clock.advance(now)
        if passed_s > RESEND_S:
            for member in self.members.values():
                member.forgive(passed_s)
        self.roster.pass_time(self.clock.now)

    # ------------------------------------------------------------------------------------------ who is there

    def _join(self, event: Joined) -> None:
        known = self.state.lives.get(event.learner)
        newest = known.life if known else 0
        if known is not None and event.process == known.process:
            if event.learner in self.ahead and self.state.phase != "closed":
                self._turn_away(event.learner, 0, self.ahead[event.learner])
                return
            self._welcome(event.learner, known.life)
            if self.state.phase == "closed":
                self._send(self.members[event.learner], Done(self.state.epoch, known.life))
        elif self.state.phase == "closed":
            self._do(Dismiss(event.learner, 0, "closed", admission.CLOSED))
        elif event.life > newest:
            self._turn_away(event.learner, 0, admission.unknown_life(event.learner, event.life, newest))
        elif event.life > 0:
            self._do(Dismiss(event.learner, 0, "taken over", admission.superseded(event.learner, event.life, newest)))
        else:
            self._begin_life(event)

    def _turn_away(self, learner: str, life: int, why: str) -> None:
        """It is this syncer that lost something, so the learner may come again; it is not merged with what it lacks.

        Once for all of this process: were it let in when others have made as many versions, it would stand on one of
        the same number that is not the same.
        """
        self.ahead[learner] = why
        self._do(Dismiss(learner, life, "ahead", why))

    def _begin_life(self, event: Joined) -> None:
        """A new process is a new life; what the old one had pending, and nobody holds, died with it."""
        known = self.state.lives.get(event.learner)
        life = known.life + 1 if known else 1
        self.ahead.pop(event.learner, None)
        index = known.index if known else len(self.state.lives)
        member = self.members.get(event.learner)
        if member is not None and member.connected:
            why = admission.superseded(event.learner, member.life, life)
            self._do(Dismiss(event.learner, member.life, "taken over", why))
        self._record(LifeStarted(event.learner, life, event.process, index, self.elapsed_s))
        self.samples.forget(event.learner)
        self._bury(event.learner, life)
        self._welcome(event.learner, life)

    def _bury(self, learner: str, life: int) -> None:
        """Lives before this one are over: what they have pending, and nobody holds, died with them."""
        for past in range(1, life):
            self._discard(learner, past, "died")

    def _welcome(self, learner: str, life: int) -> None:
        ledger = self.state.ledger
        member = self.members.get(learner)
        if member is None or member.life != life:
            settled = [at.step for at in ledger.account(learner, life).settled]
            member = Member(learner, life, settled)
        member.connect(self.clock.now)
        self.roster.update(member, self.clock.now)
        self._unwritten.add((learner, life))
        before = [ledger.account(learner, n) for n in range(1, life)]
        self._send(
            member,
            Welcome(
                run=self.state.created.run,
                epoch=self.state.epoch,
                learner=learner,
                life=life,
                index=self.state.lives[learner].index,
                config=self.state.created.config,
                fragments=self.state.created.fragments,
                prior_steps=sum(a.step for a in before),
                prior_tokens=sum(a.tokens for a in before),
                progress=self.progress,
                since=tuple(at.since for at in self.state.fragments),
            ),
        )

    def _depart(self, event: Departed) -> None:
        member = self.members.get(event.learner)
        if member is not None and member.life == event.life and member.connected:
            self._disconnect(member)
            self._witness(member, "lost")

    def _disconnect(self, member: Member) -> None:
        member.disconnect()
        self.roster.update(member, self.clock.now)

    def _report(self, report: Report) -> None:
        member = self.members.get(report.learner)
        if member is None or member.life != report.life or not member.connected:
            return
        held = [at.base_version for at in report.positions]
        if why := admission.ahead(report.learner, held, [f.version for f in self.state.fragments]):
            self._disconnect(member)
            self._turn_away(report.learner, report.life, why)
            return
        was_stepping = member.is_stepping
        if not member.take_report(report, self.clock.now):
            return
        self.samples.reported(report)
        if member.is_stepping and not was_stepping:
            self._witness(member, "stepping")
        self._see(_seen_in(report))
        if self.state.is_rolled_back:
            self.forgone.note(report, self.state.fragments)
        if report.step > 0:
            self._begin_training()
        self.rounds.measure_adoption(member, self.state.fragments, self.clock.now)
        fragments = range(len(self.held))
        member.heal(fragments, self.clock.now)
        self._publish(member, fragments)
        if report.state == "left":
            member.disconnect()
        self.roster.update(member, self.clock.now)

    # ------------------------------------------------------------------------------------------ contributions

    def _arrive(self, event: Arrived) -> None:
        c = event.contribution
        member = self.members.get(c.learner)
        if self.state.phase == "closed":
            self._count("closed")
            return
        if member is None or c.life != member.life:
            self._count("old life")
            return
        self.held.expect(c.fragment, event.payload_bytes)
        reason, harmful = self._verdict(event, c)
        if reason is None and not (self.held.fits(c.fragment) or self.held.has_room(c.fragment, self.rounds.oldest)):
            reason = "full"
            self.roster.forget(member, c.fragment)  # asked again once there is room
        if reason is None:
            self._hold(member, c, event.payload_bytes)
            self.samples.arrived(c.learner, c.life, event.payload_bytes, event.payload_s)
            return
        self._count(reason)
        if reason != "duplicate":
            self._send(member, Rejected(self.state.epoch, c.life, c.fragment, c.seq, reason, harmful))

    def _verdict(self, event: Arrived, c: Contribution) -> tuple[Refusal | None, bool]:
        held, at = self.held[c.fragment].get(c.learner), self.state.fragments[c.fragment]
        wrong = admission.contradiction(c.learner, c.life, c.to_step, c.to_tokens, self.state.ledger)
        return admission.verdict(c, event.flaw, self._settled(c), held, at.version, at.since, bool(wrong))

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
                self._record(PhaseChanged("training", (), (), 0.0))

    def _hold(self, member: Member, c: Contribution, payload_bytes: int) -> None:
        self._begin_training()
        self._see(Seen(c.learner, c.life, c.to_step, c.to_tokens, 0, 0, 0.0))
        self.held.add(c, payload_bytes)
        self._do(Hold(c.learner, c.fragment, c.seq))
        self.roster.answered(member, c.fragment, self.clock.now, c.to_step)

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
            ahead=len(self.ahead),
            held=self.held,
            state=self.state,
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
            self._send(member, Pull(self.state.epoch, member.life, p, seq, lossless, self.progress, lacking))

    def _merge(self, close: Close | None, view: View) -> None:
        """Order the merge of what is held, if a round is to be closed."""
        if close is not None:
            p, held = close.fragment, view.held.in_order(close.fragment)
            self.rounds.merge_began(p)
            for member in [self.members[c.learner] for c in held if c.learner in self.members]:
                member.merge_began(p, self.clock.now)
            self._do(Merge(decision_of(close, view, self.config, self._unwritten_seen()), held))

    def _merged(self, event: MergeDone) -> None:
        decision = event.fact.decision
        p = decision.fragment
        self._record(event.fact)
        for row in decision.rows:
            held = self.held[p].get(row.learner)
            if row.fate == MERGED and held is not None and held.seq == row.seq and held.life == row.life:
                self.held.drop(row.learner, p)
                if row.life != self.state.lives[row.learner].life:
                    self._discard(row.learner, row.life, "died")  # the rest of a life that is over
        self._settle(decision.rows)
        self.rounds.merge_ended(decision, self.roster.ready, self.clock.now)
        view = self._view()
        for member in self.roster:
            self._publish(member, [p], view)
        self._advance_checkpoints()

    # ------------------------------------------------------------------------------------------ checkpoints

    def _advance_checkpoints(self) -> None:
        """Once the run closes, no further version is kept: the last one is the model."""
        if self.closing is None and (kept := self.checkpoints.keep(self.state, self.elapsed_s)):
            self._record(kept)
        self._checkpoint(self.checkpoints.next(self.state))

    def _checkpoint(self, fragments: Iterable[int]) -> None:
        for p in fragments:
            self._do(Checkpoint(p))

    def _checkpointed(self, fact: Checkpointed) -> None:
        self.checkpoints.under_way.remove(fact.fragment)
        self._record(fact)
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
            self._do(Finish(why))

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
        self._do(Publish(member.learner, member.life, p, sent, version, at.seq, at.step, self.progress, order, lay_s))

    def _order(self, member: Member, p: int, version: int, view: View) -> int:
        """When its next contribution is due goes out with the version; one that is on its way comes first."""
        if self.closing is not None or not member.is_training:
            return 0
        order = self.rounds.order(member, p, view)
        is_coming = member.learner in self.held[p] or (p in member.asked and member.has_begun(p))
        if order and not is_coming:
            self.roster.asked(member, p, self.clock.now, order, version)
        return order

    def _publication_sent(self, event: PublicationSent) -> None:
        member = self.members.get(event.learner)
        if member is None or member.life != event.life or event.fragment not in member.sending:
            return
        member.sending.discard(event.fragment)
        member.hand_over(event.fragment, event.version, self.clock.now)
        member.heal([event.fragment], self.clock.now)
        self._publish(member, [event.fragment])

    # ------------------------------------------------------------------------------------------ the end

    def _begin_closing(self) -> None:
        """The budget is spent: no further rounds, everyone stops, then all that is left is contributed losslessly."""
        self.closing = Closing(self.clock.now, self.config.sync.close_timeout_s)
        self.rounds.abandon()
        for member in self.roster:
            for p in [p for p, asked in member.asked.items() if asked.order]:
                self.roster.forget(member, p)  # the last work is asked for, losslessly
        versions = tuple(f.version for f in self.state.fragments)
        self._record(PhaseChanged("closing", versions, self._unwritten_seen(), self.elapsed_s))
        self._advance_closing(self.closing)

    def _advance_closing(self, closing: Closing) -> None:
        view = self._view()
        for member in closing.whom_to_stop(view):
            member.told_stop_at = view.now
            self._send(member, Stop(self.state.epoch, member.life))
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
                self._record(Discarded(tuple(rest), (), self.elapsed_s))
        self._merge(closing.close(p, view), view)

    def _end(self) -> None:
        for learner, life in sorted((k, v.life) for k, v in self.state.lives.items()):
            self._discard(learner, life, "absent at close")
        self._write(self.samples.take())
        self._record(PhaseChanged("closed", (), self._unwritten_seen(), self.elapsed_s))
        self.state.ledger.check()
        assert self.state.ledger.totals().pending == 0, self.state.ledger.totals()
        for member in self.roster:
            if member.connected:
                self._send(member, Done(self.state.epoch, member.life))
        self.waiting = "for nothing: the run is closed"
        self._begin_ending("closed")

    # ------------------------------------------------------------------------------------------ how far the run is

    @property
    def elapsed_s(self) -> float:
        return self.clock.elapsed_s

    @property
    def progress(self) -> float:
        """Share of the budget that is spent, never going back."""
        return self.state.progress

    def _measure_progress(self) -> None:
        spent = spent_at(self.config.run, self.state.ledger, self.elapsed_s, self.forgone.work(self.state.ledger))
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
        """What the configuration says, or what a round takes the K quickest at it where that is longer.

        Asked for sooner, contributions would lie waiting, and those who can keep up would leave the others behind.
        Longer still where merges wait for each other: a little more work in each costs less than the age of work that
        stands in line.
        """
        configured, taken = sync_every_in(self.config.sync, stage), self.roster.round_steps(quorum)
        if taken is None:
            return configured
        crowd = max(1.0, self.rounds.under_way / self.config.merge.threads)
        return max(configured, math.ceil(taken * crowd))

    @property
    def sync_every_configured(self) -> int:
        """H of this stage."""
        return sync_every_in(self.config.sync, self.stage)

    @property
    def quorum(self) -> int:
        """K now."""
        return quorum_size(self.config.sync.quorum, len(self.roster.ready))

    # ------------------------------------------------------------------------------------------ the books

    def _discard(self, learner: str, life: int, fate: Fate) -> None:
        """Book what a life has pending and nobody holds or is merging."""
        rows: list[Row] = []
        for p, held in enumerate(self.held):
            if learner not in held or held[learner].life != life:
                rows += self.state.ledger.rest(learner, life, p, fate)
        if rows:
            seen = (self.state.ledger.seen(learner, life),)
            self._record(Discarded(tuple(rows), seen, self.elapsed_s))

    def _settle(self, rows: Iterable[Row]) -> None:
        """Rows were booked: members know up to where their work is settled."""
        for row in rows:
            member = self.members.get(row.learner)
            if member is not None and member.life == row.life:
                member.settled[row.fragment] = row.to_step
                self.roster.refresh(member, row.fragment)

    def _settled(self, c: Contribution) -> Settled:
        return self.state.ledger.settled(c.learner, c.life, c.fragment)

    def _see(self, seen: Seen) -> None:
        is_open = self.state.phase != "closed"  # so are the books: what comes after the end was never produced
        if is_open and self.state.ledger.see(seen):
            self._unwritten.add((seen.learner, seen.life))

    def _unwritten_seen(self) -> tuple[Seen, ...]:
        """The positions that no fact on the tape holds; a merge under way may end behind another, or be dropped."""
        return tuple(self.state.ledger.seen(learner, life) for learner, life in sorted(self._unwritten))

    def _written(self, seen: Iterable[Seen]) -> None:
        """A fact on the tape holds these; of some lives more may have been seen since it was decided."""
        ledger = self.state.ledger
        self._unwritten -= {(at.learner, at.life) for at in seen if ledger.seen(at.learner, at.life) == at}

    def _buffered(self, event: BuffersStored) -> None:
        """The newest of this life; a file that no record names is nobody's."""
        known, before = self.state.lives.get(event.learner), self.state.buffers.get(event.learner)
        is_newest = before is None or (before.life, before.step) < (event.life, event.step)
        is_wanted = bool(event.file) and is_newest and self.state.phase != "closed"
        if is_wanted and known is not None and known.life == event.life:
            at = (event.learner, event.life, event.step, event.tokens)
            self._record(Buffered(*at, event.file, self.elapsed_s))

    def _witness(self, member: Member, what: Sight) -> None:
        if self.state.phase != "closed":
            self._record(Witnessed(member.learner, member.life, what, self.elapsed_s))

    def _write(self, samples: tuple[Sample, ...]) -> None:
        if samples:
            self._record(Sampled(samples, self.elapsed_s))

    # ------------------------------------------------------------------------------------------ small things

    def _count(self, reason: Refusal) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _record(
        self,
        fact: Committed
        | Checkpointed
        | Kept
        | LifeStarted
        | Discarded
        | PhaseChanged
        | Buffered
        | Paused
        | Witnessed
        | Sampled,
    ) -> None:
        self.state.apply(fact)
        match fact:
            case Discarded():
                self._settle(fact.rows)
            case Committed():
                self._written(fact.decision.seen)
            case PhaseChanged() | Paused():
                self._written(fact.seen)
        self._do(Record(fact))

    def _send(self, member: Member, message: Welcome | Refused | Pull | Rejected | Stop | Done) -> None:
        self._do(Send(member.learner, member.life, message))

    def _do(self, action: SyncerAction) -> None:
        self._actions.append(action)


def _seen_in(r: Report) -> Seen:
    return Seen(r.learner, r.life, r.step, r.tokens, r.bytes_up, r.bytes_down, r.step_gap_s_max, r.alone)
