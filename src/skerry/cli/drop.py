"""skerry drop: turn a learner out of a run, and keep it out; with --readmit let it in again.

What it has not handed in is booked as expelled, and the others go on. The run's tape keeps it out, also of a syncer
that is started later. Where learners have keys, skerry keys revoke is for good, and needs no order.
"""

from __future__ import annotations

from collections.abc import Sequence

from skerry import cli
from skerry.cli import ordering
from skerry.core.messages import DropLearner, ReadmitLearner
from skerry.errors import Refusal

NAME_CHARS_MAX = 64


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry drop", description=__doc__)
    ordering.add_target(parser)
    parser.add_argument("learner", metavar="LEARNER", help="its name, as skerry status has it")
    parser.add_argument("--readmit", action="store_true", help="let it in again")
    options = ordering.parsed(parser, words)
    if len(options.learner) > NAME_CHARS_MAX:
        raise Refusal(f"{options.learner[:NAME_CHARS_MAX]!r}…: no learner has a name as long as that")
    return ordering.order(options, (ReadmitLearner if options.readmit else DropLearner)(options.learner))
