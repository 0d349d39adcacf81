"""Starts a run where people operate things already: on this machine, a Ray cluster, a Slurm queue or Kubernetes.

    spec.py      what is launched: a run's file with its syncer and its islands, read and checked before anything begins
    command.py   what each process is told: its command line and its environment, the same on every engine
    folder.py    what a launch leaves on the machine that gave it: `launch.json`, by which the other verbs find it
    local.py  ray.py  slurm.py  kubernetes.py   an engine each, behind the functions below
    supervisor.py   the processes of a run on this machine: the local engine's, and those of `skerry train`

An engine is a module with the functions of `Engine`. It starts processes, brings back what dies by the rules that its
users know, and never touches the protocol: to a syncer, a learner is a learner. What is lost with a machine is a
straggler's work, and what must survive is in the run directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, cast, get_args

import msgspec

from skerry.engines.folder import Record
from skerry.engines.spec import Launch
from skerry.errors import Refusal, one_line
from skerry.store.files import opened
from skerry.text import near

Name = Literal["local", "ray", "slurm", "kubernetes"]
NAMES: tuple[str, ...] = get_args(Name)
IMPORTS = {"ray": "ray", "kubernetes": "yaml"}  # what an engine imports that Skerry brings by its extra only
State = Literal["waiting", "starting", "running", "restarting", "ended", "failed", "unknown"]
OVER: tuple[State, ...] = ("ended", "failed")  # nothing of it is there any longer
LINE_BYTES_MAX = 1 << 20  # of a log; what is longer is more than one line
TAIL_BYTES = 1 << 16  # of a log, in which its last line is looked for
LINE_CHARS_MAX = 4096  # of that line


class Member(NamedTuple):
    """One process, or one group of them, that an engine has for a run: the syncer, or a learner of an island."""

    name: str  # "syncer", or the learner's: fast-0
    island: str  # empty for the syncer
    state: State
    where: str = ""  # the machine, as the engine calls it
    restarts: int = 0
    since: float = 0.0  # wall-clock, of this state
    detail: str = ""  # for a person: why it waits, how it ended


def is_member(name: str, islands: Iterable[str]) -> bool:
    """Of a run with these islands, now or when it had more learners; what is none names no file."""
    island, _, number = name.rpartition("-")
    return name == "syncer" or (island in islands and number.isascii() and number.isdecimal())


class NotAsked(Refusal):
    """The cluster does not answer. What would be started can be printed all the same."""


class Engine(Protocol):
    """What an engine can do; a module is one."""

    def problems(self, launch: Launch) -> Iterator[str]:
        """What of this launch the engine cannot do, or has no resources for: each a line with what would do.

        `NotAsked`, behind what can be said without it, if the cluster does not answer.
        """

    def start(self, launch: Launch, folder: Path) -> str | None:
        """Start all of it, and leave a record in `folder`; may stay until the run has ended, if that is its way.

        A command, if that is left to the user.
        """

    def dry(self, launch: Launch, folder: Path) -> str:
        """What would be started, in the engine's own language; nothing is touched."""

    def members(self, record: Record) -> list[Member]:
        """What there is of it at present, the syncer first."""

    def logs(self, record: Record, name: str, follow: bool) -> Iterator[str]:
        """What a member has said, line by line, over all its lives; `follow`: and what it says from now on."""

    def scale(self, record: Record, island: str, count: int) -> None:
        """So many learners of this island; those that go, leave in order, the highest numbers first."""

    def down(self, record: Record) -> None:
        """End all of it in order, learners first, so that their work is merged; nothing but the run directory stays."""


def engine(name: str) -> Engine:
    """Refused if what it needs is not installed; the name may be what somebody wrote in a file."""
    if name not in NAMES:
        raise Refusal(f"unknown engine {one_line(name)!r}: {near(name, NAMES)}")
    if name in IMPORTS and find_spec(IMPORTS[name]) is None:
        raise Refusal(f"the engine {name}: needs {IMPORTS[name]}: pip install 'skerry[{name}]'")
    return cast(Engine, import_module(f"skerry.engines.{name}"))


def lines_of(parts: Iterable[bytes]) -> Iterator[str]:
    """Of a log that comes in parts, its lines as they are whole; one that does not end is cut into pieces.

    Each byte is looked at once, however long its line is: a progress bar may write megabytes without an end of line.
    """
    rest = bytearray()
    for part in parts:
        *whole, last = part.split(b"\n")
        for line in whole:
            rest += line
            yield from _pieces(rest)
            yield rest.decode("utf-8", "replace")
            rest.clear()
        rest += last
        yield from _pieces(rest)
    if rest:
        yield rest.decode("utf-8", "replace")


def last_line_of(log: Path, besides: tuple[str, ...] = ()) -> str:
    """The last one that says something: torchrun, for one, rules off what it has to say.

    `besides`: lines that begin so count where there are no others. A command may print anything.
    """
    lines = _tail(log).strip().splitlines()
    if not lines:
        return "it said nothing"
    speaking = [line for line in lines if any(map(str.isalnum, line))] or lines
    own = [line for line in speaking if not line.startswith(besides)] or speaking
    line = own[-1].strip()[:LINE_CHARS_MAX]
    try:
        return str(msgspec.json.decode(line)["event"])  # of a log for machines
    except (ValueError, LookupError, TypeError, RecursionError):
        return line


def _tail(log: Path) -> str:
    try:
        with opened(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _pieces(line: bytearray) -> Iterator[str]:
    """Taken off its beginning while it is too long."""
    while len(line) > LINE_BYTES_MAX:
        yield line[:LINE_BYTES_MAX].decode("utf-8", "replace")
        del line[:LINE_BYTES_MAX]
