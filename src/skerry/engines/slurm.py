"""A run on a Slurm cluster: one job for the syncer, and an array of jobs for each island, an element a learner.

    RUN/slurm/syncer.sh, ISLAND.sh   the jobs' scripts: who it is, what is started; `--dry-run` prints them
    RUN/slurm/tend.sh                what each of them ends with (slurm.sh beside this file): policy, leave, queue again
    RUN/slurm/address                where the syncer is now; learners read it whenever they dial
    RUN/slurm/members/NAME           what became of a member, as its own script notes it
    RUN/slurm/closed, down, gone/    wishes: whoever finds one for itself is not queued again

The folder of the launch is on a file system that the cluster's machines share. Slurm is asked by its commands only,
each with a limit of time, and never through a shell. What is in the file that was launched reaches a script quoted, and
sbatch as one word a value.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from skerry.engines import Member, NotAsked, State, is_member, last_line_of
from skerry.engines.command import folder_of, learner_argv, learner_env, meeting, syncer_argv
from skerry.engines.folder import Record, record_of, write
from skerry.engines.spec import OURS, Island, Launch, Syncer
from skerry.errors import Refusal, one_line, printable
from skerry.run.keys import KEYS, Keys
from skerry.store.files import contents, fresh
from skerry.text import counted, near

ASK_S = 60.0  # for a command of Slurm's to answer
POLL_S = 1.0
NOTICE_S_MIN = 120  # before a job's time is over
NOTICE_MORE_S = 60  # beside what a learner may take to leave
SYNCER_S = 90.0  # for the syncer to write its checkpoints and go
KILL_S = 60.0  # for what was cancelled to be gone
TIME_S_MIN = 600  # of a job: less is spent on starting and leaving
FILTERS = ("SQUEUE_", "SINFO_", "SCANCEL_")  # variables by which a user's own squeue leaves things out
NOTE_BYTES_MAX = 256
LOCAL_ROOTS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
TEND = Path(__file__).with_name("slurm.sh")
# Words of a command that the script works out: where torchrun's processes on several machines meet, which is at the
# first one, where the script runs. Each machine's rank is said there, in slurm.sh.
MEETING_AT = {"\0host": '"$(hostname)"', "\0port": '"$((20000 + SLURM_JOB_ID % 20000))"'}

# Of sbatch, said by this engine or of no use to it; what may be abbreviated to one of them is refused too.
OWN = (
    "array", "chdir", "clusters", "constraint", "cpus-per-task", "dependency", "export", "export-file", "gid", "help",
    "job-name", "mem", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable",
    "partition", "requeue", "signal", "test-only", "time", "uid", "usage", "version", "wait", "wrap",
)  # fmt: skip
STATES: dict[str, State] = {
    "PENDING": "waiting", "REQUEUED": "waiting", "REQUEUE_FED": "waiting", "REQUEUE_HOLD": "waiting",
    "SPECIAL_EXIT": "waiting", "SUSPENDED": "waiting", "STOPPED": "waiting", "PREEMPTED": "waiting",
    "CONFIGURING": "starting", "RUNNING": "running", "SIGNALING": "running", "STAGE_OUT": "running",
    "RESIZING": "running", "COMPLETING": "running",
    "COMPLETED": "ended", "CANCELLED": "ended", "REVOKED": "ended",
}  # fmt: skip
LIVE = ("waiting", "starting", "running")
NO_PATH = re.compile(r"[\\\x00-\x1f\x7f-\x9f\u2028\u2029]")
NO_PATH_SAID = "Slurm takes no backslash and no control character there: choose another"
BASH_OWN = {  # variables that bash lets nobody set, or sets by itself
    "BASHOPTS", "BASHPID", "BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_CMDS", "BASH_COMMAND", "BASH_LINENO",
    "BASH_SOURCE", "BASH_VERSINFO", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS",
    "HISTCMD", "LINENO", "PIPESTATUS", "PPID", "RANDOM", "SHELLOPTS", "SHLVL", "SRANDOM", "UID", "_",
}  # fmt: skip

log = logging.getLogger("skerry.engines.slurm")


@dataclass(frozen=True)
class Job:
    """What is submitted: an island's learners, or the syncer."""

    name: str
    options: list[str]  # of sbatch, but for those of one submission
    script: str


class Element(NamedTuple):
    """A job of Slurm's, as squeue has it: one learner, or the syncer."""

    id: str  # 12, or 12_3
    job: str  # 12
    number: int
    state: str  # Slurm's word
    where: str
    reason: str


# ---------------------------------------------------------------------------------------------- the engine's functions


def problems(launch: Launch) -> Iterator[str]:
    yield from _said_wrong(launch)
    machines = _machines()
    for part in _parts(launch):
        yield from _unmet(part, launch, machines)
    most = _array_size_max()
    for island in launch.islands:
        if island.count > most:
            yield f"island {island.name}: {island.count} learners, and an array has {most} here: make two islands of it"


def start(launch: Launch, folder: Path) -> None:
    """Submit all of it; what was submitted is cancelled if the rest is refused."""
    _check_path(folder)
    run_dir = _run_dir(launch, folder)
    _warn_if_local(run_dir)
    slurm = _made(folder)
    record = record_of(
        launch, "slurm", folder, run_dir=str(run_dir), leave_s=f"{launch.config.learner.leave_timeout_s:g}"
    )
    record.handle = {key: record.handle[key] for key in ("run_dir", "leave_s")}  # the jobs of before are over
    write(record)
    _put(slurm / "run.toml", launch.text)
    for name in ("tend.sh", "closed", "down"):
        (slurm / name).unlink(missing_ok=True)
    _put(slurm / "tend.sh", TEND.read_text("utf-8"))
    syncer, *islands = _jobs(launch, folder)
    try:
        _submit(record, syncer)
        for job in islands:
            _put_up(record, job, range(record.counts[job.name]), f"--dependency=after:{record.handle['syncer']}")
    except BaseException:
        _cancel(job for name in record.counts | {"syncer": 1} for job in _ids(record, name))
        raise


def dry(launch: Launch, folder: Path) -> str:
    _check_path(folder)
    syncer, *islands = _jobs(launch, folder)
    parts = [_shown(folder, syncer)]
    for job in islands:
        count = launch.island(job.name).count
        parts.append(_shown(folder, job, f"--array={_ranges(range(count))}", "--dependency=after:JOB_OF_THE_SYNCER"))
    return "\n".join([*parts, printable(f"# {_slurm(folder) / 'tend.sh'}"), TEND.read_text("utf-8")])


def members(record: Record) -> list[Member]:
    elements = _elements(record)
    found = [_member(record, "syncer", "", elements)]
    for island, count in record.counts.items():
        indices = {number for (name, number), element in elements.items() if name == island and _is_live(element)}
        for index in sorted(indices | set(range(count))):
            found.append(_member(record, f"{island}-{index}", island, elements))
    return found


def logs(record: Record, name: str, follow: bool) -> Iterator[str]:
    names = [member.name for member in members(record)]
    path = _log(record, name)
    if name not in names and not (is_member(name, record.counts) and path.exists()):
        raise Refusal(f"no member {name!r} in this run: {near(name, names)}")
    return _lines(record, name, path, follow)


def scale(record: Record, island: str, count: int) -> None:
    """Also brings back, of those that are wanted, the ones that somebody has cancelled."""
    folder = Path(record.folder)
    _are_gone(lambda: [each for each in _of(record, island) if each.state == "COMPLETING"], KILL_S)  # or queued again
    up = {each.number for each in _of(record, island) if _is_live(each)}
    record.counts[island] = count
    going = sorted(index for index in up if index >= count)
    for index in going:
        _wish(folder, f"gone/{island}-{index}")
    write(record)
    missing = [index for index in range(count) if index not in up]
    if missing:
        options = msgspec.json.decode(record.handle[f"{island}.sbatch"], type=list[str])
        _put_up(record, Job(island, options, contents(_slurm(folder) / f"{island}.sh").decode()), missing)
    _end(record, [(island, index) for index in going], float(record.handle["leave_s"]) + NOTICE_MORE_S)


def down(record: Record) -> None:
    _wish(Path(record.folder), "down")
    everybody = list(_elements(record))
    learners = [key for key in everybody if key[0] != "syncer"]
    _end(record, learners, float(record.handle["leave_s"]) + NOTICE_MORE_S)
    _end(record, [key for key in everybody if key[0] == "syncer"], SYNCER_S)


# ------------------------------------------------------------------------------------------------------- its scripts


def _jobs(launch: Launch, folder: Path) -> list[Job]:
    folder = folder.absolute()
    return [_syncer(launch, folder), *(_island(launch, island, folder) for island in launch.islands)]


def _syncer(launch: Launch, folder: Path) -> Job:
    slurm, run_dir = _slurm(folder), _run_dir(launch, folder)
    genesis = str(launch.path(launch.syncer.genesis)) if launch.syncer.genesis else ""
    argv = syncer_argv(launch, sys.executable, str(run_dir), str(slurm / "run.toml"), genesis, "0.0.0.0", 0)
    words = [shlex.quote(word) for word in argv]
    words[argv.index("--port") + 1] = '"$port"'
    options = _options(launch, launch.syncer, "syncer", folder, launch.file.parent, launch.syncer.cpus, 0, 1)
    free = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
    python = shlex.quote(sys.executable)
    own = f"""
# Where learners find it: they read this file whenever they dial, so it may come up on another machine.
before() {{
  port={launch.syncer.port or f"$({python} -c {shlex.quote(free)})"}
  printf '%s:%s\\n' "$(hostname)" "$port" > "$slurm/address.tmp" && mv -f "$slurm/address.tmp" "$slurm/address"
  command=({" ".join(words)})
}}
after() {{ # the run is closed, or somebody has stopped the syncer
  case $({python} -m skerry status "$run" --json) in
    *'"phase":"closed"'* | *'"phase": "closed"'*) : > "$slurm/closed" ;;
    *) return ;;
  esac
  say "the run is closed: what still waits in the queue is not needed"
  for id in $(cat "$slurm/jobs"); do timeout 60 scancel --state=PENDING "$id"; done
  sleep 20 # for learners to end by themselves; who was just brought back would wait for a syncer
  for id in $(cat "$slurm/jobs"); do
    [ "$id" = "$SLURM_JOB_ID" ] || timeout 60 scancel --state=RUNNING --batch --signal=TERM "$id" 2> /dev/null
  done
}}
"""
    return Job("syncer", options, _script(launch, folder, "syncer", "syncer", "failure", 1, launch.syncer.env, own))


def _island(launch: Launch, island: Island, folder: Path) -> Job:
    slurm, where = _slurm(folder), folder_of(launch, island)
    keys = _run_dir(launch, folder) / KEYS
    env = {"OMP_NUM_THREADS": str(max(1, int(island.cpus)))} | learner_env(island, 0, f"@{slurm / 'address'}")
    del env["SKERRY_NAME"]  # each element's own
    met = meeting(island.machines, "", *MEETING_AT) if island.machines > 1 else []
    words = [MEETING_AT.get(word) or shlex.quote(word) for word in learner_argv(island, sys.executable, met)]
    if isinstance(island.speed, list) and island.is_built_in:
        words[words.index("--speed") + 1] = '"$speed"'
    cpus, gpus = island.cpus * island.workers, island.gpus * island.workers
    options = _options(launch, island, f"{island.name}-%a", folder, where, cpus, gpus, island.machines)
    own = f"""
key={shlex.quote(str(keys))}/$name.key
{_speed(island)}command=({" ".join(words)})
"""
    name = f'{island.name}-"$SLURM_ARRAY_TASK_ID"'
    return Job(
        island.name, options, _script(launch, folder, island.name, name, island.restart, island.machines, env, own)
    )


def _speed(island: Island) -> str:
    """Of each element, where they differ; who came later than those on the list has the last one's."""
    if not isinstance(island.speed, list):
        return ""
    last = len(island.speed) - 1
    speeds = " ".join(f"{speed:g}" for speed in island.speed)
    at = f"$((SLURM_ARRAY_TASK_ID < {last} ? SLURM_ARRAY_TASK_ID : {last}))"
    return f"speeds=({speeds})\nspeed=${{speeds[{at}]}}\n"


def _script(
    launch: Launch, folder: Path, what: str, name: str, restart: str, machines: int, env: dict[str, str], own: str
) -> str:
    """Setup comes first and the environment last, in the process that is started: no name in them is one of ours."""
    exports = [f"  export {key}={shlex.quote(value)}" for key, value in env.items()]
    known = [] if what == "syncer" else ['  export SKERRY_NAME="$name" SKERRY_KEY_FILE="$key"']  # an env may say `name`
    lines = [
        "#!/bin/bash",
        f"# {what} of the run {launch.name}. Made by skerry launch, which submits it with what it needs.",
        *launch.slurm.setup,
        f"name={name}",
        f"run={shlex.quote(str(_run_dir(launch, folder)))}",
        f"slurm={shlex.quote(str(_slurm(folder)))}",
        f"restart={restart}",
        f"machines={machines}",
        "environment() {",
        f"  unset {' '.join(OURS)}",
        *known,
        *exports,
        "}",
    ]
    return "\n".join(lines) + f'\n{own}\n. "$slurm/tend.sh"\n'


def _options(
    launch: Launch,
    part: Syncer | Island,
    log_name: str,
    folder: Path,
    where: Path,
    cpus: float,
    gpus: float,
    machines: int,
) -> list[str]:
    """Of sbatch, each one word."""
    partition, constraint = _place(launch, part)
    name = "syncer" if isinstance(part, Syncer) else part.name
    workers = 1 if isinstance(part, Syncer) else part.workers
    output = str(folder / "logs").replace("%", "%%") + f"/{log_name}.log"
    options = {
        "job-name": f"{launch.name}-{name}",
        "chdir": str(where.absolute()),
        "output": output,
        "open-mode": "append",
        "signal": f"B:TERM@{_notice_s(launch)}",
        "time": launch.slurm.time,
        "nodes": str(machines),
        "ntasks-per-node": "1",
        "cpus-per-task": str(math.ceil(cpus)),
        "mem": f"{math.ceil(part.memory_gib * workers * 1024)}M" if part.memory_gib else "",
        "gres": f"gpu:{round(gpus)}" if gpus else "",
        "partition": partition,
        "account": launch.slurm.account,
        "constraint": constraint,
    }
    return ["--requeue", *(f"--{key}={value}" for key, value in options.items() if value), *launch.slurm.options]


def _notice_s(launch: Launch) -> int:
    return max(NOTICE_S_MIN, math.ceil(launch.config.learner.leave_timeout_s) + NOTICE_MORE_S)


def _place(launch: Launch, part: Syncer | Island) -> tuple[str, str]:
    """Partition and constraint: `where` is a constraint, or partition=NAME, or both with a space between them."""
    words = part.where.split()
    partitions = [word.removeprefix("partition=") for word in words if word.startswith("partition=")]
    constraints = [word for word in words if not word.startswith("partition=")]
    return (partitions or [launch.slurm.partition])[-1], (constraints or [""])[-1]


# ---------------------------------------------------------------------------------------------------- what is refused


def _said_wrong(launch: Launch) -> Iterator[str]:
    """What no Slurm would take, or would take for something else."""
    said = launch.slurm
    for key, value in (("partition", said.partition), ("account", said.account)):
        if not re.fullmatch(r"[A-Za-z0-9_.,@-]*", value):
            yield f"slurm.{key} = {value!r}: use letters, digits and _ . , @ -"
    seconds = _seconds(said.time)
    if seconds is None:
        yield f"slurm.time = {said.time!r}: write it as Slurm does: MINUTES, HH:MM:SS or D-HH:MM:SS"
    elif seconds < (least := TIME_S_MIN + _notice_s(launch)):
        least_minutes = math.ceil(least / 60)
        yield f"slurm.time = {said.time!r}: too short to start, train and leave: give {least_minutes} minutes or more"
    for option in said.options:
        match = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[^\s\0]+)?", option)
        if match is None:
            yield f"slurm.options: {option!r}: write --name or --name=value, without spaces"
        elif any(own.startswith(match[1]) for own in OWN):
            yield f"slurm.options: {option!r}: --{match[1]} is said by skerry launch: leave it out"
    for called, path in (("syncer.dir", launch.syncer.dir), ("the launched file's folder", str(launch.file.parent))):
        if NO_PATH.search(path):
            yield f"{called} = {path!r}: {NO_PATH_SAID}"
    for part in _parts(launch):
        yield from _badly_placed(part)
    for text in said.setup:
        if "\0" in text:
            yield f"slurm.setup: {text[:80]!r}: has a zero byte: take it out"


def _badly_placed(part: Syncer | Island) -> Iterator[str]:
    what, words = _called(part), part.where.split()
    if len([word for word in words if not word.startswith("partition=")]) > 1 or not re.fullmatch(
        r"[A-Za-z0-9_.,@&|*()\[\]=: -]*", part.where
    ):
        yield f"{what}: where = {part.where!r}: write a constraint of sbatch, partition=NAME, or both with a space"
    values = list(part.env.values()) + ([] if isinstance(part, Syncer) else [*part.command, part.folder, part.data])
    if any("\0" in value for value in values):
        yield f"{what}: a value has a zero byte, which no process can be told: take it out"
    if isinstance(part, Island) and NO_PATH.search(part.folder):
        yield f"{what}: folder = {part.folder!r}: {NO_PATH_SAID}"
    if taken := sorted(part.env.keys() & BASH_OWN):
        yield f"{what}: env.{taken[0]} is bash's own, in which jobs begin, and cannot be said: use another name"
    if isinstance(part, Island) and not (part.gpus * part.workers).is_integer():
        yield f"{what}: {part.gpus * part.workers:g} GPUs a machine: Slurm gives whole ones"


class Machine(NamedTuple):
    """As sinfo has it."""

    partition: str
    is_default: bool
    cpus: int
    memory_mib: int
    gpus: int
    features: frozenset[str]


def _machines() -> list[Machine]:
    found = []
    for line in _ask("sinfo", "--noheader", "--Node", "--exact", "--format=%R|%P|%c|%m|%G|%f").splitlines():
        partition, shown, cpus, memory, gres, features = (line.split("|") + [""] * 6)[:6]
        gpus = sum(int(n) for n in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres))
        has = frozenset(features.strip().split(","))
        found.append(Machine(partition, shown.endswith("*"), _number(cpus), _number(memory), gpus, has))
    return found


def _number(word: str) -> int:
    """Of sinfo: a + behind it is for what differs."""
    digits = word.strip().rstrip("+")
    return int(digits) if digits.isdigit() else 0


def _unmet(part: Syncer | Island, launch: Launch, machines: list[Machine]) -> Iterator[str]:
    what, (partition, constraint) = _called(part), _place(launch, part)
    known = sorted({machine.partition for machine in machines})
    named = set(partition.split(",")) if partition else set()
    if strange := sorted(named - set(known)):
        yield f"{what}: no partition {strange[0]!r} here: {near(strange[0], known)}"
        return
    there = [machine for machine in machines if (machine.partition in named if named else machine.is_default)]
    if not named and not there:
        yield f"{what}: this cluster has no default partition: say slurm.partition, one of {', '.join(known) or 'none'}"
        return
    if re.fullmatch(r"[A-Za-z0-9_.-]+", constraint):
        if not any(constraint in machine.features for machine in there):
            features = sorted({feature for machine in there for feature in machine.features} - {"(null)", ""})
            yield f"{what}: no machine has the feature {constraint!r}: there are {', '.join(features) or 'none'}"
            return
        there = [machine for machine in there if constraint in machine.features]
    yield from _too_much(part, what, there)


def _too_much(part: Syncer | Island, what: str, there: list[Machine]) -> Iterator[str]:
    workers, count = (1, 1) if isinstance(part, Syncer) else (part.workers, part.machines)
    gpus = 0.0 if isinstance(part, Syncer) else part.gpus * workers
    needs = (
        (math.ceil(part.cpus * workers), "cores", [machine.cpus for machine in there]),
        (round(gpus), "GPUs", [machine.gpus for machine in there]),
        (math.ceil(part.memory_gib * workers * 1024), "MiB of memory", [machine.memory_mib for machine in there]),
    )
    for wanted, of_what, have in needs:
        if wanted > max(have):
            each = f" ({counted(workers, 'worker')})" if workers > 1 else ""
            yield f"{what}: {wanted} {of_what} on a machine{each}, the largest machine has {max(have)}"
            return
    enough = [all(wanted <= have[at] for wanted, _, have in needs) for at in range(len(there))]
    if sum(enough) < count:
        yield f"{what}: {counted(count, 'machine')} with all that it asks for, and there are {sum(enough)}"


def _parts(launch: Launch) -> list[Syncer | Island]:
    return [launch.syncer, *launch.islands]


def _called(part: Syncer | Island) -> str:
    return "syncer" if isinstance(part, Syncer) else f"island {part.name}"


def _seconds(time_limit: str) -> float | None:
    """As Slurm reads a limit of time."""
    if time_limit.lower() in ("infinite", "unlimited"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit, re.ASCII)
    if match is None:
        return None
    days, *rest = match.groups()
    a, b, c = (int(word or 0) for word in rest)
    if days is not None:
        return int(days) * 86400 + a * 3600 + b * 60 + c
    return a * 3600 + b * 60 + c if rest[2] is not None else a * 60 + b


def _array_size_max() -> int:
    """Elements of an array: one less than Slurm's MaxArraySize, for its numbers begin with 0 and ours too."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) - 1 if match else 1000


def _check_path(folder: Path) -> None:
    """Slurm reads patterns in a log's name, and no backslash in a path can be told from its own."""
    if NO_PATH.search(str(folder.absolute())):
        raise Refusal(f"--run {str(folder)!r}: {NO_PATH_SAID}")


def _warn_if_local(path: Path) -> None:
    if any(path.absolute().is_relative_to(root) for root in LOCAL_ROOTS):
        log.warning("%s: machines seldom share that folder: use one that all of the cluster's machines see", path)


# ------------------------------------------------------------------------------------------------------ its files


def _run_dir(launch: Launch, folder: Path) -> Path:
    return (Path(launch.syncer.dir) if launch.syncer.dir else folder).absolute()


def _slurm(folder: Path) -> Path:
    return folder.absolute() / "slurm"


def _log(record: Record, name: str) -> Path:
    return Path(record.folder) / "logs" / f"{name}.log"


def _made(folder: Path) -> Path:
    """The folder's own folders, for this user alone."""
    slurm = _slurm(folder)
    for path in (folder, folder / "logs", slurm, slurm / "members", slurm / "gone"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return slurm


def _put(path: Path, text: str) -> None:
    """For this user alone: an environment may have secrets in it."""
    with fresh(path, 0o600) as file:
        file.write(text.encode())


def _wish(folder: Path, name: str) -> None:
    _put(_slurm(folder) / name, "")


def _give_keys(record: Record, names: Iterable[str]) -> None:
    """Each has one, in a file that its owner alone can read; one that is good is kept."""
    keys = Keys(Path(record.handle["run_dir"]))
    keys.init()
    good = {row.name for row in keys.rows() if not row.revoked}
    for name in names:
        path = keys.folder / f"{name}.key"
        if name not in good or not path.exists():
            keys.issue(name, hand_over=lambda pem, path=path: _put(path, pem.decode()))  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------ its jobs


def _put_up(record: Record, job: Job, indices: Sequence[int], *more: str) -> None:
    """Learners with these numbers, as one array."""
    if not indices:
        record.handle[f"{job.name}.sbatch"] = msgspec.json.encode(job.options).decode()
        _put(_slurm(Path(record.folder)) / f"{job.name}.sh", job.script)
        write(record)
        return
    names = [f"{job.name}-{index}" for index in indices]
    for name in names:
        (_slurm(Path(record.folder)) / "gone" / name).unlink(missing_ok=True)
    _give_keys(record, names)
    _submit(record, job, f"--array={_ranges(indices)}", *more)


def _submit(record: Record, job: Job, *more: str) -> None:
    slurm = _slurm(Path(record.folder))
    script = slurm / f"{job.name}.sh"
    _put(script, job.script)
    said = _ask("sbatch", "--parsable", *job.options, *more, str(script)).strip().partition(";")[0]
    if not said.isdigit():
        raise Refusal(f"sbatch answered {one_line(said)[:200]!r} where a job's number was expected: look at squeue")
    record.handle[job.name] = ",".join([*_ids(record, job.name), said])
    record.handle[f"{job.name}.sbatch"] = msgspec.json.encode(job.options).decode()
    everything = [id for name in ("syncer", *record.counts) for id in _ids(record, name)]
    _put(slurm / "jobs", "\n".join(everything) + "\n")
    write(record)


def _shown(folder: Path, job: Job, *more: str) -> str:
    """Of what stands in its comments nothing ends a line: the next one would be a command."""
    script = str(_slurm(folder) / f"{job.name}.sh")
    command = " \\\n#   ".join(printable(shlex.quote(word)) for word in ["--parsable", *job.options, *more, script])
    return f"# {printable(script)}, submitted with:\n# sbatch {command}\n{job.script}"


def _ids(record: Record, name: str) -> list[str]:
    return [id for id in record.handle.get(name, "").split(",") if id]


def _ranges(indices: Sequence[int]) -> str:
    """As sbatch writes them: 0-3,7."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)


def _elements(record: Record) -> dict[tuple[str, int], Element]:
    """What Slurm has of this run, by island (or "syncer") and number: of several with one number the one that lives."""
    of_job = {id: name for name in ("syncer", *record.counts) for id in _ids(record, name)}
    words = ["--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%F|%K|%T|%N|%r"]
    found: dict[tuple[str, int], Element] = {}
    for line in _ask("squeue", *words).splitlines():
        id, job, index, state, where, reason = (line.strip().split("|") + [""] * 6)[:6]
        if job not in of_job:
            continue
        key = of_job[job], int(index) if index.isdigit() else 0
        element = Element(id, job, key[1], state, where, reason)
        before = found.get(key)
        if before is None or not _is_live(before):
            found[key] = element
    return found


def _of(record: Record, island: str) -> list[Element]:
    return [element for (name, _), element in _elements(record).items() if name == island]


def _is_live(element: Element) -> bool:
    return STATES.get(element.state, "failed") in LIVE


def _member(record: Record, name: str, island: str, elements: dict[tuple[str, int], Element]) -> Member:
    key = (island, int(name.rpartition("-")[2])) if island else ("syncer", 0)
    element = elements.get(key)
    noted, lives, since = _noted(record, name)
    state: State
    if element is not None and _is_live(element):
        state = STATES[element.state]
        detail = element.reason if state == "waiting" and element.reason != "None" else ""
        if noted == "restarting" and state == "running":
            state, detail = "restarting", _last_line(record, name)
        return Member(name, island, state, element.where, max(0, lives - 1), since, detail)
    if noted in ("ended", "failed") or (element is not None and element.state == "CANCELLED"):
        state = "failed" if noted == "failed" else "ended"
        detail = "cancelled" if element is not None and element.state == "CANCELLED" else ""
    else:
        state, detail = "failed", element.state.lower() if element is not None else "Slurm does not know it any more"
    detail = f"{detail} {_last_line(record, name)}".strip() if state == "failed" else detail
    return Member(name, island, state, "", max(0, lives - 1), since, detail)


def _noted(record: Record, name: str) -> tuple[str, int, float]:
    """What its own script has noted last: the state, how many lives there were, and since when it is so."""
    try:
        words = contents(_slurm(Path(record.folder)) / "members" / name, NOTE_BYTES_MAX).decode("ascii").split()
        return words[0], int(words[1]), float(words[3])
    except (OSError, ValueError, IndexError):
        return "", 0, 0.0


def _last_line(record: Record, name: str) -> str:
    """Of its log, for a person."""
    return one_line(last_line_of(_log(record, name), besides=("skerry: ", "slurmstepd")))[:200]


def _lines(record: Record, name: str, path: Path, follow: bool) -> Iterator[str]:
    """All of it; `follow`: until nothing of the member is there any more."""
    while follow and not path.exists() and _is_up(record, name):
        time.sleep(POLL_S)
    if not path.exists():
        return
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        looked_at, is_up = time.monotonic(), True
        while True:
            for line in file:
                yield line.decode("utf-8", "replace").rstrip("\n")
            if not follow or not is_up:
                return
            time.sleep(POLL_S)
            if time.monotonic() - looked_at > 10 * POLL_S:  # Slurm is asked now and then
                looked_at, is_up = time.monotonic(), _is_up(record, name)


def _is_up(record: Record, name: str) -> bool:
    return any(member.name == name and member.state not in ("ended", "failed") for member in members(record))


def _end(record: Record, keys: Sequence[tuple[str, int]], patience_s: float) -> None:
    """Those that run leave in order, those that wait are taken out of the queue; who stays longer is cancelled."""

    def still() -> list[Element]:
        return [element for key, element in _elements(record).items() if key in keys and _is_live(element)]

    elements = still()
    _cancel((each.id for each in elements if STATES[each.state] == "waiting"), "--state=PENDING")
    _cancel((each.id for each in elements if STATES[each.state] != "waiting"), "--batch", "--signal=TERM")
    if _are_gone(still, patience_s):
        return
    _cancel(each.id for each in still())
    if not _are_gone(still, KILL_S):
        left = ", ".join(each.id for each in still())
        raise Refusal(f"Slurm's jobs {left} were cancelled and are still there: look at squeue, then say this again")


def _are_gone(still: Callable[[], list[Element]], patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while still():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True


def _cancel(ids: Iterable[str], *how: str) -> None:
    """What is gone already is no trouble."""
    if them := list(ids):
        _ask("scancel", *how, *them, may_fail=True)


def _ask(command: str, *words: str, may_fail: bool = False) -> str:
    """What a command of Slurm's answers; refused in a line if it does not."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(FILTERS)}
    try:
        done = subprocess.run(
            [command, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S, check=False, env=env
        )
    except FileNotFoundError:
        raise NotAsked(
            f"{command} is not on the PATH: launch from a machine with Slurm's commands, such as a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise NotAsked(
            f"{command} had no answer within {ASK_S:.0f} s: is slurmctld up? scontrol ping says so"
        ) from None
    if done.returncode and not may_fail:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        how = Refusal if command == "sbatch" else NotAsked  # sbatch has looked at what it refuses
        raise how(f"{command}: {one_line(said[0])[:300]}: scontrol ping says whether slurmctld is up")
    return done.stdout.decode("utf-8", "replace")
