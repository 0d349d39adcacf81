"""The engine Slurm: it submits a job for the syncer and an array for each island, looks at them, scales and ends them.

    RUN/slurm/syncer.sh, ISLAND.sh   the jobs' scripts: who it is, what is started; `--dry-run` prints them
    RUN/slurm/tend.sh                what each of them ends with (slurm.sh beside this file): policy, leave, queue again
    RUN/slurm/address                where the syncer is now; learners read it whenever they dial
    RUN/slurm/members/NAME           what became of a member, as its own script notes it
    RUN/slurm/closed, down, gone/    wishes: whoever finds one for itself is not queued again

What is in the scripts, with which options they are submitted, and what is wrong with a launch as it is written, is in
`jobs.py`; here is what this cluster has, and what became of the jobs. The folder of the launch is on a file system that
the cluster's machines share. Slurm is asked by its commands only, each with a limit of time, and never through a shell.
"""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from skerry.engines import Member, NotAsked, State, is_member, last_line_of
from skerry.engines.folder import Record, record_of, write
from skerry.engines.jobs import (
    NOTICE_MORE_S,
    TEND,
    Job,
    called,
    check_path,
    jobs_of,
    parts_of,
    place_of,
    printed,
    ranges,
    run_dir_of,
    said_wrong,
    slurm_folder,
)
from skerry.engines.spec import Island, Launch, Syncer
from skerry.errors import Refusal, one_line, printable
from skerry.run.keys import Keys
from skerry.store.files import contents, fresh
from skerry.text import counted, near

ASK_S = 60.0  # for a command of Slurm's to answer
POLL_S = 1.0
SYNCER_S = 90.0  # for the syncer to write its checkpoints and go
KILL_S = 60.0  # for what was cancelled to be gone
FILTERS = ("SQUEUE_", "SINFO_", "SCANCEL_")  # variables by which a user's own squeue leaves things out
NOTE_BYTES_MAX = 256
LOCAL_ROOTS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
STATES: dict[str, State] = {
    "PENDING": "waiting", "REQUEUED": "waiting", "REQUEUE_FED": "waiting", "REQUEUE_HOLD": "waiting",
    "SPECIAL_EXIT": "waiting", "SUSPENDED": "waiting", "STOPPED": "waiting", "PREEMPTED": "waiting",
    "CONFIGURING": "starting", "RUNNING": "running", "SIGNALING": "running", "STAGE_OUT": "running",
    "RESIZING": "running", "COMPLETING": "running",
    "COMPLETED": "ended", "CANCELLED": "ended", "REVOKED": "ended",
}  # fmt: skip
LIVE = ("waiting", "starting", "running")

log = logging.getLogger("skerry.engines.slurm")


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
    yield from said_wrong(launch)
    machines = _machines()
    for part in parts_of(launch):
        yield from _unmet(part, launch, machines)
    most = _array_size_max()
    for island in launch.islands:
        if island.count > most:
            yield f"island {island.name}: {island.count} learners, and an array has {most} here: make two islands of it"


def start(launch: Launch, folder: Path) -> None:
    """Submit all of it; what was submitted is cancelled if the rest is refused."""
    check_path(folder)
    run_dir = run_dir_of(launch, folder)
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
    syncer, *islands = jobs_of(launch, folder)
    try:
        _submit(record, syncer)
        for job in islands:
            _put_up(record, job, range(record.counts[job.name]), f"--dependency=after:{record.handle['syncer']}")
    except BaseException:
        _cancel(job for name in record.counts | {"syncer": 1} for job in _ids(record, name))
        raise


def dry(launch: Launch, folder: Path) -> str:
    check_path(folder)
    syncer, *islands = jobs_of(launch, folder)
    parts = [printed(folder, syncer)]
    for job in islands:
        count = launch.island(job.name).count
        parts.append(printed(folder, job, f"--array={ranges(range(count))}", "--dependency=after:JOB_OF_THE_SYNCER"))
    return "\n".join([*parts, printable(f"# {slurm_folder(folder) / 'tend.sh'}"), TEND.read_text("utf-8")])


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
        _put_up(record, Job(island, options, contents(slurm_folder(folder) / f"{island}.sh").decode()), missing)
    _end(record, [(island, index) for index in going], float(record.handle["leave_s"]) + NOTICE_MORE_S)


def down(record: Record) -> None:
    _wish(Path(record.folder), "down")
    everybody = list(_elements(record))
    learners = [key for key in everybody if key[0] != "syncer"]
    _end(record, learners, float(record.handle["leave_s"]) + NOTICE_MORE_S)
    _end(record, [key for key in everybody if key[0] == "syncer"], SYNCER_S)


# ------------------------------------------------------------------------------------------------- what the cluster has


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
    what, (partition, constraint) = called(part), place_of(launch, part)
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


def _array_size_max() -> int:
    """Elements of an array: one less than Slurm's MaxArraySize, for its numbers begin with 0 and ours too."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) - 1 if match else 1000


def _warn_if_local(path: Path) -> None:
    if any(path.absolute().is_relative_to(root) for root in LOCAL_ROOTS):
        log.warning("%s: machines seldom share that folder: use one that all of the cluster's machines see", path)


# ------------------------------------------------------------------------------------------------------ its files


def _log(record: Record, name: str) -> Path:
    return Path(record.folder) / "logs" / f"{name}.log"


def _made(folder: Path) -> Path:
    """The folder's own folders, for this user alone."""
    slurm = slurm_folder(folder)
    for path in (folder, folder / "logs", slurm, slurm / "members", slurm / "gone"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return slurm


def _put(path: Path, text: str) -> None:
    """For this user alone: an environment may have secrets in it."""
    with fresh(path, 0o600) as file:
        file.write(text.encode())


def _wish(folder: Path, name: str) -> None:
    _put(slurm_folder(folder) / name, "")


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
        _put(slurm_folder(Path(record.folder)) / f"{job.name}.sh", job.script)
        write(record)
        return
    names = [f"{job.name}-{index}" for index in indices]
    for name in names:
        (slurm_folder(Path(record.folder)) / "gone" / name).unlink(missing_ok=True)
    _give_keys(record, names)
    _submit(record, job, f"--array={ranges(indices)}", *more)


def _submit(record: Record, job: Job, *more: str) -> None:
    slurm = slurm_folder(Path(record.folder))
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


def _ids(record: Record, name: str) -> list[str]:
    return [id for id in record.handle.get(name, "").split(",") if id]


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
        words = contents(slurm_folder(Path(record.folder)) / "members" / name, NOTE_BYTES_MAX).decode("ascii").split()
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
