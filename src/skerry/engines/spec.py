"""What is launched: one TOML file with the run's configuration, its syncer and its islands.

    [run]                            # and any other table of the configuration
    name = "mine"
    tokens = 1_000_000_000

    [syncer]
    genesis = "genesis.safetensors"

    [[islands]]
    name = "gpu"
    count = 3                        # learners gpu-0, gpu-1 and gpu-2
    command = ["python", "train.py"] # without it, the built-in trainer
    gpus = 1

It is read and checked as a whole before anything is started, and what an engine cannot do is said then. Paths in it are
as the file's own folder sees them, but for `syncer.dir`, which is as the syncer's machine sees it.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from skerry import config as configs
from skerry.errors import ConfigError
from skerry.text import near

OURS = ("SKERRY_SYNCER", "SKERRY_NAME", "SKERRY_KEY_FILE", "SKERRY_TOKEN_FILE")  # said by the engine to each learner
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")  # what Ray, Slurm and Kubernetes all take as a name
COUNT_MAX = 4096


class Syncer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The one process that merges: where it is and what it has."""

    dir: str = ""  # the run directory, as the syncer's machine sees it; empty: the folder of the launch
    genesis: str = ""  # safetensors with the first values; empty: the built-in model, seeded
    preset: str = "default"  # on which the file's tables are laid
    port: int = 0  # that learners dial; 0: any that is free, or 7077 where an engine must know it before
    cpus: float = 1.0  # cores
    memory_gib: float = 0.0  # 0: not said
    where: str = ""  # which machine, as the engine names it: docs/ENGINES.md
    env: dict[str, str] = {}  # environment variables besides the engine's own


class Island(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Learners of one kind. Each is a process, or several that train one copy of the model together."""

    name: str  # its learners are NAME-0, NAME-1, …
    count: int = 1  # learners
    command: list[str] = []  # of each worker, in `folder`; empty: the built-in trainer
    folder: str = ""  # where the command runs; empty: the folder of the file, on Kubernetes /work in the image
    workers: int = 1  # processes of one learner on each of its machines, under torchrun if there are several
    machines: int = 1  # of one learner
    cpus: float = 1.0  # cores of a worker
    gpus: float = 0.0  # of a worker
    memory_gib: float = 0.0  # of a worker; 0: not said
    preemptible: bool = False  # may be put where machines are taken away
    restart: Literal["always", "failure", "never"] = "failure"  # what a learner that ended is brought back after
    env: dict[str, str] = {}  # environment variables besides the engine's own
    data: str = ""  # what the built-in trainer reads there; a command finds it in SKERRY_DATA
    speed: float | list[float] = 1.0  # of the built-in trainer, against learner.step_s; a list: of each learner
    where: str = ""  # which machines, as the engine names them: docs/ENGINES.md

    def learner(self, index: int) -> str:
        return f"{self.name}-{index}"

    def speed_of(self, index: int) -> float:
        """Who came later than those on the list has the last one's."""
        return self.speed if isinstance(self.speed, float | int) else self.speed[min(index, len(self.speed) - 1)]

    @property
    def is_built_in(self) -> bool:
        return not self.command

    @property
    def is_group(self) -> bool:
        """Of several processes, which find each other by torchrun."""
        return self.workers * self.machines > 1


class Ray(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For --engine ray."""

    address: str = ""  # of the cluster, HOST:PORT; empty: RAY_ADDRESS, or the one that runs on this machine
    autoscales: bool = False  # machines come when they are asked for: what fits none of those that are there may wait


class Slurm(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For --engine slurm."""

    partition: str = ""  # empty: the cluster's own
    account: str = ""  # who pays; empty: the user's own
    time: str = "24:00:00"  # after which a job is ended, and queued again until the run is closed
    setup: list[str] = []  # lines of shell before each command: module load …, source …/activate
    options: list[str] = []  # of sbatch, for all jobs: "--qos=high"


class Kubernetes(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For --engine kubernetes."""

    namespace: str = "default"  # where all of it lives
    syncer_image: str = "skerry-syncer:latest"  # without torch: docker/Dockerfile, target syncer
    image: str = "skerry:latest"  # of learners, with torch and what their command needs
    volume: str = "20Gi"  # for the run directory, as Kubernetes writes it
    storage_class: str = ""  # of that volume; empty: the cluster's own
    data_claim: str = ""  # a PersistentVolumeClaim that learners find at /data, read-only; empty: none
    grace_s: int = 120  # from SIGTERM to SIGKILL


class _Tables(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What of the file is not the run's configuration."""

    syncer: Syncer = Syncer()
    islands: list[Island] = []
    ray: Ray = Ray()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()


@dataclass(frozen=True)
class Launch:
    """A file that was read and checked."""

    file: Path
    text: str  # of the file: what travels to where it is not
    overrides: tuple[tuple[str, Any], ...]  # of the command line
    config: configs.Config
    syncer: Syncer
    islands: tuple[Island, ...]
    ray: Ray
    slurm: Slurm
    kubernetes: Kubernetes

    @property
    def name(self) -> str:
        return self.config.run.name

    def island(self, name: str) -> Island:
        for island in self.islands:
            if island.name == name:
                return island
        raise ConfigError(f"no island {name!r} in this run: {near(name, [each.name for each in self.islands])}")

    def path(self, given: str) -> Path:
        """As the file's own folder sees it."""
        return self.file.parent / given


def read(file: Path, overrides: Sequence[tuple[str, Any]] = ()) -> Launch:
    """Refused in one line where anything of it could not be launched by any engine."""
    tables = configs.read_toml(file, ConfigError, "given to skerry launch")
    for where, character in _controls(tables):
        raise ConfigError(f"{file}: {where}: has the control character {character!r}: leave it out")
    own = {key: value for key, value in tables.items() if key in configs.LAUNCH}
    try:
        parts = msgspec.convert(own, _Tables)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_explained(error, own)}") from None
    if parts.syncer.preset not in configs.PRESETS:
        raise ConfigError(f"{file}: syncer.preset: {near(parts.syncer.preset, configs.PRESETS)}")
    config = _config(file, parts, overrides)
    for problem in _problems(parts, config):
        raise ConfigError(f"{file}: {problem}")
    text = file.read_text("utf-8")
    return Launch(
        file.absolute(), text, tuple(overrides), config, parts.syncer, tuple(parts.islands),
        parts.ray, parts.slurm, parts.kubernetes,
    )  # fmt: skip


def again(text: str, file: Path, overrides: Sequence[tuple[str, Any]]) -> Launch:
    """What was read from this text before, elsewhere or by another command; `file` is where it lay, and need not be."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_text(text, "utf-8")
        return dataclasses.replace(read(copy, overrides), file=file)


def built_in(config: configs.Config, speeds: Sequence[float]) -> Launch:
    """What skerry train launches, with no file."""
    return Launch(Path(), "", (), config, Syncer(), (learners(speeds),), Ray(), Slurm(), Kubernetes())


def learners(speeds: Sequence[float]) -> Island:
    """The built-in trainer as learner-0, learner-1, …"""
    return Island(name="learner", count=len(speeds), speed=[*speeds] or 1.0)


def _config(file: Path, parts: _Tables, overrides: Sequence[tuple[str, Any]]) -> configs.Config:
    """Of the run; it has as many learners as its islands have, unless it says that more may come."""
    base = configs.PRESETS[parts.syncer.preset]()
    said = configs.said(configs.Config(), file, overrides)
    learners = sum(island.count for island in parts.islands)
    if "run.learners" not in said:
        base = configs.resolve(base, None, [("run.learners", max(1, learners))])
    config = configs.validate(configs.resolve(base, file, overrides))
    if config.run.learners < learners:
        raise ConfigError(
            f"{file}: run.learners = {config.run.learners}, and the islands have {learners}: leave it out, or raise it"
        )
    return config


def _controls(value: Any, where: str = "", allowed: str = "") -> Iterator[tuple[str, str]]:
    """Every control character and the key that has it: in scripts, names and terminals each means something else.

    A word of a command, and the value of an environment variable, may be of several lines.
    """
    if isinstance(value, str):
        yield from ((where, c) for c in value if unicodedata.category(c) == "Cc" and c not in allowed)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _controls(item, f"{where}[{at}]", allowed)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _controls(key, f"{where or 'the file'}: the key {key!r}")
            is_env = re.fullmatch(r"(syncer|islands\[\d+\])\.env", where) is not None
            has_lines = is_env or (key == "command" and where.startswith("islands["))
            yield from _controls(item, f"{where}.{key}" if where else key, "\n\t" if has_lines else "")


def _problems(parts: _Tables, config: configs.Config) -> Iterator[str]:
    if not NAME.fullmatch(config.run.name):
        yield f"run.name = {config.run.name!r}: use 1 to 40 of a-z, 0-9 and '-', which every engine takes as a name"
    if not parts.islands:
        yield "no [[islands]]: write at least one, with a name"
    names: set[str] = set()
    for at, island in enumerate(parts.islands):
        where = f"islands[{at}]"
        if not NAME.fullmatch(island.name):
            yield f"{where}.name = {island.name!r}: use 1 to 40 of a-z, 0-9 and '-', and begin and end with none of '-'"
        if island.name == "syncer":
            yield f"{where}.name = 'syncer': that is what the syncer is called, choose another"
        if island.name in names:
            yield f"{where}.name = {island.name!r}: is used twice: give each island a name of its own"
        names.add(island.name)
        yield from (f"{where} ({island.name}): {problem}" for problem in _problems_of(island))
    yield from (f"syncer.{problem}" for problem in _resources(parts.syncer))
    if not 0 <= parts.syncer.port < 65536:
        yield f"syncer.port = {parts.syncer.port}: must be from 0 to 65535"


def _problems_of(island: Island) -> Iterator[str]:
    for key, low in (("count", 0), ("workers", 1), ("machines", 1)):
        if not low <= getattr(island, key) <= COUNT_MAX:
            yield f"{key} = {getattr(island, key)}: must be from {low} to {COUNT_MAX}"
    yield from _resources(island)
    if not 0 <= island.gpus <= 1024:
        yield f"gpus = {island.gpus}: must be from 0 to 1024"
    speeds = island.speed if isinstance(island.speed, list) else [island.speed]
    if not speeds or not all(0.001 <= speed <= 1000 for speed in speeds):
        yield f"speed = {island.speed}: must be from 0.001 to 1000, or a list of such numbers"
    if island.is_built_in and island.is_group:
        yield "workers and machines are of a command: the built-in trainer is one process"
    if not island.is_built_in and island.speed != 1.0:
        yield "speed is of the built-in trainer: leave it out, or the command"
    if island.command and not island.command[0]:
        yield "command[0] is empty: name a program"
    for key in island.env:
        if key in OURS:
            yield f"env.{key} is said by the engine: leave it out"


def _resources(part: Syncer | Island) -> Iterator[str]:
    if not 0 < part.cpus <= 4096:
        yield f"cpus = {part.cpus}: must be above 0, and 4096 at most"
    if not 0 <= part.memory_gib <= 10**6:
        yield f"memory_gib = {part.memory_gib}: must be from 0 (not said) to 1000000"
    for key in part.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            yield f"env: {key[:80]!r} is no name of an environment variable"


def _explained(error: msgspec.ValidationError, tables: dict[str, Any]) -> str:
    """The key, its value and what it may be, as the configuration explains it; but islands are in a list."""
    match = re.search(r" - at `\$\.islands\[(\d+)\]", str(error))
    islands = tables.get("islands")
    if match is None or not isinstance(islands, list):
        if "islands" in tables and not isinstance(islands, list):
            return "islands is a list of tables: write [[islands]], with two brackets"
        return configs.explained(error, _Tables, tables)
    at = int(match[1])
    try:
        msgspec.convert(islands[at], Island)
    except msgspec.ValidationError as own:
        if not isinstance(islands[at], dict) or "required" in str(own):
            return f"islands[{at}]: write a table with at least a name"
        return f"islands[{at}].{configs.explained(own, Island, islands[at])}"
    raise AssertionError(error)
