"""Drawings as HTML with SVG inside, made by hand: lines over time, a map, bars.

The curves are SVG that is stretched to whatever width there is, the words around them are HTML: so a phone and a sheet
of paper have the same drawing with words of a size that can be read. Colours are classes, which the page defines for
light and dark; each line has its own dashes too, for whoever cannot tell the colours apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple, TypeGuard

COLOURS = 7  # that the page knows
WIDTH, HEIGHT = 1000, 300  # of the SVG's own space
TICKS = 5
DRAWN_MAX = 1e30  # what is larger, or no number, would leave nothing of the other curves
TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)

Point = tuple[float, float | None]  # None: nothing is known there, and the line is broken
Format = Callable[[float], str]


class Line(NamedTuple):
    """One curve; `colour` also chooses its dashes, and -1 is a faint one without a place in the legend."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    kind: str = "line"  # or "bold", "dots", "area"


class Mark(NamedTuple):
    """Something that happened at one time."""

    x: float
    text: str


class _Scale(NamedTuple):
    low: float
    high: float

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def lines(
    title: str,
    drawn: Sequence[Line],
    x_format: Format,
    y_format: Format,
    marks: Sequence[Mark] = (),
    from_zero: bool = True,
    top: float | None = None,
    over_time: bool = True,
) -> str:
    """Curves over the same axes, cut off at `top`; a sentence where there is nothing to draw."""
    known = [(x, y) for line in drawn for x, y in line.points if _is_drawn(y)]
    if not known:
        return f'<p class="none">{escape(title)}: the tape says nothing of it yet.</p>'
    xs = _scale([x for x, _ in known], False)
    highest = [min(y, top) if top is not None else y for _, y in known]
    ys = _scale(highest, from_zero)
    curves = "".join(_curve(line, xs, ys) for line in drawn)
    seen = [mark for mark in marks if xs.low <= mark.x <= xs.high]
    flags = "".join(_flag(mark, xs) for mark in seen)
    grid = "".join(f'<path class="grid" d="M0 {_y(ys, y)}H{WIDTH}"/>' for y in _ticks(ys))
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{grid}{flags}{curves}</svg>'
    )
    left = "".join(f'<span style="bottom:{100 * ys.share(y):.2f}%">{escape(y_format(y))}</span>' for y in _ticks(ys))
    plot = f'<div class="y">{left}</div><div class="plot">{svg}</div>{_below(xs, x_format, over_time)}'
    return _figure(title, f'<div class="chart">{plot}</div>', _legend(drawn, bool(seen)))


def heat(title: str, rows: Sequence[tuple[str, Sequence[Point]]], width_x: float, x_format: Format, unit: str) -> str:
    """A row of cells each; the more, the darker. Nothing where a row has nothing to say."""
    known = [(x, y) for _, points in rows for x, y in points if y is not None]
    if not known:
        return f'<p class="none">{escape(title)}: the tape says nothing of it yet.</p>'
    xs = _Scale(min(x for x, _ in known), max(x for x, _ in known) + width_x)
    most = max(y for _, y in known) or 1.0
    tall = HEIGHT / len(rows)
    cells = []
    for number, (_, points) in enumerate(rows):
        for x, y in points:
            if y is not None:
                at, wide = WIDTH * xs.share(x), WIDTH * width_x / (xs.high - xs.low)
                place = f'x="{at:.2f}" y="{number * tall:.2f}" width="{wide:.2f}" height="{0.92 * tall:.2f}"'
                cells.append(f'<rect class="cell" {place} fill-opacity="{0.12 + 0.88 * y / most:.2f}"/>')
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{"".join(cells)}</svg>'
    every = max(1, math.ceil(len(rows) / 8))
    names = [(number, name) for number, (name, _) in enumerate(rows) if number % every == 0]
    middle = [(100 - 100 * (number + 0.5) / len(rows), name) for number, name in names]
    left = "".join(f'<span style="bottom:{at:.2f}%">{escape(name)}</span>' for at, name in middle)
    plot = f'<div class="y">{left}</div><div class="plot">{svg}</div>{_below(xs, x_format, True)}'
    shades = "".join(f'<i class="shade" style="opacity:{0.12 + 0.88 * k / 4:.2f}"></i>' for k in range(5))
    legend = f'<figcaption class="legend"><span>0 {shades} {most:.3g} {escape(unit)}</span></figcaption>'
    return _figure(title, f'<div class="chart">{plot}</div>', legend)


def bars(title: str, items: Sequence[tuple[str, float, str]]) -> str:
    """Name, value, and the value in words; as long as they are large."""
    most = max((value for _, value, _ in items), default=0.0) or 1.0
    rows = "".join(
        f'<div class="bar"><span>{escape(name)}</span><div><i class="f{number % COLOURS}" '
        f'style="width:{100 * value / most:.2f}%"></i></div><b>{escape(said)}</b></div>'
        for number, (name, value, said) in enumerate(items)
    )
    return _figure(title, f'<div class="bars">{rows}</div>', "") if rows else ""


def share_bar(share: float) -> str:
    """A share inside a table's cell: the number, and a bar behind it."""
    wide = 100 * min(1.0, max(0.0, share))
    return f'<div class="share"><i style="width:{wide:.1f}%"></i><b>{100 * share:.1f} %</b></div>'


def rebinned(xs: Sequence[float], ys: Sequence[float | None], count: int, how: str) -> list[Point]:
    """At most `count` points: each the sum, or the mean, of as many neighbours; a mean needs no value in each."""
    size = max(1, math.ceil(len(xs) / count))
    points: list[Point] = []
    for at in range(0, len(xs), size):
        some = [y for y in ys[at : at + size] if y is not None]
        total = sum(some)
        points.append((xs[at], None if not some else total if how == "sum" else total / len(some)))
    return points


# ---------------------------------------------------------------------------------------------- parts


def _figure(title: str, drawing: str, legend: str) -> str:
    return f'<figure role="img" aria-label="{escape(title)}"><h3>{escape(title)}</h3>{drawing}{legend}</figure>'


def _curve(line: Line, xs: _Scale, ys: _Scale) -> str:
    colour = f"c{line.colour % COLOURS}" if line.colour >= 0 else "faint"
    runs = _unbroken(line.points)
    if line.kind == "dots":  # lines of no length with round ends: a circle would be stretched with the drawing
        dots = "".join(f"M{_x(xs, x)} {_y(ys, y)}h.01" for run in runs for x, y in run)
        return f'<path class="dots {colour}" d="{dots}"/>'
    path = "".join("M" + "L".join(f"{_x(xs, x)} {_y(ys, y)}" for x, y in run) + _stub(run) for run in runs)
    drawing = f'<path class="{line.kind} {colour}" d="{path}"/>'
    if line.kind == "area":
        drawing = f'<path class="line {colour}" d="{path}"/>'
        for run in runs:
            inside = "L".join(f"{_x(xs, x)} {_y(ys, y)}" for x, y in run)
            shape = f"M{_x(xs, run[0][0])} {HEIGHT}L{inside}L{_x(xs, run[-1][0])} {HEIGHT}Z"
            drawing = f'<path class="fill {colour}" d="{shape}"/>{drawing}'
    return drawing


def _stub(run: Sequence[tuple[float, float]]) -> str:
    """A single point is seen as well."""
    return "h.01" if len(run) == 1 else ""


def _unbroken(points: Iterable[Point]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if _is_drawn(y):
            runs[-1].append((x, y))
        else:
            runs.append([])
    return [run for run in runs if run]


def _is_drawn(y: float | None) -> TypeGuard[float]:
    return y is not None and abs(y) <= DRAWN_MAX


def _flag(mark: Mark, xs: _Scale) -> str:
    return f'<path class="mark" d="M{_x(xs, mark.x)} 0V{HEIGHT}"><title>{escape(mark.text)}</title></path>'


def _legend(drawn: Sequence[Line], has_marks: bool) -> str:
    named = [line for line in drawn if line.colour >= 0 and line.points]
    keys = [
        f'<span><svg class="key" viewBox="0 0 24 8" aria-hidden="true">{_sample(line)}</svg>{escape(line.label)}</span>'
        for line in named
    ]
    if has_marks:
        mark = '<svg class="key" viewBox="0 0 24 8" aria-hidden="true"><path class="mark" d="M12 0V8"/></svg>'
        keys.append(f"<span>{mark}a failure</span>")
    return f'<figcaption class="legend">{"".join(keys)}</figcaption>' if len(keys) > 1 else ""


def _sample(line: Line) -> str:
    kind, path = ("dots", "M12 4h.01") if line.kind == "dots" else (line.kind.replace("area", "line"), "M0 4H24")
    return f'<path class="{kind} c{line.colour % COLOURS}" d="{path}"/>'


def _x(scale: _Scale, value: float) -> str:
    return f"{WIDTH * scale.share(value):.1f}"


def _y(scale: _Scale, value: float) -> str:
    return f"{HEIGHT * (1 - min(1.0, max(0.0, scale.share(value)))):.1f}"


def _scale(values: Sequence[float], from_zero: bool) -> _Scale:
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(0.0, low), high * 1.05
    is_flat = high - low <= 1e-9 * max(abs(low), abs(high), 1e-9)
    return _Scale(low, low + max(1.0, abs(low)) if is_flat else high)


def _below(xs: _Scale, x_format: Format, over_time: bool) -> str:
    ticks = _ticks(xs, over_time)
    return (
        '<div class="x">'
        + "".join(f'<span style="left:{100 * xs.share(x):.2f}%">{escape(x_format(x))}</span>' for x in ticks)
        + "</div>"
    )


def _ticks(scale: _Scale, over_time: bool = False) -> list[float]:
    """Round numbers, a handful of them; of seconds such as people count them in."""
    rough = (scale.high - scale.low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    if over_time:
        step = next((each for each in TIME_STEPS_S if each >= rough), 86400 * math.ceil(rough / 86400))
    first = math.ceil(scale.low / step - 1e-9)
    return [step * number for number in range(first, math.floor(scale.high / step + 1e-9) + 1)]
