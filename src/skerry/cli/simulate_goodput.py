"""skerry simulate goodput: what share of a fleet does useful steps while its chips fail, before anybody buys it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from skerry import cli
from skerry import text as units
from skerry.errors import Refusal
from skerry.plan.fleet import paper, plot
from skerry.plan.fleet.fit import read_record
from skerry.plan.fleet.fleet import (
    DAY_S,
    Costs,
    Fleet,
    Interval,
    Outcome,
    even_fleet,
    interval,
    needs,
    rounds_s,
    simulate,
)  # fmt: skip
from skerry.plan.fleet.kernel import Array
from skerry.text import Kind

T = TypeVar("T")
DEFAULTS = Costs()
YEAR_S = 365.25 * DAY_S
LEARNERS_MAX = 4096
SECONDS_MAX, BYTES_MAX = 120.0, 2e9  # a command may take
QUIET_S = 3.0  # beyond that it says how far it is
TITLE = "Failing chips: our model (lines), Table 1 of arXiv 2604.21428 (dots)"


def run(words: Sequence[str]) -> int:
    options, overrides = cli.parse(_parser(), words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: goodput is simulated without a run's configuration")
    if options.seed is None:
        options.seed = paper.SEED if options.paper else 0
    stem = _stem(options)
    began = time.perf_counter()
    if options.paper:
        _refuse_others(options)
        return _paper(options, stem, began)
    fleet = _fleet(options)
    days, trials = _number(options, "days", Kind(units.days, 1e-3, 36525), 30.0), _whole(options, "trials", 2, 1e5, 50)
    near = plot.around(fleet) if stem else plot.Around((), {})
    seconds = _affordable(fleet, near, days, trials)
    others = sum(like.learners for like in near.fleets if like != fleet) * min(trials, plot.TRIALS)
    with _showing(seconds, fleet.learners * trials + others) as told:
        outcome = simulate(fleet, days, trials, options.seed, told)
        drawn = _draw_around(fleet, outcome, near, stem, days, options.seed, told) if stem else None
    found: dict[str, Any] = {
        "goodput": _share(outcome.goodput),
        "uptime": _share(outcome.uptime),
        "failures_per_day": float(outcome.failures.mean()) / days,
        "mode": "rigid" if fleet.is_rigid else "elastic",
        "chips": sum(fleet.chips),
        "chips_asked": sum(_chips(options)),
        "learners": fleet.learners,
        "quorum": fleet.quorum,
        "waiting": 1 - outcome.rounds.useful,
        "fleet": _echo(fleet),
        "constants": asdict(fleet.costs),
        "days": days,
        "trials": trials,
        "seed": options.seed,
    }
    if fleet.at_night:
        found["relative_time"] = _share(outcome.relative_time)
    if fleet.learners > 1 and (fleet.quorum > 1 or fleet.grace):
        found["contributors_mean"] = outcome.rounds.contributors
    if drawn:
        found["plots"] = drawn
    found["seconds"] = time.perf_counter() - began
    cli.tell(found, options.json, _tell)
    return 0


def _parser() -> cli.Parser:
    parser = cli.Parser(prog="skerry simulate goodput", description=__doc__)
    add = parser.add_argument
    add("--paper", action="store_true", help="Tables 1, 4 and 5 of arXiv 2604.21428 instead, ours beside theirs")
    add("--chips", metavar="N[,N…]", help="in all, shared out evenly; or a list, those of each learner (default 1.2M)")
    add("--learners", metavar="M", help="how many (default 8, or as many as --chips lists)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--elastic", action="store_true", help="a learner goes on without a lost slice (default)")
    mode.add_argument("--rigid", action="store_true", help="a learner restarts whole, on spares")
    add("--mtbi", metavar="TIME[,…]", help="of a chip, between interruptions (default 1y)")
    add("--slice", metavar="N[,…]", help="chips that are lost together (default 256)")
    add("--step", metavar="TIME", help=f"of training (default {DEFAULTS.step_s:g}s)")
    add("--repair", metavar="TIME", help=f"mean, until a lost slice is back (default {DEFAULTS.repair_s:g}s)")
    add("--reconfigure", metavar="TIME", help=f"a down- or upscale takes (default {DEFAULTS.reconfigure_s:g}s)")
    add("--restart", metavar="TIME", help=f"a rigid learner's takes (default {DEFAULTS.restart_s:g}s)")
    add("--checkpoint", metavar="TIME", help="between those a rigid learner falls back to (default: none is lost)")
    add("--speeds", metavar="X[,…]", help="of each learner, relative (default: all 1)")
    add("--speed-variance", metavar="X", help="each learner's speed lies within ± this share (default 0)")
    add("--quorum", metavar="K", help="learners a merge waits for (default 1)")
    add("--grace", metavar="X", help="window after the K-th, as a share of a step (default 0)")
    add("--scavenged", metavar="N", help="this many of the learners are only there at night")
    add("--night", metavar="TIME", help="of each day (default 12h)")
    add("--regions", metavar="N", help="the learners are spread over, each of which fails as a whole")
    add("--region-mtbi", metavar="TIME", help="of a region (default 30d)")
    add("--region-repair", metavar="TIME", help="mean, until it is back (default 2h)")
    add("--days", metavar="N", help="each trial (default 30)")
    add("--trials", metavar="N", help="(default 50)")
    add("--seed", type=cli.whole, metavar="SEED", help="(default 0; with --paper that of the fit)")
    add("--plot", metavar="PATH", help="write PATH.png and PATH.svg (needs skerry[plot])")
    add("--json", action="store_true", help="print one JSON object on stdout")
    return parser


# ---------------------------------------------------------------------------------------------- what is asked


def _fleet(options: argparse.Namespace) -> Fleet:
    chips = _chips(options)
    learners = _whole(options, "learners", 1, LEARNERS_MAX, len(chips) if len(chips) > 1 else 8)
    slice_chips = _values(options, "slice", Kind(units.count, 1, 1e7), learners, 256.0)
    mtbi_s = _values(options, "mtbi", Kind(units.seconds, 60, 1e4 * YEAR_S), learners, YEAR_S)
    speeds = _values(options, "speeds", Kind(units.number, 1e-3, 1e3), learners, 1.0)
    if len(chips) > 1 and len(chips) != learners:
        raise Refusal(f"--chips {options.chips}: lists {len(chips)} learners, --learners says {learners}")
    if len(chips) == 1:
        _refuse_no_slices(options, chips[0], learners, slice_chips)
        even = even_fleet(chips[0], learners, slice_chips[0]).chips
        chips = list(even) if len(set(slice_chips)) == 1 else [chips[0] / learners] * learners
    for n, size in zip(chips, slice_chips, strict=True):
        if n < size:
            raise Refusal(f"--chips: a learner of {n:g} chips has not one slice of {size:g}: use a smaller --slice")
    chips = [size * round(n / size) for n, size in zip(chips, slice_chips, strict=True)]
    _refuse_of_another_mode(options)
    at_night = _whole(options, "scavenged", 0, learners - 1, 0)
    regions = _whole(options, "regions", 1, learners, 0)
    for name, on in (("night", at_night), ("region_mtbi", regions), ("region_repair", regions)):
        if getattr(options, name) is not None and not on:
            other = "scavenged" if name == "night" else "regions"
            raise Refusal(f"{_flag(name)} {getattr(options, name)}: says nothing without --{other}")
    return Fleet(
        chips=tuple(chips),
        slice_chips=tuple(slice_chips),
        mtbi_s=tuple(mtbi_s),
        speeds=tuple(speeds),
        is_rigid=options.rigid,
        checkpoint_s=_number(options, "checkpoint", Kind(units.seconds, 1, YEAR_S), 0.0),
        costs=Costs(
            step_s=_number(options, "step", Kind(units.seconds, 1e-3, 3600), DEFAULTS.step_s),
            restart_s=_number(options, "restart", Kind(units.seconds, 0, 30 * DAY_S), DEFAULTS.restart_s),
            reconfigure_s=_number(options, "reconfigure", Kind(units.seconds, 0, 30 * DAY_S), DEFAULTS.reconfigure_s),
            repair_s=_number(options, "repair", Kind(units.seconds, 0, 10 * YEAR_S), DEFAULTS.repair_s),
        ),
        quorum=_quorum(options, learners),
        grace=_number(options, "grace", Kind(units.share, 0, 1), 0.0),
        speed_variance=_number(options, "speed_variance", Kind(units.share, 0, 0.9), 0.0),
        at_night=at_night,
        night_s=_number(options, "night", Kind(units.seconds, 60, DAY_S), DAY_S / 2),
        regions=regions,
        region_mtbi_s=_number(options, "region_mtbi", Kind(units.seconds, 3600, 1e4 * YEAR_S), 30 * DAY_S),
        region_repair_s=_number(options, "region_repair", Kind(units.seconds, 1, YEAR_S), 7200.0),
    )


def _chips(options: argparse.Namespace) -> list[float]:
    listed = (options.chips or "").count(",") + 1
    return _values(options, "chips", Kind(units.count, 1, 1e10), listed, 1.2e6)


def _refuse_of_another_mode(options: argparse.Namespace) -> None:
    for name, of_rigid, why in (
        ("checkpoint", True, "only a --rigid learner falls back to a checkpoint"),
        ("restart", True, "only a --rigid learner restarts: use --reconfigure, or --rigid"),
        ("reconfigure", False, "a --rigid learner restarts instead: use --restart"),
        ("repair", False, "a --rigid learner restarts on spares and waits for no repair: leave it out"),
    ):
        if getattr(options, name) is not None and options.rigid != of_rigid:
            raise Refusal(f"--{name} {getattr(options, name)}: {why}")


def _refuse_no_slices(options: argparse.Namespace, chips: float, learners: int, slice_chips: Sequence[float]) -> None:
    slices = int(chips / max(slice_chips))
    if not slices:
        raise Refusal(f"--chips {options.chips}: less than one slice of {max(slice_chips):g}: use a smaller --slice")
    if learners > slices:
        raise Refusal(
            f"--learners {learners}: more than the {slices} slices of {max(slice_chips):g} that "
            f"{chips:g} chips are: use fewer learners or a smaller --slice"
        )


def _quorum(options: argparse.Namespace, learners: int) -> int:
    quorum = _whole(options, "quorum", 1, LEARNERS_MAX, 1)
    if quorum > learners:
        raise Refusal(f"--quorum {quorum}: more than the {learners} learners there are")
    return quorum


def _affordable(fleet: Fleet, near: plot.Around, days: float, trials: int) -> float:
    """Seconds it will take, refused if too many."""
    own_s, own_bytes = needs(fleet, days, trials)
    others = [needs(like, days, min(trials, plot.TRIALS)) for like in near.fleets]
    lower = "lower --days, --trials, --chips or --learners"
    asked = f"--days {days:g} --trials {trials}"
    seconds = own_s + rounds_s(fleet)
    if seconds > SECONDS_MAX:
        raise Refusal(
            f"{asked}: simulating {sum(fleet.chips):,.0f} chips would take about {seconds:,.0f} s, "
            f"more than the {SECONDS_MAX:g} s a command may take: {lower}"
        )
    seconds += sum(s for s, _ in others) + sum(rounds_s(like) for like in near.fleets if like.speeds != fleet.speeds)
    if seconds > SECONDS_MAX:
        raise Refusal(
            f"--plot with {asked}: the {len(others)} fleets around this one would take about {seconds:,.0f} s, "
            f"more than the {SECONDS_MAX:g} s a command may take: leave out --plot, or {lower}"
        )
    if (most := max([own_bytes, *(b for _, b in others)])) > BYTES_MAX:
        raise Refusal(f"{asked}: a trial would need {most / 1e9:,.1f} GB of memory: lower --days or --chips")
    return seconds


def _refuse_others(options: argparse.Namespace) -> None:
    for name, value in vars(options).items():
        if name not in ("paper", "json", "plot", "seed") and value not in (None, False):
            raise Refusal(f"{_flag(name)}: --paper has its own fleets and constants")


def _stem(options: argparse.Namespace) -> Path | None:
    if options.seed < 0:
        raise Refusal(f"--seed {options.seed}: a seed is 0 or above")
    if options.plot is None:
        return None
    if not options.plot:
        raise Refusal("--plot '': names no file: write a path like goodput.png")
    cli.need("matplotlib", "plot", "--plot")
    stem = Path(options.plot)
    stem = stem.with_suffix("") if stem.suffix in (".png", ".svg") else stem
    if not stem.name or not stem.parent.is_dir():
        raise Refusal(f"--plot {options.plot}: {stem.parent} is not a directory to write to")
    return stem


def _number(options: argparse.Namespace, name: str, kind: Kind, default: float) -> float:
    return default if getattr(options, name) is None else _read(options, name, kind.value)


def _whole(options: argparse.Namespace, name: str, low: float, high: float, default: int) -> int:
    value = _number(options, name, Kind(units.count, low, high), default)
    if value != int(value):
        raise Refusal(f"{_flag(name)} {getattr(options, name)}: must be a whole number")
    return int(value)


def _values(options: argparse.Namespace, name: str, kind: Kind, count: int, default: float) -> list[float]:
    if getattr(options, name) is None:
        return [default] * count
    return _read(options, name, lambda text: kind.values(text, count))


def _read(options: argparse.Namespace, name: str, read: Callable[[str], T]) -> T:
    text = getattr(options, name)
    try:
        return read(text)
    except ValueError as error:
        raise Refusal(f"{_flag(name)} {text}: {error}") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# ---------------------------------------------------------------------------------------------- what is told


def _paper(options: argparse.Namespace, stem: Path | None, began: float) -> int:
    cells = paper.table_1(seed=options.seed)
    largest, mean = paper.deviations(cells)
    found: dict[str, Any] = {
        "cells": [{**asdict(cell), "deviation": cell.deviation} for cell in cells],
        "deviation_max": largest,
        "deviation_mean": mean,
        "scavenging": paper.table_4(),
        "scavenging_note": paper.NIGHT_NOTE,
        "unequal": paper.table_5(),
        "constants": asdict(DEFAULTS),
        "sensitivity": read_record()["sensitivity"],
    }
    if stem:
        fleet = even_fleet(1.2e6, 8)
        outcome = simulate(fleet, paper.DAYS, paper.TRIALS, options.seed)
        swings = plot.Around((), plot.around(fleet).swings)
        _, swing = plot.simulated(fleet, outcome, swings, paper.DAYS, options.seed)
        asked = _asked("1.2M, 8 learners", fleet, outcome)
        drawn = plot.draw(stem, plot.of_cells(cells), asked, swing, TITLE)
        found["plots"] = [str(path) for path in drawn]
    found["seconds"] = time.perf_counter() - began
    cli.tell(found, options.json, lambda found: _tell_paper(found, cells))
    return 0


def _draw_around(
    fleet: Fleet, outcome: Outcome, near: plot.Around, stem: Path, days: float, seed: int, told: Callable[[], None]
) -> list[str]:
    points, swing = plot.simulated(fleet, outcome, near, days, seed, told)
    drawn = plot.draw(stem, points, _asked("this fleet", fleet, outcome), swing, plot.describe(fleet))
    return [str(path) for path in drawn]


def _asked(name: str, fleet: Fleet, outcome: Outcome) -> plot.Asked:
    return plot.Asked(name, sum(fleet.chips), 100 * float(outcome.goodput.mean()), 100 * float(outcome.uptime.mean()))


@contextmanager
def _showing(seconds: float, total: int) -> Iterator[Callable[[], None]]:
    """How far it is, on stderr, where that takes a while."""
    if seconds <= QUIET_S:
        yield lambda: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"simulating: about {seconds:.0f} s", file=sys.stderr, flush=True)
    bar = Progress(
        TextColumn("simulating"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _share(values: Array) -> dict[str, float]:
    """An interval of what cannot be less than nothing or more than all."""
    return {name: min(1.0, max(0.0, value)) for name, value in asdict(interval(values)).items()}


def _echo(fleet: Fleet) -> dict[str, Any]:
    """What was simulated, a value a learner where learners may differ; null: not asked for."""
    told = {
        name: getattr(fleet, name) for name in ("chips", "slice_chips", "mtbi_s", "speeds", "grace", "speed_variance")
    }
    return told | {
        "checkpoint_s": fleet.checkpoint_s or None,
        "scavenged": fleet.at_night,
        "night_s": fleet.night_s if fleet.at_night else None,
        "regions": fleet.regions,
        "region_mtbi_s": fleet.region_mtbi_s if fleet.regions else None,
        "region_repair_s": fleet.region_repair_s if fleet.regions else None,
    }


def _percent(found: dict[str, float]) -> str:
    one = Interval(**found)
    return f"{one.mean:.2%}  (95 %: {one.low:.2%} to {one.high:.2%})"


def _tell(found: dict[str, Any]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("fleet", f"{found['chips']:,.0f} chips, {found['learners']} learners, {found['mode']}")
    if found["chips"] != found["chips_asked"]:
        table.add_row("", f"({found['chips_asked']:,.0f} asked for: a learner is made of whole slices)")
    table.add_row("goodput", _percent(found["goodput"]))
    table.add_row("uptime", _percent(found["uptime"]))
    if "relative_time" in found:
        table.add_row("training time", _percent(found["relative_time"]) + " of the resident learners' alone")
    if "contributors_mean" in found:
        table.add_row("in a merge", f"{found['contributors_mean']:.1f} learners")
    if found["waiting"]:
        table.add_row("waiting", f"{found['waiting']:.1%} of the capacity, for the quorum")
    table.add_row("failures", f"{found['failures_per_day']:,.1f} a day")
    table.add_row("simulated", f"{found['trials']} trials of {found['days']:g} days in {found['seconds']:.1f} s")
    for path in found.get("plots", ()):
        table.add_row("drawn", path)
    console.print(table)


def _tell_paper(found: dict[str, Any], cells: Sequence[paper.Cell]) -> None:
    console = Console()
    for what in ("goodput", "uptime"):
        table = Table(box=None, pad_edge=False, title=f"{what}, %: ours (the paper's)", title_justify="left")
        table.add_column("learners")
        for chips in paper.CHIPS:
            table.add_column(f"{chips / 1e3:g}k", justify="right")
        for mode, learners in paper.ROWS:
            mine = [c for c in cells if (c.mode, c.learners, c.what) == (mode, learners, what)]
            table.add_row(f"{learners} {mode}", *(f"{c.ours:.1f} ({c.paper:g})" for c in mine))
        console.print(table)
    console.print(
        f"deviation: {found['deviation_max']:.2f} points at most, {found['deviation_mean']:.2f} on average, "
        f"over {len(cells)} cells"
    )
    table = Table(box=None, pad_edge=False, title="training time with more learners at night", title_justify="left")
    for name in ("more", "night 12 h, simulated", "half of the work at night", "of", "the paper"):
        table.add_column(name, justify="right")
    for one in found["scavenging"]:
        night, ours = f"{one['night_s'] / 3600:.1f} h", f"{one['ours']:.2f}"
        table.add_row(f"+{one['extra']:.0%}", f"{one['ours_12h']:.2f}", ours, night, f"{one['paper']:.2f}")
    console.print(table)
    console.print(found["scavenging_note"])
    for one in found["unequal"]:
        console.print(
            f"K = {one['quorum']}, grace {one['grace']:g}: goodput {one['ours']:.0f} % (the paper: {one['paper']}), "
            f"{one['contributors']:.1f} learners in a merge"
        )
    for path in found.get("plots", ()):
        console.print(f"drawn: {path}")
