"""Goodput drawn: against chips with a line a number of learners, uptime likewise, and what each constant is worth.

Needs matplotlib, imported only when something is drawn. Colours are Okabe and Ito's. The same numbers give the same
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skerry.drawing import STYLE, save
from skerry.goodput.fit import scaled
from skerry.goodput.model import Costs, Fleet, even_fleet, simulate
from skerry.goodput.paper import ROWS, Cell

COLOURS = ("#666666", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#0072B2")
SHORT = {
    "step_s": "a step",
    "restart_s": "a restart",
    "reconfigure_s": "a down- or upscale",
    "repair_s": "a slice's repair",
    "mtbi_s": "a chip's MTBI",
    "slice_chips": "chips in a slice",
}
DAYS, TRIALS = 4.0, 8


@dataclass(frozen=True)
class Point:
    """One fleet on a line; the paper's number where it has one."""

    row: tuple[str, int]
    chips: float
    what: str
    ours: float
    paper: float | None = None


Swing = Mapping[str, tuple[float, float]]  # goodput with a constant halved and doubled


def of_cells(cells: Sequence[Cell]) -> list[Point]:
    return [Point((c.mode, c.learners), c.chips, c.what, c.ours, c.paper) for c in cells]


def sweep(fleet: Fleet, seed: int) -> list[Point]:
    """Fleets of even learners around this one: its slices, failures and constants, other sizes and numbers."""
    points = []
    middle = sum(fleet.chips)
    for mode, learners in ROWS:
        for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2):
            if middle * factor < learners * fleet.slice_chips[0]:
                continue
            like = even_fleet(
                middle * factor, learners, fleet.slice_chips[0], fleet.mtbi_s[0],
                is_rigid=mode == "rigid", costs=fleet.costs,
            )  # fmt: skip
            outcome = simulate(like, DAYS, TRIALS, seed)
            for what, values in (("goodput", outcome.goodput), ("uptime", outcome.uptime)):
                points.append(Point((mode, learners), middle * factor, what, 100 * float(values.mean())))
    return points


def swings(fleet: Fleet, seed: int) -> dict[str, tuple[float, float]]:
    """What the goodput becomes with each constant halved and doubled."""
    names = ["step_s", "restart_s" if fleet.is_rigid else "reconfigure_s", "mtbi_s", "slice_chips"]
    return {
        name: (_goodput(fleet, name, 0.5, seed), _goodput(fleet, name, 2.0, seed))
        for name in (names if fleet.is_rigid else [*names, "repair_s"])
    }


def _goodput(fleet: Fleet, name: str, factor: float, seed: int) -> float:
    costs, slice_chips, mtbi_s = fleet.costs, fleet.slice_chips[0], fleet.mtbi_s[0]
    if name in Costs.__dataclass_fields__:
        costs = scaled(costs, name, factor)
    elif name == "mtbi_s":
        mtbi_s *= factor
    else:
        slice_chips *= factor
    like = even_fleet(sum(fleet.chips), fleet.learners, slice_chips, mtbi_s, is_rigid=fleet.is_rigid, costs=costs)
    return 100 * float(simulate(like, DAYS, TRIALS, seed).goodput.mean())


def draw(stem: Path, points: Sequence[Point], middle: float, swing: Swing, title: str) -> list[Path]:
    """STEM.png and STEM.svg; `middle` is the goodput the swings start from."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"font.size": 10}):
        figure = Figure(figsize=(13.0, 4.6), layout="constrained")
        left, centre, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
        _lines(left, points, "goodput")
        _lines(centre, points, "uptime")
        _tornado(right, middle, swing)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=7, fontsize=9)
        return save(figure, stem, dpi=160)


def _lines(axes: Any, points: Sequence[Point], what: str) -> None:
    for row, colour in zip(ROWS, COLOURS, strict=True):
        mine = [p for p in points if p.row == row and p.what == what]
        name = f"{row[1]} learners" if row[1] > 1 else f"1 learner, {row[0]}"
        line = "--" if row[0] == "rigid" else "-"
        axes.plot([p.chips for p in mine], [p.ours for p in mine], line, color=colour, label=name, linewidth=1.8)
        dots = [(p.chips, p.paper) for p in mine if p.paper is not None]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=5)
    if any(p.paper is not None for p in points):
        axes.plot([], [], "o", color="#444444", markersize=5, label="the paper")
    chips = sorted({p.chips for p in points})
    axes.set_xscale("log")
    axes.set_xticks(chips, [_short(n) for n in chips])
    axes.minorticks_off()
    axes.set_ylim(0, 102)
    axes.set_xlabel("chips")
    axes.set_title(f"{what}, %", loc="left", fontsize=11)


def _tornado(axes: Any, middle: float, swing: Swing) -> None:
    names = sorted(swing, key=lambda name: abs(swing[name][1] - swing[name][0]))
    for at, name in enumerate(names):
        for value, colour in zip(swing[name], ("#56B4E9", "#0072B2"), strict=True):
            axes.barh(at, value - middle, left=middle, color=colour, height=0.55)
    axes.axvline(middle, color="#444444", linewidth=1)
    axes.set_yticks(range(len(names)), [SHORT[name] for name in names])
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.margins(x=0.08)
    axes.set_title("goodput, %: halved (light), doubled (dark)", loc="left", fontsize=11)


def _short(chips: float) -> str:
    return f"{chips / 1e6:g}M" if chips >= 1e6 else f"{chips / 1e3:g}k"
