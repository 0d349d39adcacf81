"""skerry lab: run the studies of the laboratory, what is missing of them, and show what they found.

A job that fails is told in one line and the others go on; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid
from rich.text import Text

from skerry import cli
from skerry.cli import live
from skerry.data.files import STDLIB, corpus_files
from skerry.errors import Refusal, StudyError
from skerry.proof.lab import plot
from skerry.proof.lab.comparison import Row, Table, is_lost, table_of
from skerry.proof.lab.results import RESULTS, Results
from skerry.proof.lab.study import Job, Study, read
from skerry.proof.lab.workers import Event, execute
from skerry.text import near

Books = dict[str, Results]  # by study


def run(words: Sequence[str]) -> int:
    options, overrides = cli.parse(parser(), words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: a study says what is configured: write it there")
    studies = _studies(options)
    books = _books(studies, options.results)
    if options.plot:
        cli.need("matplotlib", "plot", "--plot")
        _make(options.plot)
    missing = _missing(studies, books)
    jobs = [] if options.table else missing
    device = _device(options.device, jobs, books) if jobs else ""
    for book in dict.fromkeys(books.values()):
        if book.warning:
            print(f"skerry: {book.warning}", file=sys.stderr)
    for job in missing:
        if why := books[job.study].why_again(job):
            print(f"skerry: {job}: {why}", file=sys.stderr)
    failed: list[Event] = []
    try:
        failed += _conduct(jobs, books, device, options)
    except KeyboardInterrupt:
        print("\nskerry: interrupted; what was done is kept: the same command goes on", file=sys.stderr)
        if options.json:
            cli.print_json({"error": "interrupted"})
        return 130
    _tell(studies, books, failed, options)
    return 1 if failed else 0


def parser() -> cli.Parser:
    p = cli.Parser(prog="skerry lab", description=__doc__)
    p.add_argument("studies", nargs="+", type=Path, metavar="STUDY.toml")
    p.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    p.add_argument("--jobs", type=cli.whole, default=1, metavar="N", help="at a time, a process each (default 1)")
    p.add_argument("--only", default="", metavar="VARIANT,…", help="these variants")
    p.add_argument("--seeds", default="", metavar="0,1", help="these seeds of the studies")
    p.add_argument(
        "--minutes", type=float, default=math.inf, metavar="X", help="stop after this long; jobs on their way are saved"
    )
    p.add_argument("--results", type=Path, metavar="FILE", help=f"default: {RESULTS} beside the study")
    p.add_argument("--plot", type=Path, metavar="DIR", help="draw what was found, as PNG and SVG")
    p.add_argument("--table", action="store_true", help="run nothing, only show what there is")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return p


# ---------------------------------------------------------------------------------------------- what is asked


def _studies(options: argparse.Namespace) -> list[Study]:
    if options.jobs < 1:
        raise Refusal(f"--jobs {options.jobs}: must be at least 1")
    if not options.minutes > 0:
        raise Refusal(f"--minutes {options.minutes:g}: must be above 0")
    studies = [read(file) for file in options.studies]
    names = [study.name for study in studies]
    for study in studies:
        if names.count(study.name) > 1:
            raise Refusal(f"{study.file}: another study given here is called {study.name} too: rename one")
    only = [word for word in options.only.split(",") if word]
    _check("--only", only, [variant for study in studies for variant in study.variants])
    seeds = _seeds(options.seeds)
    _check("--seeds", map(str, seeds), [str(seed) for study in studies for seed in study.seeds])
    return [study.narrowed(only, seeds) for study in studies]


def _seeds(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise Refusal(f"--seeds {text!r}: write whole numbers with commas between them, like 0,1") from None


def _check(option: str, wanted: Iterator[str] | Sequence[str], known: Sequence[str]) -> None:
    for word in wanted:
        if word not in known:
            raise Refusal(f"{option} {word}: in none of the studies: {near(word, dict.fromkeys(known))}")


def _books(studies: Sequence[Study], file: Path | None) -> Books:
    by_file: dict[Path, Results] = {}
    books: Books = {}
    for study in studies:
        path = file or Path(study.file).with_name(RESULTS)
        if path not in by_file:
            by_file[path] = Results(path)
        books[study.name] = by_file[path]
    running = {f"{study.name}:{variant}" for study in studies for variant in study.variants}
    for study in studies:
        named = ":" in study.baseline and study.baseline not in running
        if named and not books[study.name].named(*study.baseline.split(":", 1)):
            raise StudyError(
                f"{study.file}: baseline = {study.baseline!r}: not in {books[study.name].file}: "
                "run that study first, or give both"
            )
    return books


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"--plot {folder}: not a folder to draw into ({error.strerror}): choose another") from None


def _missing(studies: Sequence[Study], books: Books) -> list[Job]:
    """What there is no result of: the first seed of everything first. What two studies share is run once."""
    jobs: dict[tuple[Path, str], Job] = {}
    for turn in range(max(len(study.seeds) for study in studies)):
        for study in studies:
            for job in study.chosen:
                if job.seed in study.seeds[turn : turn + 1] and books[study.name].of(job) is None:
                    jobs.setdefault((books[study.name].file, job.key), job)
    return list(jobs.values())


def _device(wanted: str | None, jobs: Sequence[Job], books: Books) -> str:
    """The device to run on; everything that can be refused is, before the first job."""
    for folder, path in {(job.folder, job.config.data.path) for job in jobs}:
        text = path if path == STDLIB else Path(folder, path)
        maker = Path(f"{text}.py")
        if isinstance(text, Path) and not text.exists() and maker.is_file():
            raise Refusal(f"{text} does not exist: make it with python {maker}")
        corpus_files(text)
    cli.need("torch", "torch", "skerry lab without --table")
    import torch

    cli.check_interrupted()
    name = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise Refusal(f"--device {name}: the laboratory runs on cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Refusal(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices for torch")
    for job in jobs:
        books[job.study].check_writable()
    return name


# ---------------------------------------------------------------------------------------------- running


def _conduct(jobs: Sequence[Job], books: Books, device: str, options: argparse.Namespace) -> list[Event]:
    """Run the jobs and keep their results; what failed is returned."""
    if not jobs:
        return []
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # ends the workers first, as Ctrl-C does
    failed = []
    running = execute(jobs, lambda job: books[job.study].save_of(job), device, options.jobs, options.minutes)
    with _showing(len(jobs)) as show, closing(running) as events:
        for event in events:
            if event.result:
                books[event.job.study].append(event.result)
                books[event.job.study].save_of(event.job).unlink(missing_ok=True)
            if event.failure:
                failed.append(event)
            show(event)
    return failed


@contextmanager
def _showing(total: int) -> Iterator[Callable[[Event], None]]:
    """A bar a running job and one for all of them on a terminal, else lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total)
        return
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    with bar:
        yield _Bars(bar, total)


class _Lines:
    """A line for each job that has ended, and now and then one on those that run."""

    def __init__(self, total: int) -> None:
        self.total, self.ended = total, 0
        self.running: dict[Job, float] = {}
        self._at = time.monotonic()

    def __call__(self, event: Event) -> None:
        self.running[event.job] = event.progress
        if event.is_end:
            del self.running[event.job]
            self.ended += not event.is_saved
            self.say(_ended(event))
        self.follow(event)

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def follow(self, event: Event) -> None:
        if self.running and time.monotonic() - self._at > live.LINE_S:
            self._at = time.monotonic()
            doing = ", ".join(f"{job} {100 * progress:.0f} %" for job, progress in self.running.items())
            self.say(f"{self.ended} of {self.total} done; {doing}")


class _Bars(_Lines):
    def __init__(self, bar: Progress, total: int) -> None:
        super().__init__(total)
        self.bar, self.all = bar, bar.add_task("", total=total)
        self.tasks: dict[Job, TaskID] = {}

    def say(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False)

    def follow(self, event: Event) -> None:
        if event.job not in self.tasks:
            self.tasks[event.job] = self.bar.add_task(str(event.job), total=1.0)
        self.bar.update(self.tasks[event.job], completed=event.progress, visible=event.job in self.running)
        done = self.ended + sum(self.running.values())
        self.bar.update(self.all, completed=done, description=f"{self.ended} of {self.total} done")


def _ended(event: Event) -> str:
    if event.is_saved:
        return f"{event.job}: its time was up, and it is saved: the same command goes on with it"
    if event.result is None:
        return f"{event.job}: failed: {event.failure}"
    loss = "diverged" if is_lost(event.result) else f"loss {event.result.loss:.4f}"
    return f"{event.job}: {loss} in {event.result.seconds:.0f} s"


# ---------------------------------------------------------------------------------------------- telling


def _tell(studies: Sequence[Study], books: Books, failed: Sequence[Event], options: argparse.Namespace) -> None:
    records = []
    for study in studies:
        table = table_of(study, books[study.name])
        drawn = plot.draw(study, books[study.name], options.plot) if options.plot else []
        if not options.json:
            print_table(table, drawn)
        records.append(_record(table, drawn, [event for event in failed if event.job.study == study.name]))
    if options.json:
        cli.print_json(records[0] if len(records) == 1 else {"studies": records})


def _record(table: Table, drawn: Sequence[Path], failed: Sequence[Event]) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(table),
        "failed": [{"variant": e.job.variant, "seed": e.job.seed, "why": e.failure} for e in failed],
        "plots": [str(file) for file in drawn],
    }


def print_table(table: Table, drawn: Sequence[Path]) -> None:
    console = Console(width=None if sys.stdout.isatty() else live.PIPED_COLUMNS)
    console.print(Text(f"{table.study}: {table.about}" if table.about else table.study, style="bold"))
    headers = (
        "variant", "seeds", "loss", f"against {table.baseline or 'none'}", "MB a learner", "bytes a parameter",
        "contributors", "discarded", "seconds",
    )  # fmt: skip
    rows = [_cells(row, is_baseline=row.variant == table.baseline) for row in table.variants]
    grid = Grid(box=None, pad_edge=False)
    for header, *cells in zip(headers, *rows, strict=True):
        width = max(map(len, [*cells, *header.split()]))  # headers may break, numbers may not
        grid.add_column(header, justify="left" if header == "variant" else "right", min_width=width, vertical="bottom")
    for row in rows:
        grid.add_row(*row)
    console.print(grid, width=max(console.width, console.measure(grid).minimum), crop=False)
    for name in dict.fromkeys(missing.variant for missing in table.missing):
        seeds = [str(missing.seed) for missing in table.missing if missing.variant == name]
        console.print(f"missing: {name}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}", highlight=False)
    for line in (*table.notes, *(f"drawn: {file}" for file in drawn)):
        console.print(line, highlight=False)


def _cells(row: Row, is_baseline: bool) -> list[str]:
    lost = f" ({row.diverged} diverged)" if row.diverged else ""
    if row.loss is None:
        return [row.variant, str(len(row.seeds)), "diverged" if row.diverged else "–", *["–"] * 6]
    against = "baseline" if is_baseline else "–"
    if row.against is not None:
        fewer = f" ({row.against_seeds} seeds)" if 1 < row.against_seeds < len(row.seeds) else ""
        against = _spread(100 * row.against, row.against_interval and 100 * row.against_interval, "+.2f", " %") + fewer
    return [
        row.variant,
        str(len(row.seeds)),
        _spread(row.loss, row.interval, ".4f") + lost,
        against,
        f"{row.megabytes:,.1f}",
        f"{row.bytes_per_parameter:,.1f}",
        f"{row.contributors:.2f}",
        f"{row.discarded:.1%}",
        f"{row.seconds:,.0f}",
    ]


def _spread(number: float, interval: float | None, shape: str, unit: str = "") -> str:
    """A mean and half its interval, both in one unit."""
    if interval is None:
        return f"{number:{shape}}{unit} (one seed)"
    return f"{number:{shape}} ± {interval:{shape.removeprefix('+')}}{unit}"
