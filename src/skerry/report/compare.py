"""The report of two runs: their curves over each other, their figures side by side, and what was configured otherwise.

A is the first, B the second, in every drawing and table. Losses are drawn over merged tokens as well as over time: what
a run made of its tokens is one question, how quickly it had them another.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skerry.report import charts
from skerry.report import document as one_run
from skerry.report.charts import Line, Point
from skerry.report.document import SERVING, amount, final_loss, in_percent, of_series, percent, seconds, short, two
from skerry.report.page import contents, note, page, section, table, text
from skerry.text import lasting, size

Numbers = Mapping[str, Any]

COUNTED_BELOW = 100  # a difference of a few things is said as that

SECTIONS = (("figures", "Figures"), ("loss", "Loss"), ("goodput", "Goodput"), ("participation", "Participation"),
            ("traffic", "Traffic"), ("configuration", "Configuration"), ("what-ran", "What ran"))  # fmt: skip


def comparison(a: Numbers, b: Numbers) -> str:
    """The whole HTML file."""
    both = (a, b)
    heads = "".join(
        f"<p><b>{letter}</b> {text(one['history']['run'])} "
        f"<span class='soft'>{text(one['run_dir'])}: {text(SERVING[one['serving']])}</span></p>"
        for letter, one in zip("AB", both, strict=True)
    )
    title = f"{Path(a['run_dir']).name} and {Path(b['run_dir']).name}"
    body = [f"<h1>{text(title)}</h1>", heads, contents(SECTIONS), _figures(a, b)]
    body += [_losses(both), _goodput(both), _participation(both), _traffic(both), _configuration(a, b), _what_ran(both)]
    return page(f"{title} · Skerry", body)


def differences(a: Numbers, b: Numbers) -> dict[str, Any]:
    """What a machine would ask for: each figure of both, and the keys that were configured otherwise."""
    figures = {name: [of(a), of(b)] for name, of, _ in FIGURES}
    return {"figures": figures, "config": {key: list(values) for key, values in _other_keys(a, b).items()}}


def _other_keys(a: Numbers, b: Numbers) -> dict[str, tuple[Any, Any]]:
    """As orders have left them; what the runs began with is in the report of each."""
    left, right = (n["config"] | n["config_ordered"] for n in (a, b))
    pairs = {key: (left.get(key), right.get(key)) for key in sorted({*left, *right})}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _bytes(n: Numbers) -> float:
    return float(n["history"]["traffic"]["up"] + n["history"]["traffic"]["down"])


def _trained_s(n: Numbers) -> float:
    h = n["history"]
    return 0.0 if h["training_t"] is None else float((h["closing_t"] or h["t"]) - h["training_t"])


def _rate(n: Numbers) -> float | None:
    seconds_trained = _trained_s(n)
    return n["history"]["tokens"]["merged"] / seconds_trained if seconds_trained else None


def _lost(n: Numbers) -> float:
    return float(sum(n["history"]["tokens"]["discarded"].values()))


FIGURES = (
    ("loss", lambda n: final_loss(n)[1], short),
    ("tokens merged", lambda n: n["history"]["tokens"]["merged"], amount),
    ("tokens discarded", _lost, amount),
    ("training time", _trained_s, lasting),
    ("tokens merged a second", _rate, amount),
    ("goodput", lambda n: n["history"]["goodput"], percent),
    ("merges", lambda n: n["history"]["merges"], amount),
    ("contributors a merge", lambda n: n["history"]["contributors_mean"], short),
    ("learners", lambda n: len(n["history"]["learners"]), short),
    ("learners' restarts", lambda n: sum(one["life"] - 1 for one in n["history"]["learners"].values()), short),
    ("syncer's processes", lambda n: n["history"]["epoch"], short),
    ("bytes", _bytes, size),
    ("bytes a merged token", lambda n: _bytes(n) / (n["history"]["tokens"]["merged"] or 1), size),
    ("parameters", lambda n: n["history"]["parameters"], amount),
    ("broken invariants", lambda n: len(n["audit"]["violations"]), short),
)


def _figures(a: Numbers, b: Numbers) -> str:
    rows = []
    for name, of, show in FIGURES:
        left, right = of(a), of(b)
        rows.append(
            (
                name,
                *("–" if value is None else show(value) for value in (left, right)),
                _change(left, right, show is percent),
            )
        )
    return section("figures", "Figures", table(("", "A", "B", "B against A"), rows, (1, 2, 3)))


def _change(a: float | None, b: float | None, is_share: bool) -> str:
    """Of shares in points: 90 % against 80 % is 10 points, and not 12.5 %."""
    if a is None or b is None or a == b:
        return "–" if a is None or b is None else "the same"
    if is_share:
        return f"{100 * (b - a):+.1f} points"
    if isinstance(a, int) and isinstance(b, int) and max(a, b) < COUNTED_BELOW:
        return f"{b - a:+d}"
    return f"{100 * (b - a) / a:+.1f} %" if a else "–"


def _losses(both: Sequence[Numbers]) -> str:
    over_time = [Line(letter, of_series(n["history"]["series"]["loss"], "loss"), at, "bold")
                 for at, (letter, n) in enumerate(zip("AB", both, strict=True))]  # fmt: skip
    by_tokens = [
        Line(letter, _by_tokens(n["history"]), at, "bold")
        for at, (letter, n) in enumerate(zip("AB", both, strict=True))
    ]
    over_time += [Line(f"{letter}, evaluated", one_run.evaluations(n["history"]), at, "dots")
                  for at, (letter, n) in enumerate(zip("AB", both, strict=True))]  # fmt: skip
    plots = [
        charts.lines("Training loss by tokens merged", by_tokens, amount, short, from_zero=False, over_time=False),
        charts.lines("Training loss over time", over_time, seconds, short, from_zero=False),
    ]
    return section("loss", "Loss", two(plots))


def _by_tokens(h: Mapping[str, Any]) -> list[Point]:
    """Each sample at the tokens that were merged by then."""
    series = h["series"]["merges"]
    known = [(t, merged) for t, merged in zip(series["t"], series["merged"], strict=True) if merged is not None]
    times = [t for t, _ in known]
    points: list[Point] = []
    for t, y in charts.rebinned(h["series"]["loss"]["t"], h["series"]["loss"]["loss"], one_run.POINTS_MAX, "mean"):
        at = bisect.bisect_right(times, t) - 1
        if y is not None and known:
            points.append((known[at][1] if at >= 0 else 0.0, y))
    return points


def _goodput(both: Sequence[Numbers]) -> str:
    named = list(enumerate(zip("AB", (n["history"] for n in both), strict=True)))
    shares = [Line(letter, one_run.pooled(h["series"]["merges"]), at) for at, (letter, h) in named]
    merged = [Line(letter, of_series(h["series"]["merges"], "merged"), at, "bold") for at, (letter, h) in named]
    plots = [
        charts.lines("Goodput", shares, seconds, in_percent, top=1.5),
        charts.lines("Tokens merged", merged, seconds, amount),
    ]
    return section("goodput", "Goodput", two(plots))


def _participation(both: Sequence[Numbers]) -> str:
    named = list(enumerate(zip("AB", (n["history"] for n in both), strict=True)))
    who = [Line(letter, of_series(h["series"]["merges"], "contributors"), at) for at, (letter, h) in named]
    steps = [Line(letter, of_series(h["series"]["merges"], "reached"), at) for at, (letter, h) in named]
    plots = [
        charts.lines("Contributors of a merge", who, seconds, short),
        charts.lines("Steps between two merges of a fragment (H reached)", steps, seconds, short),
    ]
    return section("participation", "Participation", two(plots))


def _traffic(both: Sequence[Numbers]) -> str:
    named = list(enumerate(zip("AB", (n["history"] for n in both), strict=True)))
    plots = []
    for way in ("up", "down"):
        rates = [Line(letter, one_run.per_second(h["series"]["traffic"], way), at) for at, (letter, h) in named]
        plots.append(charts.lines(f"Bytes a second, {way}", rates, seconds, size))
    return section("traffic", "Traffic", two(plots))


def _configuration(a: Numbers, b: Numbers) -> str:
    other = _other_keys(a, b)
    rows = [(key, *(one_run.value_of(value) for value in pair)) for key, pair in other.items()]
    made = table(("key", "A", "B"), rows, wide=(1, 2)) if rows else "<p>Both were configured alike.</p>"
    return section("configuration", "Configuration", note("What differs; all other keys are the same."), made)


def _what_ran(both: Sequence[Numbers]) -> str:
    parts = []
    for letter, one in zip("AB", both, strict=True):
        for started in one["commands"][:1]:
            versions = ", ".join(f"{name} {version}" for name, version in started["versions"].items())
            parts.append(f"<p><b>{letter}</b></p><pre>{text(started['command'])}</pre>{note(versions)}")
    return section("what-ran", "What ran", *parts or [one_run.UNNOTED])
