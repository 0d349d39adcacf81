"""The history of a run, folded out of its tape as it grows: what a page or a report draws, and no more than they can.

    history = History()
    for one in tail(root):  # of `run/tail.py`; None: all that there is was read, so look again a little later
        if one is not None:
            history.take(one.at, one.fact)

The totals are those of the run's own state (`core/state.py`), exact however long it was. What is drawn over time is
kept in series of a bounded number of bins (`run/series.py`); of single rounds and events the newest are kept. So a week
of a run with 256 learners is no larger than its first day.

Seconds, `t`, count from when the run was first served (or from where a pruned tape begins) by the wall clock of its
commits, without the time for which an operator had the run paused. What was before is at 0. They never go back,
whatever that clock did. What the tape does not say, nobody here guesses.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from skerry.algo.fragments import decode_layout
from skerry.core.facts import (
    Committed,
    Discarded,
    EpochStarted,
    Evaluated,
    Fact,
    Injected,
    Kept,
    LifeStarted,
    Ordered,
    Paused,
    PhaseChanged,
    Pruned,
    Restored,
    RolledBack,
    Row,
    RunCreated,
    Sample,
    Sampled,
    Seen,
    SteppedBack,
    Witnessed,
)
from skerry.core.ledger import MERGED, Account, Past
from skerry.core.state import RunState, created
from skerry.node import telemetry
from skerry.node.transitions import closed_by
from skerry.run import evaluations
from skerry.run.facts import history_of
from skerry.run.sense import fact_of, place_of, sensible
from skerry.run.series import How, Series
from skerry.run.tally import data_parallel_bytes, steps_reached
from skerry.store.store import Store
from skerry.text import counted, lasting

BINS_MAX = 512  # of the run's own series
LEARNER_BINS_MAX = 128  # of each learner's, and of each fragment's
ROUNDS_MAX = 512  # the newest, one by one
EVENTS_MAX = 1000  # likewise
EVALUATIONS_MAX = 1000
PAUSES_MAX = 1000
FIGURE_MAX = 1e30  # of a loss: what is larger has diverged
NOTHING: Mapping[str, float] = {}
TOGETHER_S = 60.0  # work given up within this time of the last is one event

MERGES: dict[str, How] = {
    "merged": "last",  # tokens in the model by then
    "tokens": "sum",  # of them in this bin
    "merges": "sum",
    "contributors": "mean",
    "ready": "mean",
    "quorum": "mean",
    "asked": "mean",  # H
    "reached": "mean",  # H as it turned out
    "open_s": "mean",
    "progress": "last",
}
TRAFFIC: dict[str, How] = {"up": "sum", "down": "sum", "data_parallel": "sum"}
LOSS: dict[str, How] = {"loss": "mean", "grad_norm": "mean"}
LEARNER: dict[str, How] = {**LOSS, "tokens": "sum"}
FRAGMENT: dict[str, How] = {"version": "last", "contributors": "mean"}


@dataclass
class Event:
    """One line of the log; what it cost is filled in where the tape says it later."""

    t: float
    at: float  # wall-clock seconds
    kind: str
    who: str
    text: str
    cost_s: float | None = None  # for how long something did not go on,
    cost_tokens: float | None = None  # and work that was done and is in no model


@dataclass
class _Pause:
    """One of the run's, as it was for one learner, which may have trained on without a syncer."""

    t: float
    lasted_s: float
    life: int  # of the learner,
    tokens: int  # and how many of that life were known when it began
    is_worked: bool = False  # what it did next is merged

    def is_reached_by(self, row: Row) -> bool:
        """The row holds the first work that was not known before the pause."""
        return row.life == self.life and row.from_tokens <= self.tokens < row.to_tokens


@dataclass
class _Learner:
    joined: float  # second of its first life
    merges_before: int  # of the run, when it joined
    state: str = "joined"
    since: float = 0.0  # when that began
    merges: int = 0  # that it was in
    merged: int = 0  # tokens x fragments
    merged_at: float | None = None
    away_s: float = 0.0
    discarded: Counter[str] = field(default_factory=Counter)  # tokens x fragments, by fate
    step_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum of the usual ones, and how many
    latest: Sample | None = None  # with its length in `latest_s`
    latest_s: float = 0.0
    sampled: float | None = None
    lost: Event | None = None  # if it is away
    fall: Event | None = None  # the newest such, also when it is back: work that died with its process is booked later
    lost_life: int = 0
    is_out: bool = False  # it was turned out, and has not joined again
    pauses: deque[_Pause] = field(default_factory=lambda: deque(maxlen=PAUSES_MAX))
    series: Series = field(default_factory=lambda: Series(LEARNER_BINS_MAX, LEARNER))


class History:
    """Take every stamped fact of a tape in order; `record` is what they come to."""

    def __init__(self) -> None:
        self.state: RunState | None = None
        self.t = 0.0
        self.at = 0.0
        self._started_at: float | None = None
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._pauses: deque[tuple[float, float]] = deque(maxlen=PAUSES_MAX)  # of the run: when it was, for how long
        self._resumed_s: float | None = None  # how long the pause was on which its syncer followed; None: on a death
        self._closed_by = ""  # the order that finished it, in words
        self._parameters = 0
        self._merges_before = 0  # of which a pruned tape does not tell one by one
        self._training: float | None = None
        self._closing: float | None = None
        self._merged_when_kept: dict[int, int] = {0: 0}
        self._restart: Event | None = None  # of the syncer, until the next merge
        self._last_merge: float | None = None
        self._bytes = [0, 0]  # up and down
        self._given_up: dict[tuple[str, str], Event] = {}  # by learner and fate, the newest event
        self._learners: dict[str, _Learner] = {}
        self._merges = Series(BINS_MAX, MERGES)
        self._traffic = Series(BINS_MAX, TRAFFIC)
        self._loss = Series(BINS_MAX, LOSS)
        self._fragments: list[Series] = []
        self._stages: list[dict[str, Any]] = []
        self._rounds: deque[dict[str, Any]] = deque(maxlen=ROUNDS_MAX)
        self._closes: Counter[str] = Counter()
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._event_count = 0
        self._curve: deque[dict[str, Any]] = deque(maxlen=EVALUATIONS_MAX)

    def __repr__(self) -> str:
        return f"<history of {self.t:.0f} s, {counted(len(self._learners), 'learner')}, {len(self._events)} events>"

    def take(self, at: float, fact: Fact | RunState) -> None:
        """The next one; the first is the run's creation, or a fold where the tape was pruned."""
        if isinstance(fact, RunCreated | RunState):
            self._begin(at, fact)
            return
        assert self.state is not None, "a tape begins with a run"
        self._move(at, fact)
        self._see(getattr(fact, "decision", fact))  # before the state does, which tells how much is new
        self.state.apply(fact)
        self._note(self.state, at, fact)

    # ------------------------------------------------------------------------------------------ taking in

    def _begin(self, at: float, fact: RunCreated | RunState) -> None:
        """Sums there are of what came before a fold; times and single merges there are not."""
        fold = created(fact) if isinstance(fact, RunCreated) else copy.deepcopy(fact)
        self.state, self.at = fold, at
        self._started_at = at if self._started_at is None else self._started_at
        self._merges_before = fold.merges - sum(self._closes.values())
        self._parameters = decode_layout(fold.created.layout).param_count
        self._fragments = self._fragments or [Series(LEARNER_BINS_MAX, FRAGMENT) for _ in fold.fragments]
        accounts: list[Account | Past] = [*fold.ledger.accounts.values(), *fold.ledger.past.values()]
        self._bytes = [sum(a.bytes_up for a in accounts), sum(a.bytes_down for a in accounts)]
        self._merged_when_kept |= {kept.number: fold.ledger.merged for kept in fold.kept}
        for name in self._learners.keys() - fold.lives:  # forgotten in what was pruned before it was read
            self._forget(name)
        for name in fold.lives:
            self._learners.setdefault(name, _Learner(self.t, fold.merges, since=self.t))
        for name in fold.dropped:
            self._learners[name].state, self._learners[name].is_out = "expelled", True
        if fold.is_finishing and not self._closed_by:
            self._closed_by = "closed by an order"  # whose, was pruned
        if fold.phase != "created":
            self._training = self.t if self._training is None else self._training

    def _move(self, at: float, fact: Fact) -> None:
        """The clock; it stands while an operator has the run paused."""
        assert self._started_at is not None and self.state is not None
        if self.state.epoch == 0:  # nobody has served it until now
            self._started_at = at
        if isinstance(fact, EpochStarted):
            self._resumed_s = None if self._paused_at is None else max(0.0, at - self._paused_at)
            if self._paused_at is not None and self._resumed_s is not None:
                self._paused_s += self._resumed_s
                self._pauses.append((self._paused_at, self._resumed_s))
            self._paused_at = None
        self.at = max(self.at, at)
        upto = at if self._paused_at is None else min(at, self._paused_at)
        self.t = max(self.t, upto - self._started_at - self._paused_s)

    def _second(self, at: float) -> float:
        """When something was that is told later: without the pauses before it, and with none of those since."""
        assert self._started_at is not None
        since_s = sum(max(0.0, begun + lasted_s - max(at, begun)) for begun, lasted_s in self._pauses)
        return min(max(0.0, at - self._started_at - (self._paused_s - since_s)), self.t)

    def _see(self, fact: Any) -> None:
        """Traffic, by how far each life's counts are beyond what was known."""
        assert self.state is not None
        ledger = self.state.ledger
        seen: Iterable[Seen] = getattr(fact, "seen", ())
        fresh = [one for one in seen if one.life > ledger.lives_folded(one.learner)]
        known = [(one, ledger.account(one.learner, one.life)) for one in fresh]
        up = sum(max(0, one.bytes_up - account.bytes_up) for one, account in known)
        down = sum(max(0, one.bytes_down - account.bytes_down) for one, account in known)
        steps = sum(max(0, one.step - account.step) for one, account in known)
        if up or down or steps:
            self._bytes = [self._bytes[0] + up, self._bytes[1] + down]
            parallel = data_parallel_bytes(self._parameters, len(self._learners), steps)
            self._traffic.add(self.t, up=up, down=down, data_parallel=parallel)

    def _note(self, state: RunState, at: float, fact: Fact) -> None:
        match fact:
            case Committed():
                self._merge(state, at, fact)
            case Sampled():
                for sample in fact.samples:
                    self._sample(sample)
            case LifeStarted():
                self._join(state, at, fact)
            case Witnessed():
                self._witness(state, at, fact)
            case Discarded():
                self._discard(at, fact.rows)
            case EpochStarted() if fact.epoch > 1:
                self._restarted(state, at, fact)
            case Paused():
                self._paused_at = at
                self._say(at, "pause", "", "the run was paused" + (f" by an order of {fact.by}" if fact.by else ""))
            case Ordered():
                self._order(at, fact)
            case PhaseChanged():
                self._phase(at, fact)
            case Kept():
                self._merged_when_kept[fact.number] = state.ledger.merged
                self._say(at, "kept", "", f"version {fact.number} of the whole model is kept for good")
            case RolledBack():
                self._roll_back(state, at, fact)
            case SteppedBack():
                self._fragments[fact.fragment].add(self.t, version=fact.version)
            case Pruned():
                self._say(at, "pruned", "", "what lay before was removed from the tape")
            case Restored():
                self._say(at, "restored", "", f"fragment {fact.fragment} was restored from {fact.source}")
            case Injected():
                self._inject(fact)
            case Evaluated():
                self._evaluate(at, fact)

    def _merge(self, state: RunState, at: float, fact: Committed) -> None:
        decision, t = fact.decision, self.t
        merged = [row for row in decision.rows if row.fate == MERGED]
        tokens = sum(row.tokens for row in merged) / len(state.fragments)
        reached = steps_reached(decision)
        figures: dict[str, float] = {"contributors": len(merged), "ready": decision.ready, "quorum": decision.quorum}
        figures |= {"asked": decision.every, "reached": reached, "open_s": decision.open_s}
        totals = {"merged": state.ledger.merged / len(state.fragments), "progress": decision.progress}
        self._merges.add(t, tokens=tokens, merges=1, **totals, **figures)
        self._fragments[decision.fragment].add(t, version=decision.version, contributors=len(merged))
        self._closes[decision.reason] += 1
        took = fact.took
        closed = t - (took.wait_s + took.merge_s + took.put_s + took.taken_s if took else 0.0)
        place = {"fragment": decision.fragment, "version": decision.version, "stage": decision.stage}
        times = {"opened": max(0.0, closed - decision.open_s), "closed": closed, "committed": t}
        self._rounds.append({**place, **times, "why": decision.reason, "tokens": tokens, **figures})
        if not self._stages or self._stages[-1]["stage"] != decision.stage:
            self._stages.append({"stage": decision.stage, "t": t})
            self._say(
                at, "stage", "", f"the {decision.stage} stage began" if decision.stage else "the last work is merged"
            )
        if self._restart is not None and self._last_merge is not None:
            self._restart.cost_s, self._restart = t - self._last_merge, None
        self._last_merge = t
        for row in merged:
            one = self._learners[row.learner]
            one.merges, one.merged, one.merged_at = one.merges + 1, one.merged + row.tokens, t
            for pause in one.pauses:
                pause.is_worked = pause.is_worked or pause.is_reached_by(row)
        self._discard(at, [row for row in decision.rows if row.fate != MERGED])

    def _sample(self, sample: Sample) -> None:
        one, t = self._learners[sample.learner], self.t
        one.latest_s = t - max(one.joined if one.sampled is None else one.sampled, one.since if one.lost else 0.0)
        one.latest, one.sampled = sample, t
        if sample.step_s:
            one.step_s = [one.step_s[0] + statistics.median(sample.step_s), one.step_s[1] + 1]
        finite = {name: value for name in LOSS if (value := _finite(getattr(sample, name))) is not None}
        one.series.add(t, **finite, tokens=sample.tokens)
        if finite:
            self._loss.add(t, max(1, sample.tokens), **finite)

    def _join(self, state: RunState, at: float, fact: LifeStarted) -> None:
        name = fact.learner
        for gone in fact.forgotten:
            self._forget(gone)
        if name not in self._learners:
            self._learners[name] = _Learner(self.t, state.merges, since=self.t)
            self._say(at, "join", name, f"{name} joined")
            return
        one = self._learners[name]
        if one.is_out and one.fall is not None:
            one.fall.text += f", for {lasting(self.t - one.fall.t)}"
        elif one.lost is None and not one.is_out:  # nobody saw it go: the syncer was away itself
            one.lost = self._say(at, "lost", name, f"{name} was gone when its next process came")
            one.fall, one.lost_life, one.since = one.lost, fact.life - 1, self.t
        one.state, one.is_out = "joined", False
        self._say(at, "join", name, f"{name} came back as another process, its life {fact.life}")

    def _forget(self, name: str) -> None:
        """It made way in the books without having worked: it has no row, and is in no sum. What the log says stays."""
        self._learners.pop(name, None)
        for key in [key for key in self._given_up if key[0] == name]:
            del self._given_up[key]

    def _witness(self, state: RunState, at: float, fact: Witnessed) -> None:
        one, name = self._learners[fact.learner], fact.learner
        if fact.what == "stepping":
            self._back(one, name, fact.life)
            one.state, one.since = "training", self.t
        elif fact.what == "expelled":
            if not one.is_out:  # else an order said so
                self._turn_out(one, name, self._say(at, "expelled", name, f"{name} was turned out"))
        elif not one.is_out:
            is_settled = state.ledger.is_settled(name, fact.life)
            lost = "was lost, with all its work settled" if is_settled else "was lost, with work that is not merged"
            words = "left, and all its work is settled" if fact.what == "left" else lost
            one.state, one.since = fact.what, self.t
            one.lost = self._say(at, fact.what, name, f"{name} {words}")
            one.fall, one.lost_life = one.lost, fact.life

    def _back(self, one: _Learner, name: str, life: int) -> None:
        """It steps again: for how long it was away is known now."""
        if one.lost is None:
            return
        away_s = self.t - one.lost.t
        if life == one.lost_life:
            one.lost.text = f"{name}'s link was gone for {lasting(away_s)}, while it trained on"
        else:
            one.lost.text += f"; its next process stepped {lasting(away_s)} later"
            one.lost.cost_s = away_s
            one.away_s += away_s
        one.lost = None

    def _discard(self, at: float, rows: Iterable[Row]) -> None:
        """Work that is in no model, with whoever's failure it was."""
        assert self.state is not None
        for row in rows:
            tokens = row.tokens / len(self.state.fragments)
            one = self._learners[row.learner]
            one.discarded[row.fate] += row.tokens
            event = self._given_up.get((row.learner, row.fate))
            if row.fate in ("died", "expelled") and one.lost_life == row.life:
                event = one.fall
            elif event is None or self.t - event.t > TOGETHER_S:
                words = {
                    "fast-forward": "gave work up and went on from the model",
                    "died": "lost work with its process",
                }
                said = f"{row.learner} {words.get(row.fate, f'has work that is not merged: {row.fate}')}"
                event = self._say(at, "given up", row.learner, said)
                self._given_up[row.learner, row.fate] = event
            assert event is not None, "whoever was lost has fallen"
            event.cost_tokens = (event.cost_tokens or 0.0) + tokens

    def _restarted(self, state: RunState, at: float, fact: EpochStarted) -> None:
        if self._resumed_s is not None:
            self._say(at, "resume", "", "the run goes on")
            for name, known in state.lives.items():
                tokens = state.ledger.account(name, known.life).tokens
                self._learners[name].pauses.append(_Pause(self.t, self._resumed_s, known.life, tokens))
        else:
            said = f"the syncer died and another process took over, epoch {fact.epoch}"
            self._restart = self._say(at, "restart", "", said)

    def _phase(self, at: float, fact: PhaseChanged) -> None:
        closing = f"{self._closed_by or 'the budget is spent'}: the run closes"
        words = {"training": "training began", "closing": closing, "closed": self._closed_by or "closed"}
        if fact.phase == "training" and self._training is None:
            self._training = self.t
        if fact.phase == "closing":
            self._closing = self.t
        self._say(at, "phase", "", words.get(fact.phase, fact.phase))

    def _order(self, at: float, fact: Ordered) -> None:
        event = self._say(at, "order", fact.learner, _in_words(fact))
        match fact.verb:
            case "finish":
                self._closed_by = closed_by(fact)
            case "drop":
                self._turn_out(self._learners[fact.learner], fact.learner, event)
            case "readmit":
                self._learners[fact.learner].state = "left"
                self._learners[fact.learner].since = self.t

    def _turn_out(self, one: _Learner, name: str, event: Event) -> None:
        """It is out by somebody's will from here on: a failure before that ends here, and what follows is none."""
        if one.lost is not None:
            one.lost.cost_s = self.t - one.lost.t
            one.lost.text += f"; it was turned out {lasting(one.lost.cost_s)} later"
            one.away_s += one.lost.cost_s
        assert self.state is not None
        one.lost, one.is_out = None, True
        one.fall, one.lost_life = event, self.state.lives[name].life  # what it had pending goes with the order
        one.state, one.since = "expelled", self.t

    def _roll_back(self, state: RunState, at: float, fact: RolledBack) -> None:
        event = self._say(at, "rollback", "", f"the run was taken back to kept version {fact.number}")
        if (then := self._merged_when_kept.get(fact.number)) is not None:
            event.cost_tokens = (state.ledger.merged - then) / len(state.fragments)

    def _inject(self, fact: Injected) -> None:
        """It was written when the run had ended; it was done at its own time."""
        said = f"fault on purpose: {fact.kind} {fact.target} {fact.detail}".strip()
        self._say(fact.at, "fault", fact.target, said).t = self._second(fact.at)

    def _evaluate(self, at: float, fact: Evaluated) -> None:
        """Put on the tape when the run has closed; found at its own time."""
        t = self._second(fact.at)
        self._curve.append(evaluations.shown(fact) | {"t": t})
        figures = ", ".join(f"{name} {value:.4g}" for name, value in fact.figures.items() if value is not None)
        self._say(fact.at, "evaluation", "", f"evaluated: {figures or 'not finite'}").t = t

    def _say(self, at: float, kind: str, who: str, text: str) -> Event:
        self._event_count += 1
        self._events.append(Event(self.t, at, kind, who, text))
        return self._events[-1]

    # ------------------------------------------------------------------------------------------ what it comes to

    def record(self) -> dict[str, Any]:
        """All of it as one plain dict, ready for JSON; `{}` before the tape has said anything.

        The keys of `node/telemetry.py` `recorded`, and more. Times are seconds `t`, but for those named `at`.
        """
        if self.state is None:
            return {}
        state = self.state
        steps = state.ledger.steps
        parallel = data_parallel_bytes(self._parameters, len(self._learners), steps)
        return telemetry.recorded(state, self.at) | {
            "started_at": self._started_at,
            "t": self.t,
            "training_t": self._training,
            "closing_t": self._closing,
            "closed_by": self._closed_by,
            "is_paused": self._paused_at is not None,
            "paused_s": self._paused_s,
            "is_pruned": self._merges_before > 0,
            "parameters": self._parameters,
            "fragments": len(state.fragments),
            "steps": steps,
            "merges_alone": state.merges_alone,
            "ready_mean": state.ready / state.merges if state.merges else 0.0,
            "goodput": self.goodput(),
            "traffic": {"up": self._bytes[0], "down": self._bytes[1], "data_parallel": parallel},
            "closes": dict(sorted(self._closes.items())),
            "stages": self._stages,
            "curve": list(self._curve),
            "series": {
                "merges": self._merges_over_time(),
                "traffic": self._traffic.record(is_dense=True),
                "loss": self._loss.record(),
            },
            "map": [series.record() for series in self._fragments],
            "rounds": list(self._rounds),
            "learners": {name: self._learner(name) for name in sorted(self._learners)},
            "events": [_plain(event) for event in sorted(self._events, key=lambda event: event.t)],
            "events_left_out": self._event_count - len(self._events),
        }

    def _learner(self, name: str) -> dict[str, Any]:
        assert self.state is not None
        one, ledger = self._learners[name], self.state.ledger
        life = self.state.lives[name].life
        done = ledger.before(name, life + 1)
        books: list[Account | Past] = [ledger.account(name, n) for n in range(ledger.lives_folded(name) + 1, life + 1)]
        books += [ledger.past[name]] if name in ledger.past else []
        all_merged = sum(each.merged for each in self._learners.values())
        merges = self.state.merges - one.merges_before
        state = self._state_of(one)
        per, latest = len(self.state.fragments), one.latest
        is_fresh = latest is not None and state == "training"
        return {
            "life": life,
            "index": self.state.lives[name].index,
            "state": state,
            "since_t": one.since,
            "joined_t": one.joined,
            "away_s": one.away_s,
            "steps": done.steps,
            "tokens": done.tokens,
            "bytes_up": sum(each.bytes_up for each in books),
            "bytes_down": sum(each.bytes_down for each in books),
            "step_s": one.step_s[0] / one.step_s[1] if one.step_s[1] else None,
            "tokens_per_s": latest.tokens / one.latest_s if latest and is_fresh and one.latest_s > 0 else 0.0,
            "loss": _finite(latest.loss) if latest else None,
            "grad_norm": _finite(latest.grad_norm) if latest else None,
            "merges": one.merges,
            "merged_t": one.merged_at,
            "participation": one.merges / merges if merges else 0.0,
            "merged": one.merged / per,
            "merged_share": one.merged / all_merged if all_merged else 0.0,
            "discarded": {fate: n / per for fate, n in sorted(one.discarded.items())},
            "series": one.series.record(),
        }

    def _state_of(self, one: _Learner) -> str:
        """Who was there when the run was closed or paused is not, as in the status of such a run."""
        assert self.state is not None
        if one.state not in ("training", "joined"):
            return one.state
        return "finished" if self.state.phase == "closed" else "away" if self._paused_at is not None else one.state

    def _merges_over_time(self) -> dict[str, Any]:
        series = self._merges.record(is_dense=True)
        spans = [(t, t + series["width_s"]) for t in series["t"]]
        rates = self._rates()
        possible = [sum(self._capacity(start, end, rates)) for start, end in spans]
        shares = zip(series["tokens"], possible, strict=True)
        return series | {"goodput": [tokens / most if most else None for tokens, most in shares]}

    def goodput(self, lost_s: Mapping[str, float] = NOTHING) -> float | None:
        """Tokens merged, of those that all learners would have made stepping all the time since they first joined.

        Speeds are those that were measured on the way. None of the learners could have made less than is merged of it:
        usual speeds are estimates, and may be too low. `lost_s` are seconds of a learner that are not held against it.
        None where nobody has said how fast it is.
        """
        assert self.state is not None
        rates = self._rates()
        without = [rate * lost_s.get(name, 0.0) for name, (rate, _) in zip(self._learners, rates, strict=True)]
        capacity = [
            max(0.0, most - less) for most, less in zip(self._capacity(0.0, math.inf, rates), without, strict=True)
        ]
        if not any(capacity):
            return None
        merged = [one.merged / len(self.state.fragments) for _, one in rates]
        return sum(merged) / sum(map(max, merged, capacity))

    def _capacity(self, start: float, end: float, rates: Sequence[tuple[float, _Learner]]) -> list[float]:
        """Tokens that each could have made from `start` to `end`: while it trained, at its usual speed.

        A pause is no time of the run, but of a learner that trained on through it, to the model's good.
        """
        if self._training is None:
            return [0.0] * len(rates)
        first, last = max(start, self._training), min(end, self.t if self._closing is None else self._closing)
        paused = [sum(p.lasted_s for p in one.pauses if p.is_worked and start <= p.t < end) for _, one in rates]
        times = [max(0.0, last - max(first, one.joined)) for _, one in rates]
        return [rate * (s + more_s) for (rate, _), s, more_s in zip(rates, times, paused, strict=True)]

    def _rates(self) -> list[tuple[float, _Learner]]:
        """Each learner with its usual speed; 0 of one that is not known to have stepped."""
        return [(self._rate(name), one) for name, one in self._learners.items()]

    def _rate(self, name: str) -> float:
        """Tokens a second when nothing disturbs: the usual time of its steps, by the median of each sample."""
        assert self.state is not None
        one = self._learners[name]
        done = self.state.ledger.before(name, self.state.lives[name].life + 1)
        usual_s = one.step_s[0] / one.step_s[1] if one.step_s[1] else 0.0
        return done.tokens / done.steps / usual_s if done.steps and usual_s else 0.0


def history_in(store: Store) -> History:
    """All that a tape says, as far as it goes."""
    history = History()
    for record in history_of(store):
        fact = fact_of(store.root, record)
        if history.state is None or not isinstance(fact, RunState):
            with sensible(partial(place_of, store.root, record)):
                history.take(record.at, fact)
    return history


def _finite(value: float | None) -> float | None:
    """What can be averaged and drawn; a learner may say any number."""
    return value if value is not None and abs(value) <= FIGURE_MAX else None


def _in_words(fact: Ordered) -> str:
    """Who ordered what, with what each key was and is."""
    keys = ", ".join(f"{one.key} from {one.before} to {one.after}" for one in fact.changes)
    match fact.verb:
        case "set":
            return f"{fact.by} set {keys}"
        case "extend":
            spent = f"{100 * fact.progress:.0f} % of it is spent, where it was {100 * fact.progress_before:.0f} %"
            return f"{fact.by} changed the budget, {keys}: {spent}"
        case "drop":
            return f"{fact.by} turned {fact.learner} out"
        case "readmit":
            return f"{fact.by} let {fact.learner} in again"
        case "finish":
            return f"{fact.by} finished the run, at {100 * fact.progress:.0f} % of its budget"


def _plain(event: Event) -> dict[str, Any]:
    """Without what is not known."""
    about = {"t": event.t, "at": event.at, "kind": event.kind, "who": event.who, "text": event.text}
    costs = {"cost_s": event.cost_s, "cost_tokens": event.cost_tokens}
    return about | {name: value for name, value in costs.items() if value is not None}
