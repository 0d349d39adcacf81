"""Whether what a learner says it did is plausible: beside what the others do, by the syncer's own clock.

Steps and tokens are a learner's own word, and they spend the run's budget and weigh its work. Nobody here can count
them. But learners of one run are not a hundred times as quick as each other. So a life is *credited* with what a
hundred times the usual rate gives for the time since it began. A report beyond that is not booked, so it spends no
budget, in this process or the next, and no contribution is held that ends beyond it, or has a hundred times the usual
tokens in a step. Nor do K and H count who claims it: half of the fastest's steps make a fragment due. It is not given
up either: the bound grows with time and the learner says it again, so what an honest one did while no syncer was there
to see it is booked and merged a little later.

The usual is the median of the learners that K counts, the one in question among them: for what may spend the budget the
lower one, which of two is the slower one's, and for what is held the upper one, and of three at least: that half of the
learners say they do next to nothing must not keep the others' work out. A learner that is alone has nobody to be
compared with, and of two the quicker is believed in what is merged. What is measured is of this process, and is lost
with it: who is the first to come back to a run that has had others is not believed as one that is alone is, but held
against what the tape tells of the run's learners before. Where nobody whom K counts was measured, those who claim too
much are compared with each other: after an outage all may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from skerry.core.ledger import Ledger, Work
from skerry.core.membership import Member
from skerry.core.messages import Contribution
from skerry.core.roster import Roster
from skerry.core.state import RunState

PLAUSIBLE = 100.0  # times the usual
SLACK_S = 10.0  # that a life is taken for older than it is: links and clocks are not exact
MEASURE_S = 1.0  # after which the usual is measured again
UNMEASURED_S = 60.0  # of several learners, before another was measured: no more of them is believed so long
AT_ONCE = Work(1000, 1 << 24)  # steps and tokens beyond what is settled that are believed whatever is usual


class Usual(NamedTuple):
    """Of one learner, as the syncer sees it."""

    steps_per_s: float
    tokens_per_s: float


class Credit:
    """Of the learners of a run; what is known of those before this process is in its state."""

    def __init__(self, state: RunState, now: float) -> None:
        self._before = _before(state)
        self._usual: Usual | None = None  # the lower median
        self._only = ""  # the one learner of which that is, if it is of one
        self._upper: Usual | None = None  # and the upper one, of three at least
        self._measured_at = float("-inf")
        self._several_since = now if len(state.lives) > 1 else None  # that there is somebody to be compared with

    def measure(self, roster: Roster, member: Member, now: float) -> None:
        """What is usual among those there and the one in question, which need not be ready for what it claims.

        At most once in a while, for it looks at all of them.
        """
        several = {**roster.ready, member.learner: member}
        if now - self._measured_at < MEASURE_S and (self._usual is not None or len(several) < 2):
            return
        self._measured_at = now
        found = _rates(several)
        if len(found) < 2:
            several |= {name: each for name, each in roster.idle.items() if each.is_beyond_belief}
            found = _rates(several)
        rates, self._only = list(found.values()), next(iter(found)) if len(found) == 1 else ""
        self._usual = _at(rates, (len(rates) - 1) // 2) if rates and len(several) > 1 else None
        self._upper = _at(rates, len(rates) // 2) if len(rates) > 2 else None
        if len(several) > 1 and self._several_since is None:
            self._several_since = now

    def _bound(self, usual: Usual | None, settled: Work, age_s: float, now: float) -> Work | None:
        """What a life of this age can have done, of which so much is settled; None: nobody can say."""
        if usual is None and (self._several_since is None or now - self._several_since >= UNMEASURED_S):
            return None
        rate, most_s = usual or self._before, PLAUSIBLE * (age_s + SLACK_S)
        steps, tokens = settled.steps + AT_ONCE.steps, settled.tokens + AT_ONCE.tokens
        return Work(max(steps, int(most_s * rate.steps_per_s)), max(tokens, int(most_s * rate.tokens_per_s)))

    def believes(self, member: Member, ledger: Ledger, age_s: float, now: float) -> bool:
        """Whether what it has reported is no more than it is credited with."""
        most = max(ledger.account(member.learner, member.life).settled, key=lambda at: at.step)
        usual = self._usual if self._only != member.learner else None  # nobody is held against its own word alone
        report, bound = member.report, self._bound(usual, Work(most.step, most.tokens), age_s, now)
        assert report is not None
        return bound is None or (report.step <= bound.steps and report.tokens <= bound.tokens)

    def is_plausible(self, c: Contribution, age_s: float, now: float) -> bool:
        if self._upper is None and self._usual is not None and not self._only:
            return True  # of two that were measured
        bound, usual = self._bound(self._upper, Work(c.from_step, c.from_tokens), age_s, now), self._upper
        if bound is not None and (c.to_step > bound.steps or c.to_tokens > bound.tokens):
            return False
        return usual is None or c.tokens * usual.steps_per_s <= PLAUSIBLE * usual.tokens_per_s * c.steps


def _rates(members: Mapping[str, Member]) -> dict[str, Usual]:
    """Of those that were measured."""
    return {name: rate for name, member in members.items() if (rate := rate_of(member)) is not None}


def rate_of(member: Member) -> Usual | None:
    """Of its link so far, if it has taken a step on it."""
    if member.report is None or member.linked_from is None:
        return None
    step, tokens, at = member.linked_from
    steps, passed_s = member.report.step - step, member.reported_at - at
    if steps < 1 or passed_s <= 0 or member.report.tokens <= tokens:
        return None
    return Usual(steps / passed_s, (member.report.tokens - tokens) / passed_s)


def _before(state: RunState) -> Usual:
    """Of the quickest life that the tape tells of, over all the time since it began; nothing if there was none.

    It makes no difference that others are slower, or were there for a part of that time: what a learner did while no
    syncer was there is told by no tape, and is to be believed of an honest one at once, or the run stands until it is.
    """
    rates = [Usual(0.0, 0.0)]
    for name, known in state.lives.items():
        account, age_s = state.ledger.accounts.get(f"{name}/{known.life}"), state.elapsed_s - known.since
        if account is not None and age_s > 0:
            rates.append(Usual(account.step / age_s, account.tokens / age_s))
    return _at(rates, len(rates) - 1)


def _at(rates: Sequence[Usual], place: int) -> Usual:
    """Each of the two by itself, in order of size."""
    steps, tokens = (sorted(each)[place] for each in zip(*rates, strict=True))
    return Usual(steps, tokens)
