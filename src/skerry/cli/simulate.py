"""skerry simulate protocol: the real core, nodes, store and frames in virtual time, under faults drawn from seeds.

`skerry simulate goodput --help` and `skerry simulate run --help` tell of the other two.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from skerry import cli
from skerry.errors import Refusal
from skerry.proof.chaos.plan import FaultPlan, read_plan
from skerry.proof.sim.seeds import Outcome, Result, run_seed, run_seeds

SEEDS = 1000
WHAT = ("protocol", "goodput", "run")


def run(words: Sequence[str]) -> int:
    if words[:1] == ["goodput"]:
        from skerry.cli import simulate_goodput

        return simulate_goodput.run(words[1:])
    if words[:1] == ["run"]:
        from skerry.cli import simulate_run

        return simulate_run.run(words[1:])
    return _protocol(words)


def _protocol(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry simulate", description=__doc__)
    parser.add_argument("what", choices=WHAT, help="what to simulate")
    parser.add_argument("--seeds", type=cli.whole, default=SEEDS, metavar="N", help=f"how many (default {SEEDS})")
    parser.add_argument("--first", type=cli.whole, default=0, metavar="SEED", help="the first of them (default 0)")
    parser.add_argument("--seed", type=cli.whole, metavar="SEED", help="this one alone, with everything that happens")
    parser.add_argument("--plan", metavar="PLAN", help="the faults of a plan, as skerry chaos takes it, not drawn ones")
    parser.add_argument("--tensors", action="store_true", help="real tensors and codecs instead of exact integers")
    parser.add_argument("--jobs", type=cli.whole, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: a simulation draws its configuration from the seed")
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise Refusal(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.first < 0 or (options.seed or 0) < 0:
        raise Refusal("--first and --seed: a seed is 0 or above")
    plan = read_plan(options.plan) if options.plan else None
    if options.seed is not None:
        result = _replay(options.seed, options.tensors, plan)
    else:
        seeds = range(options.first, options.first + options.seeds)
        with _showing(len(seeds)) as progress:
            result = run_seeds(seeds, options.tensors, plan, min(options.jobs, len(seeds)), progress)
    return _tell(result, options)


def _replay(seed: int, tensors: bool, plan: FaultPlan | None) -> Result:
    """One seed, every event told on stderr."""
    result = Result()
    logging.disable(logging.CRITICAL)
    try:
        result.add(run_seed(seed, tensors, plan, trace=lambda text: print(text, file=sys.stderr)))
    finally:
        logging.disable(logging.NOTSET)
    return result


def _tell(result: Result, options: argparse.Namespace) -> int:
    for outcome in result.failures:
        print(f"seed {outcome.seed}: {outcome.failure}\nreplay: {_command(outcome, options)}", file=sys.stderr)
    if options.json:
        cli.print_json(
            {
                "seeds": result.seeds,
                "violations": len(result.failures),
                "events": result.events,
                "seeds_per_s": result.seeds / result.seconds if result.seconds else 0.0,
                "rare": result.rare,
                "saw": dict(sorted(result.saw.items())),
                "failures": [
                    {"seed": f.seed, "what": f.failure, "replay": _command(f, options)} for f in result.failures
                ],
                "tensors": options.tensors,
                "plan": options.plan,
                "seconds": result.seconds,
            }
        )
    else:
        _print(result)
    return 1 if result.failures else 0


def _command(outcome: Outcome, options: argparse.Namespace) -> str:
    more = (f" --plan {options.plan}" if options.plan else "") + (" --tensors" if options.tensors else "")
    return f"skerry simulate protocol --seed {outcome.seed}{more}"


def _print(result: Result) -> None:
    console = Console()
    rate = f", {result.seeds / result.seconds:.0f} seeds/s" if result.seconds else ""
    console.print(
        f"{result.seeds:,} seeds, {result.events:,} events ({result.events / result.seeds:.0f} a seed){rate}: "
        + (f"[red]{len(result.failures)} violations[/]" if result.failures else "[green]no violation[/]")
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("rare things that happened")
    table.add_column("times", justify="right")
    for name, count in result.rare.items():
        table.add_row(name, f"{count:,}" if count else "[yellow]never[/]")
    console.print(table)


@contextmanager
def _showing(total: int) -> Iterator[Callable[[Result], None]]:
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("no violation so far", total=total)

        def show(result: Result) -> None:
            failed = len(result.failures)
            text = f"[red]{failed} violations" if failed else "no violation so far"
            bar.update(task, completed=result.seeds, description=text)

        yield show
