"""What a command says on stderr while it works: lines for a person, or with `--log json` one JSON object a line.

    {"at": 1794994112.87, "level": "info", "who": "syncer", "event": "a joined", "fields": {...}}

`event` is the line that a person would read. `fields` has what a machine would sort by: `logger`, `template` (the same
for every line of a kind) and `values` (what stands in it); where an error is told, its `traceback`. Every line of a
process has the same form, a refusal too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from skerry.errors import printable

if TYPE_CHECKING:
    from skerry.cli import Parser

Form = Literal["text", "json"]
LARGE = 50_000_000  # parameters of a model: so many take seconds to make

_form: Form = "text"
_who = "skerry"  # whose log it is


def add_log(parser: Parser) -> None:
    """--log; it is read by `begin`, before anything can be refused."""
    about = "json: one JSON object a line, with at, level, who, event and fields (default: lines for people)"
    parser.add_argument("--log", choices=["text", "json"], default="text", help=about)


def begin(words: Sequence[str]) -> None:
    """A command with these words begins to speak."""
    global _form, _who
    asks = any(pair == ("--log", "json") for pair in itertools.pairwise(words))
    _form, _who = "json" if asks or "--log=json" in words else "text", "skerry"


def say(line: str, level: str = "info", mark: str = "skerry: ", fields: Mapping[str, Any] | None = None) -> None:
    """A word of the command itself, which for a person begins with `mark`."""
    said = _line(time.time(), level, line, fields or {}) if _form == "json" else f"{mark}{line}"
    with contextlib.suppress(OSError):  # where there is no room for a word, the exit code still tells
        print(said, file=sys.stderr, flush=True)


def tell_making(parameters: int) -> None:
    """A word before a built-in model is made, where somebody would wonder."""
    if parameters >= LARGE:
        say(f"making the built-in model of {parameters:,} parameters ...", mark="")


def log_to_stderr(name: str, level: int = logging.INFO) -> None:
    """One line a happening, with the process's name; nothing else logs until the command ends."""
    global _who
    _who = name
    handler = logging.StreamHandler(sys.stderr)
    lines = Printable(f"%(asctime)s {name}: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines() if _form == "json" else lines)
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level)


class Printable(logging.Formatter):
    """Whatever a peer had a hand in, a line of the log is one line: those of a traceback stand further in."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "\n    ".join(map(printable, record.message.splitlines()))
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """The same for machines."""

    def format(self, record: logging.LogRecord) -> str:
        args = record.args if isinstance(record.args, tuple) else ()
        fields = {"logger": record.name, "template": str(record.msg), "values": [_plain(value) for value in args]}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return _line(record.created, record.levelname.lower(), record.getMessage(), fields)


def _line(at: float, level: str, event: str, fields: Mapping[str, Any]) -> str:
    said = {
        "at": round(at, 3),
        "level": level,
        "who": _who,
        "event": printable(" ".join(event.split())),
        "fields": fields,
    }
    return msgspec.json.encode(said).decode()


def _plain(value: object) -> Any:
    """A number as it is, all else as text."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return printable(str(value))
