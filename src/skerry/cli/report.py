"""skerry report: what became of a run, as one HTML file without network or script; of two runs, side by side.

It reads the run directory and changes nothing in it, whoever serves the run meanwhile.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skerry import cli
from skerry.cli import live, voice
from skerry.cli.export import check_out
from skerry.errors import DiskFull, Refusal
from skerry.report.compare import comparison, differences
from skerry.report.document import document
from skerry.report.numbers import numbers_of
from skerry.store.files import put_in_place
from skerry.store.lock import NO_ROOM
from skerry.text import size

RUNS_MAX = 2


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry report", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="one, or two to compare")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: report-RUN.html here)")
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object, and write no file")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    if len(options.runs) > RUNS_MAX:
        raise Refusal(f"{len(options.runs)} run directories: give one, or two to compare")
    if options.json and options.out is not None:
        raise Refusal("--json and --out: give one of them")
    if options.out is not None:
        _check_out(options.runs, options.out)
    numbers = [_numbers(root, options.json or not sys.stderr.isatty()) for root in options.runs]
    if options.json:
        cli.print_json(numbers[0] if len(numbers) == 1 else {"runs": numbers, "differences": differences(*numbers)})
        return 0
    for warning in filter(None, (each["warning"] for each in numbers)):
        voice.say(warning, "warning")
    html = document(numbers[0]) if len(numbers) == 1 else comparison(*numbers)
    out = options.out or Path(_name(options.runs))
    data = html.encode()
    try:
        put_in_place(out, data)
    except OSError as error:
        kind, remedy = (DiskFull, "free space, or name") if error.errno in NO_ROOM else (Refusal, "name")
        raise kind(f"{out}: cannot be written ({error.strerror}): {remedy} another file with --out") from None
    print(f"skerry: wrote {out} ({size(len(data))}): open it in any browser")
    return 0


def _numbers(root: Path, quiet: bool) -> dict[str, Any]:
    with live.counting(f"reading {root}", quiet, of="bytes") as show:
        return numbers_of(root, show)


def _check_out(roots: Sequence[Path], out: Path) -> None:
    for root in roots:
        check_out(root, out)
    if out.is_dir():
        raise Refusal(f"--out {out}: is a folder: name a file in it")


def _name(roots: Sequence[Path]) -> str:
    names = [re.sub(r"[^\w.-]", "_", root.resolve().name) or "run" for root in roots]
    return f"report-{'-'.join(names)}.html"
