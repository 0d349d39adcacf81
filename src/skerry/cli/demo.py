"""skerry demo: train on four local learners, one of them three times slower; kill a learner, then the syncer."""

from __future__ import annotations

from collections.abc import Sequence

from skerry import cli
from skerry.cli import train

STORY = (
    "Four learners train one model; learner-3 is three times slower than the rest.\n"
    "A third of the way learner-1 is SIGKILLed and comes back; halfway the syncer is SIGKILLed and comes back."
)


def run(words: Sequence[str]) -> int:
    description = f"{__doc__} Every option of skerry train changes it."
    options, overrides = cli.parse(train.parser("skerry demo", description), words)
    if options.resume is None:
        options.speeds = options.speeds or ("1,1,1,0.33" if options.learners in (None, 4) else None)
    if options.kill_learner is None:
        options.kill_learner = 0.33
    if options.kill_syncer is None:
        options.kill_syncer = 0.5
    if not (options.steps or options.tokens or options.minutes or options.resume):
        options.minutes = 1.5
    return train.train(options, overrides, STORY)
