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


def small(record: str, work_s: float) -> Scenario:
    """Two learners, two fragments, a dozen merges, a new tape segment and a collection every few commits."""
    config = configs.Config(
        run=configs.Run(learners=2, steps=16),
        sync=configs.Sync(num_fragments=2, sync_every=4, fragment_sync_delay=1, policy="fixed", close_timeout_s=20.0),
        store=configs.Store(segment_bytes=3_000, record=record, checkpoint_every=2),
    )
    return Scenario(config, dict.fromkeys("ab", 0.3), 0.005, 0.02, 0.0, 0.0, (), 1.0, 0.0, work_s=work_s)


@cache
def undisturbed(record: str, work_s: float) -> World:
    world = World(3, scenario=small(record, work_s))
    world.run()
    assert world.saw["tape rotated"] and len(world.oracle.tape) > 20
    return world


FATES = [("crash", "full"), ("power cut", "full"), ("power cut", "decisions"), ("EIO", "full"), ("ENOSPC", "full")]


@pytest.mark.parametrize("work_s", [0.0, 0.2])  # 0: everything is durable at once; else groups of merges wait for it
@pytest.mark.parametrize(("fate", "record"), FATES)
def test_the_run_goes_on_whatever_operation_it_broke_off_at(fate, record, work_s, caplog):
    caplog.set_level("CRITICAL")
    operations = undisturbed(record, work_s).disk.operations
    for at in range(1, operations + 1):
        world = World(3, scenario=small(record, work_s))
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
    kinds = {line.split()[0] for line in undisturbed("full", 0.0).disk.log}
    assert kinds == {"write", "append", "sync", "sync_dir", "rename", "remove"}
