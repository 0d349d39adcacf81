"""What a launch is on Slurm, as jobs with a script and options of sbatch; `slurm.py` submits them and sees to them.

The syncer is a job, and each island an array with an element for each learner. A script says who its member is and what
is started, and ends with `tend.sh` (slurm.sh beside this file). What is in the file that was launched reaches a script
quoted, and sbatch as one word a value.

Nothing here is asked of Slurm or written down: what is wrong with a launch is said as far as the launch itself shows
it. What this cluster has, which of the jobs there are and what became of them is not known here.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skerry.engines.command import folder_of, learner_argv, learner_env, meeting, syncer_argv
from skerry.engines.spec import OURS, Island, Launch, Syncer
from skerry.errors import Refusal, printable
from skerry.python import code_argv, module_argv
from skerry.run.keys import KEYS

NOTICE_S_MIN = 120  # before a job's time is over
NOTICE_MORE_S = 60  # beside what a learner may take to leave
TIME_S_MIN = 600  # of a job: less is spent on starting and leaving
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
NO_PATH = re.compile(r"[\\\x00-\x1f\x7f-\x9f\u2028\u2029]")
NO_PATH_SAID = "Slurm takes no backslash and no control character there: choose another"
BASH_OWN = {  # variables that bash lets nobody set, or sets by itself
    "BASHOPTS", "BASHPID", "BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_CMDS", "BASH_COMMAND", "BASH_LINENO",
    "BASH_SOURCE", "BASH_VERSINFO", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS",
    "HISTCMD", "LINENO", "PIPESTATUS", "PPID", "RANDOM", "SHELLOPTS", "SHLVL", "SRANDOM", "UID", "_",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What is submitted: an island's learners, or the syncer."""

    name: str
    options: list[str]  # of sbatch, but for those of one submission
    script: str


def jobs_of(launch: Launch, folder: Path) -> list[Job]:
    folder = folder.absolute()
    return [_syncer(launch, folder), *(_island(launch, island, folder) for island in launch.islands)]


def _syncer(launch: Launch, folder: Path) -> Job:
    slurm, run_dir = slurm_folder(folder), run_dir_of(launch, folder)
    genesis = str(launch.path(launch.syncer.genesis)) if launch.syncer.genesis else ""
    argv = syncer_argv(launch, sys.executable, str(run_dir), str(slurm / "run.toml"), genesis, "0.0.0.0", 0)
    words = [shlex.quote(word) for word in argv]
    words[argv.index("--port") + 1] = '"$port"'
    options = _options(launch, launch.syncer, "syncer", folder, launch.file.parent, launch.syncer.cpus, 0, 1)
    free = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
    own = f"""
# Where learners find it: they read this file whenever they dial, so it may come up on another machine.
before() {{
  port={launch.syncer.port or f"$({shlex.join(code_argv(free))})"}
  printf '%s:%s\\n' "$(hostname)" "$port" > "$slurm/address.tmp" && mv -f "$slurm/address.tmp" "$slurm/address"
  command=({" ".join(words)})
}}
after() {{ # the run is closed, or somebody has stopped the syncer
  case $({shlex.join(module_argv("skerry", "status"))} "$run" --json) in
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
    slurm, where = slurm_folder(folder), folder_of(launch, island)
    keys = run_dir_of(launch, folder) / KEYS
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
        f"run={shlex.quote(str(run_dir_of(launch, folder)))}",
        f"slurm={shlex.quote(str(slurm_folder(folder)))}",
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
    partition, constraint = place_of(launch, part)
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


# ----------------------------------------------------------------------------------------- what is told of a submission


def printed(folder: Path, job: Job, *more: str) -> str:
    """Of what stands in its comments nothing ends a line: the next one would be a command."""
    script = str(slurm_folder(folder) / f"{job.name}.sh")
    command = " \\\n#   ".join(printable(shlex.quote(word)) for word in ["--parsable", *job.options, *more, script])
    return f"# {printable(script)}, submitted with:\n# sbatch {command}\n{job.script}"


def ranges(indices: Sequence[int]) -> str:
    """As sbatch writes them: 0-3,7."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)


# ------------------------------------------------------------------------------------------------------ what is refused


def said_wrong(launch: Launch) -> Iterator[str]:
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
    for what, path in (("syncer.dir", launch.syncer.dir), ("the launched file's folder", str(launch.file.parent))):
        if NO_PATH.search(path):
            yield f"{what} = {path!r}: {NO_PATH_SAID}"
    for part in parts_of(launch):
        yield from _badly_placed(part)
    for text in said.setup:
        if "\0" in text:
            yield f"slurm.setup: {text[:80]!r}: has a zero byte: take it out"


def _badly_placed(part: Syncer | Island) -> Iterator[str]:
    what, words = called(part), part.where.split()
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


def check_path(folder: Path) -> None:
    """Slurm reads patterns in a log's name, and no backslash in a path can be told from its own."""
    if NO_PATH.search(str(folder.absolute())):
        raise Refusal(f"--run {str(folder)!r}: {NO_PATH_SAID}")


# -------------------------------------------------------------------------------------------- what is read off a launch


def parts_of(launch: Launch) -> list[Syncer | Island]:
    return [launch.syncer, *launch.islands]


def called(part: Syncer | Island) -> str:
    return "syncer" if isinstance(part, Syncer) else f"island {part.name}"


def place_of(launch: Launch, part: Syncer | Island) -> tuple[str, str]:
    """Partition and constraint: `where` is a constraint, or partition=NAME, or both with a space between them."""
    words = part.where.split()
    partitions = [word.removeprefix("partition=") for word in words if word.startswith("partition=")]
    constraints = [word for word in words if not word.startswith("partition=")]
    return (partitions or [launch.slurm.partition])[-1], (constraints or [""])[-1]


def run_dir_of(launch: Launch, folder: Path) -> Path:
    return (Path(launch.syncer.dir) if launch.syncer.dir else folder).absolute()


def slurm_folder(folder: Path) -> Path:
    """Of the launch in this folder: scripts, states and wishes."""
    return folder.absolute() / "slurm"
