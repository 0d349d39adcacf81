"""skerry down: end a launched run in order, learners first, so that their work is merged; what it wrote stays.

It does no harm to say it twice. The same skerry launch goes on with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skerry import cli
from skerry.cli import ps
from skerry.engines import OVER, engine, folder
from skerry.errors import one_line, printable


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry down", description=__doc__)
    ps.add_run(parser)
    options = ps.parsed(parser, words)
    record = folder.read(options.run)
    where = engine(record.engine)
    up = [member.name for member in where.members(record) if member.state not in OVER]
    where.down(record)
    cli.tell({"run": str(options.run), "engine": record.engine, "ended": up}, options.json, _show)
    return 0


def _show(record: dict[str, Any]) -> None:
    ended = ", ".join(map(one_line, record["ended"]))
    print(f"{printable(record['run'])}: " + (f"ended {ended}" if ended else "nothing of it was up"))
