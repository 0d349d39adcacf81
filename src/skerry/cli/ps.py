"""skerry ps: what there is of a launched run: its syncer and its learners, where each is and how it does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from skerry import cli
from skerry.cli import live
from skerry.engines import Member, engine, folder
from skerry.errors import Refusal, one_line
from skerry.text import lasting

COLOURS = {"running": "green", "starting": "yellow", "restarting": "yellow", "waiting": "yellow", "failed": "red"}


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry ps", description=__doc__)
    add_run(parser)
    options = parsed(parser, words)
    cli.tell(looked(options.run), options.json, show)
    return 0


def add_run(parser: cli.Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder that skerry launch named")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def parsed(parser: cli.Parser, words: Sequence[str]) -> Any:
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here: skerry set changes a run")
    return options


def looked(root: Path) -> dict[str, Any]:
    record = folder.read(root)
    members = engine(record.engine).members(record)
    return {
        "run": str(root),
        "name": record.name,
        "engine": record.engine,
        "counts": record.counts,
        "members": [member._asdict() for member in members],
    }


def show(record: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("name", "state", "for", "restarts", "where", ""):
        table.add_column(column, justify="right" if column == "restarts" else "left", overflow="fold")
    for member in record["members"]:
        table.add_row(*_cells(Member(**member)))
    live.console_of_stdout().print(table)


def _cells(member: Member) -> list[Text | str]:
    since = lasting(max(0.0, time.time() - member.since)) if member.since > 0 else "–"
    state = Text(member.state, style=COLOURS.get(member.state, ""))
    said = [Text(one_line(text)) for text in (member.name, member.where, member.detail)]
    return [said[0], state, since, f"{member.restarts:,}", said[1], said[2]]
