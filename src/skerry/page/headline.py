"""What a run does right now and what it waits for, in a word and a sentence, from its status record.

The word is one of a closed set, by which a page chooses how it looks; the sentence is for people. Both are made here
and nowhere else, so that the page says of a run what its tests say.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from skerry.text import counted, lasting

OLD_S = 5.0  # a syncer writes its status twice a second: by then something is wrong, or it is very busy

Mood = Literal[
    "empty",  # the directory holds no run that can be read
    "new",  # nobody has served it yet
    "starting",
    "away",  # its syncer died and is about to be back
    "waiting",  # for its first learner, or for those it begins with
    "training",
    "stalled",  # it is served, and nobody trains
    "silent",  # it is served, and its syncer has not been heard of for a while
    "closing",
    "finished",
    "paused",
    "died",
]
GONE = ("lost", "left", "away", "expelled")


class Headline(NamedTuple):
    mood: Mood
    word: str  # for the badge beside the run's name
    sentence: str
    waits: str = ""  # what for, in the syncer's own words


def headline(status: dict[str, Any], closed_by: str = "") -> Headline:
    """Of a record as `run.status.status_of` gives it, and the order that closed the run, as its history words it."""
    if status.get("finishing"):
        closed_by = closed_by or "closed by an order"  # its history is not read that far yet
    match status["serving"]:
        case "closed":
            return _finished(status, closed_by)
        case "paused":
            return Headline("paused", "paused", f"Paused at {_share(status)}. {_achieved(status)}")
        case "died":
            said = f"Nobody serves this run: its syncer died at {_share(status)}. Nothing that was merged is lost."
            return Headline("died", "not running", said)
        case "new":
            return Headline("new", "not begun", "The run has been created, and nobody serves it yet.")
        case "starting" | "away" if not status["epoch"] or status["serving"] == "starting":
            said = "The syncer is starting. It reads the tape, then learners can join."
            return Headline("starting", "starting", said)
        case "away":
            said = f"The syncer is gone and is being started again. {_learners(status)} on by themselves meanwhile."
            return Headline("away", "syncer away", said)
    return _served(status, closed_by)


def _finished(status: dict[str, Any], closed_by: str) -> Headline:
    how = f", {closed_by}" if closed_by else ""
    return Headline("finished", "finished", f"The run is finished{how}. {_achieved(status)}")


def _served(status: dict[str, Any], closed_by: str) -> Headline:
    if status["age_s"] > OLD_S and status["phase"] != "closed":
        said = f"The syncer has not been heard of for {lasting(status['age_s'])}. Learners train on meanwhile."
        return Headline("silent", "silent", said)
    if status["phase"] == "closed":
        return _finished(status, closed_by)
    if status["phase"] == "closing":
        why = f"The run is {closed_by}" if closed_by else "The budget is spent"
        return Headline("closing", "closing", f"{why}: the last work is being merged.")
    learners = status["learners"].values()
    present = sum(each["state"] not in GONE for each in learners)
    waits = str(status.get("waiting", ""))
    if not learners:
        how = f"for SKERRY_SYNCER={status['address']} python train.py" if "address" in status else waits
        return Headline("waiting", "no learner yet", "The syncer is ready and waits for its first learner.", how)
    if status["phase"] == "created":
        said = f"{counted(present, 'learner')} here, and nobody has taken a step yet."
        return Headline("waiting", "gathering", said, waits)
    training = sum(each["state"] == "training" for each in learners)
    if not training:
        said = f"Nobody trains at present: of {counted(len(learners), 'learner')} {present} connected."
        return Headline("stalled", "stalled", said, waits)
    return Headline("training", "training", _training(status, training), waits)


def _training(status: dict[str, Any], training: int) -> str:
    known, left_s = len(status["learners"]), _left_s(status)
    who = "1 learner trains" if training == known == 1 else f"{training} of {counted(known, 'learner')} train"
    far = f"{_share(status)} done" + (f", about {lasting(left_s)} left" if left_s else "")
    if status.get("ready", 0) < status.get("quorum", 0):
        return f"{who}; {far}. Nothing is merged before {counted(status['quorum'], 'learner')} are ready."
    return f"{who}; {far}."


def _left_s(status: dict[str, Any]) -> float:
    done, elapsed_s = status["progress"], status["elapsed_s"]
    return float(elapsed_s * (1 - done) / done) if 0 < done < 1 else 0.0


def _share(status: dict[str, Any]) -> str:
    unit, n = next(iter(status.get("budget", {}).items()), ("", 0))
    return f"{100 * status['progress']:.0f} % of {n:,.12g} {unit}" if unit else f"{100 * status['progress']:.0f} %"


def _achieved(status: dict[str, Any]) -> str:
    tokens = status["tokens"]
    return (
        f"{tokens['merged']:,.0f} of {tokens['produced']:,.0f} tokens that learners worked on are in the model, in "
        f"{status['merges']:,} merges."
    )


def _learners(status: dict[str, Any]) -> str:
    count = sum(each["state"] not in GONE for each in status["learners"].values())
    return f"{counted(count, 'learner')} train" if count != 1 else "1 learner trains"
