"""Studies: TOML in, jobs out; and what a job gives.

A study names variants of a run and the seeds each is run with. A job is one variant with one seed, its configuration
resolved; its key is a digest of all that decides the outcome. RECIPE is raised when the laboratory changes what it
computes. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from skerry import config as configs
from skerry.config import Config
from skerry.errors import ConfigError, StudyError
from skerry.run.delays import MEASURED, NONE, Delays
from skerry.text import near
from skerry.train.shapes import shape_of

RECIPE = 1
WHOLE = 0.05  # 1 / speed may miss a whole number by this much: 0.33 is a third

HEAD = ("name", "about", "seeds", "baseline", "common", "variants")
REPLICA = ("run", "model", "data", "learner")  # what data-parallel training reads
TABLES = (*Config.__struct_fields__, "lab")
DELAYS = {"none": NONE, "measured": MEASURED}  # by figures in a job's key, so that other measurements are another job
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


class Trial(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the product does not do, or not yet: it is measured here first (`lab.trials`)."""

    optimizer: Literal["adamw", "muon"] = "adamw"  # of the matrices inside; the rest is always AdamW's
    beta2: float = 0.95  # how long AdamW remembers squared gradients
    weights: Literal["tokens", "equal"] = "tokens"  # of contributions
    norms: Literal["tensor", "row"] = "tensor"  # what RDA takes direction and length of
    embeddings: Literal["mean", "rda"] = "mean"
    kept: float = 1.0  # share of a contribution that is sent, the largest of each 4096 elements; the rest stays behind
    alone: Literal["merge", "pause", "forward", "shrink"] = "merge"  # what a learner does beyond alone_steps without a
    alone_steps: int = 0  # syncer, or has done to its drift: nothing, it stands still, none is left, or their share
    steer: float = 0.0  # how strongly a fragment's outer step follows the cosine between its merges


PRODUCT = Trial()  # nothing tried: as the product has it


class Setting(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What only the laboratory knows: who is slow, dead or away, what the links carry, what is measured.

    Time is virtual: a step of speed 1 takes learner.step_s, or 0.3 s where that is 0.
    """

    data_parallel: bool = False  # one replica with M times the batch and no syncer: the baseline
    speeds: tuple[float, ...] = ()  # 1/n each; one per learner, or a pattern that repeats; (): all 1
    dead_share: float = 0.0  # of the time of each learner
    dead_steps: float = 50.0  # how long at a time, on average, in steps of speed 1
    keep_optimizer: bool = False  # a learner that comes back has its Adam moments
    text: Literal["all", "dealt", "domains"] = "all"  # what a learner draws from: all, its chunks, a stretch of its own
    outage_at: float = 0.0  # of the budget, when the syncer goes away,
    outage_steps: int = 0  # and for how long, in steps of speed 1; 0: never
    away_half: int = 0  # so many learners come for the middle half of the run only
    extend_at: float = 0.0  # of the budget, when an order makes that so many times as large;
    extend_by: float = 0.0  # 0: none does
    latency_s: float = 0.02  # one way
    mbit_s: float = 0.0  # of each learner's link, each way; 0: unlimited
    points: int = 20  # of the loss curve
    held_out: int = 256  # batches of 8, for the loss at the end
    delays: Delays = NONE  # what the product's own work takes: "none", "measured" (`run/delays.py`), or figures
    precision: Literal["bf16", "float32"] = "bf16"  # of matrix products on a GPU; on a CPU always float32
    trial: Trial = PRODUCT


class Job(Struct, frozen=True, kw_only=True):
    """One variant with one seed; a relative data.path begins at `folder`, which is no part of the key."""

    study: str
    variant: str
    seed: int
    config: Config
    setting: Setting
    folder: str = "."

    @property
    def tables(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return msgspec.to_builtins(self.config), msgspec.to_builtins(self.setting)

    @property
    def key(self) -> str:
        return digest(*self.tables)

    def __str__(self) -> str:
        return f"{self.study}/{self.variant} seed {self.seed}"


class Stint(NamedTuple):
    """Until when a job may go on this time, and where it is saved to go on another."""

    file: Path
    until: float = math.inf  # by time.monotonic(), which is the same in all processes of a machine


class Point(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The loss on the way: tokens kept and bytes sent both ways by all learners so far."""

    progress: float
    tokens: int
    bytes: int
    loss: float
    agreement: float = 0.0  # mean cosine between two learners' contributions to a merge, since the last point
    echo: float = 0.0  # and between a merged delta and the one before it


class Result(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one job gave; losses are held-out nats/byte, NaN where the run diverged."""

    key: str
    study: str
    variant: str
    seed: int
    loss: float
    loss_before_close: float
    diverged: bool
    points: tuple[Point, ...]
    parameters: Annotated[int, Meta(gt=0)]
    tokens: int
    tokens_discarded: int
    steps: int
    merges: int
    contributors: float
    bytes_up: int
    bytes_down: int
    seconds: float
    device: str
    versions: dict[str, str]
    config: dict[str, dict[str, Any]]
    setting: dict[str, Any]


class Study(Struct, frozen=True, kw_only=True):
    """A file's content; `variants` are those chosen, `jobs` those of all variants, in the order in which they run."""

    file: str
    name: str
    about: str
    baseline: str
    seeds: tuple[int, ...]
    variants: tuple[str, ...]
    jobs: tuple[Job, ...]

    @property
    def chosen(self) -> list[Job]:
        return [job for job in self.jobs if job.variant in self.variants]

    def narrowed(self, variants: Sequence[str] = (), seeds: Sequence[int] = ()) -> Study:
        """Only these variants, or only these seeds."""
        kept = tuple(seed for seed in self.seeds if not seeds or seed in seeds)
        return msgspec.structs.replace(
            self,
            seeds=kept,
            variants=tuple(name for name in self.variants if not variants or name in variants),
            jobs=tuple(job for job in self.jobs if job.seed in kept),
        )


def digest(config: dict[str, Any], setting: dict[str, Any]) -> str:
    said = json.dumps([RECIPE, deciding(config, setting)], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def deciding(config: dict[str, Any], setting: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables that decide the outcome: neither the run's name, nor what a data-parallel replica does not read."""
    tables = {name: table for name, table in config.items() if name in REPLICA or not setting.get("data_parallel")}
    if setting.get("data_parallel"):
        setting = {key: value for key, value in setting.items() if key != "delays"}
    tables["run"] = {key: value for key, value in config.get("run", {}).items() if key != "name"}
    return tables | {"lab": setting}


def read(file: Path) -> Study:
    table = configs.read_toml(file, StudyError, "of the study")
    for key in table:
        if key not in HEAD:
            raise StudyError(f"{file}: unknown key {key}: {near(key, HEAD)}")
    name, about, baseline = (_word(file, table, key) for key in ("name", "about", "baseline"))
    if not NAME.fullmatch(name):
        raise StudyError(f"{file}: name = {name!r}: use 1 to 64 of a-z, 0-9, '.' and '-'")
    seeds = _seeds(file, table.get("seeds"))
    variants = _variants(file, table)
    if baseline and ":" not in baseline and baseline not in variants:
        hint = f"{near(baseline, variants)} (another study's is written study:variant)"
        raise StudyError(f"{file}: baseline = {baseline!r}: no such variant: {hint}")
    jobs = [
        Job(
            study=name,
            variant=variant,
            seed=seed,
            config=msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, seed=seed)),
            setting=setting,
            folder=str(file.absolute().parent),
        )
        for seed in seeds
        for variant, (config, setting) in variants.items()
    ]
    return Study(
        file=str(file),
        name=name,
        about=about,
        baseline=baseline,
        seeds=seeds,
        variants=tuple(variants),
        jobs=tuple(jobs),
    )


def _word(file: Path, table: dict[str, Any], key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise StudyError(f"{file}: {key} = {value!r}: must be text")
    return value


def _seeds(file: Path, seeds: object) -> tuple[int, ...]:
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds):
        raise StudyError(f"{file}: seeds = {seeds!r}: write a list of whole numbers from 0, like [0, 1, 2]")
    for seed in seeds:
        if seeds.count(seed) > 1:
            raise StudyError(f"{file}: seeds = {seeds!r}: {seed} is there twice")
    return tuple(seeds)


def _variants(file: Path, table: dict[str, Any]) -> dict[str, tuple[Config, Setting]]:
    common, named = table.get("common", {}), table.get("variants")
    if not isinstance(named, dict) or not named:
        raise StudyError(f"{file}: has no variant: write a table like [variants.defaults]")
    base, common_lab = _overlaid(f"{file}, common", configs.default(), {}, common)
    variants = {}
    for name, changes in named.items():
        where = f"{file}, variant {name}"
        if not NAME.fullmatch(name):
            raise StudyError(f"{where}: use 1 to 64 of a-z, 0-9, '.' and '-' for its name")
        config, lab = _overlaid(where, base, common_lab, changes)
        setting = _setting(where, lab)
        for problem in _problems(config, setting):
            raise StudyError(f"{where}: {problem}")
        variants[name] = config, setting
    return variants


def _overlaid(where: str, base: Config, lab: dict[str, Any], changes: object) -> tuple[Config, dict[str, Any]]:
    """A configuration and the laboratory's keys, with changes on top; what is unknown is refused."""
    if not isinstance(changes, dict):
        raise StudyError(f"{where}: must be a table")
    for table, values in changes.items():
        if table not in TABLES:
            raise StudyError(f"{where}: unknown table {table}: {near(table, TABLES)}")
        if not isinstance(values, dict):
            raise StudyError(f"{where}: {table} = {values!r}: is a table: write keys below it")
    given = [(f"{table}.{key}", value) for table, values in changes.items() for key, value in values.items()]
    for dotted, _ in given:
        table, key = dotted.split(".", 1)
        if table == "lab" and key not in Setting.__struct_fields__:
            raise StudyError(f"{where}: unknown key {dotted}: {near(key, Setting.__struct_fields__)}")
        if dotted == "run.seed":
            raise StudyError(f"{where}: run.seed: a study lists its seeds at the top: seeds = [0, 1, 2]")
    try:
        config = configs.resolve(base, None, [one for one in given if not one[0].startswith("lab.")])
    except ConfigError as error:
        raise StudyError(f"{where}: {str(error).removeprefix('command line: ')}") from None
    return config, _under(lab, changes.get("lab", {}))


def _under(lab: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The laboratory's keys with changes on top, those of lab.trial one by one."""
    trial, tried = lab.get("trial", {}), changes.get("trial", {})
    both = isinstance(trial, dict) and isinstance(tried, dict)
    return lab | changes | ({"trial": trial | tried} if both and (trial or tried) else {})


def _setting(where: str, lab: dict[str, Any]) -> Setting:
    named = lab.get("delays")
    if isinstance(named, str):
        if named not in DELAYS:
            raise StudyError(f"{where}: lab.delays = {named!r}: {near(named, DELAYS)}, or a table of figures")
        lab = lab | {"delays": msgspec.to_builtins(DELAYS[named])}
    try:
        return msgspec.convert(lab, Setting)
    except msgspec.ValidationError as error:
        raise StudyError(f"{where}: lab.{configs.explained(error, Setting, lab)}") from None


def _problems(config: Config, setting: Setting) -> Iterator[str]:
    try:
        configs.validate(config)
        shape_of(config.model)
    except ConfigError as error:
        yield str(error)
    if config.run.minutes:
        yield f"run.minutes = {config.run.minutes:g}: variants are compared at equal work: set run.tokens or run.steps"
    for key, low, high in _RANGES:
        value = operator.attrgetter(key)(setting)
        if not low <= value <= high:
            yield f"lab.{key} = {value:g}: must be from {low:g} to {high:g}"
    learners, speeds = config.run.learners, list(setting.speeds)
    for speed in speeds:
        if not 0.001 <= speed <= 1 or abs(1 / speed - round(1 / speed)) > WHOLE:
            yield f"lab.speeds = {speeds}: {speed:g} is not 1/n with n a whole number, like 1, 0.5 or 0.25"
    if len(speeds) > learners:
        yield f"lab.speeds = {speeds}: {len(speeds)} speeds for {learners} learners (run.learners)"
    if setting.away_half >= learners:
        yield f"lab.away_half = {setting.away_half}: of {learners} learners (run.learners) one must be there throughout"
    if setting.outage_steps and (setting.dead_share or setting.away_half):
        yield "lab.outage_steps: with lab.dead_share or lab.away_half: learners join while nobody is there to join"
    if 0 < setting.extend_by <= 1:
        yield f"lab.extend_by = {setting.extend_by:g}: times the budget, so more than 1, or 0 for never"
    idle = [key for key in ("speeds", "dead_share", "away_half", "outage_steps", "extend_by") if getattr(setting, key)]
    if setting.data_parallel and idle:
        none = "[]" if idle[0] == "speeds" else "0"
        what = "a data-parallel replica is never slow, dead, away or extended"
        yield f"lab.{idle[0]}: {what}: set it to {none} in this variant"


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("dead_share", 0, 0.9),
    ("dead_steps", 1, 10**6),
    ("away_half", 0, 4096),
    ("outage_at", 0, 1),
    ("outage_steps", 0, 10**6),
    ("extend_at", 0, 0.99),
    ("extend_by", 0, 1000),
    ("latency_s", 0, 60),
    ("mbit_s", 0, 10**6),
    ("points", 1, 10**4),
    ("held_out", 1, 10**5),
    ("delays.encode_ns", 0, 10**6),
    ("delays.adopt_ns", 0, 10**6),
    ("delays.inspect_ns", 0, 10**6),
    ("delays.merge_ns", 0, 10**6),
    ("delays.commit_s", 0, 60),
    ("trial.beta2", 0.5, 0.9999),
    ("trial.kept", 0.001, 1),
    ("trial.alone_steps", 0, 10**6),
    ("trial.steer", 0, 10),
)
