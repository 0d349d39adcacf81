"""What goes on with a run that nobody serves: the command that it had, so that it can be typed again."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Any

import msgspec

from skerry import cli
from skerry.engines import folder
from skerry.engines.supervisor import LOCAL
from skerry.errors import Refusal, SkerryError
from skerry.run.provenance import PROVENANCE, Started, commands_of
from skerry.run.status import status_of

ONCE = ("--parent", "--repair")  # options of a command that was for that time
CHARS_MAX = 4096  # of a command that is shown: a longer one was not typed


def command_for(root: Path) -> str:
    """What goes on with the run in this directory, or begins with it."""
    with contextlib.suppress(Refusal):  # nothing was launched into it
        record = folder.read(root)
        if record.file:
            return launched(record, root)
    if (root / LOCAL).exists():
        return shlex.join(["skerry", "train", "--resume", str(root)])
    if served := _served(root):
        return served
    had = "" if _is_new(root) else "  (with the options it had)"  # a fork has had none
    return shlex.join(["skerry", "syncer", "--run", str(root)]) + had


def _is_new(root: Path) -> bool:
    with contextlib.suppress(SkerryError):  # where it cannot be read, whoever looks at it says so
        return bool(status_of(root)["serving"] == "new")
    return False


def launched(record: folder.Record, root: Path) -> str:
    """The same launch again, which is refused with anything else than it had."""
    engine = [] if record.engine == "local" else ["--engine", record.engine]
    overrides = [f"--{key}={_said(value)}" for key, value in record.overrides]
    return shlex.join(["skerry", "launch", record.file, "--run", str(root), *engine, *overrides])


def _said(value: Any) -> str:
    """As it is read again: text as it is, unless it would be taken for a number or a truth."""
    is_plain = isinstance(value, str) and cli.scalar(value) == value
    return value if is_plain else msgspec.json.encode(value).decode()


def _served(root: Path) -> str:
    """The last `skerry syncer` that somebody typed for it, by what is noted beside the tape; empty if none is.

    A supervisor's own syncers are not meant, which end with it, nor a repair. Nobody is invited to a command
    that another user may have written there.
    """
    with contextlib.suppress(Refusal):
        folder.check_ours(root / PROVENANCE)
        for started in reversed(commands_of(root)):
            words = _words(started)
            if words[:2] == ["skerry", "syncer"] and not any(word.startswith(ONCE) for word in words):
                return _again(words, root, started.folder)
    return ""


def _words(started: Started) -> list[str]:
    """Of a command as we write them; none of anything else, such as one with escape codes or a second command."""
    text = started.command
    if len(text) > CHARS_MAX or not (text + started.folder).isprintable():
        return []
    try:
        words = shlex.split(text)
    except ValueError:
        return []
    return words if shlex.join(words) == text else []


def _again(words: list[str], root: Path, where: str) -> str:
    """For the directory where the run is now; what else it names is as the folder sees it where it was typed."""
    is_there = where in ("", str(Path.cwd()))
    run = str(root if is_there else root.absolute())
    words = [run if before == "--run" else word for before, word in zip(["", *words], words, strict=False)]
    words = [f"--run={run}" if word.startswith("--run=") else word for word in words]
    return shlex.join(words) + ("" if is_there else f"  (in {where})")
