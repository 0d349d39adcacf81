"""skerry simulate run: a real run's twin in virtual time, fed from its tape, and how far the two agree."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from skerry import cli
from skerry.errors import Refusal
from skerry.proof.twin import measurements, twin
from skerry.text import counted

SEEDS = 3
COMPARED = ("goodput", "merges", "contributors_mean")


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry simulate run", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="of a finished run, its tape in it")
    parser.add_argument("--seeds", type=cli.whole, default=SEEDS, metavar="N", help=f"twins (default {SEEDS})")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: a twin has its run's configuration")
    if not 1 <= options.seeds <= 1000:
        raise Refusal(f"--seeds {options.seeds}: must be from 1 to 1000")
    began = time.perf_counter()
    found = compare(options.run_dir, options.seeds)
    found["seconds"] = time.perf_counter() - began
    cli.tell(found, options.json, _tell)
    return 0


def compare(run_dir: Path, seeds: int) -> dict[str, Any]:
    """Measured and predicted, a mean over twins; deviations as shares of what was measured."""
    read = measurements.read(run_dir)
    logging.disable(logging.CRITICAL)  # the twins' nodes say what nodes say
    try:
        twins = [measurements.numbers(read, twin.live(read, seed)) for seed in range(seeds)]
    finally:
        logging.disable(logging.NOTSET)
    measured = measurements.numbers(read, read.tally)
    predicted = {key: sum(one[key] for one in twins) / seeds for key in measured}
    deviation = {key: predicted[key] / value - 1 if value else 0.0 for key, value in measured.items()}
    return {
        "run_dir": str(run_dir),
        "measured": measured,
        "predicted": predicted,
        "low": {key: min(one[key] for one in twins) for key in measured},
        "high": {key: max(one[key] for one in twins) for key in measured},
        "deviation": deviation,
        "deviation_max": max(abs(deviation[key]) for key in COMPARED),
        "compared": list(COMPARED),
        "delays": msgspec.to_builtins(read.delays),
        "faults": dict(sorted(Counter(fault.kind for fault in read.faults).items())),
        "seeds": seeds,
    }


def _tell(found: dict[str, Any]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ("", "measured", "predicted", "twins", "deviation"):
        table.add_column(column, justify="left" if not column else "right")
    for key, value in found["measured"].items():
        low, high = found["low"][key], found["high"][key]
        table.add_row(
            key, _short(value), _short(found["predicted"][key]), f"{_short(low)} to {_short(high)}",
            f"{found['deviation'][key]:+.1%}",
        )  # fmt: skip
    console.print(table)
    d = found["delays"]
    console.print(
        f"nanoseconds a parameter: encoding {d['encode_ns']:.3g}, adopting {d['adopt_ns']:.3g}, looking through "
        f"{d['inspect_ns']:.3g}, merging {d['merge_ns']:.3g}; seconds a commit {d['commit_s']:.3g}"
    )
    twins, faults = counted(found["seeds"], "twin"), counted(sum(found["faults"].values()), "fault")
    if found["seeds"] > 1 and found["low"] == found["high"]:
        twins += ", all equal: every step was on the tape"
    console.print(
        f"at most {found['deviation_max']:.1%} in {', '.join(found['compared'])}; {twins}, {faults} from the tape, "
        f"{found['seconds']:.1f} s"
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"
