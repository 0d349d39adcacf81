"""Fault plans: TOML in, a list of concrete faults out.

A plan says what may happen; `schedule` says what does, to whom and when, from a seed alone, so that the same plan runs
on real processes and in virtual time. Nothing here does anything to anybody.

Rules that hold here: a process has one fault at a time, and time to recover between two of them; a fault that finds no
process free is left out; kills, and whatever is drawn, leave one learner undisturbed, unless the plan says "all". A
climate (slow, delay or bandwidth for all learners) is no disturbance in this sense: other faults come on top of it.
Every fault ends with the run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from skerry.config import read_toml
from skerry.errors import PlanError
from skerry.text import near

PRESETS = Path(__file__).with_name("plans")
GUARD_S = 2.0  # between two faults of one process
RETURN_S = 6.0  # after a kill, in which the next process comes up
EVERY_S_MIN = 0.5
FROM, TO = 0.05, 0.95
LEARNERS_MAX = 64

LINK = ("partition", "half_open", "delay", "bandwidth", "drop", "corrupt", "truncate")
KINDS = ("kill", "kill_node", "stop", "slow", "disk_full", *LINK)
KILLS = ("kill", "kill_node")  # of a learner: its next life begins with what the syncer has
ENDS_PROCESS = ("kill", "disk_full")  # its target is away until the next process is started
MOMENTARY = ("kill_node", "drop", "corrupt", "truncate")
GENTLE = ("slow", "delay", "bandwidth")  # things go on, only slower
DIRECTED = ("half_open", "corrupt", "truncate")  # in a direction that is drawn if the plan names none
NEEDS = {"slow": "speed", "delay": "delay_s", "bandwidth": "mbit"}
RANGES = {"speed": (0.001, 1.0), "delay_s": (0.0, 60.0), "mbit": (0.001, 1e6)}
HEAD = ("name", "about", "minutes", "learners", "speeds", "fault")
KEYS = ("kind", "kinds", "target", "at", "every_s", "from", "to", "for_s", "share", "direction", *RANGES)


class Fault(Struct, frozen=True):
    """One thing that is done to one process: when, counted from the first step of the run, and for how long."""

    kind: str
    target: str
    at_s: float
    for_s: float
    parameters: dict[str, float | str]


class Line(Struct, frozen=True, kw_only=True):
    """One [[fault]] table."""

    kinds: tuple[str, ...]
    target: str
    at: tuple[float, ...] = ()  # fractions of the run, or
    every_s: float = 0.0  # from `start` to `end`, also fractions
    start: float = FROM
    end: float = TO
    for_s: tuple[float, float] = (0.0, 0.0)
    share: float = 0.0  # of the run, in place of for_s
    parameters: dict[str, float | str]


class FaultPlan(Struct, frozen=True):
    name: str
    about: str
    minutes: float
    learners: int
    speeds: tuple[float, ...]
    lines: tuple[Line, ...]


# ---------------------------------------------------------------------------------------------- reading


def presets() -> list[FaultPlan]:
    return [_plan(file) for file in sorted(PRESETS.glob("*.toml"))]


def read_plan(name_or_path: str) -> FaultPlan:
    """A preset by its name, or a file by its path."""
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        return _plan(Path(name_or_path))
    file = PRESETS / f"{name_or_path}.toml"
    if not file.is_file():
        known = sorted(preset.stem for preset in PRESETS.glob("*.toml"))
        raise PlanError(f"unknown plan {name_or_path!r}: {near(name_or_path, known)} (or give a path ending in .toml)")
    return _plan(file)


def _plan(file: Path) -> FaultPlan:
    table = read_toml(file, PlanError, "of the plan")
    reader = _Reader(str(file), table, HEAD)
    learners = reader.number("learners", 4, 1, LEARNERS_MAX)
    if learners != int(learners):
        raise reader.wrong("learners", "must be a whole number")
    speeds = reader.numbers("speeds", (), 0.001, 1000)
    if speeds and len(speeds) != learners:
        raise reader.wrong("speeds", f"write one number for each of the {int(learners)} learners")
    tables = table.get("fault", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
        raise PlanError(f"{file}: has no fault: write a [[fault]] table with kind, target and at")
    return FaultPlan(
        name=reader.word("name", file.stem),
        about=reader.word("about", ""),
        minutes=reader.number("minutes", 2.0, 0.05, 1e5),
        learners=int(learners),
        speeds=speeds,
        lines=tuple(_line(_Reader(f"{file}, fault {n}", one, KEYS)) for n, one in enumerate(tables, 1)),
    )


def _line(reader: _Reader) -> Line:
    kinds = _kinds(reader)
    target = _target(reader, kinds)
    times = reader.one_of("at", "every_s")
    lasting = [kind for kind in kinds if kind not in MOMENTARY]
    if lasting:
        reader.one_of("for_s", "share", why=f"how long {lasting[0]} lasts")
    start, end = reader.number("from", FROM, 0, 1), reader.number("to", TO, 0, 1)
    if start >= end:
        raise reader.wrong("from", f"must be below to = {end:g}")
    return Line(
        kinds=kinds,
        target=target,
        at=reader.numbers("at", (), 0, 1) if times == "at" else (),
        every_s=reader.number("every_s", 0.0, EVERY_S_MIN, 1e6) if times == "every_s" else 0.0,
        start=start,
        end=end,
        for_s=_span(reader),
        share=reader.number("share", 0.0, 0, 1),
        parameters=_parameters(reader, kinds),
    )


def _kinds(reader: _Reader) -> tuple[str, ...]:
    key = reader.one_of("kind", "kinds")
    value = reader.table[key]
    kinds = [value] if key == "kind" else value
    if not isinstance(kinds, list) or not kinds:
        raise reader.wrong(key, "write a list of kinds")
    for kind in kinds:
        if kind not in KINDS:
            raise reader.wrong(key, f"unknown kind {kind!r}: {near(str(kind), KINDS)}")
    return tuple(kinds)


def _target(reader: _Reader, kinds: tuple[str, ...]) -> str:
    legal = 'must be "learner", "learner-2" for a certain one, "half", "all" or "syncer"'
    target = reader.table.get("target")
    if target is None:
        raise PlanError(f"{reader.where}: target is missing: it {legal}")
    if not isinstance(target, str) or (target not in ("learner", "half", "all", "syncer") and _index(target) is None):
        raise reader.wrong("target", legal)
    for kind in kinds:
        if target == "syncer" and kind in ("slow", "kill_node"):
            raise reader.wrong("target", f"{kind} takes learners only")
        if target != "syncer" and kind == "disk_full":
            raise reader.wrong("target", 'disk_full takes "syncer" only')
    return target


def _index(target: str) -> int | None:
    digits = target.removeprefix("learner-")
    return int(digits) if digits != target and digits.isascii() and digits.isdigit() else None


def _span(reader: _Reader) -> tuple[float, float]:
    spans = reader.numbers("for_s", (0.0,), 0, 1e6)
    if len(spans) > 2 or spans[0] > spans[-1]:
        raise reader.wrong("for_s", "write seconds, or two numbers to draw between like [2.0, 6.0]")
    return spans[0], spans[-1]


def _parameters(reader: _Reader, kinds: tuple[str, ...]) -> dict[str, float | str]:
    needed = {NEEDS[kind]: kind for kind in kinds if kind in NEEDS}
    for key, kind in needed.items():
        if key not in reader.table:
            raise PlanError(f"{reader.where}: {key} is missing: {kind} needs it")
    for key in RANGES:
        if key in reader.table and key not in needed:
            raise reader.wrong(key, f"{' and '.join(dict.fromkeys(kinds))} cannot take it")
    parameters: dict[str, float | str] = {key: reader.number(key, 0.0, *RANGES[key]) for key in needed}
    if "direction" in reader.table:
        if not any(kind in DIRECTED for kind in kinds) or reader.table["direction"] not in ("up", "down"):
            raise reader.wrong("direction", f'must be "up" or "down", for {", ".join(DIRECTED)}')
        parameters["direction"] = reader.table["direction"]
    return parameters


class _Reader:
    """One table of a file, and how to complain about it."""

    def __init__(self, where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
        self.where, self.table = where, table
        for key in table:
            if key not in known:
                raise PlanError(f"{where}: unknown key {key!r}: {near(key, known)}")

    def wrong(self, key: str, legal: str) -> PlanError:
        return PlanError(f"{self.where}: {key} = {self.table.get(key)!r}: {legal}")

    def one_of(self, *keys: str, why: str = "") -> str:
        given = [key for key in keys if key in self.table]
        if len(given) != 1:
            choice, said = " or ".join(keys), " and ".join(given) or "none"
            raise PlanError(f"{self.where}: write either {choice}{why and f', {why}'}; {said} is given")
        return given[0]

    def word(self, key: str, default: str) -> str:
        value = self.table.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "must be text")
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        if key not in self.table:
            return default
        return self._checked(key, self.table[key], low, high)

    def numbers(self, key: str, default: tuple[float, ...], low: float, high: float) -> tuple[float, ...]:
        """One number or a list of them."""
        if key not in self.table:
            return default
        value = self.table[key]
        if value == []:
            raise self.wrong(key, "is empty")
        return tuple(self._checked(key, one, low, high) for one in (value if isinstance(value, list) else [value]))

    def _checked(self, key: str, value: Any, low: float, high: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, "must be a number")
        if not low <= value <= high:
            raise self.wrong(key, f"must be from {low:g} to {high:g}")
        return float(value)


# ---------------------------------------------------------------------------------------------- scheduling


def schedule(plan: FaultPlan, minutes: float, learners: int, seed: int) -> list[Fault]:
    """What happens in a run of this length with this many learners, in order of time."""
    _check_targets(plan, learners)
    diary = _Diary([f"learner-{n}" for n in range(learners)])
    wanted = [one for n, line in enumerate(plan.lines, 1) for one in _wanted(line, minutes * 60, f"{seed}/{n}")]
    # What the plan aims at a certain process comes first; then those that can be drawn find their place around it.
    for line, fault, source in sorted(wanted, key=lambda w: (w[0].target == "learner", w[1].at_s)):
        diary.place(line, fault, source)
    return sorted(diary.faults, key=lambda f: (f.at_s, f.target, f.kind))


def _check_targets(plan: FaultPlan, learners: int) -> None:
    for n, line in enumerate(plan.lines, 1):
        index = _index(line.target)
        if index is not None and index >= learners:
            last = f"learner-{learners - 1}"
            raise PlanError(f"plan {plan.name}, fault {n}: target = {line.target!r}: the last of {learners} is {last}")
        if line.target == "half" and learners < 2:
            raise PlanError(f"plan {plan.name}, fault {n}: target = 'half': needs at least 2 learners, not {learners}")


def _wanted(line: Line, total_s: float, seed: str) -> Iterator[tuple[Line, Fault, random.Random]]:
    """The faults of one line, their targets as the plan names them; the source is drawn on to choose those."""
    source = random.Random(seed)
    deck: list[str] = []
    for at_s in _times(line, total_s):
        if not deck:
            deck = list(line.kinds)
            source.shuffle(deck)
        kind = deck.pop()
        for_s = line.share * total_s if line.share else source.uniform(*line.for_s)
        for_s = 0.0 if kind in MOMENTARY else min(for_s, total_s - at_s)
        parameters = {key: value for key, value in line.parameters.items() if key == NEEDS.get(kind)}
        if kind in DIRECTED:
            parameters["direction"] = line.parameters.get("direction") or source.choice(("up", "down"))
        yield line, Fault(kind, line.target, at_s, for_s, parameters), source


def _times(line: Line, total_s: float) -> list[float]:
    if line.at:
        return [fraction * total_s for fraction in sorted(line.at)]
    count = math.floor((line.end - line.start) * total_s / line.every_s + 1e-9) + 1
    return [line.start * total_s + n * line.every_s for n in range(count)]


class _Diary:
    """Who is disturbed when."""

    def __init__(self, learners: list[str]) -> None:
        self.learners = learners
        self.faults: list[Fault] = []
        self._taken: dict[str, list[Fault]] = {}

    def place(self, line: Line, fault: Fault, source: random.Random) -> None:
        """Aim a fault at processes, those of them that are free."""
        is_climate = fault.kind in GENTLE and line.target in ("all", "syncer")
        targets = self._targets(line.target, fault, source)
        is_drawn = line.target == "learner" and len(self.learners) > 1
        if is_drawn or (fault.kind in KILLS and line.target not in ("all", "syncer")):
            undisturbed = [name for name in self.learners if name not in targets and self._is_free(name, fault)]
            targets = targets if undisturbed else []
        for target in targets:
            concrete = Fault(fault.kind, target, fault.at_s, fault.for_s, fault.parameters)
            if is_climate:
                self.faults.append(concrete)
            elif self._is_free(target, fault):
                self.faults.append(concrete)
                self._taken.setdefault(target, []).append(concrete)

    def _targets(self, target: str, fault: Fault, source: random.Random) -> list[str]:
        match target:
            case "learner":
                free = [name for name in self.learners if self._is_free(name, fault)]
                return [source.choice(free)] if free else []
            case "half":
                return sorted(source.sample(self.learners, len(self.learners) // 2), key=self.learners.index)
            case "all":
                return self.learners
            case "syncer" if fault.kind in LINK:
                return self.learners
            case _:
                return [target]

    def _is_free(self, name: str, fault: Fault) -> bool:
        others = self._taken.get(name, [])
        return all(fault.at_s >= _free_at(other) or other.at_s >= _free_at(fault) for other in others)


def _free_at(fault: Fault) -> float:
    return fault.at_s + fault.for_s + (RETURN_S if fault.kind in KILLS else GUARD_S)
