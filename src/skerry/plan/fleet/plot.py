"""Goodput drawn: a fleet and those around it against chips, uptime likewise, and what each constant is worth to it.

What is varied is the fleet itself, with all that was asked of it; its own numbers are marked. A line for each number of
learners is drawn only where another number says what it is: of learners that are alike, with nobody to wait for.

Needs matplotlib, imported only when something is drawn. Colours are Okabe and Ito's. The same numbers give the same
files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skerry.drawing import STYLE, save
from skerry.plan.fleet.fit import scaled
from skerry.plan.fleet.fleet import Costs, Fleet, Outcome, even_fleet, simulate
from skerry.plan.fleet.paper import Cell
from skerry.text import counted

COLOURS = ("#E69F00", "#D55E00", "#CC79A7", "#009E73", "#0072B2", "#000000")
RIGID_LINE = "1 learner, rigid"  # of the paper's table, beside its elastic ones
RIGID_COLOUR, HALVED, DOUBLED = "#666666", "#56B4E9", "#0072B2"
SHORT = {
    "step_s": "a step",
    "restart_s": "a restart",
    "reconfigure_s": "a down- or upscale",
    "repair_s": "a slice's repair",
    "mtbi_s": "a chip's MTBI",
    "slice_chips": "chips in a slice",
    "checkpoint_s": "time between checkpoints",
    "region_mtbi_s": "a region's MTBI",
    "region_repair_s": "a region's repair",
}
LEARNERS = (1, 2, 4, 8, 16)
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2)
SEEN = 0.05  # points: what is worth less is left out
TRIALS = 8  # of each fleet around the one asked for


@dataclass(frozen=True)
class Point:
    """One fleet on a line; the paper's number where it has one."""

    line: str
    chips: float
    what: str
    ours: float
    paper: float | None = None


@dataclass(frozen=True)
class Asked:
    """The fleet that is marked, and of which the swings are."""

    name: str
    chips: float
    goodput: float
    uptime: float


Swing = Mapping[str, tuple[float, float]]  # goodput with a constant halved and doubled


@dataclass(frozen=True)
class Around:
    """Fleets like one: of other sizes, by the line they lie on, and with each constant halved and doubled."""

    lines: Sequence[tuple[str, float, Fleet]]  # and its chips before they were whole slices
    swings: Mapping[str, tuple[Fleet, Fleet]]

    @property
    def fleets(self) -> list[Fleet]:
        return [fleet for _, _, fleet in self.lines] + [fleet for pair in self.swings.values() for fleet in pair]


def around(fleet: Fleet) -> Around:
    numbers = sorted({*LEARNERS, fleet.learners}) if _is_plain(fleet) else [fleet.learners]
    chips = sum(fleet.chips)
    sized = [(counted(n, "learner"), factor * chips, _resized(fleet, n, factor)) for n in numbers for factor in FACTORS]
    return Around(
        [(line, nominal, like) for line, nominal, like in sized if like is not None],
        {name: (_varied(fleet, name, 0.5), _varied(fleet, name, 2.0)) for name in _names(fleet)},
    )


def describe(fleet: Fleet) -> str:
    more = [
        counted(fleet.learners, "learner" if _is_alike(fleet) else "unlike learner"),
        "rigid" if fleet.is_rigid else "elastic",
    ]
    more += [f"quorum {fleet.quorum}"] if fleet.quorum > 1 else []
    more += [f"{fleet.at_night} of them at night"] if fleet.at_night else []
    more += [counted(fleet.regions, "region")] if fleet.regions else []
    return ", ".join([f"{sum(fleet.chips):,.0f} chips", *more])


def of_cells(cells: Sequence[Cell]) -> list[Point]:
    return [
        Point(RIGID_LINE if c.mode == "rigid" else counted(c.learners, "learner"), c.chips, c.what, c.ours, c.paper)
        for c in cells
    ]


def simulated(
    fleet: Fleet, outcome: Outcome, near: Around, days: float, seed: int, told: Callable[[], None] = lambda: None
) -> tuple[list[Point], dict[str, tuple[float, float]]]:
    """The lines and swings of a picture.

    A fleet's trials draw the same numbers as its neighbours'; what a constant is worth is told by those they share.
    """
    trials = min(TRIALS, len(outcome.goodput))
    points = []
    for line, chips, like in near.lines:
        found = outcome if like == fleet else simulate(like, days, trials, seed, told)
        for what, values in (("goodput", found.goodput), ("uptime", found.uptime)):
            points.append(Point(line, chips, what, 100 * float(values.mean())))
    offset = float(outcome.goodput.mean() - outcome.goodput[:trials].mean())

    def goodput(like: Fleet) -> float:
        return 100 * (offset + float(simulate(like, days, trials, seed, told).goodput.mean()))

    return points, {name: (goodput(less), goodput(more)) for name, (less, more) in near.swings.items()}


def draw(stem: Path, points: Sequence[Point], asked: Asked, swing: Swing, title: str) -> list[Path]:
    """STEM.png and STEM.svg."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"font.size": 10}):
        figure = Figure(figsize=(13.0, 4.6), layout="constrained")
        left, centre, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
        _lines(left, points, "goodput", asked, asked.goodput)
        _lines(centre, points, "uptime", asked, asked.uptime)
        _tornado(right, asked, swing)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower left", ncols=8, fontsize=9, handlelength=2.6, columnspacing=1.3
        )
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=9)
        return save(figure, stem, dpi=160)


def _lines(axes: Any, points: Sequence[Point], what: str, asked: Asked, value: float) -> None:
    names = list(dict.fromkeys(p.line for p in points))
    looks = iter(enumerate(COLOURS))
    for name in names:
        mine = [p for p in points if p.line == name and p.what == what]
        at, colour = (0, RIGID_COLOUR) if name == RIGID_LINE else next(looks)
        # Uptimes lie on one another: each line has longer gaps than those under it, and all are seen.
        look = ":" if name == RIGID_LINE else (0, (6 - at, at)) if at else "-"
        axes.plot(
            [p.chips for p in mine], [p.ours for p in mine], linestyle=look, color=colour, label=name, linewidth=2.2
        )
        dots = [(p.chips, p.paper) for p in mine if p.paper is not None]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=5)
    if any(p.paper is not None for p in points):
        axes.plot([], [], "o", color="#444444", markersize=5, label="the paper")
    axes.plot([asked.chips], [value], "D", color="none", markeredgecolor="black", markersize=9, label=asked.name)
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
    axes.annotate(f"{value:.1f}", (asked.chips, value), (0, -18), textcoords="offset points", ha="center", bbox=behind)
    ticks = sorted({p.chips for p in points})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [_short(n) for n in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 103)
    axes.set_xlabel("chips")
    axes.set_title(f"{what}, %", loc="left", fontsize=11)


def _tornado(axes: Any, asked: Asked, swing: Swing) -> None:
    middle = asked.goodput
    swing = {name: pair for name, pair in swing.items() if max(abs(n - middle) for n in pair) > SEEN} or swing
    names = sorted(swing, key=lambda name: abs(swing[name][1] - swing[name][0]))
    for which, (word, colour) in enumerate((("halved", HALVED), ("doubled", DOUBLED))):
        changes = [swing[name][which] - middle for name in names]
        axes.barh(range(len(names)), changes, left=middle, color=colour, height=0.55, label=word)
    axes.axvline(middle, color="#444444", linewidth=1)
    axes.set_yticks(range(len(names)), [SHORT[name] for name in names])
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.margins(x=0.08)
    axes.set_xlabel(f"{asked.name}: {middle:.1f}")
    axes.set_title("goodput, %: one thing halved or doubled", loc="left", fontsize=11)


def _short(chips: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if chips >= 0.9995 * size:
            return f"{chips / size:.3g}{letter}"
    return f"{chips:.3g}"


def _is_alike(fleet: Fleet) -> bool:
    """Learners that differ by no more than what whole slices make them."""
    kinds = len(set(zip(fleet.slice_chips, fleet.mtbi_s, fleet.speeds, strict=True)))
    return kinds == 1 and max(fleet.chips) - min(fleet.chips) <= fleet.slice_chips[0]


def _is_plain(fleet: Fleet) -> bool:
    return _is_alike(fleet) and fleet.quorum == 1 and not fleet.at_night and not fleet.regions


def _resized(fleet: Fleet, learners: int, factor: float) -> Fleet | None:
    """The fleet with more or fewer chips in all; None where a learner has not one slice."""
    if learners == fleet.learners:
        sized = replace(fleet, chips=_whole([factor * n for n in fleet.chips], fleet.slice_chips))
    else:
        even = even_fleet(factor * sum(fleet.chips), learners, fleet.slice_chips[0], fleet.mtbi_s[0])
        sized = replace(
            fleet,
            chips=even.chips,
            slice_chips=even.slice_chips,
            mtbi_s=even.mtbi_s,
            speeds=fleet.speeds[:1] * learners,
        )
    return sized if all(sized.chips) else None


def _whole(chips: Sequence[float], slice_chips: Sequence[float]) -> tuple[float, ...]:
    return tuple(size * round(n / size) for n, size in zip(chips, slice_chips, strict=True))


def _names(fleet: Fleet) -> list[str]:
    """What can be halved and doubled, and matters to the fleet."""
    names = ["step_s", "mtbi_s"]
    names += ["restart_s"] if fleet.is_rigid else ["reconfigure_s", "repair_s"]
    if not fleet.is_rigid and all(_whole(fleet.chips, [2 * size for size in fleet.slice_chips])):
        names.append("slice_chips")
    names += ["checkpoint_s"] if fleet.checkpoint_s else []
    return names + (["region_mtbi_s", "region_repair_s"] if fleet.regions else [])


def _varied(fleet: Fleet, name: str, factor: float) -> Fleet:
    if name in Costs.__dataclass_fields__:
        return replace(fleet, costs=scaled(fleet.costs, name, factor))
    value = getattr(fleet, name)
    changes: dict[str, Any] = {name: tuple(factor * n for n in value) if isinstance(value, tuple) else factor * value}
    if name == "slice_chips":
        changes["chips"] = _whole(fleet.chips, changes[name])
    return replace(fleet, **changes)
