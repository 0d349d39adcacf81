"""Carrying an operator's order out: what it changes, or why it is refused.

    carried = carry_out(order, state, by, elapsed_s)

One function for every way that an order can come: over the wire to the machine that serves the run, or to a directory
that nobody serves. It changes nothing: what is to be changed is a fact, which the caller makes durable and applies
before anybody hears of the outcome. Words for a person are made here, so that they are the same on both ways.

An order that asks for what is so already is done, without a fact: whoever did not hear the answer may give it again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from skerry import config as configs
from skerry.config import Config, Run
from skerry.core.facts import Change, Ordered
from skerry.core.messages import (
    DropLearner,
    ExtendRun,
    FinishRun,
    Order,
    Outcome,
    PauseRun,
    ReadmitLearner,
    SetKeys,
)
from skerry.core.schedule import budget_of
from skerry.core.state import RunState
from skerry.core.vocabulary import Verb
from skerry.errors import ConfigError, one_line
from skerry.text import counted, near

NAMES_SHOWN = 8
FORK = "skerry fork RUN DIR begins another from its model"


class Carried(NamedTuple):
    """What an order comes to: the fact to write, if it changes anything, and what its giver is told."""

    outcome: Outcome
    fact: Ordered | None = None


class _Refused(Exception):
    """Why an order is not carried out, in one line."""


def carry_out(order: Order, state: RunState, by: str, elapsed_s: float) -> Carried:
    try:
        _check_open(order, state)
        match order:
            case PauseRun():
                return _done("this syncer ends, and the run goes on when it is started again", {})
            case FinishRun():
                return _finished(state, by, elapsed_s)
            case SetKeys():
                return _set(order, state, by, elapsed_s)
            case ExtendRun():
                return _extended(order, state, by, elapsed_s)
            case DropLearner():
                return _dropped(order.learner, state, by, elapsed_s)
            case ReadmitLearner():
                return _readmitted(order.learner, state, by, elapsed_s)
    except (_Refused, ConfigError) as error:
        return refused(str(error))


def refused(why: str) -> Carried:
    return Carried(Outcome(False, one_line(why)))


def _done(text: str, record: dict[str, Any], fact: Ordered | None = None) -> Carried:
    return Carried(Outcome(True, one_line(text), msgspec.json.encode({**record, "changed": fact is not None})), fact)


def _check_open(order: Order, state: RunState) -> None:
    """Of a run that is closed nothing changes any more, and of one that closes only who is waited for."""
    if state.phase == "closed":
        raise _Refused(f"the run is closed, and its model is final: {FORK}")
    is_closing = state.phase == "closing" or state.is_finishing
    if is_closing and isinstance(order, SetKeys | ExtendRun):
        raise _Refused(f"the run is closing, and its learners hand in their last work: once it is closed, {FORK}")


def _finished(state: RunState, by: str, elapsed_s: float) -> Carried:
    said = f"at {state.progress:.1%} of its budget, after {counted(state.merges, 'merge')}"
    record = {"progress": state.progress, "merges": state.merges}
    if state.phase == "closing" or state.is_finishing:
        return _done(f"the run is closing already, {said}", record)
    if state.phase == "created":
        raise _Refused("nobody has taken a step yet, so there is nothing to finish: skerry stop ends the syncer")
    text = f"the run closes now, {said}: its learners hand in their last work and are told to end"
    return _done(text, record, _ordered("finish", state, by, elapsed_s))


def _set(order: SetKeys, state: RunState, by: str, elapsed_s: float) -> Carried:
    before = configs.decode(state.config)
    after = configs.changed(before, order.settings.items())
    fact, words = _reconfigured("set", before, after, state, by, elapsed_s)
    if fact is None:
        return _done(f"nothing to change: {_in_words(order.settings.items())}", {"changes": {}})
    return _done(f"in force from now on: {words}", {"changes": _pairs(before, after)}, fact)


def _extended(order: ExtendRun, state: RunState, by: str, elapsed_s: float) -> Carried:
    before = configs.decode(state.config)
    unit = unit_of(before.run)
    given = {name: value for name in ("tokens", "steps", "minutes") if (value := getattr(order, name))}
    if list(given) != [unit]:
        said = " and ".join(f"--{name}" for name in given) or "nothing"
        raise _Refused(f"the run's budget is in {unit}, and {said} was given: say --{unit} N, the whole of it")
    after = configs.validate_change(before, replace(before, run=replace(before.run, **given)))
    spent = state.progress * getattr(before.run, unit)
    if budget_of(after.run) <= state.progress * budget_of(before.run):
        raise _Refused(f"{given[unit]:,.12g} {unit} are no more than the {spent:,.12g} that are spent: give more")
    fact, words = _reconfigured("extend", before, after, state, by, elapsed_s)
    record = {"changes": _pairs(before, after), "progress": fact.progress if fact else state.progress}
    if fact is None:
        return _done(f"nothing to change: the budget is {given[unit]:,g} {unit}", record)
    text = f"the budget is {words}; {fact.progress:.1%} of it is spent, where it was {fact.progress_before:.1%}"
    return _done(text, record, fact)


def _reconfigured(
    verb: Verb, before: Config, after: Config, state: RunState, by: str, elapsed_s: float
) -> tuple[Ordered | None, str]:
    changes = configs.changes(before, after)
    if not changes:
        return None, ""
    told = tuple(Change(key, _json(was), _json(now)) for key, was, now in changes)
    progress = state.progress * (budget_of(before.run) / budget_of(after.run)) if verb == "extend" else state.progress
    fact = Ordered(
        verb,
        by,
        elapsed_s,
        config=configs.encode(after),
        changes=told,
        progress_before=state.progress,
        progress=progress,
    )
    return fact, ", ".join(f"{key} = {_json(now)} (it was {_json(was)})" for key, was, now in changes)


def _dropped(learner: str, state: RunState, by: str, elapsed_s: float) -> Carried:
    if learner in state.dropped:
        return _done(f"{learner} is out already", {"learner": learner})
    if learner not in state.lives:
        known = sorted(state.lives)
        there = near(learner, known[:NAMES_SHOWN]) if known else "nobody has"
        raise _Refused(f"no learner {learner!r:.80} has joined this run: {there}")
    text = f"{learner} is turned out, and what it has not handed in is booked so; --readmit lets it in again"
    left, quorum = len(state.lives.keys() - state.dropped.keys() - {learner}), configs.decode(state.config).sync.quorum
    if isinstance(quorum, int) and left < quorum:
        advice = f", or skerry set RUN sync.quorum={left}" if left else ""
        text += (
            f"; {counted(left, 'learner')} that ever joined may take part now, for a quorum of {quorum}: nothing is "
            f"merged until others join{advice}"
        )
    record = {"learner": learner, "left": left, "quorum": quorum}
    return _done(text, record, _ordered("drop", state, by, elapsed_s, learner))


def _readmitted(learner: str, state: RunState, by: str, elapsed_s: float) -> Carried:
    if learner in state.dropped:
        fact = _ordered("readmit", state, by, elapsed_s, learner)
        return _done(f"{learner} may join again, as a new process", {"learner": learner}, fact)
    if learner in state.lives:
        return _done(f"{learner} is not kept out by any order", {"learner": learner})
    raise _Refused(f"no learner {learner!r:.80} was dropped: {', '.join(sorted(state.dropped)) or 'nobody'} is out")


def _ordered(verb: Verb, state: RunState, by: str, elapsed_s: float, learner: str = "") -> Ordered:
    return Ordered(verb, by, elapsed_s, learner, progress_before=state.progress, progress=state.progress)


def unit_of(run: Run) -> str:
    return "minutes" if run.minutes else "tokens" if run.tokens else "steps"


def _pairs(before: Config, after: Config) -> dict[str, Any]:
    return {key: {"before": was, "after": now} for key, was, now in configs.changes(before, after)}


def _in_words(settings: Any) -> str:
    return ", ".join(f"{key} is {_json(value)}" for key, value in settings)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
