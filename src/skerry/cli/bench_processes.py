"""skerry bench wire | start: what processes of the product take to talk, and to come up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from skerry import cli
from skerry.errors import Refusal
from skerry.text import Kind, count
from skerry.text import size as size_text
from skerry.wire.handshake import STREAMS_MAX

if TYPE_CHECKING:
    from skerry.proof.bench import start, wire

MIB = Kind(count, 1, 4096)
STREAMS = Kind(count, 1, STREAMS_MAX)
PARAMETERS = Kind(count, 1, 1e11)


def run_wire(words: Sequence[str]) -> int:
    parser = cli.Parser(
        prog="skerry bench wire",
        description="Payloads from a learner's endpoint to a syncer's over loopback, in two processes; in between bare "
        "sockets carry the same bytes and compute the same checksum. CPU is that of both processes.",
    )
    add = parser.add_argument
    add("--mib", type=cli.listed(MIB), default="1,4,16,64", metavar="N,…", help="of a payload (%(default)s)")
    add("--streams", type=cli.listed(STREAMS), default="1,4", metavar="S,…", help="bulk connections (%(default)s)")
    add("--total", type=cli.counting(MIB), default=256, metavar="MIB", help="each carries in a round (%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    from skerry.proof.bench.wire import measure

    rows = measure(options.mib, options.streams, options.total, _tell)
    cli.tell({"rows": rows}, options.json, lambda found: _show_wire(found["rows"]))
    return 0


def run_start(words: Sequence[str]) -> int:
    parser = cli.Parser(
        prog="skerry bench start",
        description="A syncer begins a run from a safetensors file of random values, is killed when its port is open, "
        "and started again. Dotted overrides (--sync.num_fragments 48) change the run's configuration. All of it lies "
        "in the folder for temporary files (TMPDIR).",
    )
    add = parser.add_argument
    add("--parameters", type=cli.listed(PARAMETERS), default="10M,100M", metavar="N,…", help="(%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    from skerry.proof.bench.start import measure

    rows = measure(options.parameters, overrides, _tell)
    cli.tell({"rows": rows}, options.json, lambda found: _show_starts(found["rows"]))
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show_wire(rows: Sequence[wire.Row]) -> None:
    table = _table("MiB", "streams", "CPU of bare sockets", "from", "to", "CPU s/GB", "bare", "GB/s", "bare")
    for row in rows:
        table.add_row(
            f"{row.mib:g}",
            str(row.streams),
            f"x {row.cpu_ratio:.2f}",
            f"{row.cpu_ratio_spread.min:.2f}",
            f"{row.cpu_ratio_spread.max:.2f}",
            *(f"{n:.2f}" for n in (row.cpu_s_per_gb, row.bare_cpu_s_per_gb, row.gb_s, row.bare_gb_s)),
        )
    Console().print(table)


def _show_starts(rows: Sequence[start.Row]) -> None:
    table = _table("parameters", "fresh, s", "memory", "after a kill, s", "memory", "disk", "bytes a parameter")
    for row in rows:
        table.add_row(
            f"{row.parameters / 1e6:g}M",
            f"{row.fresh_s:.2f}",
            _bytes(row.fresh_peak_bytes),
            f"{row.again_s:.2f}",
            _bytes(row.again_peak_bytes),
            _bytes(row.disk_bytes),
            f"{row.bytes_per_parameter:.1f}",
        )
    Console().print(table)


def _bytes(value: int | None) -> str:
    return "–" if value is None else size_text(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table
