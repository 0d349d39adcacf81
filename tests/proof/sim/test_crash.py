"""The whole syncer at every file operation of a run: it dies there, or the disk fails there, and the run goes on.

Not a sample: an undisturbed run of a small world is counted, then broken off at each of its operations in turn. What
is checked after every event is in `skerry.proof.sim.oracle`; among it, that no version any learner ever saw is gone.
"""

from __future__ import annotations

import errno
from functools import cache

import pytest

from skerry import config as configs
from skerry.proof.sim.scenario import Scenario
from skerry.proof.sim.world import World


def small(record: str) -> Scenario:
    """Two learners, two fragments, a dozen merges, a new tape segment and a collection every few commits."""
    config = configs.Config(
        run=configs.Run(learners=2, steps=16),
        sync=configs.Sync(num_fragments=2, sync_every=4, fragment_sync_delay=1, policy="fixed", close_timeout_s=20.0),
        store=configs.Store(segment_bytes=3_000, record=record),
    )
    return Scenario(config, dict.fromkeys("ab", 0.3), 0.005, 0.02, 0.0, 0.0, (), 1.0, 0.0)


@cache
def undisturbed(record: str) -> World:
    world = World(3, scenario=small(record))
    world.run()
    assert world.saw["tape rotated"] and len(world.oracle.tape) > 20
    return world


FATES = [("crash", "full"), ("power cut", "full"), ("power cut", "decisions"), ("EIO", "full"), ("ENOSPC", "full")]


@pytest.mark.parametrize(("fate", "record"), FATES)
def test_the_run_goes_on_whatever_operation_it_broke_off_at(fate, record, caplog):
    caplog.set_level("CRITICAL")
    operations = undisturbed(record).disk.operations
    for at in range(1, operations + 1):
        world = World(3, scenario=small(record))
        begun = world.disk.operations  # those of creating the run
        if fate in ("crash", "power cut"):
            world.disk.crash_at = at
        else:
            world.disk.fail_at = (at, getattr(errno, fate))
        world.cuts_power = fate == "power cut"
        world.run()
        assert at <= begun or world.saw["syncer crash"], f"operation {at} did not break anything off"
    assert operations > begun + 80


def test_the_undisturbed_run_reaches_every_kind_of_operation():
    kinds = {line.split()[0] for line in undisturbed("full").disk.log}
    assert kinds == {"write", "append", "sync", "sync_dir", "rename", "remove"}
