"""A small world broken off at a chosen file operation: in a module that the worker processes of `test_crash` import."""

from __future__ import annotations

import errno
import logging

from skerry import config as configs
from skerry.proof.sim.scenario import Scenario
from skerry.proof.sim.world import World


def small(record: str, work_s: float) -> World:
    """Two learners, three fragments, a dozen merges, a new tape segment and a collection every few commits."""
    config = configs.Config(
        run=configs.Run(learners=2, steps=11),
        sync=configs.Sync(num_fragments=3, sync_every=4, fragment_sync_delay=1, policy="fixed", close_timeout_s=20.0),
        store=configs.Store(segment_bytes=3_000, record=record, checkpoint_every=2, keep_every=0.5),
    )
    scenario = Scenario(config, dict.fromkeys("ab", 0.3), 0.005, 0.02, 0.0, 0.0, (), 1.0, 0.0, work_s=work_s)
    return World(3, scenario=scenario)


def break_off(fate: str, record: str, work_s: float, at: int) -> bool:
    """Let operation `at` of the small world meet its fate, and the run go on to its end; whether anything broke off."""
    world = small(record, work_s)
    if fate in ("crash", "power cut"):
        world.disk.crash_at = at
    else:
        world.disk.fail_at = (at, getattr(errno, fate))
    world.cuts_power = fate == "power cut"
    world.run()
    return bool(world.saw["syncer crash"])


def be_quiet() -> None:
    logging.disable(logging.CRITICAL)  # what breaks is told of by the hundred
