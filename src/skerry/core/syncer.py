"""The syncer's side of the protocol: rounds, quorum, settlement, publication, the end.

    actions = machine.step(event, now)

Invariants: a fragment has at most one open round and one merge under way; at most one contribution is held per learner
and fragment; a contribution is accepted only if it starts at or after what is settled, and is merged once; every
message about a fragment carries that learner's cumulative settled_seq. The machine holds no payload and no array:
contributions are named, their bytes are the node's. Time is whatever `now` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skerry.config import Config
from skerry.core import admission
from skerry.core.events import (
    Arrived,
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
    Decision,
    Discarded,
    LifeStarted,
    Part,
    Paused,
    PhaseChanged,
    Row,
    Sampled,
    Seen,
    Witnessed,
)
from skerry.core.ledger import MERGED, Settled
from skerry.core.membership import RESEND_S, Member, ema, patience_s
from skerry.core.messages import Contribution, Done, Pull, Refused, Rejected, Stop, Welcome
from skerry.core.quorum import decide, grace_s, quorum_size
from skerry.core.samples import Samples
from skerry.core.schedule import (
    Pacer,
    first_due,
    gain_of,
    pace_s,
    recipe_of,
    rounds_open_max,
    spent_at,
    stage_at,
    steps_due,
    sync_every_in,
    weight_of,
)
from skerry.core.state import RunState
from skerry.core.vocabulary import Closes, Fate, Sight, Stage

SAMPLE_S = 5.0  # how often measurements are written to the tape
AWAY_S = 60.0  # no merge takes this long: the machine slept, or its clock jumped


@dataclass
class Round:
    """An open round of one fragment: who was asked, when the quorum was reached, why it still waits."""

    opened_at: float
    stage: Stage | None  # None: it only names what the closing merges
    quorum_at: float | None = None
    pulled: set[str] = field(default_factory=set)
    waits: str = "opened"


class SyncerMachine:
    """Decides for the syncer; `state` is the fold of the tape, the rest is lost in a crash and measured anew."""

    def __init__(self, config: Config, state: RunState, now: float) -> None:
        self.config = config
        self.state = state
        self.members: dict[str, Member] = {}
        self.held: list[dict[str, Contribution]] = [{} for _ in state.fragments]
        self.held_bytes: dict[tuple[str, int], int] = {}
        self._payload_bytes: dict[int, int] = {}  # fragment -> size of its last contribution
        self.rounds: dict[int, Round] = {}
        self.merging: set[int] = set()
        self.pacer = Pacer()
        self.quorum_s: float | None = None
        self.sync_s: float | None = None
        self.waiting = "for learners"  # why nothing merges right now
        self.refused: dict[str, int] = {}
        self.ahead: dict[str, str] = {}  # learner -> what it holds that this tape lacks, in one line
        self.samples = Samples()
        self._sampled_at = now
        self.closing_since: float | None = now if state.phase == "closing" else None
        self._floors: dict[str, list[int]] = {}  # learner -> per fragment, up to where its work is out of reach
        self._closed_at: dict[int, float] = {}  # fragment -> when its last round closed
        self._adopting: dict[int, set[str]] = {}  # fragment -> learners that have not yet reported its version
        self._origin: float | None = None  # when the clock of `elapsed_s` would have begun; it stands until a step
        self._now = now  # this machine's own time
        self._asleep_s = 0.0  # by which it is behind what it is told
        self._actions: list[SyncerAction] = []

    def __repr__(self) -> str:
        ready = sum(m.is_ready(self._now, self.config.sync.stall_s) for m in self.members.values())
        return (
            f"<syncer {self.state.phase} merges={self.state.merges} ready={ready} open={sorted(self.rounds)} "
            f"waiting {self.waiting}>"
        )

    def step(self, event: SyncerEvent, now: float) -> list[SyncerAction]:
        """Take one event in; the orders it leads to come out, to be carried out in this order."""
        self._wake(max(now - self._asleep_s, self._now))
        self._actions = []
        match event:
            case Started():
                for learner, known in sorted(self.state.lives.items()):
                    self._bury(learner, known.life)
            case Joined():
                self._join(event)
            case Departed():
                self._depart(event)
            case Reported():
                self._report(event)
            case Arrived():
                self._arrive(event)
            case PublicationSent():
                self._publication_sent(event)
                return self._actions  # that bytes have left moves no round
            case MergeDone():
                self._merged(event)
            case Interrupted():
                self._record(Paused(self._seen(), self.elapsed_s))
                self._do(Finish("interrupted"))
                return self._actions
            case Ticked():
                pass
        self._advance(is_due_anew=not isinstance(event, Arrived))
        return self._actions

    # ------------------------------------------------------------------------------------------ who is there

    def _wake(self, now: float) -> None:
        """If this process itself was away, the learners were not heard, which is not the same as stalled.

        Where it slept, or its clock jumped, no time has passed: no budget is spent, no round was open for a day.
        """
        away_s = now - self._now
        if away_s > AWAY_S:
            self._asleep_s += away_s
            return
        if away_s > RESEND_S:
            for member in self.members.values():
                member.stepped_at += away_s
        self._now = now

    @property
    def now(self) -> float:
        """The machine's own time, which stands while its process sleeps."""
        return self._now

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
            self._do(Dismiss(event.learner, 0, admission.CLOSED))
        elif event.life > newest:
            self._turn_away(event.learner, 0, admission.unknown_life(event.learner, event.life, newest))
        elif event.life > 0:
            self._do(Dismiss(event.learner, 0, admission.superseded(event.learner, event.life, newest)))
        else:
            self._begin_life(event)

    def _turn_away(self, learner: str, life: int, why: str) -> None:
        """It is this syncer that lost something, so the learner may come again; it is not merged with what it lacks.

        Once for all of this process: were it let in when others have made as many versions, it would stand on one of
        the same number that is not the same.
        """
        self.ahead[learner] = why
        self._do(Dismiss(learner, life, why, final=False))

    def _begin_life(self, event: Joined) -> None:
        """A new process is a new life; what the old one had pending, and nobody holds, died with it."""
        known = self.state.lives.get(event.learner)
        life = known.life + 1 if known else 1
        self.ahead.pop(event.learner, None)
        index = known.index if known else len(self.state.lives)
        member = self.members.get(event.learner)
        if member is not None and member.connected:
            self._do(Dismiss(event.learner, member.life, admission.superseded(event.learner, member.life, life)))
        self._record(LifeStarted(event.learner, life, event.process, index, self.elapsed_s))
        self.samples.forget(event.learner)
        self._bury(event.learner, life)
        self._welcome(event.learner, life)

    def _bury(self, learner: str, life: int) -> None:
        """Lives before this one are over: what they have pending, and nobody holds, died with them."""
        for past in range(1, life):
            self._discard(learner, past, "died")

    def _welcome(self, learner: str, life: int) -> None:
        member = self.members.get(learner)
        if member is None or member.life != life:
            member = self.members[learner] = Member(learner, life, len(self.state.fragments))
            self._floors.pop(learner, None)
        member.connect(self._now)
        before = [self.state.ledger.account(learner, n) for n in range(1, life)]
        self._send(
            member,
            Welcome(
                run=self.state.created.run,
                epoch=self.state.epoch,
                learner=learner,
                life=life,
                index=self.state.lives[learner].index,
                config=self.state.created.config,
                prior_steps=sum(a.step for a in before),
                prior_tokens=sum(a.tokens for a in before),
                progress=self.progress,
            ),
        )

    def _depart(self, event: Departed) -> None:
        member = self.members.get(event.learner)
        if member is not None and member.life == event.life and member.connected:
            member.disconnect()
            self._witness(event.learner, event.life, "lost")

    def _report(self, event: Reported) -> None:
        report = event.report
        member = self.members.get(report.learner)
        if member is None or member.life != report.life or not member.connected:
            return
        held = [at.base_version for at in report.positions]
        if why := admission.ahead(report.learner, held, [f.version for f in self.state.fragments]):
            member.disconnect()
            self._turn_away(report.learner, report.life, why)
            return
        was_stepping = member.is_stepping
        if not member.take_report(report, self._now):
            return
        self._floors.pop(report.learner, None)
        self.samples.reported(report)
        if member.is_stepping and not was_stepping:
            self._witness(report.learner, report.life, "stepping")
        self._see(
            Seen(
                report.learner,
                report.life,
                report.step,
                report.tokens,
                report.bytes_up,
                report.bytes_down,
                report.step_gap_s_max,
            )
        )
        if self._origin is None and report.step > 0:
            self._origin = self._now - self.state.elapsed_s
            if self.state.phase == "created":
                self._record(PhaseChanged("training", (), (), 0.0))
        self._measure_adoption(member)
        member.heal(self._now)
        self._publish(member)
        if report.state == "left":
            member.disconnect()

    def _measure_adoption(self, member: Member) -> None:
        assert member.report is not None
        for p, waiting in self._adopting.items():
            if member.learner in waiting and member.report.positions[p].base_version >= self.state.fragments[p].version:
                waiting.discard(member.learner)
                self.sync_s = ema(self.sync_s, self._now - self._closed_at[p])

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
        self._payload_bytes[c.fragment] = event.payload_bytes
        reason, harmful = self._verdict(event, c)
        if not reason and not self._has_room(c.fragment):
            reason = "full"
            member.pulled_at.pop(c.fragment, None)  # asked again once there is room
        if not reason:
            self._hold(member, c, event.payload_bytes)
            self.samples.arrived(c.learner, c.life, event.payload_bytes, event.payload_s)
            return
        self._count(reason)
        if reason != "duplicate":
            why = event.fault or reason
            self._send(member, Rejected(self.state.epoch, c.life, c.fragment, c.seq, why, harmful))

    def _verdict(self, event: Arrived, c: Contribution) -> tuple[str, bool]:
        held, version = self.held[c.fragment].get(c.learner), self.state.fragments[c.fragment].version
        return admission.verdict(c, event.fault, self._settled(c), held, version)

    def _has_room(self, p: int) -> bool:
        """Within `held_bytes_max`; one fragment is let in beyond it, else full rounds wait for each other for ever."""
        if self._fits(self._payload_bytes.get(p, 0)):
            return True
        oldest = min(self.rounds, key=lambda q: (self.rounds[q].opened_at, q), default=None)
        return p == (oldest if oldest is not None else min((q for q, held in enumerate(self.held) if held), default=p))

    def _fits(self, payload_bytes: int) -> bool:
        return sum(self.held_bytes.values()) + payload_bytes <= self.config.wire.held_bytes_max

    def _hold(self, member: Member, c: Contribution, payload_bytes: int) -> None:
        self._see(Seen(c.learner, c.life, c.to_step, c.to_tokens, 0, 0, 0.0))
        self.held[c.fragment][c.learner] = c
        self.held_bytes[c.learner, c.fragment] = payload_bytes
        self._do(Hold(c.learner, c.fragment, c.seq))
        if c.fragment in member.pulled_at:
            member.answer_s = ema(member.answer_s, self._now - member.pulled_at.pop(c.fragment))

    # ------------------------------------------------------------------------------------------ rounds

    def _advance(self, is_due_anew: bool) -> None:
        """Whatever follows from where things stand: open, pull, close, end.

        Which fragments are due follows from reports, merges and time; a contribution's arrival spares the look at all.
        """
        self._measure_progress()
        if self.state.phase == "closed":
            return
        self._write_samples()
        if self.state.phase == "closing":
            self._advance_closing()
            return
        if self.progress >= 1:
            self._begin_closing()
            return
        ready = self._ready()
        quorum = quorum_size(self.config.sync.quorum, len(ready))
        if is_due_anew:
            self._open(ready, quorum)
        for p in sorted(self.rounds):
            self._pull(p, ready)
            self._close(p, ready, quorum)
        if is_due_anew and len(ready) >= quorum:
            self._ask_ahead(ready, quorum)
        self._let_go([m for m in self._connected() if m.is_leaving], ready, quorum)
        self._explain(ready, quorum)

    def _write_samples(self) -> None:
        if self._now - self._sampled_at >= SAMPLE_S:
            self._sampled_at = self._now
            if samples := self.samples.take():
                self._record(Sampled(samples, self.elapsed_s))

    def _let_go(self, leaving: list[Member], ready: list[Member], quorum: int) -> None:
        """Learners that want to leave hand over at once; their work merges in the next rounds, or now if all leave."""
        for p in range(len(self.state.fragments)):
            for member in leaving:
                if self._may_pull(member, p):
                    self._send_pull(member, p, lossless=False)
            all_in = all(m.learner in self.held[p] or self._unsettled(m, p) <= 0 for m in leaving)
            if leaving and not ready and all_in and len(self.held[p]) >= quorum and p not in self.merging:
                self.rounds.pop(p, None)
                self._merge(p, self._round(), "everyone is leaving", quorum, 0)

    def _open(self, ready: list[Member], quorum: int) -> None:
        every = self.sync_every
        count = len(self.state.fragments)
        self.pacer.grow(self._now, pace_s(_steps_s(ready), quorum), count / every)
        if len(ready) < quorum:
            return
        room = rounds_open_max(self.config.sync.fragment_sync_delay, count, every) - len(self.rounds)
        if room <= 0 or not self.pacer.has_any:
            return  # nothing could be opened: spare the look at every fragment
        candidates = []
        for p in range(count):
            if p in self.rounds or p in self.merging:
                continue
            overdue = self._steps_due(p, ready, quorum) / self._due_at(p)
            if overdue >= 1:
                candidates.append((-overdue, p))
        for _, p in sorted(candidates)[:room]:
            if not self.pacer.take():
                break
            self.rounds[p] = self._round()

    def _round(self) -> Round:
        """A round that begins now; what it does follows from the stage at its opening."""
        return Round(self._now, None if self.closing_since is not None else self.stage)

    def _steps_due(self, p: int, ready: list[Member], quorum: int) -> float:
        return steps_due([self._unsettled(m, p) for m in ready], quorum)

    def _due_at(self, p: int) -> int:
        """H; at the start, and where H has more than doubled, staggered offsets, so that traffic stays smooth."""
        every = self.sync_every
        is_jump = every > 2 * self.state.fragments[p].sync_every
        return first_due(p, len(self.state.fragments), every) if is_jump else every

    def _ask_ahead(self, ready: list[Member], quorum: int) -> None:
        """Ask those who would miss a round's window before it opens, by as much as they would miss it.

        A contribution belongs to no round, so a slow learner's can lie ready when the round opens. Asked only at the
        opening it would be late, held for the next round, and so be in every other merge at best.
        """
        step_s = pace_s(_steps_s(ready), quorum)
        if step_s is None or self.quorum_s is None:
            return
        window_s = self.quorum_s + self._grace_s(ready, quorum)
        ahead = {m.learner: m.answer_s + (m.step_s or 0.0) / 2 - window_s for m in ready if m.answer_s is not None}
        slow = [m for m in ready if ahead.get(m.learner, 0.0) > 0]
        for p in range(len(self.state.fragments) if slow else 0):
            if p in self.rounds or p in self.merging:
                continue
            due_s = (self._due_at(p) - self._steps_due(p, ready, quorum)) * step_s
            for member in slow:
                if due_s <= ahead[member.learner] and self._may_pull(member, p):
                    self._send_pull(member, p, lossless=False)

    def _pull(self, p: int, ready: list[Member]) -> None:
        for member in ready:
            if self._may_pull(member, p):
                self._send_pull(member, p, lossless=False)
            if p in member.pulled_at:
                self.rounds[p].pulled.add(member.learner)

    def _may_pull(self, member: Member, p: int) -> bool:
        """It has work on p, none of it held, there is room, it knows what is settled, and was not just asked."""
        assert member.report is not None
        settled = self.state.ledger.settled(member.learner, member.life, p)
        asked = member.pulled_at.get(p)
        return (
            member.learner not in self.held[p]
            and self._has_room(p)
            and self._unsettled(member, p) > 0
            and member.report.positions[p].mark_step >= settled.step
            and (asked is None or self._now - asked > patience_s(member.answer_s or 0.0))
        )

    def _send_pull(self, member: Member, p: int, lossless: bool) -> None:
        member.pulled_at[p] = self._now
        seq = self.state.ledger.settled(member.learner, member.life, p).seq
        self._send(member, Pull(self.state.epoch, member.life, p, seq, lossless, self.progress))

    def _close(self, p: int, ready: list[Member], quorum: int) -> None:
        round_, held = self.rounds[p], self.held[p]
        if len(held) >= quorum and round_.quorum_at is None:
            round_.quorum_at = self._now
            self.quorum_s = ema(self.quorum_s, self._now - round_.opened_at)
        missing = {
            m.learner: m.pulled_at.get(p, self._now) + (m.answer_s or 0.0)
            for m in ready
            if m.learner in round_.pulled and m.learner not in held
        }
        verdict = decide(len(held), quorum, missing, round_.quorum_at, self._grace_s(ready, quorum), self._now)
        round_.waits = verdict.waits
        if verdict.closes is not None:
            del self.rounds[p]
            self._merge(p, round_, verdict.closes, quorum, len(ready))

    def _grace_s(self, ready: list[Member], quorum: int) -> float:
        sync = self.config.sync
        return grace_s(sync.grace, sync.fragment_sync_delay, _kth_step_s(ready, quorum), self.quorum_s, self.sync_s)

    def _merge(self, p: int, round_: Round, reason: Closes, quorum: int, ready: int) -> None:
        """Order the merge of what is held."""
        contributions = tuple(self.held[p][learner] for learner in sorted(self.held[p]))
        self.merging.add(p)
        self._do(Merge(self._decision(p, round_, reason, quorum, ready, contributions), contributions))

    def _decision(
        self, p: int, round_: Round, reason: Closes, quorum: int, ready: int, contributions: tuple[Contribution, ...]
    ) -> Decision:
        stage, at = round_.stage, self.state.fragments[p]
        recipe, every = recipe_of(self.config, stage), sync_every_in(self.config.sync, stage)
        rows = tuple(row for c in contributions for row in admission.rows_of(c, self._settled(c)))
        return Decision(
            epoch=self.state.epoch,
            fragment=p,
            version=at.version + 1,
            parent=at.digest,
            rule=recipe.rule,
            outer=recipe.outer,
            lr=recipe.lr,
            momentum=recipe.momentum,
            delay=recipe.delay,
            restart=recipe.restart,
            gain=gain_of(rows, at.merged_in, at.version + 1, every),
            codec="fp32" if stage is None else self.config.wire.codec_down,
            sync_every=every,
            quorum=quorum,
            stage=stage,
            reason=reason,
            ready=ready,
            rows=rows,
            parts=tuple(Part(c.codec, c.base_version, weight_of(c.tokens, c.steps)) for c in contributions),
            seen=self._seen(),
            progress=self.progress,
            steps=self.state.steps,
            open_s=self._now - round_.opened_at,
            elapsed_s=self.elapsed_s,
        )

    def _merged(self, event: MergeDone) -> None:
        decision = event.fact.decision
        p = decision.fragment
        self.merging.discard(p)
        self.state.apply(event.fact)
        self._floors.clear()
        for row in decision.rows:
            held = self.held[p].get(row.learner)
            if row.fate == MERGED and held is not None and held.seq == row.seq and held.life == row.life:
                del self.held[p][row.learner]
                self.held_bytes.pop((row.learner, p), None)
                if row.life != self.state.lives[row.learner].life:
                    self._discard(row.learner, row.life, "died")  # the rest of a life that is over
        self._closed_at[p] = self._now
        self._adopting[p] = {m.learner for m in self._ready()}
        for member in self._connected():
            self._publish(member)

    def _explain(self, ready: list[Member], quorum: int) -> None:
        if len(ready) < quorum:
            ahead = f", {len(self.ahead)} ahead of this tape" if self.ahead else ""
            self.waiting = f"for learners: {len(ready)} ready{ahead}, quorum {quorum}"
        elif self.rounds:
            p = min(self.rounds, key=lambda q: (self.rounds[q].opened_at, q))
            self.waiting = f"fragment {p}: {self.rounds[p].waits}"
        else:
            self.waiting = f"for steps: no fragment is due (H = {self.sync_every})"

    # ------------------------------------------------------------------------------------------ publication

    def _publish(self, member: Member) -> None:
        """Bring a learner up to date: one publication per fragment on its way, always of the newest version."""
        for p, fragment in enumerate(self.state.fragments):
            sent = member.sent[p]
            if member.connected and sent is not None and sent < fragment.version and p not in member.sending:
                member.sending.add(p)
                at = self.state.ledger.settled(member.learner, member.life, p)
                self._do(
                    Publish(member.learner, member.life, p, sent, fragment.version, at.seq, at.step, self.progress)
                )

    def _publication_sent(self, event: PublicationSent) -> None:
        member = self.members.get(event.learner)
        if member is None or member.life != event.life or event.fragment not in member.sending:
            return
        member.sending.discard(event.fragment)
        member.hand_over(event.fragment, event.version, self._now)
        member.heal(self._now)
        self._publish(member)

    # ------------------------------------------------------------------------------------------ the end

    def _begin_closing(self) -> None:
        """The budget is spent: no further rounds, everyone stops, then all that is left is contributed losslessly."""
        self.closing_since = self._now
        self.rounds.clear()
        files = tuple(f.file for f in self.state.fragments)
        self._record(PhaseChanged("closing", files, self._seen(), self.elapsed_s))
        self._advance_closing()

    def _advance_closing(self) -> None:
        assert self.closing_since is not None
        share = (self._now - self.closing_since) / self.config.sync.close_timeout_s
        for member in self._connected():
            self._tell_stop(member)
        for p in range(len(self.state.fragments)):
            if p not in self.merging:
                self._close_out(p, share)
        unsettled = self._unsettled_learners()
        self.waiting = f"for the last work of {', '.join(unsettled)}" if unsettled else "to end"
        if not self.merging and (not unsettled or share > 1):
            self._end()

    def _tell_stop(self, member: Member) -> None:
        told = member.told_stop_at
        if not member.is_stopped and (told is None or self._now - told > RESEND_S):
            member.told_stop_at = self._now
            self._send(member, Stop(self.state.epoch, member.life))

    def _close_out(self, p: int, share: float) -> None:
        """Merge a fragment's last contributions once everyone who has work on it is in, or the time is over.

        One that stands in the way of its learner's very last, or of others where there is no room for more, does not
        wait for learners that are away. It does wait for those present: merged one by one, each would move the model
        by its whole drift instead of its share. But for half of the time only (`share` of it is over): one that hangs
        must not cost the others their last work.
        """
        for member in self._connected():
            if member.is_stopped and self._may_pull(member, p):
                self._send_pull(member, p, lossless=True)
            elif member.is_stopped and member.learner not in self.held[p] and self._unsettled(member, p) == 0:
                rest = self.state.ledger.rest(member.learner, member.life, p, "fast-forward")
                if rest:  # it gave this up and will not contribute again
                    self._record(Discarded(tuple(rest), (), self.elapsed_s))
        awaited = [m for m in self.members.values() if m.learner not in self.held[p] and self._owes(m, p)]
        in_the_way = any(not self._is_last(c) for c in self.held[p].values())
        if in_the_way or not self._fits(max(self._payload_bytes.values(), default=0)):
            awaited = [m for m in awaited if m.connected and share < 0.5]
        if self.held[p] and (share > 1 or not awaited):
            self._merge(p, self._round(), "the last work", 1, len(self.held[p]))

    def _is_last(self, c: Contribution) -> bool:
        account = self.state.ledger.account(c.learner, c.life)
        return c.to_step >= account.step and c.life == self.state.lives[c.learner].life

    def _owes(self, member: Member, p: int) -> bool:
        if member.connected and not member.is_stopped:
            return True
        account = self.state.ledger.account(member.learner, member.life)
        return account.step > account.settled[p].step

    def _unsettled_learners(self) -> list[str]:
        """Current lives with pending work, those still stepping, and dead ones whose held work is not merged yet."""
        fragments = range(len(self.state.fragments))
        owing = {m.learner for m in self.members.values() if any(self._owes(m, p) for p in fragments)}
        owing |= self.state.lives.keys() - self.members.keys()  # not heard of since this process began
        return sorted(owing | {learner for held in self.held for learner in held})

    def _end(self) -> None:
        for learner, life in sorted((k, v.life) for k, v in self.state.lives.items()):
            self._discard(learner, life, "absent at close")
        if samples := self.samples.take():
            self._record(Sampled(samples, self.elapsed_s))
        self._record(PhaseChanged("closed", (), self._seen(), self.elapsed_s))
        self.state.ledger.check()
        assert self.state.ledger.totals().pending == 0, self.state.ledger.totals()
        for member in self._connected():
            self._send(member, Done(self.state.epoch, member.life))
        self.waiting = "for nothing: the run is closed"
        self._do(Finish("closed"))

    # ------------------------------------------------------------------------------------------ small things

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far; while the syncer is away, or nobody has come back yet, the clock stands."""
        return self.state.elapsed_s if self._origin is None else self._now - self._origin

    @property
    def progress(self) -> float:
        """Share of the budget that is spent, never going back."""
        return self.state.progress

    def _measure_progress(self) -> None:
        spent = spent_at(self.config.run, self.state.ledger, self.elapsed_s)
        self.state.progress = max(self.state.progress, min(1.0, spent))
        self.state.steps = max(self.state.steps, self.state.ledger.steps)

    @property
    def stage(self) -> Stage:
        """Of training, now."""
        return stage_at(self.config, self.progress, self.state.steps)

    @property
    def sync_every(self) -> int:
        """H now."""
        return sync_every_in(self.config.sync, self.stage)

    def _discard(self, learner: str, life: int, fate: Fate) -> None:
        """Book what a life has pending and nobody holds or is merging."""
        rows: list[Row] = []
        for p in range(len(self.state.fragments)):
            held = self.held[p].get(learner)
            if held is None or held.life != life:
                rows += self.state.ledger.rest(learner, life, p, fate)
        if rows:
            seen = (self.state.ledger.seen(learner, life),)
            self._record(Discarded(tuple(rows), seen, self.elapsed_s))

    def _connected(self) -> list[Member]:
        return [self.members[k] for k in sorted(self.members) if self.members[k].connected]

    def _ready(self) -> list[Member]:
        return [m for m in self._connected() if m.is_ready(self._now, self.config.sync.stall_s)]

    def _unsettled(self, member: Member, p: int) -> int:
        """Steps of a learner on p that it could still contribute: not settled, and not given up by itself."""
        assert member.report is not None
        floors = self._floors.get(member.learner)
        if floors is None:
            settled = self.state.ledger.account(member.learner, member.life).settled
            marks = member.report.positions
            floors = [max(at.step, mark.mark_step) for at, mark in zip(settled, marks, strict=True)]
            self._floors[member.learner] = floors
        return member.report.step - floors[p]

    def _settled(self, c: Contribution) -> Settled:
        return self.state.ledger.settled(c.learner, c.life, c.fragment)

    def _see(self, seen: Seen) -> None:
        if self.state.phase != "closed":  # the books are, too: what comes after the end was never produced
            self.state.ledger.see(seen)

    def _seen(self) -> tuple[Seen, ...]:
        return tuple(self.state.ledger.seen(m.learner, m.life) for _, m in sorted(self.members.items()))

    def _witness(self, learner: str, life: int, what: Sight) -> None:
        if self.state.phase != "closed":
            self._record(Witnessed(learner, life, what, self.elapsed_s))

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _record(self, fact: LifeStarted | Discarded | PhaseChanged | Paused | Witnessed | Sampled) -> None:
        self.state.apply(fact)
        self._floors.clear()
        self._do(Record(fact))

    def _send(self, member: Member, message: Welcome | Refused | Pull | Rejected | Stop | Done) -> None:
        self._do(Send(member.learner, member.life, message))

    def _do(self, *actions: SyncerAction) -> None:
        self._actions.extend(actions)


def _kth_step_s(ready: list[Member], quorum: int) -> float | None:
    """The K-th fastest ready learner's step time, once K were measured."""
    times = sorted(_steps_s(ready))
    return times[quorum - 1] if len(times) >= quorum else None


def _steps_s(members: list[Member]) -> list[float]:
    """Their step times, as far as measured."""
    return [m.step_s for m in members if m.step_s]
