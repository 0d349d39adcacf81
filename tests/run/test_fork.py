"""Forks: a run's model is the start of another run, which has its own budget and says where it came from."""

import json
import os

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save, save_file

from cli.called import called
from node.pair import Pair, config_of
from skerry.algo.contents import decode_contents
from skerry.core.events import Interrupted
from skerry.core.facts import Buffered, EpochStarted, LifeStarted, Lineage
from skerry.core.state import state_of
from skerry.node import telemetry
from skerry.run.evaluations import read
from skerry.run.genesis import METADATA, create_run, read_genesis
from skerry.store import Store

SETTINGS = {"store": {"keep_every": 0.25, "checkpoint_every": 4}}


@pytest.fixture
def root(tmp_path):
    """A paused run that has kept a version."""
    with Pair(tmp_path / "run", config_of(steps=60, **SETTINGS)) as pair:
        pair.join("a")
        pair.until(lambda: pair.syncer.machine.state.kept)
        pair.run(9)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
    return pair.root


@pytest.fixture
def closed(tmp_path):
    with Pair(tmp_path / "closed", config_of(steps=40, **SETTINGS)) as pair:
        pair.join("a")
        pair.close()
    return pair.root


def opened(root):
    with Store.open(root, readonly=True) as store:
        return store.tape.head, state_of(store.records)


def answered(capsys, *words):
    code, out, err = called(capsys, *words, "--json")
    assert (code, err) == (0, ""), err
    return json.loads(out)


def served(pair):
    """As if a syncer answered there."""
    status = telemetry.recorded(pair.syncer.machine.state, 0.0) | {"pid": os.getpid()}
    (pair.root / "status.json").write_text(json.dumps(status))


def refused(capsys, *words):
    code, out, err = called(capsys, *words, "--json")
    assert code == 2 and err.count("\n") == 1, (out, err)
    return json.loads(out)["error"]


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]), name


def test_a_closed_runs_model_is_the_start_of_another(capsys, closed, tmp_path):
    head, parent = opened(closed)
    record = answered(capsys, "fork", closed, tmp_path / "fork", "--run.steps", 80, "--run.name", "second")
    _, state = opened(tmp_path / "fork")
    same(read(tmp_path / "fork").arrays, read(closed).arrays)
    versions = tuple(at.version for at in parent.fragments)
    assert state.created.lineage == Lineage(parent.created.run, head, versions, None)
    assert (state.epoch, state.merges, state.phase, state.progress) == (0, 0, "created", 0.0)
    assert state.ledger.sums().produced == 0 and state.lives == {}
    assert record["budget"] == {"steps": 80} and record["run"] == "second"
    assert opened(closed)[0] == head, "the parent is as it was"


def test_a_fork_is_trained_to_its_end_and_can_be_forked_again(capsys, closed, tmp_path):
    answered(capsys, "fork", closed, tmp_path / "fork")
    with Pair(tmp_path / "fork", config_of(steps=40, **SETTINGS)) as pair:
        assert pair.syncer.machine.state.created.lineage is not None
        pair.join("a")
        pair.close()
    assert opened(tmp_path / "fork")[1].phase == "closed"
    replayed = answered(capsys, "replay", tmp_path / "fork")
    assert replayed["violations"] == 0 and replayed["lineage"]["run"] == opened(closed)[1].created.run
    second = answered(capsys, "fork", tmp_path / "fork", tmp_path / "again")
    assert second["lineage"]["commit"] == opened(tmp_path / "fork")[0].hex()


def test_a_fork_of_a_kept_version_and_of_the_start(capsys, root, tmp_path):
    kept = opened(root)[1].kept[0]
    for number, versions in ((kept.number, list(kept.versions)), (0, [0, 0, 0])):
        record = answered(capsys, "fork", root, tmp_path / f"fork-{number}", "--version", number)
        assert record["lineage"]["version"] == number and record["lineage"]["fragment_versions"] == versions
        same(read(tmp_path / f"fork-{number}").arrays, read(root, number).arrays)


def test_fragments_may_be_others_and_the_model_is_the_same(capsys, root, tmp_path):
    record = answered(capsys, "fork", root, tmp_path / "fork", "--sync.num_fragments", 2)
    assert record["fragments"] == 2
    same(read(tmp_path / "fork").arrays, read(root).arrays)


def test_status_export_and_replay_say_where_it_came_from(capsys, closed, tmp_path):
    answered(capsys, "fork", closed, tmp_path / "fork")
    commit = opened(closed)[0].hex()
    said = {
        "commit": commit,
        "run": opened(closed)[1].created.run,
        "version": None,
        "fragment_versions": [at.version for at in opened(closed)[1].fragments],
    }
    for words in (["status", tmp_path / "fork"], ["export", tmp_path / "fork"], ["replay", tmp_path / "fork"]):
        assert answered(capsys, *words)["lineage"] == said
        assert f"its newest model at commit {commit[:12]}" in called(capsys, *words)[1]
    with safe_open(tmp_path / "fork" / "model.safetensors", "numpy") as file:
        assert json.loads(file.metadata()[METADATA])["lineage"] == said
    answered(capsys, "export", closed)
    with safe_open(closed / "model.safetensors", "numpy") as file:
        assert "lineage" not in json.loads(file.metadata()[METADATA])


def test_what_is_not_trained_and_other_names_go_over(capsys, tmp_path):
    """Frozen parameters, buffers and aliases; and values that are trained keep more bits than their dtype has."""
    arrays = {
        "w": np.arange(600, dtype=np.float16).reshape(20, 30),
        "frozen": np.arange(12, dtype=np.int64),
        "mean": np.ones(5, np.float32),
    }
    said = {"embeddings": [], "trained": ["w"], "buffers": ["mean"], "aliases": {"tied": "w"}, "files": {}}
    save_file(arrays, tmp_path / "g.safetensors", {METADATA: json.dumps(said)})
    with Store.open(tmp_path / "run") as store:
        created = create_run(
            store, config_of(steps=60, sync={"num_fragments": 1}), *read_genesis(tmp_path / "g.safetensors")
        )
    answered(capsys, "fork", tmp_path / "run", tmp_path / "fork")
    forked = opened(tmp_path / "fork")[1].created
    assert decode_contents(forked.contents) == decode_contents(created.contents) and forked.fixed == created.fixed
    assert (tmp_path / "fork" / "fixed.safetensors").stat().st_mode & 0o077 == 0
    same(read(tmp_path / "fork").arrays, read(tmp_path / "run").arrays)
    assert set(read(tmp_path / "fork").arrays) == {"w", "frozen", "mean", "tied"}
    (tmp_path / "run" / "fixed.safetensors").write_bytes(b"")
    assert "fixed.safetensors" in refused(capsys, "fork", tmp_path / "run", tmp_path / "other")
    assert not list(tmp_path.glob("other*"))


def test_buffers_are_those_that_learners_last_had(capsys, tmp_path):
    """An export has them, so a fork begins with them; a kept version has the run's first."""
    arrays = {"w": np.ones((20, 30), np.float32), "mean": np.ones(5, np.float32)}
    said = {"embeddings": [], "trained": ["w"], "buffers": ["mean"], "aliases": {}, "files": {}}
    save_file(arrays, tmp_path / "g.safetensors", {METADATA: json.dumps(said)})
    with Store.open(tmp_path / "run") as store:
        create_run(store, config_of(steps=60, sync={"num_fragments": 1}), *read_genesis(tmp_path / "g.safetensors"))
        file = store.put([save({"mean": np.full(5, 3.0, np.float32)})])
        facts = [EpochStarted(1), LifeStarted("a", 1, "p", 0, 0.0), Buffered("a", 1, 0, 0, file, 0.0)]
        store.commit([msgspec.msgpack.encode(fact) for fact in facts], [file])
    answered(capsys, "fork", tmp_path / "run", tmp_path / "newest")
    answered(capsys, "fork", tmp_path / "run", tmp_path / "start", "--version", 0)
    assert read(tmp_path / "newest").arrays["mean"].tolist() == [3.0] * 5
    assert read(tmp_path / "start").arrays["mean"].tolist() == [1.0] * 5
    answered(capsys, "export", tmp_path / "newest")  # whose digests are held against the tape


def test_a_fork_of_a_local_run_is_one(capsys, root, tmp_path):
    (root / "local.json").write_text('{"speeds":[0.5]}')
    record = answered(capsys, "fork", root, tmp_path / "fork")
    assert record["go_on"] == f"skerry train --resume {tmp_path / 'fork'}"
    assert json.loads((tmp_path / "fork" / "local.json").read_bytes())["speeds"] == [0.5]
    answered(capsys, "fork", root, tmp_path / "more", "--run.learners", 3)
    assert json.loads((tmp_path / "more" / "local.json").read_bytes())["speeds"] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model.width", 64], "model.width: the model is the run's, and a fork begins with its values: leave it out"),
        (["--model.preset", "tiny"], "model.preset: the model is the run's"),
        (["--version", 9], "version 9 is not kept: kept are 1, and 0, the start of the run"),
        (["--run.tokens", 1, "--run.steps", 1], "exactly one of run.tokens, run.steps and run.minutes is the budget"),
        (["--run.toknes", 1], "run.toknes"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(capsys, root, tmp_path, words, says):
    assert says in refused(capsys, "fork", root, tmp_path / "fork", *words)
    assert not list(tmp_path.glob("fork*"))


def test_a_directory_that_is_there_and_a_run_that_is_not_are_refused(capsys, root, tmp_path):
    assert "is there already" in refused(capsys, "fork", root, root)
    (tmp_path / "empty").mkdir()
    assert "is there already" in refused(capsys, "fork", root, tmp_path / "empty")
    assert "holds no run" in refused(capsys, "fork", tmp_path / "nothing", tmp_path / "fork")


def test_the_newest_model_of_a_run_that_is_served_is_refused_and_a_kept_one_is_not(capsys, tmp_path):
    with Pair(tmp_path / "run", config_of(steps=60, **SETTINGS)) as pair:
        pair.join("a")
        pair.until(lambda: pair.syncer.machine.state.kept)
        served(pair)
        assert "is served, and its newest model changes" in refused(capsys, "fork", pair.root, tmp_path / "fork")
        answered(capsys, "fork", pair.root, tmp_path / "fork", "--version", 1)
    same(read(tmp_path / "fork").arrays, read(pair.root, 1).arrays)


def test_a_budget_that_is_given_takes_the_place_of_the_runs(capsys, root, tmp_path):
    assert answered(capsys, "fork", root, tmp_path / "fork", "--run.tokens", "2e9")["budget"] == {"tokens": 2 * 10**9}
    assert msgspec.json.decode(opened(tmp_path / "fork")[1].created.config)["run"]["steps"] == 0
