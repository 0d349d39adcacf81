"""skerry extend: give a run another budget, while it goes on or while nobody serves it.

The number is the whole budget, in the unit that the run has: tokens, steps a learner or minutes. It has to be more than
what is spent. Progress is a share of it from then on, so the learning rate and the last stage are the longer run's.
"""

from __future__ import annotations

from collections.abc import Sequence

from skerry import cli
from skerry import config as configs
from skerry.cli import ordering
from skerry.core.facts import COUNT_MAX
from skerry.core.messages import ExtendRun
from skerry.errors import Refusal


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry extend", description=__doc__)
    ordering.add_target(parser)
    parser.add_argument("--tokens", type=cli.whole, metavar="N", help="like 2e9")
    parser.add_argument("--steps", type=cli.whole, metavar="N", help="inner steps of each learner, on average")
    parser.add_argument("--minutes", type=float, metavar="N")
    options = ordering.parsed(parser, words)
    given = {unit: value for unit in ("tokens", "steps", "minutes") if (value := getattr(options, unit)) is not None}
    if len(given) != 1:
        raise Refusal("give the whole budget in the run's own unit: --tokens N, --steps N or --minutes N")
    for unit, value in given.items():
        most = min(COUNT_MAX, configs.most(f"run.{unit}"))
        if not 0 < value <= most:
            raise Refusal(f"--{unit} {value:g}: must be above 0 and at most {most:g}")
    return ordering.order(options, ExtendRun(**given))
