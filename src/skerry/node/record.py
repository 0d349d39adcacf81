"""A status record as it may be shown: whoever wrote it, nothing in it moves a cursor, fills a screen or ends a process.

`legible` is the one way from bytes to a record (`node/telemetry.py`): a syncer anywhere may say anything, and a file
may hold anything. Text is printable and of bounded length, tables and lists have a bounded number of rows, and each
key that people are shown is of its kind. A time is one of these centuries; a number that there is not (JSON has none
that is not finite), or that has more digits than any that is counted, is a NaN. What is missing beside what is there is
filled with nothing of its kind. Keys that this version does not know are kept: a later one may have more to say.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from skerry.errors import one_line

RECORD_BYTES_MAX = 4 << 20  # a thousand learners take half a megabyte
ROWS_MAX = 4096  # of a table or a list in it
DEPTH_MAX = 6

AT_MAX = 1e11  # the year 5138
INT_MAX = 1 << 63  # Python has longer ones, which no float holds and no encoder takes
NUMBER, MAYBE, TEXT, SCALAR = "a number", "a number or nothing", "text", "a number, text or nothing"
WHEN = "a time"
_TOKENS = {"produced": NUMBER, "merged": NUMBER, "pending": NUMBER, "discarded": {"*": NUMBER}}
_LEARNER = {
    "life": NUMBER, "state": TEXT, "step": NUMBER, "steps": NUMBER, "tokens": NUMBER, "tokens_per_s": NUMBER,
    "step_s": NUMBER, "round_steps": NUMBER, "unmerged_steps": NUMBER, "loss": NUMBER, "bytes_up": NUMBER,
    "bytes_down": NUMBER, "heard_s": MAYBE,
}  # fmt: skip
_EVALUATED = {"progress": NUMBER, "tokens": NUMBER, "at": WHEN, "figures": {"*": MAYBE}}
_RECORD: dict[str, Any] = {
    "run": TEXT, "at": WHEN, "epoch": NUMBER, "phase": TEXT, "progress": NUMBER, "elapsed_s": NUMBER,
    "budget": {"*": NUMBER}, "over_budget": NUMBER, "merges": NUMBER, "contributors_mean": NUMBER,
    "rounds_open": NUMBER, "waiting": TEXT,
    "sync_every": NUMBER, "sync_every_configured": NUMBER, "sync_every_reached": NUMBER, "behind": TEXT,
    "quorum": NUMBER, "ready": NUMBER, "versions": [NUMBER], "tokens": _TOKENS, "refused": {"*": NUMBER},
    "ahead": {"*": TEXT}, "turned_away": [{"who": TEXT, "why": TEXT, "count": NUMBER, "ago_s": NUMBER}],
    "orders": NUMBER, "dropped": [TEXT], "finishing": NUMBER, "admin": TEXT,
    "disk": {"free_bytes": NUMBER, "needed_bytes": NUMBER}, "bytes_in": NUMBER, "bytes_out": NUMBER,
    "learners": {"*": _LEARNER}, "address": TEXT, "evaluated": _EVALUATED, "curve": [_EVALUATED], "pid": SCALAR,
}  # fmt: skip
_NEEDED = {
    "run", "at", "phase", "progress", "elapsed_s", "merges", "contributors_mean", "sync_every", "versions", "tokens",
    "learners",
}  # fmt: skip
_NEEDED_OF_LEARNER = {"life", "state", "step"}
_FILLED = ("epoch", "rounds_open", "waiting", "quorum", "ready", "bytes_in", "bytes_out", "address", "pid")
_OPTIONAL = {"disk", "evaluated"}  # which may be there and be nothing


def legible(data: bytes) -> dict[str, Any]:
    """The record in these bytes; `ValueError` says why there is none that can be shown."""
    if len(data) > RECORD_BYTES_MAX:
        raise ValueError(f"{len(data)} bytes, at most {RECORD_BYTES_MAX} are read")
    try:
        found = fitted(msgspec.json.decode(data, type=dict[str, Any]))
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ValueError(str(error)) from None
    if missing := _NEEDED - found.keys():
        raise ValueError(f"it has no {min(missing)}")
    for learner in found["learners"].values():
        if missing := _NEEDED_OF_LEARNER - learner.keys():
            raise ValueError(f"a learner has no {min(missing)}")
    return {key: _nothing(_RECORD[key]) for key in _FILLED if key not in found} | found


def fitted(record: dict[str, Any]) -> dict[str, Any]:
    """A record that was made here, of a tape that anybody may have written, as fit to be shown as any other."""
    found: dict[str, Any] = _fitted(record, _RECORD, "it", 0)
    return found


def _fitted(value: Any, shape: Any, where: str, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError(f"{where} is nested too deep")
    if isinstance(shape, dict) and isinstance(value, dict):
        inner = [(one_line(key), each, shape.get(key, shape.get("*"))) for key, each in _some(value.items())]
        found = {
            key: None if each is None and key in _OPTIONAL else _fitted(each, kind, key, depth + 1)
            for key, each, kind in inner
        }
        is_whole = shape is not _RECORD and shape is not _LEARNER  # they have keys that not everybody says
        return {**(_nothing(shape) if is_whole else {}), **found}
    if isinstance(shape, list) and isinstance(value, list):
        return [_fitted(each, shape[0], where, depth + 1) for each in _some(value)]
    if shape is None and isinstance(value, dict):
        return _fitted(value, {}, where, depth)
    if shape is None and isinstance(value, list):
        return _fitted(value, [None], where, depth)
    if isinstance(value, int) and abs(value) > INT_MAX and shape != WHEN:
        value = None
    if shape == NUMBER and (value is None or isinstance(value, int | float)):
        return math.nan if value is None else value
    if shape == WHEN and (value is None or isinstance(value, int | float)):
        return min(max(value or 0.0, 0.0), AT_MAX)
    if shape in (TEXT, SCALAR, None) and isinstance(value, str):
        return one_line(value)
    if shape in (MAYBE, SCALAR, None) and (value is None or isinstance(value, int | float)):
        return value
    raise ValueError(f"{where} is not {shape if isinstance(shape, str) else 'what it was'}")


def _nothing(shape: Any) -> Any:
    if isinstance(shape, dict):
        return {key: _nothing(kind) for key, kind in shape.items() if key != "*"}
    if isinstance(shape, list):
        return []
    return {NUMBER: math.nan, TEXT: "", WHEN: 0.0}.get(shape)


def _some(rows: Any) -> list[Any]:
    return [each for _, each in zip(range(ROWS_MAX), rows, strict=False)]
