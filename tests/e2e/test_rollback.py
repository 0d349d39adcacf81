"""Rollbacks of real runs, and their ends after it: real processes, files and sockets."""

import json
import logging
import shutil
import signal

import pytest
from safetensors import safe_open

from e2e.processes import Running, Syncer, facts_of, set_pace, skerry, status_of, until
from e2e.test_lost_commits import Island
from skerry.core.facts import Committed, EpochStarted, LifeStarted, RolledBack, SteppedBack
from skerry.core.state import state_of
from skerry.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = [
    "--learners", "2", "--model", "tiny", "--step-s", "0.05", "--steps", "200", "--record", "full",
    "--store.keep_every", "0.2",
]  # fmt: skip


def done(*words, timeout=90):
    """What a command said, as JSON."""
    ended = skerry(*words, "--json", timeout=timeout)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def has_kept(run_dir):
    """Whether the run has kept a version and gone on from it."""
    with Store.open(run_dir, readonly=True) as store:
        state = state_of(store.records)
    newest = sum(at.version for at in state.fragments)
    return bool(state.kept) and newest > sum(state.kept[0].versions) + len(state.fragments)


def tensors_in(path):
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped some merges behind its first kept version; while it was served, no rollback was taken."""
    folder = tmp_path_factory.mktemp("stopped")
    run_dir = folder / "run"
    with Running(folder, "train", *SMALL, "--out", run_dir, "--json") as train:
        until(lambda: status_of(run_dir).get("merges", 0) and has_kept(run_dir), "a kept version")
        set_pace(run_dir, 2, 0.1)
        served = skerry("rollback", run_dir, "--to", "1")
        assert served.returncode == 2 and f"end it with skerry stop {run_dir}" in served.stderr
        train.signal(signal.SIGINT)
        assert train.wait() == 130
    set_pace(run_dir, 2, 1)
    return run_dir


@pytest.fixture
def run_dir(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


def test_a_run_is_rolled_back_and_trained_to_its_end(run_dir):
    exported = done("export", run_dir, "--version", 1)
    back = done("rollback", run_dir, "--to", 1)
    assert back["go_on"] == f"skerry train --resume {run_dir}" and back["progress"] > 0.2
    assert tensors_in(done("export", run_dir)["model_path"]) == tensors_in(exported["model_path"])

    summary = done("train", "--resume", run_dir, timeout=240)
    assert summary["ledger"]["balance"] == 0 and summary["tokens_pending"] == 0
    assert summary["val_loss_end"] < summary["val_loss_start"]
    facts = facts_of(run_dir)
    (at,) = [number for number, fact in enumerate(facts) if isinstance(fact, RolledBack)]
    assert isinstance(facts[at - 1], SteppedBack) and facts[at].number == 1
    since = {fact.fragment: fact.version for fact in facts[:at] if isinstance(fact, SteppedBack)}
    after = [fact.decision for fact in facts[at:] if isinstance(fact, Committed)]
    assert all(part.base_version >= since[d.fragment] for d in after for part in d.parts) and after
    report = done("replay", run_dir)
    assert report["identical"] and report["model_sha256"] == summary["model_sha256"]


def test_a_learner_that_lives_through_a_rollback_gives_up_what_it_learned_and_goes_on(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with Syncer(tmp_path, "--store.keep_every", "5", "--store.record", "full") as first, Island(first.port) as island:
        until(lambda: has_kept(first.run_dir), "a kept version")
        first.signal(signal.SIGTERM)
        assert first.wait() == 0, first.said
        done("rollback", first.run_dir, "--to", 1)
        merges = first.status["merges"]
        with Syncer(tmp_path, "--port", first.port) as again:
            until(lambda: again.status["merges"] > merges + 4, "merges after the rollback")
            island.keeps_stepping()
            again.signal(signal.SIGTERM)
            assert again.wait() == 0, again.said
    assert "island: fast-forward to the published model: rolled back" in caplog.messages
    assert island.parameters.optimizer_resets == 1
    facts = facts_of(first.run_dir)
    assert [fact.life for fact in facts if isinstance(fact, LifeStarted)] == [1]
    assert [fact.epoch for fact in facts if isinstance(fact, EpochStarted)] == [1, 2, 3]
    assert done("replay", first.run_dir)["identical"]


def test_a_pruned_run_is_resumed_and_ends(run_dir):
    merges = status_of(run_dir)["merges"]
    pruned = done("prune", run_dir, "--keep-days", 0, "--kept", 1)
    assert pruned["merges_untold"] >= merges > 0 and pruned["frees"]["contributions"] > 0
    summary = done("train", "--resume", run_dir, timeout=240)
    assert summary["merges"] > merges and summary["ledger"]["balance"] == 0
    report = done("replay", run_dir)
    assert report["identical"] and f"begins with segment {pruned['first_segment']}" in report["begins"]
    assert done("export", run_dir)["model_sha256"] == summary["model_sha256"]
