"""Which commands worked on a run, with which versions: a line for each process, in a file beside the tape.

It is for people who read a report later. Nothing is decided by it, so that it cannot be written ends nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec import Struct

from skerry import __version__
from skerry.store.files import UNREADABLE, contents, put_in_place

PROVENANCE = "commands.jsonl"
FIRST_MAX, LAST_MAX = 10, 90  # lines: a service manager may start a syncer that cannot start once a second
PACKAGES = ("numpy", "numba", "msgspec", "torch")  # whose versions may matter to bits, speed or what is on the tape


class Started(Struct, frozen=True):
    """A process that began to work on the run."""

    at: float  # wall-clock seconds
    command: str
    versions: dict[str, str]
    folder: str = ""  # where it was typed; empty: not known


def note(root: Path, command: str) -> None:
    """This process, now; whoever calls holds the run."""
    known = commands_of(root)
    lines = [*known, Started(time.time(), command, versions(), _here())]
    if len(lines) > FIRST_MAX + LAST_MAX:
        lines = lines[:FIRST_MAX] + lines[-LAST_MAX:]
    with contextlib.suppress(OSError):
        put_in_place(root / PROVENANCE, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def commands_of(root: Path) -> list[Started]:
    """As far as they were noted; what cannot be read is nobody's loss."""
    try:
        return [msgspec.json.decode(line, type=Started) for line in contents(root / PROVENANCE).splitlines()]
    except UNREADABLE:
        return []


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def versions() -> dict[str, str]:
    """Of Skerry, Python, the system and what is installed; nothing is imported for it."""
    found = {"skerry": __version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
