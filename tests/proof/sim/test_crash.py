"""The whole syncer at every file operation of a run: it dies there, or the disk fails there, and the run goes on.

Not a sample: an undisturbed run of a small world is counted, then broken off at each of its operations in turn. What
is checked after every event is in `skerry.proof.sim.oracle`; among it, that no version any learner ever saw is gone.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context

import pytest

from proof.sim.breaking import be_quiet, break_off, small
from skerry.proof.sim.world import World

AT_ONCE, LATE = 0.0, 0.2  # everything is durable when it is written; or groups of merges wait for it
CHUNK = 4  # operations handed to a process at a time

# Which error the disk fails with decides only what is said, and the operations of a run that records decisions alone
# are among those of one that records everything: so each of these is broken off in one of the two ways to wait.
BREAKS = [
    ("crash", "full", AT_ONCE),
    ("crash", "full", LATE),
    ("power cut", "full", AT_ONCE),
    ("power cut", "full", LATE),
    ("power cut", "decisions", LATE),
    ("EIO", "full", LATE),
    ("ENOSPC", "full", AT_ONCE),
]


@pytest.fixture(scope="module")
def pool():
    # Spawned, not forked: a fork of a process with threads may hang.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), be_quiet) as pool:
        yield pool


@cache
def undisturbed(record: str, work_s: float) -> World:
    world = small(record, work_s)
    world.run()
    assert world.saw["tape rotated"] and world.saw["version kept"] and len(world.oracle.tape) > 20
    return world


@pytest.mark.parametrize(("fate", "record", "work_s"), BREAKS)
def test_the_run_goes_on_whatever_operation_it_broke_off_at(pool, fate, record, work_s):
    begun = small(record, work_s).disk.operations  # those of creating the run
    operations = range(1, undisturbed(record, work_s).disk.operations + 1)
    broke_off = list(pool.map(partial(break_off, fate, record, work_s), operations, chunksize=CHUNK))
    unbroken = [at for at, broke in zip(operations, broke_off, strict=True) if not broke]
    assert all(at <= begun for at in unbroken), f"operations {unbroken} did not break anything off"
    assert len(operations) > begun + 80


def test_the_undisturbed_runs_reach_every_kind_of_operation():
    kinds = {line.split()[0] for work_s in (AT_ONCE, LATE) for line in undisturbed("full", work_s).disk.log}
    assert kinds == {"write", "append", "sync", "sync_dir", "rename", "remove"}


def test_merges_are_committed_together_where_the_disk_is_late():
    journal = Counter(line.split()[0] for line in undisturbed("full", LATE).disk.log if " journal/" in line)
    assert journal["append"] > journal["sync"]
