"""The local engine: a launch on this machine, under a supervisor that stays until the run has ended.

What it does meanwhile is in `supervisor.py`. Here is what the other verbs need, which find it by what it leaves in the
folder of the launch and in the run directory.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from skerry.engines import OVER, TAIL_BYTES, Member, command, leash, lines_of
from skerry.engines import folder as folders
from skerry.engines.child import PROCESS, aside
from skerry.engines.folder import Record
from skerry.engines.machine import cores_here, gpus_here, memory_gib_here
from skerry.engines.spec import Island, Launch
from skerry.engines.supervisor import COPY, MEMBERS, TOKEN, LocalRun, parent_words
from skerry.errors import Refusal, one_line
from skerry.node.record import legible
from skerry.run.status import holders_of, status_of
from skerry.shell.stop import stop
from skerry.shell.syncer import few_files
from skerry.store import lock
from skerry.store.files import UNREADABLE, contents, opened
from skerry.store.lock import Holder
from skerry.text import near

HAND_OVER_S = 5.0  # beyond learner.leave_timeout_s, for a learner: a loop finishes its step, torchrun ends its workers
DOWN_S = 300.0  # for all of it to end: learners' grace, then the syncer's checkpoints
TAKING_PART = ("joining", "training", "stalled")  # what a syncer says of learners that are there
FOLLOW_S = 0.2  # between two looks at a log


def problems(launch: Launch) -> Iterator[str]:
    cores, memory_gib, gpus = cores_here(), memory_gib_here(), len(gpus_here())
    if launch.syncer.where:
        yield f"syncer.where = {launch.syncer.where!r}: the local engine has one machine: leave it out"
    if launch.syncer.cpus > cores:
        yield f"syncer: {launch.syncer.cpus:g} cores, this machine has {cores}"
    if launch.syncer.memory_gib > memory_gib:
        yield f"syncer: {launch.syncer.memory_gib:g} GiB of memory, this machine has {memory_gib:.1f}"
    learners = sum(island.count for island in launch.islands)
    if few := few_files(learners, launch.config.wire.streams):
        yield f"{learners} learners, and {few}"
    for island in launch.islands:
        where = f"island {island.name}"
        if island.machines > 1:
            yield f"{where}: {island.machines} machines a learner, the local engine has one machine: use another engine"
        if island.where:
            yield f"{where}: where = {island.where!r}: the local engine has one machine: leave it out"
        if island.cpus > cores:
            yield f"{where}: {island.cpus:g} cores a worker, this machine has {cores}"
        if island.gpus * island.workers > gpus:
            each = f"{island.gpus:g} GPUs a worker" + (f", {island.workers} workers" if island.workers > 1 else "")
            yield f"{where}: {each}, this machine has {gpus or 'none'}"
        if island.memory_gib > memory_gib:
            yield f"{where}: {island.memory_gib:g} GiB of memory a worker, this machine has {memory_gib:.1f}"
        yield from (f"{where}: {problem}" for problem in _commands(launch, island))


def _commands(launch: Launch, island: Island) -> Iterator[str]:
    there = command.folder_of(launch, island)
    if not there.is_dir():
        yield f"folder = {island.folder!r}: there is no folder {there}: make it, or name another"
    elif (island.is_built_in or island.is_group) and find_spec("torch") is None:
        yield "needs torch: pip install 'skerry[torch]'"
    elif not island.is_built_in and island.command[0] != "python":
        path = island.env.get("PATH", os.environ.get("PATH"))
        program = island.command[0] if "/" not in island.command[0] else str(there / island.command[0])
        if shutil.which(program, path=path) is None:
            yield f"command[0] = {island.command[0]!r}: no such program here: install it, or give its path"


def start(launch: Launch, folder: Path, show: Callable[[LocalRun], None] | None = None) -> None:
    """Supervise all of it until the run has ended; `show` is called whenever there may be something to see."""
    run = supervisor(launch, folder)
    run.run(lambda: show(run) if show else None)


def supervisor(
    launch: Launch, folder: Path, syncer_arguments: Iterable[str] = (), learner_arguments: Iterable[str] = ()
) -> LocalRun:
    """Of a launch; the arguments are added to those of our own processes."""
    record = record_of(launch, folder)
    run_dir, copy = run_dir_of(record), Path(record.folder) / COPY
    return LocalRun(
        run_dir,
        launch.islands,
        [],
        [*_syncer_options(launch, copy), *syncer_arguments],
        [*learner_arguments],
        record=record,
        syncer_env=launch.syncer.env,
        folder=launch.file.parent,
        asked_port=launch.syncer.port,
        term_s=launch.config.learner.leave_timeout_s + HAND_OVER_S,
        gives_up=False,
        is_evaluated=launch.config.run.evaluate_every > 0,
    )


def record_of(launch: Launch, folder: Path) -> Record:
    """By which it will be found, once there is a supervisor to write it; a run that is over is refused."""
    folder = folder.absolute()
    run_dir = Path(launch.syncer.dir).absolute() if launch.syncer.dir else folder
    folders.check_ours(run_dir)
    if has_begun(run_dir) and status_of(run_dir)["phase"] == "closed":
        raise Refusal(f"{run_dir}: this run is closed; export it with: skerry export {shlex.quote(str(run_dir))}")
    genesis = launch.path(launch.syncer.genesis)
    if launch.syncer.genesis and not has_begun(run_dir) and not genesis.is_file():
        raise Refusal(f"syncer.genesis: {genesis}: no such file; write one with skerry.save_genesis(model, path)")
    return folders.record_of(launch, "local", folder, run_dir=str(run_dir) if run_dir != folder else "")


def _syncer_options(launch: Launch, config: Path) -> list[str]:
    """What `command.syncer_argv` says behind its address and port."""
    genesis = str(launch.path(launch.syncer.genesis)) if launch.syncer.genesis else ""
    words = command.syncer_argv(launch, "", "", str(config), genesis, "", 0)
    return words[words.index("--config") :]


def dry(launch: Launch, folder: Path) -> str:
    run_dir = Path(launch.syncer.dir or folder).absolute()
    run = LocalRun(run_dir, launch.islands, [], _syncer_options(launch, launch.file), folder=launch.file.parent)
    run.token_file, run.port = run_dir / TOKEN, launch.syncer.port
    learners = [run.learner_child(island, index) for island in launch.islands for index in range(island.count)]
    lines = ["# the syncer", _typed(launch.syncer.env, run.syncer_words(run.port), None)]
    for child in learners:
        words = child.words if leash.__file__ not in child.words else child.words[6:]
        lines += [f"# {child.name}, brought back {_WHEN[child.restart]}", _typed(child.env, words, child.folder)]
    chosen = "\n".join(lines).replace(" " + shlex.join(parent_words()), "")  # what is known only when it is started
    return chosen if run.port else chosen.replace("127.0.0.1:0", "127.0.0.1:PORT")


_WHEN = {"always": "whenever it ends", "failure": "when it fails", "never": "never"}


def _typed(env: Mapping[str, str], words: Sequence[str], folder: Path | None) -> str:
    there = f"cd {shlex.quote(str(folder))} && " if folder else ""
    return there + " ".join([*(f"{key}={shlex.quote(value)}" for key, value in env.items()), shlex.join(words)])


def members(record: Record) -> list[Member]:
    try:
        found = msgspec.json.decode(contents(Path(record.folder) / MEMBERS), type=list[Member])
    except UNREADABLE:
        return []
    supervisor = holders_of(run_dir_of(record))[1]
    if supervisor is not None:
        there = [_if_there(member, supervisor) for member in found]
        return [_told(member, _status(record)) for member in there]
    gone = "its supervisor was killed, or could not write how it ended: the same skerry launch goes on"
    return [one if one.state in OVER else one._replace(state="failed", where="", detail=gone) for one in found]


def _if_there(member: Member, supervisor: Holder) -> Member:
    """As it was written, if that process is one of the supervisor's still: a full disk keeps tables old.

    A number alone proves nothing, for it may be another's by now.
    """
    pid = member.where.removeprefix(PROCESS)
    if not supervisor.is_here or pid == member.where or _parent_of(pid) in (supervisor.pid, None):
        return member
    old = f"{member.where} has ended, and this table is older: is there room on its disk, and may it be written?"
    return member._replace(state="unknown", where="", detail=old)


def _parent_of(pid: str) -> int | None:
    """0 of a process that has ended; None where the system does not say."""
    try:
        state, parent = contents(Path("/proc", pid, "stat")).decode(errors="replace").rpartition(")")[2].split()[:2]
        return 0 if state in "ZX" else int(parent)
    except FileNotFoundError:
        return 0 if Path("/proc/self/stat").exists() else None
    except (OSError, ValueError):
        return None


def _told(member: Member, status: dict[str, Any]) -> Member:
    """With what the syncer knows of a learner that runs."""
    known = status.get("learners", {}).get(member.name)
    if member.state != "running":
        return member
    is_known = isinstance(known, dict)
    if (why := _turned_away(member.name, status)) and not (is_known and known.get("state") in TAKING_PART):
        return member._replace(detail=one_line(f"turned away: {why}"))
    return member._replace(detail=one_line(f"{known.get('state')}, step {known.get('step')}")) if is_known else member


def _turned_away(name: str, status: dict[str, Any]) -> str:
    """Why a learner was not let in the last time; by its name alone, or with where it dialled from."""
    rows = [row for row in status.get("turned_away", []) if row["who"] == name or row["who"].startswith(f"{name} at ")]
    return str(min(rows, key=lambda row: row["ago_s"])["why"]) if rows else ""


def _status(record: Record) -> dict[str, Any]:
    try:
        return legible(contents(run_dir_of(record) / "status.json"))
    except (OSError, ValueError):
        return {}


def is_up(record: Record) -> bool:
    """Whether its supervisor is there."""
    return holders_of(run_dir_of(record))[1] is not None


def has_begun(run_dir: Path) -> bool:
    """Whether there is a run in it, that has its own first values and its own configuration."""
    return (run_dir / "tape").is_dir()


def run_dir_of(record: Record) -> Path:
    return Path(record.handle.get("run_dir") or record.folder)


def logs(record: Record, name: str, follow: bool) -> Iterator[str]:
    folder = Path(record.folder) / "logs"
    if folder.is_symlink():
        raise Refusal(f"{folder}: is a link, which is not followed: remove it")
    known = sorted(path.name.removesuffix(".log") for path in folder.glob("*.log"))
    if name not in known:
        raise Refusal(f"no log of {name!r} in {folder}: {near(name, known)}")
    for path in (aside(folder / f"{name}.log"), folder / f"{name}.log"):
        if os.path.lexists(path):
            yield from lines_of(_parts(path, follow and path.suffix == ".log", record))


def _parts(path: Path, follow: bool, record: Record) -> Iterator[bytes]:
    """Of a log; one that is followed has an end when its supervisor is gone and all was read."""
    try:
        file = opened(path)
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror}): a plain file belongs there") from None
    with file:
        while True:
            goes_on = follow and is_up(record)
            yield from itertools.takewhile(bool, iter(lambda: file.read(TAIL_BYTES), None))
            if not goes_on:
                return
            time.sleep(FOLLOW_S)


def scale(record: Record, island: str, count: int) -> None:
    """The supervisor sees it at its next look."""
    if not is_up(record):
        raise Refusal(f"{record.folder}: nothing of it is up: launch it first")
    record.counts[island] = count
    folders.write(record)


def down(record: Record) -> None:
    run_dir = run_dir_of(record)
    folders.check_ours(run_dir)
    stop(run_dir, DOWN_S, lambda line: print(f"skerry: {line}", file=sys.stderr, flush=True))
    if _was_killed(run_dir):
        with folders.writing(run_dir):
            (run_dir / TOKEN).unlink(missing_ok=True)


def _was_killed(run_dir: Path) -> bool:
    """Whether a supervisor is gone and has left its name there, which one that ends in order takes away.

    Without that nobody says that what is called a token there is one of ours.
    """
    try:
        return bool(contents(run_dir / lock.SUPERVISOR)) and holders_of(run_dir)[1] is None
    except OSError:
        return False
