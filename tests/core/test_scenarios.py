"""Golden transcripts: scenarios/*.txt hold commands, each with everything the syncer ordered in answer.

SKERRY_REWRITE=1 writes the transcripts anew; the diff is what is reviewed. Commands (steps count inner steps):

    config KEY=VALUE ...      settings of [sync]; `steps` is the budget
    join A [process] [life]   a learner says hello
    report A STEP [state]     its whole position, having adopted what was published to it
    contribute A P [STEP]     its work on fragment P up to STEP (its last report) arrives
    again A P                 the last contribution of A to P arrives once more
    depart A                  its link is gone
    expel A, readmit A        an operator turns it out, or lets it come again
    wait SECONDS              time passes, in ticks of half a second
    crash                     the syncer's process ends and another takes over
    deaf, hearing             learners do not, or do again, adopt what is published
    obeying                   learners know of orders, and need no pull
    ledger                    the books
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.hand import Desk, config_of
from skerry.core.events import (
    Checkpoint,
    Dismiss,
    Drop,
    Expelled,
    Finish,
    Hold,
    Merge,
    Publish,
    Readmitted,
    Record,
    Send,
)
from skerry.core.facts import (
    Checkpointed,
    Committed,
    Decision,
    Discarded,
    LifeStarted,
    PhaseChanged,
    Row,
    Sampled,
    Witnessed,
)
from skerry.core.messages import FULL, Contribution, Done, Pull, Rejected, Stop, Welcome

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_scenario(file):
    written = file.read_text()
    played = play(written)
    if os.environ.get("SKERRY_REWRITE"):
        file.write_text(played)
    else:
        assert played == written, "SKERRY_REWRITE=1 writes it anew; then read the diff"


def play(text: str) -> str:
    """The same text with what the commands lead to below each."""
    stage, out = Stage(), []
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            out.append(line)
        elif not line.startswith(" "):
            out.append(line)
            out += [f"    {said}" for said in stage.do(*line.split())]
    return "\n".join(out) + "\n"


class Stage:
    def __init__(self) -> None:
        self.desk = Desk()
        self.last: dict[tuple[str, int], Contribution] = {}

    def do(self, verb: str, *words: str) -> list[str]:
        desk = self.desk
        match verb, words:
            case "config", _:
                values = {k: float(v) if "." in v else int(v) for k, v in (w.split("=") for w in words)}
                steps = values.pop("steps", 10**6)
                self.desk = Desk(config_of({"steps": steps, "learners": 2}, **values))
                return []
            case "join", (name, *rest):
                return said(desk.join(name, rest[0] if rest else "", int(rest[1]) if rest[1:] else 0))
            case "report", (name, step, *state):
                return said(desk.report(name, int(step), *state))
            case "contribute", (name, p, *to):
                c = self.last[name, int(p)] = desk.contribution(name, int(p), int(to[0]) if to else None)
                return said(desk.arrive(c))
            case "again", (name, p):
                return said(desk.arrive(self.last[name, int(p)]))
            case "depart", (name,):
                return said(desk.depart(name))
            case "readmit", (name,):
                return said(desk.step(Readmitted(name)))
            case "expel", (name,):
                return said(desk.step(Expelled(name, "its key was revoked")))
            case "wait", (seconds,):
                return said(desk.wait(float(seconds)))
            case "crash", ():
                return said(desk.start())
            case (("deaf" | "hearing"), ()):
                desk.adopts = verb == "hearing"
                return []
            case "obeying", ():
                desk.obeys = True
                return []
            case "ledger", ():
                return books(desk)
        raise AssertionError(f"no such command: {verb} {words}")


def said(actions: list[object]) -> list[str]:
    return [line for action in actions for line in describe(action)] or ["nothing"]


def describe(action: object) -> list[str]:
    match action:
        case Record(fact):
            return [f"record {describe_fact(fact)[0]}", *describe_fact(fact)[1:]]
        case Send():
            return [f"send {action.learner}.{action.life} {describe_message(action.message)}"]
        case Hold():
            return [f"hold {action.learner}'s contribution {action.seq} to fragment {action.fragment}"]
        case Drop():
            return [f"drop {action.learner}'s contribution to fragment {action.fragment}"]
        case Publish():
            base = "whole" if action.base_version == FULL else f"on {action.base_version}"
            settled = f"settled {action.settled_seq} up to step {action.settled_step}"
            to = f"{action.learner}.{action.life}"
            what = f"publish fragment {action.fragment} version {action.version} ({base}) to {to}, {settled}"
            return [f"{what}, order: at {action.order}" if action.order else what]
        case Merge():
            d = action.decision
            how = f"{d.stage or 'closing'}: {d.rule}, {d.outer} {d.lr:g}/{d.momentum:g}"
            head = f"merge fragment {d.fragment} to version {d.version} ({describe_reason(d)}; {how})"
            return [head, *(f"  {describe_row(row)}" for row in d.rows)]
        case Dismiss():
            return [f"dismiss {action.learner}.{action.life}: {action.text}"]
        case Finish():
            return [f"finish: {action.reason}"]
        case Checkpoint():
            return [f"checkpoint fragment {action.fragment}"]
    raise AssertionError(action)


def describe_reason(decision: Decision) -> str:
    """In a round's merge it counts who is in."""
    count = len(decision.parts)
    match decision.reason:
        case "all in":
            return f"all {count} in"
        case "everyone is leaving" | "the last work":
            return decision.reason
    return f"{count} in, {decision.reason}"


def describe_fact(fact: object) -> list[str]:
    match fact:
        case LifeStarted():
            return [f"life {fact.life} of {fact.learner} (process {fact.process})"]
        case Discarded():
            return ["discarded", *(f"  {describe_row(row)}" for row in fact.rows)]
        case PhaseChanged():
            return [f"phase {fact.phase}"]
        case Committed():
            return [f"fragment {fact.decision.fragment} version {fact.decision.version}"]
        case Witnessed():
            return [f"{fact.learner}.{fact.life} is {fact.what}"]
        case Sampled():
            return ["samples"]
        case Checkpointed():
            return [f"checkpoint of fragment {fact.fragment} version {fact.version}"]
    raise AssertionError(fact)


def describe_message(message: object) -> str:
    match message:
        case Welcome():
            return f"welcome, epoch {message.epoch}, {message.prior_steps} steps in earlier lives"
        case Pull():
            kind = "lossless pull" if message.lossless else "pull"
            return f"{kind} of fragment {message.fragment}, settled {message.settled_seq}"
        case Rejected():
            return f"rejected {message.seq} of fragment {message.fragment}: {message.reason}"
        case Stop():
            return "stop"
        case Done():
            return "done"
    raise AssertionError(message)


def describe_row(row: Row) -> str:
    seq = f" (contribution {row.seq})" if row.seq else ""
    return f"{row.learner}.{row.life} fragment {row.fragment} ({row.from_step}, {row.to_step}] {row.fate}{seq}"


def books(desk: Desk) -> list[str]:
    totals = desk.machine.state.ledger.totals()
    discarded = ", ".join(f"{n} {fate}" for fate, n in totals.discarded.items()) or "0"
    return [
        f"produced {totals.produced} = merged {totals.merged} + discarded {discarded} + pending {totals.pending}",
        f"waiting {desk.machine.waiting}",
    ]
