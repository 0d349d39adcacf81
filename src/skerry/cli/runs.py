"""skerry runs: which runs are in a folder, where each stands, what it takes on the disk, and whether it is served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from skerry import cli
from skerry.cli import live
from skerry.errors import Refusal, one_line
from skerry.run.listing import runs_in
from skerry.text import lasting, size

SERVED = {"served": "green", "starting": "yellow", "away": "yellow", "died": "red"}


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry runs", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="default: ./runs, and this one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    folders = [options.folder] if options.folder else [each for each in (Path("runs"), Path(".")) if each.is_dir()]
    record = {"folders": [str(each) for each in folders], "runs": runs_in(folders)}
    cli.tell(record, options.json, _show)
    return 0


def _show(record: dict[str, Any]) -> None:
    if not record["runs"]:
        print(f"no run in {' or '.join(record['folders'])}: skerry train and skerry syncer make one")
        return
    console = live.console_of_stdout()
    table = Table(box=None, pad_edge=False)
    for column in ("run", "phase", "progress", "merges", "learners", "on disk", "last", "served"):
        table.add_column(column, justify="right" if column in ("progress", "merges", "on disk") else "left")
    for row in record["runs"]:
        table.add_row(*_cells(row))
    console.print(table)
    for row in record["runs"]:
        if row["damaged"]:
            console.print(Text(f"{row['run_dir']}: {one_line(row['damaged'])}"), style="red")


def _cells(row: dict[str, Any]) -> list[Text | str]:
    name, bytes_ = Text(one_line(row["run_dir"])), size(row["bytes"])
    if row["at"] is None:
        return [name, Text("damaged", style="red"), "–", "–", "–", bytes_, "–", "no"]
    training = f"{row['training']} of {row['learners']}" if row["serving"] == "served" else str(row["learners"])
    phase = Text("damaged", style="red") if row["damaged"] else Text(row["phase"])
    served = {"served": "yes", "new": "not yet", "closed": "no"}.get(row["serving"], row["serving"])
    cells = [f"{row['progress']:.1%}", f"{row['merges']:,}", training, bytes_, f"{lasting(row['age_s'])} ago"]
    return [name, phase, *cells, Text(served, style=SERVED.get(row["serving"], ""))]
