"""Memory and disk: the formulas against the arrays and files of real nodes."""

import msgspec
import pytest

from node.pair import STEP_S, Pair, config_of
from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import Tensor, layout_of, split
from skerry.errors import Refusal
from skerry.plan import needs
from skerry.plan.bandwidth import periods
from skerry.plan.syncs import Island, RunPlan, sizes_of, stretch
from skerry.run import room
from skerry.store.journal import FILE_BYTES_MIN

TENSORS = tuple(Tensor(f"w{i}", (64, 32)) for i in range(8))
INT4 = {"codec_up": "int4", "codec_down": "int4"}
LEARNERS = 3
HEADER_BYTES = 8  # of a checkpoint


def sizes(pair):
    return [fragment.size for fragment in pair.fragments]


def bytes_in(*arrays):
    return sum(a.nbytes for a in arrays if a is not None)


@pytest.fixture
def started(tmp_path):
    """Three learners that have trained for a while, on four fragments."""

    def start(ticks=40, **tables):
        sync = {"num_fragments": 4, "sync_every": 4} | tables.pop("sync", {})
        config = config_of(LEARNERS, wire=INT4, sync=sync, **tables)
        pair = Pair(tmp_path, config, TENSORS)
        for i in range(LEARNERS):
            pair.join(f"learner-{i}")
        pair.run(ticks)
        return pair, config

    return start


@pytest.mark.parametrize("learner", [{}, {"residual": "theta"}, {"adopt": "overwrite"}])
def test_a_learners_arrays(started, learner):
    pair, config = started(learner=learner)
    told = needs.learner_memory(config, sizes(pair), rounds=3, burst=1)["host"]
    for loop in pair.loops.values():
        node = loop.node
        assert bytes_in(*node.bases) == told["bases"]
        assert bytes_in(*node.residuals) == told["residuals"]


def test_a_learners_outstanding_contributions(started):
    pair, config = started(ticks=0)
    pair.tap = lambda learner, message, payload: (message, payload) if payload is None else None  # none gets through
    pair.until(lambda: pair.loops["learner-0"].node.outstanding)
    told = needs.learner_memory(config, sizes(pair), rounds=1, burst=1)["host"]
    out = next(iter(pair.loops["learner-0"].node.outstanding.values()))
    assert (bytes_in(out.drift), len(out.payload)) == (told["drifts"], told["payloads"])


def test_a_state_on_the_device_leaves_payloads_on_the_host():
    """The figures of docs/ARCHITECTURE.md: 12 bytes of state a parameter and half a byte of payload."""
    largest, config = 128 * 10**5, config_of(wire=INT4)
    fragments, count = [largest] * 8, 8 * largest
    on_host, on_device = (needs.learner_memory(config, fragments, 8, 1, state) for state in ("host", "device"))
    assert sum(on_host["host"][part] for part in ("bases", "residuals", "drifts")) == 12 * count
    assert (on_host["device"]["training"], on_host["device"]["cells"]) == (16 * count, 16 * largest)
    assert on_device["host"].keys() == {"payloads", "staging", "total", "at_worst"}
    assert on_device["host"]["total"] < 0.7 * count
    for part in ("bases", "residuals", "drifts", "cells"):
        assert on_device["device"][part] == on_host["host"][part]
    assert on_device["device"]["total"] == on_device["device"]["at_worst"], "all of it is outstanding"


@pytest.mark.parametrize("state", ["host", "device"])
def test_at_worst_every_fragment_is_outstanding(state):
    config, fragments = config_of(wire=INT4), [1280, 2560, 5120]
    usual, worst = (needs.learner_memory(config, fragments, rounds, 1, state) for rounds in (1, 3))
    more = usual["host"]["at_worst"] - usual["host"]["total"] + usual["device"]["at_worst"] - usual["device"]["total"]
    assert more == 4 * (1280 + 2560) + payload_bytes("int4", 1280 + 2560)
    for where in ("host", "device"):
        assert worst[where]["at_worst"] == worst[where]["total"] >= usual[where]["at_worst"]


def test_the_device_works_on_as_much_at_once_as_the_plan_says():
    pytest.importorskip("torch")
    from skerry.adapters import device, kernels

    assert (needs.PIECE, needs.STAGING_BYTES) == (kernels.PIECE, device.STAGING_BYTES)


def test_the_syncers_arrays(started):
    pair, config = started(ticks=80)
    told = needs.syncer_memory(config, sizes(pair), rounds=2)
    assert sum(bytes_in(*values) for values in pair.syncer.values) == told["values"]
    assert all(at.version >= config.store.deltas_kept for at in pair.syncer.machine.state.fragments)
    assert sum(len(d.payload) for kept in pair.syncer.deltas for d in kept.values()) == told["deltas"]


def test_held_contributions_are_bounded_as_the_core_bounds_them():
    config = config_of(8, wire=INT4 | {"held_bytes_max": 1 << 20})
    told = needs.syncer_memory(config, [128 * 10**5] * 4, rounds=3)
    assert told["held"] == (1 << 20) + 8 * payload_bytes("int4", 128 * 10**5)
    assert told["at_worst"] == told["total"]


def test_disk_of_a_real_run(started):
    pair, config = started(ticks=0, outer={"rule": "nesterov", "lr": 0.7, "momentum": 0.9})
    pair.store.journal.file_bytes = 1  # each entry has a file, so that what nobody needs goes at once
    pair.run(8)
    before, merges = pair.store.tape.size, pair.syncer.machine.state.merges
    pair.run(160)
    merged = pair.syncer.machine.state.merges - merges
    hours = 160 * STEP_S / 3600
    told = needs.disk(config, sizes(pair), merged / hours, contributors=LEARNERS)
    assert pair.store.tape.size - before == pytest.approx(told["tape_per_hour"] * hours, rel=0.3)
    pair.store.collect(pair.syncer.machine.state.files, pair.syncer.machine.state.journal)
    files, entries = ([file.stat().st_size for file in (pair.root / f).iterdir()] for f in ("files", "journal"))
    assert len(files) == 12  # of each fragment genesis, the newest checkpoint and the one before it
    assert sum(files) - 12 * HEADER_BYTES == (4 + 12 + 12) * sum(sizes(pair))
    assert told["files"] == (4 + 12 + 12) * sum(sizes(pair)) + 12 * max(sizes(pair))  # and one that is being written
    every = config.store.checkpoint_every
    assert every * 2 * sum(sizes(pair)) <= sum(entries) <= told["journal"] - FILE_BYTES_MIN
    assert told["recorded_per_hour"] == 0


def test_what_a_merge_writes(started):
    """A delta of two bytes an element, and each sixteenth time a checkpoint of twelve."""
    pair, config = started(ticks=160, outer={"rule": "nesterov", "lr": 0.7, "momentum": 0.9})
    merges, mean = len(pair.commits), sum(sizes(pair)) / 4
    told = needs.disk(config, sizes(pair), merges, LEARNERS)
    deltas = sum(commit.result.entry.size for commit in pair.commits)
    assert deltas == 2 * mean * merges
    assert told["written_per_hour"] - told["grows_per_hour"] == deltas + 12 * mean * merges / 16


def test_recorded_contributions_of_a_real_run(started):
    pair, config = started(ticks=80, store={"record": "full"})
    merges = pair.syncer.machine.state.merges
    on_disk = sum(file.stat().st_size for file in (pair.root / "record").iterdir())
    contributors = pair.syncer.machine.state.contributors / merges
    assert needs.disk(config, sizes(pair), merges, contributors)["recorded_per_hour"] == pytest.approx(on_disk)


def test_merges_and_bytes_of_a_real_run_are_the_planned_ones(started):
    pair, config = started(ticks=40, sync={"sync_every": 16})
    plan = RunPlan(config, pair.layout, tuple(Island(n, STEP_S, 1e12, 0.0) for n in pair.loops))
    at = stretch(plan, sizes_of(plan), periods(config)[-1])
    assert at.limit == "steps" and at.period_s == 16 * STEP_S
    before, sent = pair.syncer.machine.state.merges, len(pair.contributions)
    pair.run(400)
    merged = pair.syncer.machine.state.merges - before
    assert merged == pytest.approx(400 * STEP_S / at.period_s * 4, rel=0.06)
    assert len(pair.contributions) - sent == pytest.approx(LEARNERS * merged, rel=0.03)


@pytest.mark.parametrize(("every", "count"), [(0.25, 3), (0.1, 9), (0.3, 3), (0.0, 0), (5.0, 0)])
def test_kept_versions_by_the_end_of_a_run(every, count):
    config = config_of(store={"keep_every": every})
    told = needs.disk(config, [1000, 3000], merges_per_h=60.0, contributors=1.0)
    assert told["kept"] == count * 12 * 4000
    assert told["kept_per_hour"] == (12 * 4000 * 60 / 2 / 5 if every == 5 else 0)


def test_kept_versions_of_a_real_run(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=200, store={"keep_every": 0.25})) as pair:
        pair.join("a")
        pair.close()
        state = pair.syncer.machine.state
        told = needs.disk(pair.syncer.config, sizes(pair), merges_per_h=60.0, contributors=1.0)
        kept = [pair.root / "files" / c.file for version in state.kept for c in version.checkpoints]
        assert sum(path.stat().st_size for path in kept) <= told["kept"] == 3 * 12 * sum(sizes(pair))


def test_a_disk_too_small_for_kept_versions_is_told_to_keep_none(tmp_path, monkeypatch):
    config = config_of(store={"keep_every": 0.1})
    fragments = split(layout_of(Tensor(f"w{n}", (2**20 - 1,)) for n in range(4)), 4)
    without = sum(room.disk([2**20] * 4, msgspec.structs.replace(config.store, keep_every=0.0)).values())
    monkeypatch.setattr(room, "free_disk", lambda root: without)
    with pytest.raises(Refusal, match=r"a model of 4,194,300 .* of disk in .*: with --store.keep_every 0 it fits$"):
        room.check(tmp_path, config, fragments, is_new=True)
