"""What a run will take on its disk is reckoned before the start, also what grows with it, and watched from then on."""

import logging

import pytest

from e2e.processes import Puppet, Syncer
from node.pair import Pair, config_of
from skerry import algo
from skerry.algo.fragments import Tensor, layout_of, split
from skerry.errors import Refusal
from skerry.proof.bench.cores import memory_bytes
from skerry.run import room

FRAGMENTS = split(layout_of(Tensor(f"w{n}", (2**20 - 1,)) for n in range(4)), 4)
SIZES = [fragment.size for fragment in FRAGMENTS]
STEPS = 96
TOKENS = {"steps": 0, "tokens": 10**9}


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_what_a_whole_run_records_is_known_from_its_steps(tmp_path, policy):
    sync = {"policy": policy, "warm_every": 2, "warm_share": 0.25, "sync_every": 8}
    config = config_of(learners=1, steps=STEPS, sync=sync, store={"record": "full", "keep_every": 4})
    with Pair(tmp_path / "run", config) as pair:
        pair.join("a")
        pair.run(4 * STEPS)
        pair.close()
    told = room.grown([fragment.size for fragment in pair.fragments], config)
    assert 0.6 * told["recorded"] <= bytes_in(pair.root / "record") <= told["recorded"]
    kept = pair.syncer.machine.state.kept
    files = {c.file for version in kept for c in version.checkpoints}
    assert 0 < sum((pair.root / "files" / file).stat().st_size for file in files) <= 1.1 * told["kept by number"]


def test_a_disk_too_small_for_what_is_recorded_is_told_to_record_less(tmp_path, monkeypatch):
    config = config_of(steps=10_000, store={"record": "full", "keep_every": 0.0})
    monkeypatch.setattr(room, "free_disk", lambda root: sum(room.disk(SIZES, config.store).values()))
    with pytest.raises(Refusal, match=r" of disk in .*: with --store.record decisions it fits$"):
        room.check(tmp_path, config, FRAGMENTS, is_new=True)


def test_a_disk_too_small_for_versions_that_are_kept_by_number_is_told_to_keep_none(tmp_path, monkeypatch):
    config = config_of(steps=10_000, store={"keep_every": 5})
    monkeypatch.setattr(room, "free_disk", lambda root: sum(room.disk(SIZES, config.store).values()))
    with pytest.raises(Refusal, match=r" of disk in .*: with --store.keep_every 0 it fits$"):
        room.check(tmp_path, config, FRAGMENTS, is_new=True)


@pytest.mark.parametrize("store", [{"record": "full"}, {"keep_every": 5}])
def test_where_nobody_knows_how_many_merges_there_will_be_it_is_said_what_they_add(tmp_path, caplog, store):
    caplog.set_level(logging.INFO, "skerry.syncer")
    room.check(tmp_path, config_of(run=TOKENS, store=store), FRAGMENTS, is_new=True)
    assert caplog.text.count("records and kept versions grow by up to ") == 1 and "with 1,000 merges" in caplog.text


def test_a_run_that_does_not_grow_says_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO, "skerry.syncer")
    room.check(tmp_path, config_of(run=TOKENS), FRAGMENTS, is_new=True)
    assert not caplog.text


def test_a_syncer_takes_no_more_memory_than_is_reckoned_with(tmp_path):
    """Nearly all of it is the process itself where the model is small."""
    algo.warm_up(lambda: None)  # to compile takes more, once on a machine
    with Syncer(tmp_path) as syncer, Puppet(syncer.port) as puppet:
        puppet.merge_once()
        peak = memory_bytes(syncer.process.pid, "VmHWM")
    told = room.memory(config_of(learners=1), [fragment.size for fragment in puppet.fragments])
    assert peak <= 1.15 * sum(told.values()), "another system's libraries may be a little larger"


# ---------------------------------------------------------------------------------------------- while it is served


LOOKS = round(room.AHEAD_S / room.LOOK_S)  # in ten minutes
GB = 10**9


class Disk:
    """A disk of which a test says how much is free, and how much the run has of what it was reckoned with."""

    def __init__(self, root, monkeypatch):
        store = config_of().store
        self.watch, self.now = room.DiskWatch(root, SIZES, store), 0.0
        self.reckoned = self.ours = sum(room.disk(SIZES, store).values())
        self.free = 1000 * GB
        monkeypatch.setattr(room, "free_disk", lambda root: self.free)
        monkeypatch.setattr(room, "taken", lambda root: self.ours)

    def pass_by(self, looks, others=0, ours=0):
        """So many looks, before each of which so many bytes are written."""
        for _ in range(looks):
            self.now += room.LOOK_S
            self.free -= others + ours
            self.ours += ours
            self.watch.look(self.now)


@pytest.fixture
def disk(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "skerry.syncer")
    return Disk(tmp_path, monkeypatch)


def test_a_disk_that_does_not_last_for_ten_minutes_is_said_once_with_the_numbers(disk, caplog):
    disk.free = 3 * LOOKS * GB
    disk.pass_by(2 * LOOKS - 1, others=GB)
    assert disk.watch.short is None and not caplog.text
    disk.pass_by(LOOKS // 2, others=GB)
    assert disk.watch.short == (disk.free, LOOKS * GB) and disk.free > 0
    assert caplog.text.count("the disk is about to be full, ") == 1 and f"skerry prune {disk.watch.root}" in caplog.text


def test_what_the_run_has_not_written_yet_of_what_it_needs_is_kept_room_for(disk):
    disk.ours, disk.free = disk.reckoned // 2, disk.reckoned
    disk.pass_by(1)
    assert disk.watch.short is None
    disk.free = disk.reckoned // 3
    disk.pass_by(1)
    assert disk.watch.short == (disk.free, disk.reckoned - disk.ours)


def test_a_run_that_fills_the_room_it_was_reckoned_with_is_no_reason_to_say_anything(disk, caplog):
    disk.ours, disk.free = 0, disk.reckoned
    for _ in range(10):
        disk.pass_by(LOOKS, ours=disk.reckoned // LOOKS)
        disk.pass_by(1, ours=-disk.ours)  # the journal and checkpoints before it are removed
    assert not caplog.text


def test_versions_that_are_kept_by_number_come_on_top(disk):
    disk.free = LOOKS * GB
    disk.pass_by(LOOKS // 2 + 1, ours=GB)
    assert disk.watch.short == (disk.free, LOOKS * GB)


def test_room_that_was_made_is_said_once(disk, caplog):
    disk.ours, disk.free = 0, 0
    disk.pass_by(3)
    disk.free = 1000 * GB
    disk.pass_by(3)
    assert disk.watch.short is None and len(caplog.records) == 2 and "has room again" in caplog.text


def test_it_is_looked_at_no_more_often_than_that(disk):
    disk.pass_by(1)
    disk.ours = disk.free = 0
    disk.watch.look(disk.now + room.LOOK_S / 2)
    assert disk.watch.short is None


def test_what_a_real_run_has_taken_are_its_checkpoints_and_its_journal(tmp_path):
    with Pair(tmp_path / "run", config_of()) as pair:
        pair.join("a")
        pair.run(200)
        assert room.taken(pair.root) == bytes_in(pair.root / "files") + bytes_in(pair.root / "journal") > 0
