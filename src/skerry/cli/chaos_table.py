"""skerry chaos table: what four faults cost Skerry and plain data-parallel training, both measured here."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skerry import cli
from skerry import config as configs
from skerry.cli import live, train
from skerry.errors import Refusal
from skerry.proof.chaos import ddp
from skerry.proof.chaos.versus import SPARE_S, WARM_S, Resilience
from skerry.shell.syncer import write_json
from skerry.text import near
from skerry.train.data import open_data
from skerry.train.held_out import HeldOut
from skerry.train.shapes import SHAPES, shape_of

SECONDS_MIN, STEPS_MIN = 2.0, 10  # in a window, to make a rate


def run(words: Sequence[str]) -> int:
    options, overrides = cli.parse(parser(), words)
    faults, config, out = _checked(options, overrides)
    held_out = HeldOut(config, open_data(config))
    cli.check_interrupted()
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # ends the children first, as Ctrl-C does
    if not options.json:
        minutes = len(faults) * 2 * (config.run.minutes + SPARE_S / 60)
        print(f"{', '.join(faults)}: about {minutes:.0f} minutes\nruns in {out}", file=sys.stderr)
    cli.warm_up()
    began = time.monotonic()
    with _showing(quiet=options.json) as show:
        table = Resilience(config, held_out, out, options.seconds, show)
        rows = [table.row(fault) for fault in faults]
    result = {
        "rows": rows,
        "violations": len(table.violations),
        "violated": table.violations,
        "seconds": options.seconds,
        "learners": config.run.learners,
        "model": config.model.preset,
        "parameters": held_out.parameter_count,
        "step_s": config.learner.step_s,
        "rate_set": config.run.learners * config.data.batch * shape_of(config.model).context / config.learner.step_s,
        "cores": len(os.sched_getaffinity(0)),
        "hardware": _hardware(),
        "wall_s": time.monotonic() - began,
        "out": str(out),
    }
    write_json(out / "table.json", result)
    cli.tell(result, options.json, print_table)
    return 1 if table.violations else 0


def parser() -> cli.Parser:
    p = cli.Parser(
        prog="skerry chaos table",
        description="What four faults cost a run of Skerry and plain data-parallel training, both measured here.",
        epilog="Any key of the configuration is an option: --sync.quorum 2",
    )
    p.add_argument("--seconds", type=float, default=20.0, metavar="S", help="undisturbed, and again under the fault")
    p.add_argument("--faults", default=",".join(ddp.FAULTS), metavar="A,B", help=f"of {', '.join(ddp.FAULTS)}")
    p.add_argument("--learners", type=cli.whole, metavar="M", help="how many, and as many ranks (default 4)")
    p.add_argument("--step-s", type=float, metavar="S", help="pad a step to S seconds")
    p.add_argument("--data", metavar="PATH", help="a file or a folder (default: Python's standard library)")
    p.add_argument("--model", metavar="PRESET", help=", ".join(SHAPES))
    p.add_argument("--seed", type=cli.whole)
    p.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default runs/table-TIME)")
    p.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    p.add_argument("--preset", choices=sorted(configs.PRESETS), default="local")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    p.set_defaults(speeds=None, steps=None, tokens=None, record=None)
    return p


def _checked(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> tuple[list[str], configs.Config, Path]:
    """Everything that can be refused is, before anything is written."""
    wanted = [word.strip() for word in options.faults.split(",")]
    for word in wanted:
        if word not in ddp.FAULTS:
            raise Refusal(f"--faults: unknown fault {word!r}: {near(word, ddp.FAULTS)}")
    if not options.seconds >= SECONDS_MIN:
        raise Refusal(f"--seconds {options.seconds:g}: must be {SECONDS_MIN:g} or more")
    options.minutes = (WARM_S + 2 * options.seconds + SPARE_S) / 60
    config = train.measured_config_of(options, overrides)
    if config.run.minutes != options.minutes:
        raise Refusal(f"run.minutes = {config.run.minutes:g}: a row's length is set with --seconds")
    if config.run.learners < 2:
        raise Refusal(f"run.learners = {config.run.learners}: one may fail, so 2 or more are needed")
    if not config.learner.step_s:
        raise Refusal("learner.step_s = 0: both halves run at one set pace; set it, like 0.3")
    if options.seconds < STEPS_MIN * config.learner.step_s:
        least = STEPS_MIN * config.learner.step_s
        raise Refusal(f"--seconds {options.seconds:g}: at learner.step_s = {config.learner.step_s:g} "
                          f"{least:g} or more make a rate")  # fmt: skip
    return [fault for fault in ddp.FAULTS if fault in wanted], config, train.fresh_dir(options.out, "table")


def _hardware() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


# ---------------------------------------------------------------------------------------------- for people


@contextmanager
def _showing(quiet: bool) -> Iterator[ddp.Show]:
    """What is being measured now: one line in place on a terminal, else one now and then, or none."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda text: status.update(text)
    else:
        yield (lambda text: None) if quiet else _Lines()


class _Lines:
    def __init__(self) -> None:
        self._at = float("-inf")

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._at > live.LINE_S:
            self._at = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def print_table(result: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("fault", "takes away", "Skerry loses", "beyond it", "merged", "DDP loses", "beyond it"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    table.add_column("what happened to DDP", overflow="fold")
    for row in result["rows"]:
        ours, theirs = row["skerry"], row["ddp"]
        mine = (f"{ours['impact']:.1%}", f"{ours['impact_beyond']:.1%}", f"{ours['merged_share']:.1%}")
        table.add_row(row["fault"], f"{row['share_lost']:.1%}", *mine, *_of_ddp(theirs))
    console = Console(width=None if sys.stdout.isatty() else live.PIPED_COLUMNS)
    console.print(table)
    console.print(
        f"tokens/s of completed steps, {result['seconds']:g} s undisturbed against {result['seconds']:g} s under the "
        f"fault; {result['learners']} learners at {result['step_s']:g} s a step make "
        f"{result['rate_set']:,.0f}/s if nothing else slows them; {result['parameters']:,} parameters, "
        f"{result['cores']} cores ({result['hardware']}); {result['wall_s']:.0f} s; runs in {result['out']}",
        highlight=False,
    )
    for line in result["violated"]:
        console.print(Text(line, style="bold red"))


def _of_ddp(half: dict[str, Any]) -> tuple[str, str, str]:
    if not half["measured"]:
        return "–", "–", half["why_not"]
    least = "≥ " if half["is_bound"] else ""
    return f"{least}{half['impact']:.1%}", f"{least}{half['impact_beyond']:.1%}", half["what_happened"]
