"""What a run will take on its disk is reckoned before the start, also what grows with it."""

import logging

import pytest

from node.pair import Pair, config_of
from skerry.algo.fragments import Tensor, layout_of, split
from skerry.errors import Refusal
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
