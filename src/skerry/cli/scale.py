"""skerry scale: more or fewer learners of one island; those that go, leave in order, the highest numbers first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skerry import cli
from skerry.cli import ps
from skerry.engines import engine, folder
from skerry.engines.spec import COUNT_MAX
from skerry.errors import Refusal
from skerry.text import counted, near


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry scale", description=__doc__)
    ps.add_run(parser)
    parser.add_argument("island", metavar="ISLAND", help="its name in the file that was launched")
    parser.add_argument("count", type=cli.whole, metavar="N", help="learners that it is to have")
    options = ps.parsed(parser, words)
    with folder.changing(options.run) as record:
        _check(record, options.island, options.count)
        before = record.counts[options.island]
        engine(record.engine).scale(record, options.island, options.count)
    told = {"run": str(options.run), "island": options.island, "before": before, "count": options.count}
    cli.tell(told, options.json, _show)
    return 0


def _check(record: folder.Record, island: str, count: int) -> None:
    if island not in record.counts:
        raise Refusal(f"no island {island!r} in this run: {near(island, record.counts)}")
    if not 0 <= count <= COUNT_MAX:
        raise Refusal(f"{count} learners: must be from 0 to {COUNT_MAX}")
    if not folder.has_room(record.counts | {island: count}, record.learners):
        others = sum(n for name, n in record.counts.items() if name != island)
        raise Refusal(
            f"{counted(others + count, 'learner')} in all, and the run is for {record.learners} (run.learners): "
            f"{record.learners - others} of {island} at most; say more as [run] learners in the file of another launch"
        )


def _show(record: dict[str, Any]) -> None:
    print(f"{record['island']}: {counted(record['count'], 'learner')}, where there were {record['before']}")
