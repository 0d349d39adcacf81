"""skerry logs: what the syncer or a learner of a launched run has said, over all its lives."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import deque
from collections.abc import Sequence

from skerry import cli
from skerry.cli import ps
from skerry.engines import engine, folder
from skerry.errors import Refusal, one_line, printable
from skerry.text import near

BESIDE = ("syncer", "evaluator", "supervisor")  # who is of no island
LINES_MAX = 10_000  # the last ones, of an object for a machine


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry logs", description=__doc__)
    ps.add_run(parser)
    parser.add_argument("name", metavar="NAME", help="syncer, or a learner as skerry ps names it")
    parser.add_argument("-f", "--follow", action="store_true", help="and what it says from now on, until Ctrl-C")
    options = ps.parsed(parser, words)
    if options.json and options.follow:
        raise Refusal("--json and --follow: one object has an end, and what is followed has none: give one of them")
    record = folder.read(options.run)
    _check(record, options.name)
    lines = (printable(line) for line in engine(record.engine).logs(record, options.name, options.follow))
    if options.json:
        cli.print_json({"run": str(options.run), "name": options.name, "lines": [*deque(lines, LINES_MAX)]})
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        for line in lines:
            print(line)
            if options.follow:
                sys.stdout.flush()
    return 0


def _check(record: folder.Record, name: str) -> None:
    """A member that the launch has or had: engines look for a file of this name."""
    learner = re.fullmatch(r"(.+)-[0-9]{1,4}(\.[0-9]{1,4})?", name)  # behind the dot: which of its machines
    if name not in BESIDE and (learner is None or learner[1] not in record.counts):
        known = ["syncer", *(f"{each}-{at}" for each, count in record.counts.items() for at in range(count))]
        raise Refusal(f"no member {one_line(name)!r} in this run: {near(name, known)}")
