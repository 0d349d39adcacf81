"""skerry bench wire | start: what processes of the product take to talk, and to come up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from skerry import cli
from skerry.cli.bench_tables import PARAMETERS, bytes_text, refuse_overrides, table, tell
from skerry.text import Kind, count
from skerry.wire.handshake import STREAMS_MAX

if TYPE_CHECKING:
    from skerry.proof.bench import start, wire

MIB = Kind(count, 1, 4096)
STREAMS = Kind(count, 1, STREAMS_MAX)


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
    add("--tls", action="store_true", help="both through TLS 1.3, with keys made for it")
    add("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    refuse_overrides(overrides)
    from skerry.proof.bench.wire import measure

    rows = measure(options.mib, options.streams, options.total, tell, options.tls)
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

    rows = measure(options.parameters, overrides, tell)
    cli.tell({"rows": rows}, options.json, lambda found: _show_starts(found["rows"]))
    return 0


def _show_wire(rows: Sequence[wire.Row]) -> None:
    shown = table("MiB", "streams", "CPU of bare sockets", "from", "to", "CPU s/GB", "bare", "GB/s", "bare")
    for row in rows:
        shown.add_row(
            f"{row.mib:g}",
            str(row.streams),
            f"x {row.cpu_ratio:.2f}",
            f"{row.cpu_ratio_spread.min:.2f}",
            f"{row.cpu_ratio_spread.max:.2f}",
            *(f"{n:.2f}" for n in (row.cpu_s_per_gb, row.bare_cpu_s_per_gb, row.gb_s, row.bare_gb_s)),
        )
    Console().print(shown)


def _show_starts(rows: Sequence[start.Row]) -> None:
    shown = table("parameters", "fresh, s", "memory", "after a kill, s", "memory", "disk", "bytes a parameter")
    for row in rows:
        shown.add_row(
            f"{row.parameters / 1e6:g}M",
            f"{row.fresh_s:.2f}",
            bytes_text(row.fresh_peak_bytes),
            f"{row.again_s:.2f}",
            bytes_text(row.again_peak_bytes),
            bytes_text(row.disk_bytes),
            f"{row.bytes_per_parameter:.1f}",
        )
    Console().print(shown)
