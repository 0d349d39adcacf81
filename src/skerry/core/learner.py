"""The learner's side of the protocol: positions, contributions, adoption, fast-forward.

    actions = machine.step(event, now)

Invariants: at most one contribution per fragment is outstanding, and until it is settled a pull of that fragment brings
its same bytes again or, if the syncer does not know of it yet, nothing; a mark never goes back; versions are adopted
only upwards, a delta only on exactly its base. No step depends on any of this: the training loop never waits. No array
here; drift and bytes are the node's.

When it contributes: a version brings with it the *order* for the next contribution to its fragment, the number of
unsettled steps at which it is due. The training thread knows it when that boundary comes, and no message is waited for.
An order counts from the mark, so it holds on when the mark moves (a fast-forward, an overwrite), and a new version's
takes its place. It ends with the link it came on: after an outage all orders would be due at once. It ends with the
loop, and when the run wants no further step, because the last work is asked for losslessly. Whoever has no order waits
to be asked by a pull, as everyone does for the last work.

A rollback: the welcome says from which version on each fragment counts. A learner that stands on an earlier one has
learned from what was rolled back, so all of its drift is given up, with its optimizer's state, at the boundary where it
has adopted such a version of every fragment. Until then it contributes nothing.

Progress never goes back, so that the inner rate does not: but for an operator who extends the run. Then it is a smaller
share of a larger budget, and every message that speaks of it says of which budget.

Alone: a learner whose link is lost trains on, and what it did is merged when a syncer is back. If that was more than
`learner.alone_steps_max` steps, its reports say so, and the work spends nothing of the run's budget: it is worth
something, but less than as many steps together (docs/LOG.md). Steps count from the loss of the link, and go on counting
over links that brought no version. No contribution of so many steps is made before the welcome: it could come before
the first report.

The way out: once the training loop has closed, every event is followed by a look at whether the process may end. The
last report says "left", `Leave` says why, and after that the machine does nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from skerry.config import Config
from skerry.core.events import (
    Adopt,
    Boundary,
    Closing,
    Contribute,
    FastForward,
    LearnerAction,
    LearnerEvent,
    Leave,
    Linked,
    Prepared,
    Resend,
    SayHello,
    SendReport,
    Snapshot,
    Spare,
    Spoiled,
    Ticked,
    Told,
    Unlinked,
    Unusable,
)
from skerry.core.facts import Stretch
from skerry.core.messages import (
    FULL,
    NORM_MAX,
    STEP_S_MAX,
    STEP_S_MIN,
    Done,
    FragmentPosition,
    Publication,
    Pull,
    Refused,
    Rejected,
    Report,
    Stop,
    Welcome,
)
from skerry.core.vocabulary import GivenUp, LearnerState, WayOut

REPORT_S_MIN = 0.05  # at most one report per this long while stepping
REPORT_S_MAX = 1.0  # and one at least this often while linked
LAST_VERSIONS_S = 2.0  # after the word that the run is done, which may overtake the last versions
CLOSE_MARGIN_S = 5.0  # beyond the syncer's own limit on closing, so that its word comes first


@dataclass
class Position:
    """One fragment as this life holds it; `mark` is up to where its own work on it is settled."""

    base_version: int = FULL
    mark_step: int = 0
    mark_tokens: int = 0
    outstanding: Contribute | None = None
    is_asked: bool = False  # by a pull that is not answered yet
    order: int = 0  # unsettled steps at which it contributes unasked; 0: when it is asked
    lay_s: float = 0.0  # how long the contribution that is taken out next waited for its round to close
    snapshot_at: int | None = None  # the step from which on the node takes a snapshot; None: it does not
    want_full: bool = False
    since: int = 0  # the version that the last rollback made
    given_up_steps: int = 0  # that lie before the mark and are in no contribution

    @property
    def is_rolled_back(self) -> bool:
        """It stands on what is no longer part of the run."""
        return FULL < self.base_version < self.since


class Traffic(NamedTuple):
    """What a learner's link has carried in this life."""

    bytes_up: int
    bytes_down: int
    payload_bytes: int  # of publications received,
    payload_s: float  # and the seconds from their first bytes to their last


class Labour(NamedTuple):
    """What a learner's node thread has done in this life, in parameters, and the seconds it took for them."""

    encoded: int = 0
    encode_s: float = 0.0
    adopted: int = 0
    adopt_s: float = 0.0


class LearnerMachine:
    """Decides for one learner process; a new process is a new machine and a new life."""

    def __init__(self, learner: str, config: Config, fragment_count: int) -> None:
        self.learner = learner
        self.config = config
        self.fragment_count = fragment_count
        self.life = 0
        self.epoch = 0
        self.step_count = 0
        self.tokens = 0
        self.state: LearnerState = "training"
        self.is_stop_asked = False  # the run wants no further step; the loop may be in the middle of one
        self.linked = False
        self.progress = 0.0
        self.budget = 0  # of which that is a share: the run's first, or how many came after it
        self.discards: list[GivenUp] = []  # why each fast-forward happened
        self.positions = [Position() for _ in range(fragment_count)]
        self._seq = 0
        self._number = 0
        self._reported_at = float("-inf")
        self._step_s = 0.0
        self._step_gap_s_max = 0.0
        self._loss = self._grad_norm = 0.0
        self._round_steps = 0
        self._linked_step = 0  # since which the link is up
        self._lost_at: tuple[int, int] | None = None  # steps and tokens, of a link; None: versions have come since
        self._alone = Stretch()  # the last that was too long
        self._lossless = False
        self._forwarding: set[int] = set()  # fragments that a fast-forward has yet to overwrite
        self._is_to_forget = False  # all of its drift, once no fragment stands on what was rolled back
        self._has_news = False
        self._done_at: float | None = None
        self._closing_at: float | None = None
        self._limit_s: float | None = None  # the caller's own, on closing
        self._refused: Refused | None = None
        self._actions: list[LearnerAction] = []

    def __repr__(self) -> str:
        outstanding = sum(p.outstanding is not None for p in self.positions)
        return (
            f"<learner {self.learner} life={self.life} {self.state} step={self.step_count} "
            f"outstanding={outstanding} linked={self.linked}>"
        )

    @property
    def is_ready(self) -> bool:
        """Every fragment has a base: training may start."""
        return self.life > 0 and all(p.base_version > FULL for p in self.positions)

    @property
    def is_settled(self) -> bool:
        return all(p.mark_step == self.step_count and p.outstanding is None for p in self.positions)

    @property
    def steps_merged(self) -> int:
        """Of this life, those whose work on every fragment is known to be in the run."""
        return min(p.mark_step - p.given_up_steps for p in self.positions)

    @property
    def alone_steps(self) -> int:
        """Taken since the link was lost; 0 while there is one."""
        return 0 if self.linked else self._steps_since_lost

    @property
    def _steps_since_lost(self) -> int:
        return 0 if self._lost_at is None else self.step_count - self._lost_at[0]

    @property
    def is_done(self) -> bool:
        """The syncer has said that the run is closed."""
        return self._done_at is not None

    def step(self, event: LearnerEvent, now: float) -> list[LearnerAction]:
        self._actions = []
        if self.state == "left":
            return []
        match event:
            case Boundary():
                self._boundary(event)
            case Linked():
                self._do(SayHello(self.life))
            case Unlinked():
                self._unlinked()
            case Told():
                self._told(event, now)
            case Prepared():
                self._prepared(event)
            case Unusable():
                self.positions[event.fragment].want_full = True
            case Spoiled():
                self._spoiled(event)
            case Closing():
                self._close(event, now)
            case Ticked():
                pass
        self._forget()
        for p, position in enumerate(self.positions):
            self._take_snapshot(p, position)
        way = None if self._actions else self._way_out(now)  # the outcome of an order comes before it may go
        if way is not None:
            self.state = "left"
        self._report(event, now)
        if way is not None:
            self._do(Leave(way, self._refused))
        return self._actions

    # ------------------------------------------------------------------------------------------ the way out

    def _close(self, event: Closing, now: float) -> None:
        self._closing_at, self._limit_s = now, event.limit_s
        self.state = "stopped" if self.is_stop_asked else "leaving"

    def _way_out(self, now: float) -> WayOut | None:
        """Why this process may end now; None while somebody still needs it."""
        if self._refused is not None:
            return "refused"
        if self._closing_at is None:
            return None
        if self.is_settled and self.is_done:
            return "done"
        if self.is_settled and self.state == "leaving":
            return "settled"
        if self._done_at is not None and now - max(self._done_at, self._closing_at) > LAST_VERSIONS_S:
            return "no last versions"
        limit_s = patience_s(self.config, self.is_stop_asked, self._limit_s)
        return "timeout" if now - self._closing_at >= limit_s else None

    # ------------------------------------------------------------------------------------------ own work

    def _boundary(self, event: Boundary) -> None:
        self.step_count += event.steps
        self.tokens += event.tokens
        if event.steps:
            self._step_s, self._loss = min(max(event.step_s, STEP_S_MIN), STEP_S_MAX), event.loss
            self._grad_norm = event.grad_norm if 0.0 <= event.grad_norm <= NORM_MAX else 0.0
            # the first step includes whatever the loop did before it, so it says nothing about a pause
            if self.step_count > 1:
                self._step_gap_s_max = max(self._step_gap_s_max, event.step_s)
        for taken in event.snapshots:
            self.positions[taken.fragment].snapshot_at = None
            if taken.is_first:
                self._contribute(taken.fragment, taken.base_version)
        for p in event.overwritten:
            self._forwarding.discard(p)
            self._overwritten(self.positions[p])
        for taken in event.snapshots:
            if taken.fragment in event.overwritten and self.state == "training":
                pass  # there is nothing left to answer with; after a step there is
            elif not taken.is_first:
                self._contribute(taken.fragment, taken.base_version)

    def _overwritten(self, position: Position) -> None:
        """The fragment holds a version and nothing of its own: the steps up to here are given up.

        Not those of an outstanding contribution, whose bytes may be merged yet: the mark stays before them. What
        settles or drops it comes with an overwrite or a fast-forward, which moves the mark past everything, so no two
        contributions overlap. Were it dropped here, one with a slow link might never get its work in.
        """
        if position.outstanding is None:
            position.given_up_steps += self.step_count - position.mark_step
            position.mark_step, position.mark_tokens = self.step_count, self.tokens

    def _contribute(self, p: int, base_version: int) -> None:
        position = self.positions[p]
        position.is_asked = False
        if position.outstanding is not None or self.step_count <= position.mark_step or self._is_giving_up:
            return
        if not self.linked and self._is_alone_too_long:
            return  # it is asked again
        self._seq += 1
        position.outstanding = Contribute(
            life=self.life,
            seq=self._seq,
            fragment=p,
            base_version=base_version,
            from_step=position.mark_step,
            from_tokens=position.mark_tokens,
            to_step=self.step_count,
            to_tokens=self.tokens,
            codec="fp32" if self._lossless else self.config.wire.codec_up,
        )
        self._do(position.outstanding)

    def _spoiled(self, event: Spoiled) -> None:
        """A boundary may find several fragments so; with the first of them all are given up."""
        self.positions[event.fragment].outstanding = None
        if not self._forwarding:
            self._fast_forward("not finite", event.parameter, reset_optimizer=True)

    def _fast_forward(self, reason: GivenUp, detail: str = "", reset_optimizer: bool = False) -> None:
        """Give the drift up, everywhere; each mark moves at the boundary where its fragment is overwritten.

        Until all are, nothing is contributed: a model of which half is given up is nobody's.
        """
        self.discards.append(reason)
        self._forwarding = {p for p, position in enumerate(self.positions) if position.base_version > FULL}
        for position in self.positions:
            position.outstanding = None
        self._do(FastForward(reason, detail, reset_optimizer))

    @property
    def _is_giving_up(self) -> bool:
        """Whatever its drift is, it is of no use."""
        return bool(self._forwarding) or self._is_to_forget

    def _forget(self) -> None:
        """After a rollback, once; a fast-forward under way may have come too early for the last version, so it ends."""
        is_ready = not self._forwarding and not any(position.is_rolled_back for position in self.positions)
        if self._is_to_forget and is_ready:
            self._is_to_forget = False
            self._fast_forward("rolled back", reset_optimizer=True)

    def _take_snapshot(self, p: int, position: Position) -> None:
        """Let the node know at which boundary to take a snapshot, if that is not what it knows."""
        at = self._snapshot_at(position)
        if at != position.snapshot_at:
            position.snapshot_at = at
            self._do(Spare(p) if at is None else Snapshot(p, at))

    def _snapshot_at(self, position: Position) -> int | None:
        """The step after which one is due: at once if it is asked, else by order; None: not as things stand."""
        if position.outstanding is not None:
            return None
        if position.is_asked:
            return 0
        if not position.order or not self._obeys_orders or self._is_giving_up:
            return None
        return position.mark_step + position.order

    @property
    def _obeys_orders(self) -> bool:
        """While it steps; what it has done after that is asked for."""
        return self.state == "training" and not self.is_stop_asked

    def _unlinked(self) -> None:
        self.linked = False
        if self._lost_at is None:
            self._lost_at = (self.step_count, self.tokens)
        for position in self.positions:
            position.order = 0

    # ------------------------------------------------------------------------------------------ what the syncer says

    def _told(self, event: Told, now: float) -> None:
        message = event.message
        match message:
            case Welcome():
                self._welcome(message)
            case Refused():
                self._refused, self.linked = message, False
            case Pull() | Publication() | Rejected() | Stop() | Done():
                if message.life == self.life and message.epoch >= self.epoch:
                    self.epoch = message.epoch
                    self._obey(message, now)

    def _welcome(self, message: Welcome) -> None:
        assert self.life in (0, message.life), "a life does not change under a process"
        self.life, self.epoch = message.life, max(self.epoch, message.epoch)
        self.linked, self._linked_step = True, self.step_count
        self._hear_progress(message)
        for position, since in zip(self.positions, message.since, strict=False):  # none of a syncer that knows of none
            position.since = since
        self._is_to_forget |= any(position.is_rolled_back for position in self.positions)
        if self._lost_at is not None and self._is_alone_too_long:
            self._alone = Stretch(*self._lost_at, self.step_count, self.tokens)
            self._lost_at = None
            for position in self.positions:
                position.is_asked = False  # on another link: a contribution could overtake the report that says this
        self._reported_at = float("-inf")

    @property
    def _is_alone_too_long(self) -> bool:
        return 0 < self.config.learner.alone_steps_max < self._steps_since_lost

    def _obey(self, message: Pull | Publication | Rejected | Stop | Done, now: float) -> None:
        match message:
            case Pull():
                self._hear_progress(message)
                self._pull(message)
            case Publication():
                self._hear_progress(message)
                self._publication(message)
            case Rejected():
                outstanding = self.positions[message.fragment].outstanding
                if message.harmful and outstanding is not None and outstanding.seq == message.seq:
                    self._fast_forward("refused", message.reason, reset_optimizer=message.reason == "rolled back")
            case Stop():
                self.is_stop_asked = True
                self.state = "stopped" if self.state == "leaving" else self.state
            case Done() if self._done_at is None:
                self._done_at = now

    def _hear_progress(self, message: Welcome | Pull | Publication) -> None:
        """It never goes back within one budget; where an operator gave the run another, it is a share of that.

        What was sent before that and comes late speaks of a budget that is no more.
        """
        if message.budget == self.budget:
            self.progress = max(self.progress, message.progress)
        elif message.budget > self.budget:
            self.budget, self.progress = message.budget, message.progress

    def _pull(self, message: Pull) -> None:
        position = self.positions[message.fragment]
        self._lossless = message.lossless
        if self._is_to_forget:
            return  # it is asked again
        if position.outstanding is not None:
            if message.lacking_seq == position.outstanding.seq > message.settled_seq:
                self._do(Resend(message.fragment))
        elif self.step_count > position.mark_step:
            position.is_asked = True

    def _publication(self, message: Publication) -> None:
        position = self.positions[message.fragment]
        if message.version <= position.base_version:
            return
        if message.base_version not in (FULL, position.base_version):
            position.want_full |= position.base_version == FULL
            return  # the next report says where this learner stands
        settled = position.outstanding is not None and position.outstanding.seq <= message.settled_seq
        behind = message.version - position.base_version
        is_stale = behind > self.config.sync.stale_versions_max
        if self._is_giving_up:
            pass  # all of it is given up
        elif is_stale and position.base_version > FULL:
            self._fast_forward("stale", f"{behind} versions behind")
            settled = False
        elif not settled and message.settled_step > position.mark_step:
            self._fast_forward("settled but not at hand")
        take_out = position.outstanding.seq if settled and position.outstanding else 0
        position.order, position.lay_s = message.order, message.lay_s
        self._do(Adopt(message, take_out))

    def _prepared(self, event: Prepared) -> None:
        position = self.positions[event.fragment]
        position.base_version = event.version
        position.want_full = False
        self._lost_at = None if self.linked else self._lost_at
        outstanding = position.outstanding
        if event.took_out and outstanding is not None and outstanding.seq == event.took_out:
            position.mark_step, position.mark_tokens = outstanding.to_step, outstanding.to_tokens
            position.outstanding = None
            if position.mark_step >= self._linked_step:  # else it tells how long the link or the syncer was away
                self._round_steps = self._steps_taken(position)

    def _steps_taken(self, position: Position) -> int:
        """By a round, up to the next boundary, which adopts it; not those while the contribution waited for others."""
        waited = position.lay_s / self._step_s if self._step_s else 0.0
        return max(1, self.step_count + 1 - position.mark_step - int(waited))

    # ------------------------------------------------------------------------------------------ reports

    def _report(self, event: LearnerEvent, now: float) -> None:
        """Restate the whole position: after steps, when something changed, and now and then."""
        if not self.linked:
            return
        self._has_news |= not isinstance(event, Ticked)
        pause = 0.0 if self.state == "left" else REPORT_S_MIN if self._has_news else REPORT_S_MAX
        if now - self._reported_at < pause:
            return
        self._has_news = False
        self._reported_at = now
        self._number += 1
        self._do(SendReport())

    def report(self, traffic: Traffic, labour: Labour) -> Report:
        return Report(
            learner=self.learner,
            life=self.life,
            number=self._number,
            step=self.step_count,
            tokens=self.tokens,
            step_s=self._step_s,
            state=self.state,
            positions=tuple(
                FragmentPosition(
                    p.base_version,
                    p.mark_step,
                    p.mark_tokens,
                    p.outstanding.seq if p.outstanding else 0,
                    p.want_full,
                    p.order if self._obeys_orders else 0,
                )
                for p in self.positions
            ),
            step_gap_s_max=self._step_gap_s_max,
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
            loss=self._loss,
            fast_forwards=len(self.discards),
            payload_bytes=traffic.payload_bytes,
            payload_s=traffic.payload_s,
            encoded=labour.encoded,
            encode_s=labour.encode_s,
            adopted=labour.adopted,
            adopt_s=labour.adopt_s,
            round_steps=self._round_steps,
            alone=self._alone,
            grad_norm=self._grad_norm,
        )

    def _do(self, action: LearnerAction) -> None:
        self._actions.append(action)


def patience_s(config: Config, is_stop_asked: bool, limit_s: float | None) -> float:
    """How long one that closes waits for others to do their part; `limit_s` is its caller's, if it has one."""
    if limit_s is not None:
        return limit_s
    if is_stop_asked:
        return config.sync.close_timeout_s + CLOSE_MARGIN_S
    return config.learner.leave_timeout_s
