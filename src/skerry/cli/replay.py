"""skerry replay: read a run's tape again, audit every fact, recompute every merge and compare to the bit.

Merges are recomputed where the run kept the contributions (--store.record full). With --exclude they are merged
again without one learner's, the others' as recorded.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from skerry import cli
from skerry.cli.export import check_out
from skerry.cli.live import forked_from
from skerry.errors import Refusal, printable
from skerry.run.facts import read_run
from skerry.run.replay import Excluded, Report, Show, replay


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry replay", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--exclude", metavar="LEARNER", help="merge again without this learner's contributions")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the recomputed model as safetensors")
    parser.add_argument("--threads", type=cli.whole, default=1, metavar="N", help="any number gives the same bits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    if not 1 <= options.threads <= 256:
        raise Refusal(f"--threads {options.threads}: must be from 1 to 256")
    if options.out is not None:
        _check_out(options.run, options.out)
    with _showing() as show:
        report = read_run(options.run, lambda store: replay(store, options.threads, options.exclude, show))
    if options.out is not None:
        _write(options.out, report)
    if options.json:
        cli.print_json(_record(report, options.run))
    else:
        _print(report)
    return 0 if report.agrees else 1


def _check_out(root: Path, out: Path) -> None:
    check_out(root, out)
    if out.exists():
        raise Refusal(f"--out {out}: is there already: name another file, or remove it")


def _write(out: Path, report: Report) -> None:
    if not report.model:
        why = (
            "it differs" if not report.agrees else "this run kept no contributions: begin one with --store.record full"
        )
        first = report.first_difference or (report.begins if report.record == "full" else "")
        raise Refusal(f"--out {out}: there is no recomputed model to write: {first or why}")
    try:
        with out.open("xb") as file:
            file.writelines(report.model())
    except OSError as error:
        raise Refusal(f"--out {out}: cannot be written ({error.strerror}): name another file") from None


@contextmanager
def _showing() -> Iterator[Show]:
    """A bar, if a person is there."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("merges", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _record(report: Report, run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = {
        "identical": report.identical,
        "note": _nothing(report) if report.identical is None else "",
        "merges": report.merges,
        "recomputed": report.recomputed,
        "record": report.record,
        "checks": report.checks,
        "violations": len(report.violations),
        "violated": report.violations,
        "first_difference": report.first_difference,
        "left_out": report.left_out,
        "skipped": report.skipped,
        "begins": report.begins,
        "lineage": report.lineage,
        "model_sha256": report.model_sha256,
        "run_dir": str(run_dir),
    }
    if report.excluded is not None:
        record["excluded"] = dataclasses.asdict(report.excluded) | {"note": report.excluded.note}
    return record


def _print(report: Report) -> None:
    for line in [*report.violations, report.first_difference, report.left_out, report.begins]:
        if line:
            print(printable(line), file=sys.stderr)
    if not report.agrees:
        print(f"not identical: {report.recomputed} of {report.merges} merges agreed up to there")
    elif report.recomputed:
        skipped = f", {report.skipped} could not be" if report.skipped else ""
        print(f"identical: {report.recomputed} merges recomputed{skipped}, {report.checks:,} checks")
        print(f"sha256 {report.model_sha256}" if report.model else "not every fragment could be recomputed")
    else:
        print(_nothing(report))
    if report.lineage is not None:
        print(printable(f"forked from {forked_from(report.lineage)}"))
    if report.excluded is not None:
        _print_excluded(report.excluded)


def _nothing(report: Report) -> str:
    held = f"choices, weights and versions of {report.merges} merges hold, {report.checks:,} checks"
    return f"nothing was recomputed, {_why_not(report)}: {held}"


def _why_not(report: Report) -> str:
    if report.record != "full":
        return "for this run kept no contributions (store.record = decisions)"
    return (
        "for no kept version leads on to a merge that the tape still tells of"
        if report.begins
        else "for none was merged"
    )


def _print_excluded(gone: Excluded) -> None:
    print(
        f"without {gone.learner}: {gone.contributions} contributions, {gone.tokens:,.0f} tokens less; "
        f"{gone.merges_changed} merges changed, {gone.merges_skipped} skipped; "
        f"the model moves by {gone.relative_change:.3%} of its norm\nsha256 {gone.model_sha256}\n"
        f"{gone.note}: this is not the run that would have been"
    )
