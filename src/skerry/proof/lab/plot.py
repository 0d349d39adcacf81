"""What a study found, drawn: the loss on the way, and what the last loss cost in bytes.

Needs matplotlib, imported only when something is drawn. Colours are Okabe and Ito's, which the colour-blind can tell
apart; beyond their number the kind of line or mark changes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skerry.drawing import STYLE, save
from skerry.proof.lab.comparison import baseline_of, bytes_per_parameter, found_of, is_lost, mean
from skerry.proof.lab.results import Results
from skerry.proof.lab.study import Result, Study

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D")
INCHES, DPI = (9.0, 5.0), 200  # readable when shown 900 pixels wide
TITLE_COLUMNS = 95
EARLY = 0.4  # of the run: above where every loss is by then, nothing is told apart

Runs = Mapping[str, Sequence[Result]]


def draw(study: Study, results: Results, folder: Path) -> list[Path]:
    """STUDY-tokens and STUDY-bytes as PNG and SVG; the paths of what was drawn."""
    import matplotlib

    found = {variant: list(by_seed.values()) for variant, by_seed in found_of(study, results).items()}
    if study.baseline and study.baseline not in found:
        found[study.baseline] = list(baseline_of(study, results).values())
    sound = {name: [run for run in runs if not is_lost(run)] for name, runs in found.items()}
    sound = {name: runs for name, runs in sound.items() if runs}
    if not sound:
        return []
    with matplotlib.rc_context(STYLE):
        return [
            *save(_loss_against_tokens(study, sound), folder / f"{study.name}-tokens", DPI),
            *save(_loss_against_bytes(study, sound), folder / f"{study.name}-bytes", DPI),
        ]


def _figure(study: Study, x_label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(textwrap.fill(study.about or study.name, TITLE_COLUMNS), x=0.01, ha="left", fontsize=12)
    axes.set_xlabel(x_label)
    axes.set_ylabel("held-out loss, nats/byte")
    axes.set_axisbelow(True)
    return figure, axes


def _look(number: int) -> dict[str, str]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number // len(COLOURS) % len(LINES)]}


def _loss_against_tokens(study: Study, runs: Runs) -> Any:
    """A line a variant, the mean over its seeds; a band from the lowest to the highest of them."""
    figure, axes = _figure(study, "tokens kept, millions")
    later = []
    for number, (name, results) in enumerate(runs.items()):
        curves = [[*((p.tokens, p.loss) for p in run.points), (run.tokens, run.loss)] for run in results]
        columns = list(zip(*curves, strict=False))  # points are taken at the same progress
        tokens = [sum(tokens for tokens, _ in column) / len(column) / 1e6 for column in columns]
        losses = [[loss for _, loss in column] for column in columns]
        axes.plot(tokens, [mean(some) for some in losses], label=name, linewidth=1.8, **_look(number))
        if len(results) > 1:
            lows, highs = [min(some) for some in losses], [max(some) for some in losses]
            axes.fill_between(tokens, lows, highs, color=_look(number)["color"], alpha=0.15, linewidth=0)
        later += [loss for at, some in zip(tokens, losses, strict=True) if at >= EARLY * tokens[-1] for loss in some]
    margin = 0.05 * (max(later) - min(later)) or 0.01
    axes.set_ylim(min(later) - margin, max(later) + margin)
    axes.set_xlim(left=0)
    _legend(figure, axes, runs)
    return figure


def _loss_against_bytes(study: Study, runs: Runs) -> Any:
    """A point a variant; one without a wire, the data-parallel baseline, is a line across."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure, axes = _figure(study, "bytes sent per parameter and learner, both ways (logarithmic)")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.12)
    for number, (name, results) in enumerate(runs.items()):
        look = _look(number)
        losses = [run.loss for run in results]
        loss, sent = mean(losses) or 0.0, mean([bytes_per_parameter(run) for run in results]) or 0.0
        if sent:
            spread = [[loss - min(losses)], [max(losses) - loss]]
            mark = MARKS[number // len(COLOURS) % len(MARKS)]
            axes.errorbar(sent, loss, spread, fmt=mark, color=look["color"], markersize=7, elinewidth=1.2, label=name)
        else:
            axes.axhline(loss, linewidth=1.2, label=name, **look)
    _legend(figure, axes, runs)
    return figure


def _legend(figure: Any, axes: Any, runs: Runs) -> None:
    """Every variant with its last loss, highest first, as the eye finds them in the picture."""
    last = {name: mean([run.loss for run in results]) or 0.0 for name, results in runs.items()}
    marks, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda n: -last[names[n]])
    labels = [f"{names[n]}  {last[names[n]]:.4f}" for n in order]
    size = 11 if len(order) < 15 else 9
    figure.legend([marks[n] for n in order], labels, loc="outside right center", title="loss at the end", fontsize=size)
