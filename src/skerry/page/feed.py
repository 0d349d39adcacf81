"""What is known of a run at present, by looking at its directory again and again: the one fold for all viewers.

    record = feed.look()     plain data: a headline, the status, and the history of the run

It reads and changes nothing, and looks closer only where something has changed since it last looked: the status file,
who holds the run, or the end of the tape. What it cannot read it says in the record (`trouble`), and looks again. What
learners and syncers had a hand in is text of bounded length by then (`node/record.py`), and shown as text.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from pathlib import Path
from typing import Any

from skerry import __version__
from skerry.errors import SkerryError, StoreError, one_line
from skerry.page.headline import headline
from skerry.run.history import History
from skerry.run.last_words import STATUS
from skerry.run.sense import sensible
from skerry.run.status import holders_of, status_of
from skerry.run.tail import tail

READ_S = 0.5  # of a look that are spent on a long tape; the rest is for the next look
ROUNDS_SHOWN = 120
EVENTS_SHOWN = 200
JOINS_APART = 8  # that are told one by one
DIGITS = 4  # that a number which is only looked at has
HEARD_S = 5.0  # a learner that was heard of since then was heard of just now
SHOWN = {  # of a learner
    "life", "state", "steps", "tokens", "tokens_per_s", "step_s", "round_steps", "unmerged_steps", "loss",
    "bytes_up", "bytes_down", "heard_s",
}  # fmt: skip
LEFT_OUT = {"threads", "turns", "pid", "supervisor", "is_here", "at", "starting_s"}  # of use to others


class Feed:
    """Owned by one thread at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._seen: object = None  # what the status below was read from
        self._status: dict[str, Any] = {}
        self._begin_tape()

    @property
    def is_behind(self) -> bool:
        """There is more on the tape than was read of it so far."""
        return self._is_behind

    def look(self) -> dict[str, Any]:
        """The record as of now."""
        about = {"skerry": __version__, "folder": one_line(str(self.root.absolute()))}
        try:
            status = self._look_at_status()
            self._read_tape()
            return about | {
                "headline": headline(status, self._history.get("closed_by", ""))._asdict(),
                "status": _shown(status),
                "history": self._history,
                "is_behind": self._is_behind,
                "disk_free_bytes": shutil.disk_usage(self.root).free >> 20 << 20,
            }
        except (SkerryError, OSError) as error:
            self._seen = None
            self._begin_tape()
            said = {"mood": "empty", "word": "no run", "sentence": "There is no run here that could be shown."}
            return about | {"headline": said | {"waits": ""}, "trouble": one_line(str(error))}

    def _look_at_status(self) -> dict[str, Any]:
        """A tape without a syncer may be long, so it is read again only when something has changed."""
        seen = (holders_of(self.root), _stamp(self.root / STATUS), _newest(self.root / "tape"))
        if seen != self._seen or not self._status:
            self._status, self._seen = status_of(self.root), seen
            self._said_at = time.time() - self._status["age_s"]
        return self._status | {"age_s": max(0.0, time.time() - self._said_at)}

    # ------------------------------------------------------------------------------------------ the tape

    def _begin_tape(self) -> None:
        self._tape, self._fold, self._is_behind = tail(self.root), History(), True
        self._history: dict[str, Any] = {}

    def _read_tape(self) -> None:
        """What came since the last look, as far as there is time for it."""
        until, is_new = time.monotonic() + READ_S, False
        with sensible(lambda: self._tape.place):
            for one in self._tape:
                self._is_behind = one is not None
                if one is None:
                    break
                self._fold.take(one.at, one.fact)
                is_new = True
                if time.monotonic() > until:
                    break
            else:
                raise StoreError(f"{self.root}: the tape was read to an end that it does not have")
            if is_new:
                self._history = _drawn(self._fold)


def _drawn(fold: History) -> dict[str, Any]:
    """What the page draws of a history."""
    record = fold.record()
    names = ("t", "goodput", "traffic", "merges_alone", "closes", "curve", "series", "map", "parameters", "started_at")
    drawn = {name: _rounded(record[name]) for name in names} | {"closed_by": one_line(record["closed_by"])}
    rounds = record["rounds"]
    latest = rounds[-min(len(rounds), record["fragments"])]["committed"] if rounds else 0.0
    drawn["rounds"] = _rounded(rounds[-ROUNDS_SHOWN:])
    drawn["events"] = [_told(event) for event in _gathered(record["events"])[-EVENTS_SHOWN:]]
    drawn["learners"] = {
        name: {
            "merged_share": _rounded(each["merged_share"]),
            "participation": _rounded(each["participation"]),
            "is_participating": each["merged_t"] is not None and each["merged_t"] >= latest,
        }
        for name, each in record["learners"].items()
    }
    assert fold.state is not None
    drawn["ledger_balance"] = fold.state.ledger.totals().balance / record["fragments"]
    return drawn


def _gathered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins that follow each other are one line, where they are many: hundreds begin a large run."""
    gathered: list[dict[str, Any]] = []
    for kind, group in itertools.groupby(events, key=lambda event: event["kind"]):
        each = list(group)
        if kind == "join" and len(each) > JOINS_APART:
            gathered.append(each[-1] | {"text": f"{len(each)} learners came, the last of them {each[-1]['who']}"})
        else:
            gathered += each
    return gathered


def _told(event: dict[str, Any]) -> dict[str, Any]:
    """Names of learners and the words of judges are in it."""
    return {key: one_line(value) if isinstance(value, str) else _rounded(value) for key, value in event.items()}


def _shown(status: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a status, in as many digits as anybody reads: what changes less is sent less."""
    shown = {key: value for key, value in status.items() if key not in LEFT_OUT}
    shown["age_s"] = round(status["age_s"]) if status["serving"] == "served" else round(status["age_s"], -1)
    shown["learners"] = {name: _learner(each) for name, each in status["learners"].items()}
    return shown


def _learner(each: dict[str, Any]) -> dict[str, Any]:
    shown = {key: _rounded(value) for key, value in each.items() if key in SHOWN}
    if shown.get("heard_s") is not None:
        shown["heard_s"] = 0 if each["heard_s"] < HEARD_S else round(each["heard_s"])
    return shown


def _rounded(value: Any) -> Any:
    """In all that is inside too. Hundredths stay whatever the size: seconds of a long run are such numbers."""
    if isinstance(value, float):
        return round(value, 2) if abs(value) > 10.0 ** (DIGITS - 2) else float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return value


def _newest(folder: Path) -> object:
    """The last segment of a tape, and how long it is."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return _stamp(folder / names[-1]) if names else None


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return path.name, found.st_ino, found.st_size, found.st_mtime_ns
