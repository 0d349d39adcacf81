"""The report of one run: sections in the order in which people ask.

Is it training and what is it worth, what did it get done, who took part, what went over the wire, what went wrong and
what did that cost, what exactly ran, and does its tape hold. Figures come from `report/numbers.py` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from skerry.report import charts
from skerry.report.charts import Line, Mark, Point
from skerry.report.numbers import HELD_OUT
from skerry.report.page import Raw, cards, contents, note, page, section, table, text
from skerry.text import counted, lasting, size

POINTS_MAX = 96  # of a curve that is drawn: more is noise
POOLED_MAX = 24  # of goodput: in less than a round's time a merge or two more decide
LEARNERS_DRAWN = 6  # by a colour each; of more only the run's own curve has one
FAILURES = ("lost", "restart", "rollback", "fault", "given up")

UNNOTED = '<p class="none">Nobody noted it: the run is of an earlier version.</p>'
SERVING = {
    "served": "training",
    "starting": "its syncer is starting",
    "away": "its syncer is being started again",
    "new": "not begun",
    "paused": "paused",
    "died": "its syncer died",
    "closed": "closed",
    "broken": "its tape is broken",
}
SECTIONS = (
    ("loss", "Loss"),
    ("goodput", "Goodput"),
    ("participation", "Participation"),
    ("rounds", "Rounds"),
    ("traffic", "Traffic"),
    ("recoveries", "Recoveries"),
    ("learners", "Learners"),
    ("ledger", "Ledger"),
    ("invariants", "Invariants"),
    ("what-ran", "What ran"),
    ("events", "Events"),
    ("configuration", "Configuration"),
)


def document(numbers: Mapping[str, Any]) -> str:
    """The whole HTML file."""
    h = numbers["history"]
    body = [_head(numbers), _warning(numbers), cards(_figures(numbers)), contents(SECTIONS)]
    body += [loss(h, numbers["held_out"]), goodput(h), _participation(h), _rounds(h), _traffic(h), _recoveries(h)]
    body += [_learners(h), _ledger(h), _invariants(numbers), _what_ran(numbers), _events(h), _configuration(numbers)]
    return page(f"{h['run']} · Skerry", [*(part for part in body if part), _foot(numbers)])


# ---------------------------------------------------------------------------------------------- the head


def _head(numbers: Mapping[str, Any]) -> str:
    h = numbers["history"]
    serving = SERVING[numbers["serving"]]
    kind = "bad" if numbers["serving"] in ("died", "broken") else "good"
    began = f"begun {clock(h['started_at'])}" + ("; its first part was pruned" if h["is_pruned"] else "")
    about = f"{h['parameters']:,} parameters in {counted(h['fragments'], 'fragment')}, {began}"
    badge = f'<span class="badge {kind}">{text(serving)}</span>'
    why = f"<p>The run was {text(h['closed_by'])}.</p>" if h["closing_t"] is not None and h["closed_by"] else ""
    return f"<h1>{text(h['run'])} {badge}</h1><p class='soft'>{text(numbers['run_dir'])}: {text(about)}</p>{why}"


def _warning(numbers: Mapping[str, Any]) -> str:
    return f'<p class="warn">{text(numbers["warning"])}</p>' if numbers["warning"] else ""


def _figures(numbers: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    h, audit = numbers["history"], numbers["audit"]
    traffic = h["traffic"]["up"] + h["traffic"]["down"]
    fewer = h["traffic"]["data_parallel"] / traffic if traffic else 0.0
    name, value = final_loss(numbers)
    trained = (h["closing_t"] or h["t"]) - h["training_t"] if h["training_t"] is not None else 0.0
    failures = sum(event["kind"] in ("lost", "restart", "rollback") for event in h["events"])
    return [
        ("progress", percent(h["progress"]), f"after {lasting(trained)} of training" if trained else "not begun"),
        ("loss", "–" if value is None else f"{value:.3f}", name),
        ("tokens merged", amount(h["tokens"]["merged"]), f"of {amount(h['tokens']['produced'])} produced"),
        ("goodput", "–" if h["goodput"] is None else percent(h["goodput"]), "of what its learners could do"),
        ("merges", f"{h['merges']:,}", f"{h['contributors_mean']:.2f} of {h['ready_mean']:.2f} ready learners in each"),
        ("bytes", size(traffic), f"{fewer:.0f} times fewer than data-parallel" if fewer >= 1.5 else "up and down"),
        ("failures", str(failures), "learners and syncers lost, rollbacks"),
        ("invariants", "hold" if not audit["violations"] else "broken", f"{audit['checks']:,} checks of the tape"),
    ]


def final_loss(numbers: Mapping[str, Any]) -> tuple[str, float | None]:
    """The best word on what the model is worth, and whose it is."""
    if "val_loss_end" in numbers["held_out"]:
        return "held out, at the end", numbers["held_out"]["val_loss_end"]
    curve = [point for point in numbers["history"]["curve"] if point["figures"].get("loss") is not None]
    if curve:
        return "at the last evaluation", curve[-1]["figures"]["loss"]
    said = [loss for loss in numbers["history"]["series"]["loss"]["loss"] if loss is not None]
    return ("of the learners, at the last sample", said[-1]) if said else ("nobody said one", None)


# ---------------------------------------------------------------------------------------------- sections


def loss(h: Mapping[str, Any], held_out: Mapping[str, float]) -> str:
    learners = h["learners"]
    named = len(learners) <= LEARNERS_DRAWN
    drawn = [
        Line(name, of_series(one["series"], "loss"), number + 1 if named else -1)
        for number, (name, one) in enumerate(learners.items())
    ]
    drawn.append(Line("the run", of_series(h["series"]["loss"], "loss"), 0, "bold"))
    drawn.append(Line("evaluated", evaluations(h), 5, "dots"))
    norms = [
        Line(name, of_series(one["series"], "grad_norm"), number + 1 if named else -1)
        for number, (name, one) in enumerate(learners.items())
    ]
    norms.append(Line("the run", of_series(h["series"]["loss"], "grad_norm"), 0, "bold"))
    words = "What learners said of their own steps, averaged by tokens over a few seconds; nothing is decided by it."
    found = ", ".join(f"{held_out[name]:.4f} {said}" for name, said in HELD_OUT.items() if name in held_out)
    plots = [charts.lines("Training loss", drawn, seconds, short, marks(h), from_zero=False)]
    if any(line.points for line in norms):
        plots.append(charts.lines("Gradient norm", norms, seconds, short, marks(h)))
    return section(
        "loss", "Loss", note(words), f"<p>{text('Held-out loss: ' + found)}</p>" if found else "", two(plots)
    )


def goodput(h: Mapping[str, Any]) -> str:
    series = h["series"]["merges"]
    words = (
        "Goodput is the share of tokens merged, of those that all learners that ever joined would have made stepping "
        "all the time at their own usual speed. A pause counts for who trained on through it and had that work merged. "
        "Merges come in bursts, so the curve can pass 100 % for a moment."
    )
    shares = pooled(series)
    merged = [Line("merged", of_series(series, "merged"), 0, "area")]
    plots = [
        charts.lines("Goodput", [Line("goodput", shares, 0, "area")], seconds, in_percent, marks(h), top=1.5),
        charts.lines("Tokens merged", merged, seconds, amount, marks(h)),
    ]
    return section("goodput", "Goodput", note(words), two(plots))


def _participation(h: Mapping[str, Any]) -> str:
    names = (("ready", "ready learners"), ("contributors", "contributors"), ("quorum", "quorum"))
    who = [Line(said, of_series(h["series"]["merges"], name), at, "bold" if at == 1 else "line")
           for at, (name, said) in enumerate(names)]  # fmt: skip
    rows = [(f"{p}", of_series(one, "contributors")) for p, one in enumerate(h["map"])]
    width = max((one["width_s"] for one in h["map"]), default=1.0) * _merged_bins(h)
    words = "How many were ready when a round closed, how many were in its merge, and how many it had to have."
    plots = [
        charts.lines("Learners in a merge", who, seconds, short, marks(h)),
        charts.heat("Fragments over time: contributors of each merge", rows, width, seconds, "contributors"),
    ]
    return section("participation", "Participation", note(words), two(plots))


def _rounds(h: Mapping[str, Any]) -> str:
    series = h["series"]["merges"]
    steps = [
        Line("H asked for", of_series(series, "asked"), 0),
        Line("H reached", of_series(series, "reached"), 1),
    ]
    waits = [Line("open", of_series(series, "open_s"), 0)]
    plots = [
        charts.lines("Steps between two merges of a fragment (H)", steps, seconds, short, marks(h)),
        charts.lines("How long rounds were open", waits, seconds, shortly, marks(h)),
    ]
    total = sum(h["closes"].values()) or 1
    why = sorted(h["closes"].items(), key=lambda item: -item[1])
    closes = charts.bars("Why rounds closed", [(name, n, f"{n:,} ({percent(n / total)})") for name, n in why])
    stages = [(stage["stage"] or "the last work", seconds(stage["t"])) for stage in h["stages"]]
    told = table(("stage", "from"), stages) if stages else ""
    return section("rounds", "Rounds", two(plots), two([closes, f"<figure><h3>Stages</h3>{told}</figure>"]))


def _traffic(h: Mapping[str, Any]) -> str:
    t = h["traffic"]
    totals = [("up, to the syncer", t["up"]), ("down, to learners", t["down"]), ("data-parallel", t["data_parallel"])]
    series = h["series"]["traffic"]
    rates = [Line(name, per_second(series, name), at) for at, name in enumerate(("up", "down"))]
    words = (
        "Payloads and messages of all learners. Beside it, what a ring that adds up float32 gradients after each step "
        "would have sent for as many steps. Peaks are learners that get the whole model, and the last work, in float32."
    )
    drawn = charts.bars("Bytes in all", [(name, value, size(value)) for name, value in totals])
    plot = charts.lines("Bytes a second", rates, seconds, size, marks(h))
    return section("traffic", "Traffic", note(words), two([plot, drawn]))


def _recoveries(h: Mapping[str, Any]) -> str:
    rows = [
        (seconds(e["t"]), e["text"], cost_time(e), amount(e["cost_tokens"]) if e.get("cost_tokens") else "–")
        for e in h["events"]
        if e["kind"] in FAILURES
    ]
    words = (
        "What went wrong, and what it cost as far as the tape says: the time until it went on, and the work that was "
        "done and is in no model. Others kept training meanwhile."
    )
    made = table(("at", "what happened", "time", "tokens lost"), rows, (2, 3), (1,))
    return section("recoveries", "Recoveries", note(words), made if rows else "<p>Nothing went wrong.</p>")


def _learners(h: Mapping[str, Any]) -> str:
    heads = ("learner", "state", "lives", "steps", "tokens", "tokens/s", "share of merged", "in merges", "away", "lost")
    rows = [
        (
            name,
            one["state"],
            str(one["life"]),
            f"{one['steps']:,}",
            amount(one["tokens"]),
            amount(usual(one)),
            Raw(charts.share_bar(one["merged_share"])),
            Raw(charts.share_bar(one["participation"])),
            lasting(one["away_s"]) if one["away_s"] else "–",
            amount(sum(one["discarded"].values())) if one["discarded"] else "–",
        )
        for name, one in h["learners"].items()
    ]
    words = "Tokens a second are at its usual speed. A slow learner is in as many merges as the others, with less work."
    return section("learners", "Learners", note(words), table(heads, rows, (2, 3, 4, 5, 6, 7, 8, 9)))


def _ledger(h: Mapping[str, Any]) -> str:
    tokens = h["tokens"]
    items = [("merged", tokens["merged"]), ("pending", tokens["pending"])]
    items += [(f"discarded: {why}", n) for why, n in tokens["discarded"].items()]
    whole = tokens["produced"] or 1.0
    drawn = [(name, n, f"{amount(n)} ({percent(n / whole)})") for name, n in items]
    words = (
        "Every token that a learner reported was merged once, waits to be, or was discarded with a reason. The sum of "
        "these is what was produced, to the token."
    )
    return section(
        "ledger", "Ledger", note(words), charts.bars(f"Of {amount(tokens['produced'])} tokens produced", drawn)
    )


def _invariants(numbers: Mapping[str, Any]) -> str:
    audit = numbers["audit"]
    told = (
        f"{audit['checks']:,} checks over {counted(audit['merges'], 'merge')} of the tape, its chain of hashes verified"
    )
    if numbers["history"]["is_pruned"]:
        told += ", from where it was pruned on"
    if audit["violations"]:
        lines = "".join(f'<p class="warn">{text(line)}</p>' for line in audit["violations"])
        verdict = f'<p class="bad"><b>Broken.</b> {text(told)}; the first that does not hold:</p>{lines}'
    else:
        verdict = f'<p><b class="good">All hold.</b> {text(told)}. skerry replay recomputes the values as well.</p>'
    rows = list(audit["invariants"].items())
    listed = f"<details open><summary>What was checked</summary>{table(('', 'what holds'), rows, wide=(1,))}</details>"
    return section("invariants", "Invariants", verdict, listed)


def _what_ran(numbers: Mapping[str, Any]) -> str:
    parts = []
    for one in numbers["commands"]:
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        parts += [f"<pre>{text(one['command'])}</pre>", note(f"{clock(one['at'])}, {versions}")]
    return section("what-ran", "What ran", *parts or [UNNOTED])


def _configuration(numbers: Mapping[str, Any]) -> str:
    begun, ordered = numbers["config"], numbers["config_ordered"]
    keys = [*begun, *(key for key in ordered if key not in begun)]
    words = "As it is on the tape, every key resolved."
    if ordered:
        words += f" Orders have left {counted(len(ordered), 'key')} with another value than the run began with."
        rows = [(key, _begun(begun, key), value_of(ordered[key]) if key in ordered else "") for key in keys]
        made = table(("key", "begun with", "left by orders"), rows, wide=(1, 2))
    else:
        made = table(("key", "value"), [(key, _begun(begun, key)) for key in keys], wide=(1,))
    listed = f"<details open><summary>{len(keys)} keys</summary>{made}</details>"
    return section("configuration", "Configuration", note(words), listed)


def _begun(config: Mapping[str, Any], key: str) -> str:
    return value_of(config[key]) if key in config else "–"


def _events(h: Mapping[str, Any]) -> str:
    rows = [(seconds(e["t"]), clock(e["at"]), e["kind"], e["text"]) for e in h["events"]]
    left = f"The newest; {h['events_left_out']:,} before them are left out." if h["events_left_out"] else ""
    told = table(("at", "time", "kind", "what happened"), rows, wide=(3,))
    return section("events", "Events", note(left) if left else "", told)


def _foot(numbers: Mapping[str, Any]) -> str:
    made = f"Made by Skerry {numbers['made_with']['skerry']} out of the run's directory."
    times = "Times count from when the run was first served, without the time for which the run was paused."
    return f"<footer>{text(made)} {times}</footer>"


# ---------------------------------------------------------------------------------------------- series


def of_series(series: Mapping[str, Any], name: str) -> list[Point]:
    """A column, with as many points as can be seen."""
    points = charts.rebinned(series["t"], series[name], POINTS_MAX, "mean")
    return [(x, y) for x, y in points if y is not None]


def per_second(series: Mapping[str, Any], name: str) -> list[Point]:
    return [(x, y / series["width_s"]) for x, y in of_series(series, name) if y is not None]


def pooled(series: Mapping[str, Any]) -> list[Point]:
    """Goodput over wider bins, where those are so short that a few merges decide."""
    points = charts.rebinned(series["t"], series["goodput"], POOLED_MAX, "mean")
    return [(x, y) for x, y in points]


def evaluations(h: Mapping[str, Any]) -> list[Point]:
    found = [(point["t"], point["figures"].get("loss")) for point in h["curve"]]
    return [(x, y) for x, y in found if y is not None]


def marks(h: Mapping[str, Any]) -> list[Mark]:
    kinds = ("lost", "restart", "rollback", "fault")
    return [Mark(event["t"], event["text"]) for event in h["events"] if event["kind"] in kinds]


def _merged_bins(h: Mapping[str, Any]) -> int:
    longest = max((len(one["t"]) for one in h["map"]), default=0)
    return max(1, math.ceil(longest / POINTS_MAX))


# ---------------------------------------------------------------------------------------------- words


def two(parts: Sequence[str]) -> str:
    """Side by side where there is room."""
    return f'<div class="two">{"".join(part for part in parts if part)}</div>'


def seconds(t: float) -> str:
    """Minutes and seconds, or hours and days."""
    days, rest = divmod(round(t), 86400)
    if days:
        return f"{days} d {rest // 3600:02d} h"
    hours, rest = divmod(rest, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def clock(at: float) -> str:
    """In universal time: a report is read elsewhere."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def short(value: float) -> str:
    return f"{value:.4g}"


def shortly(s: float) -> str:
    return lasting(s) if s else "0"


def in_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share == 0 or abs(share) >= 0.995 else f"{100 * share:.1f} %"


def amount(n: float) -> str:
    """1,234, 56.7k, 8.9M, 1.2B."""
    for unit, many in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(n) >= many:
            return f"{n / (1e3 if unit == 'k' else many):.3g}{unit}"
    return f"{n:,.0f}" if n >= 10 or n == round(n) else f"{n:.2g}"


def cost_time(event: Mapping[str, Any]) -> str:
    return lasting(event["cost_s"]) if event.get("cost_s") is not None else "–"


def usual(learner: Mapping[str, Any]) -> float:
    """Tokens a second at its usual speed."""
    if not learner["steps"] or not learner["step_s"]:
        return 0.0
    return float(learner["tokens"] / learner["steps"] / learner["step_s"])


def value_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else '""' if value == "" else str(value)
