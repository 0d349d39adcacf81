"""Who is alive, in which life, how fast, and what each was last told.

*Connected* is a state of the link, *ready* of a life: it has adopted every fragment, is training, and steps. K counts
ready learners, but for those that are *idle*: asked for contributions for long, by this process's clock, they step on
and bring none. Measured times are exponential averages that do not exist before the first measurement.

What a learner says of its own speed is believed as far as it is in line with how its steps come in here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from skerry.core.messages import FULL, STEP_S_MIN, FragmentPosition, Report

EMA_WEIGHT = 0.2
STEP_RISE_MAX = 3.0  # times the usual that a step counts for: a loop that pauses would else slow the rounds after it
OUT_OF_LINE = 10.0  # times quicker or slower than its steps come in: a step time that nobody believes
CLOCKED_STEPS, CLOCKED_S = 16, 2.0  # of a learner, at least, that its steps are clocked over
IDLE_ANSWERS, IDLE_STEPS = 4, 10  # of its usual answers, and of its steps, for which nothing comes of who is asked
RESEND_S = 2.0  # what has no effect for this long, a pull, a stop or something bulky, is repeated at the soonest
RESEND_S_MAX = 30.0  # however slowly a learner usually answers


def ema(value: float | None, sample: float) -> float:
    return sample if value is None else value + EMA_WEIGHT * (sample - value)


def patience_s(usual_s: float) -> float:
    """How long to wait for what usually takes this long before it is taken for lost."""
    return min(RESEND_S_MAX, max(RESEND_S, 4 * usual_s))


class Asked(NamedTuple):
    """A contribution that was asked for: by a pull at its next boundary, or by an order, when so much is unsettled."""

    at: float
    since: float  # when it was asked, or, once a report said so, since when its answer is outstanding
    seq: int  # of what is outstanding, by the last report; 0: nothing is
    order: int = 0  # unsettled steps at which it is due; 0: a pull
    version: int = 0  # that carries the order


@dataclass
class Member:
    """One learner in its current life, as the syncer sees it."""

    learner: str
    life: int
    settled: list[int]  # per fragment, the step up to which this life's work has its fate, as the ledger has it
    connected: bool = True
    report: Report | None = None
    reported_at: float = 0.0
    stepped_at: float = 0.0
    stepped: int = 0  # the last step that is known of it, by a report or a contribution
    step_s: float | None = None
    answer_s: float | None = None  # pull, or the step by which it was ordered, to complete contribution
    round_steps: float | None = None  # its own from a snapshot to the version that has it
    adopt_s: float | None = None  # publication handed over to report of its adoption
    sent: list[int | None] = field(default_factory=list)  # newest version handed over; None until it says what it has
    sent_at: list[float] = field(default_factory=list)  # since when something handed over is not adopted
    sending: set[int] = field(default_factory=set)  # fragments with a publication on its way
    waiting: dict[int, None] = field(default_factory=dict)  # and those that it lacks, until they may leave: in order
    timed: dict[int, tuple[int, float]] = field(default_factory=dict)  # fragment -> version to measure, handed over at
    asked: dict[int, Asked] = field(default_factory=dict)  # by fragment
    came_at: dict[int, float] = field(default_factory=dict)  # fragment -> when its last contribution came,
    lay_s: dict[int, float] = field(default_factory=dict)  # and how long the last that was merged lay here before
    told_stop_at: float | None = None
    adopted: int = 0  # fragments of which it has some version, by its last report
    is_stepping: bool = False  # it took a step since its link is up
    is_expelled: bool = False  # an operator has turned it out
    clocked_s: float | None = None  # of a step, by this process's clock
    clock_from: tuple[int, float] | None = None  # the step from which it is being clocked, and when that was heard of
    linked_from: tuple[int, int, float] | None = None  # steps, tokens and when: the first report on its link
    owed_s: float = 0.0  # for which it was asked, and has begun to answer, since anything of it was last held
    is_beyond_belief: bool = False  # it claims more steps or tokens than it is credited with
    has_given: bool = False  # a contribution of it was held, in this life or since this process began

    def connect(self, now: float) -> None:
        """A link is up; the first report on it says what the learner has and that it can take publications."""
        self.connected = True
        self.sent = [None] * len(self.settled)
        self.sent_at = [now] * len(self.settled)
        self.sending.clear()
        self.waiting.clear()
        self.timed.clear()
        self.asked.clear()
        self.told_stop_at = None
        self.report = None
        self.adopted = 0
        self.is_stepping = False
        self.stepped_at = now
        self.clock_from = self.linked_from = None

    def follow(self, before: Member) -> None:
        """It has the name of another process, and with it what that owed: a new process is no way out of it."""
        self.owed_s, self.has_given, self.answer_s = before.owed_s, before.has_given, before.answer_s

    def disconnect(self) -> None:
        self.connected = False
        self.sending.clear()
        self.waiting.clear()
        self.asked.clear()

    def take_report(self, report: Report, now: float) -> bool:
        """Accept a newer report; an older one changes nothing."""
        if self.report is not None and report.number <= self.report.number:
            return False
        if self.report is None or report.step > self.report.step:
            self.stepped_at = now
            self.is_stepping |= self.report is not None
        if self.report is None:
            self.linked_from = (report.step, report.tokens, now)
        self._owe(now)
        self._clock(report.step, now)
        if 0 < report.step_s < math.inf:
            step_s = self._believed(report, now)
            usual_s = self.step_s or step_s
            self.step_s = ema(usual_s, min(step_s, STEP_RISE_MAX * usual_s))
        if 0 < report.round_steps <= self._steps_on_link(report):  # no round takes longer than that
            self.round_steps = ema(self.round_steps, report.round_steps)
        for p, position in enumerate(report.positions):
            before = self.report.positions[p] if self.report is not None else None
            if self.sent[p] is None:
                self.sent[p] = position.base_version
            if before is not None and position.base_version > before.base_version:
                self.sent_at[p] = now
            if p in self.timed and position.base_version >= self.timed[p][0]:
                self.adopt_s = ema(self.adopt_s, now - self.timed.pop(p)[1])
            if position.want_full and (before is None or not before.want_full):
                self.sent_at[p] = float("-inf")  # not under way: it is there, and of no use
            if p in self.asked:
                self._follow_up(p, position, now)
        self.report, self.reported_at = report, now
        self.stepped = max(self.stepped, report.step)
        self.adopted = sum(position.base_version > FULL for position in report.positions)
        return True

    def _steps_on_link(self, report: Report) -> int:
        assert self.linked_from is not None
        return report.step - self.linked_from[0]

    def _clock(self, step: int, now: float) -> None:
        """How its steps come in, over some of them; an outage counts with the steps that were taken in it."""
        if self.clock_from is None:
            self.clock_from = (step, now)
        steps, passed_s = step - self.clock_from[0], now - self.clock_from[1]
        if steps >= CLOCKED_STEPS and passed_s >= CLOCKED_S:
            self.clocked_s = passed_s / steps
            self.clock_from = (step, now)

    def _believed(self, report: Report, now: float) -> float:
        """The step time that it reports, unless that is out of line with how its steps come in.

        Before they were clocked only a claim to be quicker can be: a few reports that came together say nothing.
        """
        assert self.clock_from is not None
        if self.clocked_s is not None:
            in_line = min(max(report.step_s, self.clocked_s / OUT_OF_LINE), self.clocked_s * OUT_OF_LINE)
            return max(in_line, STEP_S_MIN)
        steps, passed_s = report.step - self.clock_from[0], now - self.clock_from[1]
        return max(report.step_s, passed_s / steps / OUT_OF_LINE) if steps > 0 else report.step_s

    def _owe(self, now: float) -> None:
        """Count the time since its last report, if it owed an answer then; one that says little owes no more for it."""
        if self.report is not None and any(map(self.has_begun, self.asked)):
            self.owed_s += min(now - self.reported_at, max(RESEND_S, 2 * (self.step_s or 0.0)))

    def is_idle(self, stall_s: float) -> bool:
        """It was asked for long, as its own rounds go, and brought nothing."""
        return self.owed_s > max(stall_s, IDLE_STEPS * (self.step_s or 0.0), IDLE_ANSWERS * (self.answer_s or 0.0))

    def hand_over(self, p: int, version: int, now: float) -> None:
        """A version has left; the time to adopt runs from the first that it still lacks, not from the latest."""
        if self.report is not None and self.report.positions[p].base_version == self.sent[p]:
            self.sent_at[p] = now
        self.sent[p] = version
        self.timed.setdefault(p, (version, now))  # if it is sent again: it may be the first that is adopted

    def heal(self, fragments: Iterable[int], now: float) -> None:
        """Forget what was handed over of these but, by a report from long after, is not there: it is sent again.

        Handed over is not arrived: it may lie for many seconds before a narrow link, and every repeat makes that
        longer. So long after is by what adoption usually takes. Before the first was measured it is as long as can
        be: a stream that lives loses nothing, and what a broken one lost is known from the first report on the next.
        """
        assert self.report is not None
        resend_s = RESEND_S_MAX if self.adopt_s is None else patience_s(self.adopt_s)
        for p in fragments:
            position, sent = self.report.positions[p], self.sent[p]
            if p in self.sending or sent is None or self.reported_at - self.sent_at[p] < resend_s:
                continue
            if position.want_full or position.base_version < sent:
                self.sent[p] = FULL if position.want_full else position.base_version
                self.sent_at[p] = now

    def unsettled(self, p: int) -> int:
        """Steps on p that it could still contribute: not settled, and not given up by itself."""
        assert self.report is not None
        return self.stepped - max(self.settled[p], self.report.positions[p].mark_step)

    def _ended(self, p: int) -> int:
        """The step up to which its work on p has its fate, or was given up by itself."""
        assert self.report is not None
        return max(self.settled[p], self.report.positions[p].mark_step)

    # ------------------------------------------------------------------------------------------ what it was asked for

    def ask(self, p: int, now: float, order: int = 0, version: int = 0) -> None:
        """Ask for its work on p: by a pull, or by the order that a version carries."""
        self.asked[p] = Asked(now, now, self.outstanding_seq(p), order, version)

    def outstanding_seq(self, p: int) -> int:
        """The contribution to p that it has made, by its last report, and whose fate it does not know; 0: none."""
        return self.report.positions[p].outstanding_seq if self.report is not None else 0

    def _follow_up(self, p: int, position: FragmentPosition, now: float) -> None:
        """It says where it stands with what it was asked for: if that is lost, it is as if it had not been asked."""
        asked = self.asked[p]
        if position.outstanding_seq != asked.seq:
            asked = self.asked[p] = asked._replace(since=now, seq=position.outstanding_seq)
        if self._has_lost_order(asked, position) or self._has_lost_answer(asked, position, now):
            del self.asked[p]

    def _has_lost_order(self, asked: Asked, position: FragmentPosition) -> bool:
        """It has adopted the version that carried the order, and knows of none."""
        is_adopted = bool(asked.order) and position.base_version >= asked.version
        return is_adopted and not position.order and not position.outstanding_seq

    def _has_lost_answer(self, asked: Asked, position: FragmentPosition, now: float) -> bool:
        """By a report from long after, a pull had no effect, or what is outstanding is still not here.

        It is always the learner that says so: of one that is silent nothing is known to be lost. An order that stands,
        or is on its way with its version, is not lost however long it takes.
        """
        if asked.order and (position.base_version < asked.version or not position.outstanding_seq):
            return False
        return now - asked.since > patience_s(self.answer_s or 0.0)

    def forgive(self, passed_s: float) -> None:
        """It was not listened to for so long: that it did not step, or that something did not come, says nothing."""
        self.stepped_at += passed_s
        for p, asked in self.asked.items():
            self.asked[p] = asked._replace(since=asked.since + passed_s)

    def _begins_at(self, p: int) -> float:
        """When it begins to answer: at once if it was pulled, else once its order's steps are there, as reports go."""
        asked = self.asked[p]
        if not asked.order or self.report is None or self.step_s is None:
            return asked.at
        lacking = asked.order - (self.report.step - self._ended(p))
        return max(asked.at, self.reported_at + lacking * self.step_s)

    def expected_at(self, p: int) -> float:
        """When its contribution is likely to be here."""
        return self._begins_at(p) + (self.answer_s or 0.0)

    def may_come_sooner(self, p: int, now: float) -> bool:
        """It has work on p, and its order for it is more than a step off: a pull would bring it sooner."""
        is_far_off = bool(self.asked[p].order) and self._begins_at(p) > now + (self.step_s or 0.0)
        return is_far_off and self._has_work(p)

    def has_begun(self, p: int) -> bool:
        """By its last report it has the steps that were ordered, or it was pulled: its answer is on its way."""
        return self.unsettled(p) >= self.asked[p].order

    def may_be_asked(self, p: int) -> bool:
        """It has work on p, knows what is settled, and is not asked for it already."""
        return p not in self.asked and self._has_work(p)

    def _has_work(self, p: int) -> bool:
        assert self.report is not None
        return self.unsettled(p) > 0 and self.report.positions[p].mark_step >= self.settled[p]

    def came(self, p: int, now: float) -> None:
        """A contribution of this learner is held from now on."""
        self.came_at[p] = now
        self.owed_s, self.has_given = 0.0, True

    def merge_began(self, p: int, now: float) -> None:
        """The round with its contribution is closed. What it waited for that is no part of what a round takes: it would
        make H longer, which makes rounds fewer, and contributions wait longer still."""
        self.lay_s[p] = now - self.came_at.get(p, now)

    def answered(self, p: int, now: float) -> None:
        """What it was asked for is here."""
        self.answer_s = ema(self.answer_s, max(0.0, now - self._begins_at(p)))
        del self.asked[p]

    def was_just_told_to_stop(self, now: float) -> bool:
        return self.told_stop_at is not None and now - self.told_stop_at <= RESEND_S

    def lacks(self, p: int, version: int) -> bool:
        """It was not handed this version of a fragment, and none is on its way to it."""
        sent = self.sent[p]
        return self.connected and sent is not None and sent < version and p not in self.sending

    def is_before(self, p: int, version: int) -> bool:
        """It has an older version, or has not said what it has; who has none is handed a whole one."""
        return self.report is None or FULL < self.report.positions[p].base_version < version

    @property
    def has_adopted_all(self) -> bool:
        return self.adopted == len(self.settled)

    @property
    def step(self) -> int:
        return self.report.step if self.report else 0

    @property
    def is_stopped(self) -> bool:
        return self.report is not None and self.report.state in ("stopped", "left")

    @property
    def has_left(self) -> bool:
        """By its own word, which is its last."""
        return self.report is not None and self.report.state == "left"

    @property
    def is_training(self) -> bool:
        return self.report is not None and self.report.state == "training"

    @property
    def is_leaving(self) -> bool:
        return self.report is not None and self.report.state == "leaving" and self.has_adopted_all

    def is_stalled(self, now: float, stall_s: float) -> bool:
        return now - self.stepped_at > self._stall_s(stall_s)

    def stalls_at(self, stall_s: float) -> float:
        """When it will have stalled, if it takes no further step."""
        return self.stepped_at + self._stall_s(stall_s)

    def _stall_s(self, stall_s: float) -> float:
        return max(stall_s, 10 * (self.step_s or 0.0))

    def is_ready(self, now: float, stall_s: float) -> bool:
        return (
            self.connected
            and self.report is not None
            and self.report.state == "training"
            and self.has_adopted_all
            and not self.is_stalled(now, stall_s)
        )

    def state(self, now: float, stall_s: float) -> str:
        """One word for a table."""
        if self.is_expelled:
            return "expelled"
        if not self.connected:
            return "left" if self.has_left else "lost"
        if self.report is None or not self.has_adopted_all:
            return "joining"
        if self.report.state != "training":
            return self.report.state
        return "stalled" if self.is_stalled(now, stall_s) else "training"
