"""skerry bench merge | codec: the arithmetic alone, against what this machine's memory carries."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from skerry import cli
from skerry import config as configs
from skerry.algo.codecs import CODECS
from skerry.algo.merge import RULES
from skerry.cli.bench_tables import refuse_overrides, table, tell
from skerry.text import Kind, count, near

if TYPE_CHECKING:
    from skerry.proof.bench import codec, merge

SIZE = Kind(count, 1, 1e10)
LEARNERS = Kind(count, 1, configs.most("run.learners"))
THREADS = Kind(count, 1, 1024)


def run_merge(words: Sequence[str]) -> int:
    parser = cli.Parser(
        prog="skerry bench merge",
        description="What a merge takes without network and disk: contributions in memory become the next version. The "
        "fragments of a small model, or one for each of the most threads, are merged by pools of each number of "
        "threads in turn; in between as many threads copy memory.",
    )
    add = parser.add_argument
    add(
        "--sizes",
        type=cli.listed(SIZE),
        default="450k,4M,16M",
        metavar="N,…",
        help="parameters of a fragment (%(default)s)",
    )
    add(
        "--learners", type=cli.counting(LEARNERS), default=8, metavar="M", help="contributions to a merge (%(default)s)"
    )
    add("--threads", type=cli.listed(THREADS), default="1", metavar="T,…", help="that merge (%(default)s)")
    add("--rules", type=_names(RULES), default="rda", metavar="RULE,…", help=f"of {', '.join(RULES)} (%(default)s)")
    add(
        "--codecs", type=_names(CODECS), default="int4", metavar="CODEC,…", help=f"of {', '.join(CODECS)} (%(default)s)"
    )
    add("--json", action="store_true", help="print one JSON object")
    options = _parsed(parser, words)
    from skerry.proof.bench.merge import Load, measure

    load = Load(options.sizes, options.rules, options.codecs, options.threads, options.learners)
    rows = measure(load, tell)
    cli.tell({"rows": rows}, options.json, lambda found: _show_merges(found["rows"]))
    return 0


def run_codec(words: Sequence[str]) -> int:
    parser = cli.Parser(
        prog="skerry bench codec",
        description="What encoding and decoding take; in between as many threads copy memory.",
    )
    add = parser.add_argument
    add("--sizes", type=cli.listed(SIZE), default="4M", metavar="N,…", help="parameters (%(default)s)")
    add("--threads", type=cli.listed(THREADS), default="1", metavar="T,…", help="that share one (%(default)s)")
    add("--codecs", type=_names(CODECS), default=",".join(CODECS), metavar="CODEC,…", help="(%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    options = _parsed(parser, words)
    from skerry.proof.bench.codec import Load, measure

    rows = measure(Load(options.sizes, options.codecs, options.threads), tell)
    cli.tell({"rows": rows}, options.json, lambda found: _show_codecs(found["rows"]))
    return 0


def _parsed(parser: cli.Parser, words: Sequence[str]) -> argparse.Namespace:
    options, overrides = cli.parse(parser, words)
    refuse_overrides(overrides)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if max(options.threads) > cores:
        print(f"skerry: {max(options.threads)} threads share {cores} cores here", file=sys.stderr)
    return options


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Known names between commas."""

    def read(text: str) -> tuple[str, ...]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown: {near(name, known)}")
        return tuple(text.split(","))

    return read


def _show_merges(rows: Sequence[merge.Row]) -> None:
    stages = list(rows[0].ns_per_parameter)
    shown = table("size", "rule, codec", "threads", "M/s", "of a copy", "close", *stages)
    for row in rows:
        shown.add_row(
            f"{row.parameters / 1e6:g}M",
            f"{row.rule} {row.codec}",
            str(row.threads),
            f"{row.parameters_per_s / 1e6:.0f}",
            f"{row.of_bandwidth:.2f}",
            f"{row.close_ms:.3g}",
            *(f"{row.ns_per_parameter[stage]:.2f}" for stage in stages),
        )
    Console().print(shown)
    print(f"M/s: millions of merged parameters a second; close: ms; {', '.join(stages)}: CPU time, ns a parameter")


def _show_codecs(rows: Sequence[codec.Row]) -> None:
    shown = table("size", "codec", "threads", "encode, GB/s", "of a copy", "decode, GB/s", "of a copy")
    for row in rows:
        shown.add_row(
            f"{row.parameters / 1e6:g}M",
            row.codec,
            str(row.threads),
            f"{row.encode_gb_s:.1f}",
            f"{row.encode_of_bandwidth:.2f}",
            f"{row.decode_gb_s:.1f}",
            f"{row.decode_of_bandwidth:.2f}",
        )
    Console().print(shown)
