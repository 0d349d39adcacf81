"""What a person sees of a local run: a live table on a terminal, lines elsewhere, a summary at the end."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from skerry.cli import voice
from skerry.text import counted, lasting, size

LINE_S = 10.0
PIPED_COLUMNS = 200
POINTS_SHOWN = 8  # of a curve
COLOURS = {
    "training": "green",
    "stopped": "cyan",
    "left": "dim",
    "lost": "red",
    "expelled": "red",
    "stalled": "yellow",
    "joining": "yellow",
    "away": "dim",
    "finished": "dim",
}
OVER_SHARE = 0.01  # of the budget: less is what is on its way at the end of any run
SILENT_S = 5.0  # a syncer tells of itself twice a second
WIDE = 96  # columns of a terminal that has room for what each learner sent and when
NUMBER_CHARS_MAX = 14  # of a cell: learners say these numbers, and a long one must not take the others' place
LOSS_PLAIN = 1e6  # beyond it a loss is written with an exponent


class Show(Protocol):
    def __call__(self, status: dict[str, Any], news: list[str]) -> None: ...


@contextmanager
def showing(quiet: bool) -> Iterator[Show]:
    """Show status records on stderr: a table if a person is there, else lines, or nothing."""
    console = Console(stderr=True)
    if quiet:
        yield lambda status, news: None
    elif console.is_terminal:
        with _table(console) as show:
            yield show
    else:
        yield _Lines()


@contextmanager
def telling() -> Iterator[Show]:
    """For machines: what happens to processes as it happens, and where the run stands every few seconds."""
    told, at = 0, -LINE_S

    def show(status: dict[str, Any], news: list[str]) -> None:
        nonlocal told, at
        for line in news[told:]:
            voice.say(line)
        told = len(news)
        if status and time.monotonic() - at >= LINE_S:
            at = time.monotonic()
            fields = {name: status[name] for name in ("phase", "progress", "merges", "contributors_mean", "tokens")}
            voice.say(f"{status['phase']} {100 * status['progress']:.0f} %", fields=fields)

    yield show


@contextmanager
def _table(console: Console) -> Iterator[Show]:
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        console=console,
    )  # fmt: skip
    task = bar.add_task("starting", total=1.0)
    with Live(Group(bar), console=console, refresh_per_second=5, transient=True) as live:
        told = 0

        def show(status: dict[str, Any], news: list[str]) -> None:
            nonlocal told
            for line in news[told:]:
                live.console.print(Text(line, style="bold"))
            told = len(news)
            if status:
                bar.update(task, completed=status["progress"], description=f"{status['phase']:8s}")
                syncer = Text(syncer_line(status), style=_freshness(status))
                live.update(Group(bar, table_of(status, console.width), syncer))

        yield show


@contextmanager
def in_place(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """What is shown takes the place of what was, as far as the window goes; the last stays."""
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as shown:
        yield lambda page: shown.update(page, refresh=True)


@contextmanager
def counting(what: str, quiet: bool, of: str = "batches") -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left, on stderr, for work that says how many of how many are done.

    Where no person looks, a line now and then, or nothing.
    """
    console = Console(stderr=True)
    if quiet:
        yield lambda done, total: None
    elif console.is_terminal:
        words = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = (TextColumn("left:"), TimeRemainingColumn())
        with Progress(*words, *left, console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _counting_lines(what, of)


def _counting_lines(what: str, of: str) -> Callable[[int, int], None]:
    at = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal at
        if time.monotonic() - at > LINE_S:
            at = time.monotonic()
            print(f"{what}: {done} of {total} {of}", file=sys.stderr, flush=True)

    return told


class _Lines:
    """One line every few seconds, for logs."""

    def __init__(self) -> None:
        self._at = float("-inf")
        self._told = 0

    def __call__(self, status: dict[str, Any], news: list[str]) -> None:
        for line in news[self._told :]:
            print(line, file=sys.stderr, flush=True)
        self._told = len(news)
        if status and time.monotonic() - self._at > LINE_S:
            self._at = time.monotonic()
            states = ", ".join(f"{name} {m['state']}" for name, m in status["learners"].items())
            print(f"{100 * status['progress']:3.0f} %  {syncer_line(status)}  [{states}]", file=sys.stderr, flush=True)


def table_of(status: dict[str, Any], width: int, names: Iterable[str] | None = None) -> Table:
    """A line for each learner, or for these, in this order; what a record has nothing to say about is a dash."""
    learners = status["learners"]
    rows = {name: _cells(learners[name]) for name in (learners if names is None else names)}
    columns = ["life", "state", "step", "step time", "tokens/s", "unmerged", "loss"]
    columns += ["up", "down", "heard"] if width >= WIDE else []
    table = Table(box=None, pad_edge=False)
    table.add_column("learner", no_wrap=True, overflow="ellipsis")
    for column in columns:
        justify: Literal["left", "right"] = "left" if column == "state" else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis", max_width=NUMBER_CHARS_MAX)
    for name, cells in rows.items():
        table.add_row(Text(name), *(cells[column] for column in columns))
    return table


def _cells(m: dict[str, Any]) -> dict[str, str | Text]:
    is_training = m["state"] == "training"
    return {
        "life": str(m["life"]),
        "state": Text(m["state"], style=COLOURS.get(m["state"], "")),
        "step": f"{m['step']:,}",
        "step time": lasting(m["step_s"]) if is_training and m.get("step_s") else "–",
        "tokens/s": f"{m.get('tokens_per_s', 0):,.0f}" if is_training else "–",
        "unmerged": str(m.get("unmerged_steps", "–")),
        "loss": _loss(m["loss"]) if m.get("loss") else "–",
        "up": size(m.get("bytes_up", 0)),
        "down": size(m.get("bytes_down", 0)),
        "heard": _ago(m.get("heard_s")),
    }


def _loss(value: float) -> str:
    return f"{value:.3f}" if abs(value) < LOSS_PLAIN else f"{value:.3g}"


def _ago(s: float | None) -> str:
    return "–" if s is None else "now" if s < 1 else f"{lasting(s)} ago"


def syncer_line(status: dict[str, Any]) -> str:
    """Where the syncer stands, or that it has not been heard of."""
    silent = time.time() - status["at"]
    if silent > 2.0:
        return f"syncer: silent for {silent:.0f} s; learners train on"
    return (
        f"syncer: {status['merges']} merges, {status['contributors_mean']:.1f} contributors on average, "
        f"{counted(status['rounds_open'], 'round')} open; waiting {status['waiting']}"
    )


def headline(status: dict[str, Any], trouble: str = "") -> str:
    """What a run does and what it waits for, in one line, whoever said it."""
    if trouble:
        return f"no word: {trouble}; looking again"
    done = f"{100 * status['progress']:.1f} %, {counted(status['merges'], 'merge')}"
    if status.get("serving", "served") != "served":
        return f"not served ({status['serving']}); {status['phase']}, {done}"
    waiting = f", waiting {status['waiting']}" if status.get("waiting") else ""
    old = f"; silent for {lasting(status['age_s'])}" if status.get("age_s", 0.0) > SILENT_S else ""
    return f"{status['phase']}, {done}{waiting}{old}"


def _freshness(status: dict[str, Any]) -> str:
    return "red" if time.time() - status["at"] > 2.0 else ""


def print_summary(s: dict[str, Any]) -> None:
    """The short end of a run, for a person."""
    up, down, parallel = s["bytes_up"], s["bytes_down"], s["bytes_data_parallel"]
    discarded = ", ".join(f"{n:,.0f} {why}" for why, n in s["tokens_discarded"].items()) or "none"
    ratio = f", {parallel / (up + down):.0f} times less than data-parallel's {size(parallel)}" if up + down else ""
    fall = f"{s['val_loss_start']:.3f} → {s['val_loss_end']:.3f} nats/byte"
    rows = [
        ("held-out loss", f"{fall} (before the last merge {s['val_loss_before_close']:.3f})"),
        *([("on the way", _curve(s["curve"]))] if s["curve"] else []),
        ("tokens merged", f"{s['tokens_merged']:,.0f} of {s['tokens_produced']:,.0f} produced; discarded: {discarded}"),
        ("merges", f"{s['merges']:,} with {s['contributors_mean']:.2f} contributors on average"),
        ("goodput", _goodput(s)),
        ("longest gap", f"{s['merge_gap_max_s']:.1f} s between merges, {s['learner_step_gap_max_s']:.2f} s in a step"),
        ("recoveries", f"{s['learner_restarts']} learner, {s['syncer_restarts']} syncer"),
        ("on the wire", f"{size(up)} up, {size(down)} down{ratio}"),
        ("run", s["run_dir"]),
        ("model", f"{s['model_path']}\nsha256 {s['model_sha256']}"),
    ]
    if over := over_budget(s):
        late = ", ".join(f"{n:,.0f} tokens of {name}" for name, n in s["tokens_after_budget"].items())
        rows.insert(2, ("over budget", f"{over}; merged after that were {late}"))
    console_of_stdout().print(listed(rows))
    where = shlex.quote(s["run_dir"])
    print(f"\nlook again with: skerry dashboard {where}, or: skerry report {where}")


def _goodput(s: dict[str, Any]) -> str:
    if s["goodput"] is None:
        return "not known: the run was too short to say how fast its learners are"
    spared = f"; of the capacity no kill took away {s['goodput_of_capacity']:.1%}"
    return f"{s['goodput']:.1%}{spared if s['goodput_of_capacity'] is not None else ''}"


def over_budget(s: dict[str, Any]) -> str:
    """By how much a status or a summary says that the budget was passed, and why; empty if hardly."""
    unit, budget = next(iter(s.get("budget", {}).items()), ("", 0))
    over = s.get("over_budget", 0.0)
    if over <= OVER_SHARE * budget:
        return ""
    return (
        f"{over:,.0f} {unit} more than the {budget:,.12g} asked for: steps that learners took before they heard that "
        "the budget was spent, as while no syncer was there"
    )


def forked_from(lineage: dict[str, Any]) -> str:
    """Where the first values of a run came from, for a person."""
    number = lineage.get("version")
    which = "its newest model" if number is None else "its start" if number == 0 else f"its kept version {number}"
    return f"{lineage.get('run')}, {which} at commit {str(lineage.get('commit'))[:12]}"


def _curve(points: list[dict[str, Any]]) -> str:
    """At most so many of the losses that were measured while the run went, from first to last."""
    shown = points[:: -(-len(points) // POINTS_SHOWN)]
    return ", ".join(f"{p['figures']['loss'] or math.nan:.3f} at {100 * p['progress']:.0f} %" for p in shown)


def console_of_stdout() -> Console:
    """As wide as the terminal; in a pipe or a file no line is broken for want of room."""
    return Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)


def listed(rows: Iterable[tuple[str, str]]) -> Table:
    """Things with their names before them."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, what in rows:
        table.add_row(name, Text(what))
    return table
