"""Processes looked at, interrupted and orphaned: they load what they may, end when told, leave nothing behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from e2e.processes import (
    OPTIONS,
    Puppet,
    Running,
    Syncer,
    facts_of,
    is_running,
    processes_naming,
    skerry,
    status_of,
    until,
    write_genesis,
)
from skerry.core.facts import Discarded, LifeStarted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = ["--learners", "2", "--model", "tiny", "--step-s", "0.05", "--steps", "60"]


def children_of(pid):
    """Processes that a supervisor started, also when it is gone itself."""
    return processes_naming(f"--parent\0{pid}\0")


def test_the_live_syncer_never_loads_torch(tmp_path):
    with Syncer(tmp_path) as syncer, Puppet(syncer.port) as puppet:
        while puppet.merge_once() < 2:
            pass
        with open(f"/proc/{syncer.process.pid}/maps") as file:
            maps = file.read()
    assert "numpy" in maps, "the maps name what is loaded"
    assert "libtorch" not in maps


def test_ctrl_c_leaves_no_process_and_the_run_can_be_resumed(tmp_path):
    run_dir = tmp_path / "run"
    with Running(tmp_path, "train", *SMALL, "--out", run_dir, "--json") as train:
        until(lambda: status_of(run_dir).get("merges", 0) > 4, "merges")
        train.signal(signal.SIGINT)
        assert train.wait() == 130
    assert not children_of(train.process.pid) and not processes_naming(str(run_dir))
    assert f"interrupted; go on with: skerry train --resume {run_dir}" in train.said
    assert json.loads(train.out.read_text()) == {"error": "interrupted", "run_dir": str(run_dir)}

    done = skerry("train", "--resume", run_dir, "--json", timeout=240)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["ledger"]["balance"] == 0 and summary["tokens_pending"] == 0
    assert summary["val_loss_end"] < summary["val_loss_start"]
    # the budget is steps of both together: one that comes up late may find it spent
    assert max(learner["lives"] for learner in summary["learners"].values()) == 2
    assert not processes_naming(str(run_dir))
    closed = skerry("train", "--resume", run_dir)
    assert closed.returncode == 2 and "this run is closed" in closed.stderr


def test_the_command_that_began_a_run_goes_on_with_it_after_a_kill(tmp_path):
    """What a service manager does: the same words again, whatever happened to the process before."""
    (tmp_path / "run.toml").write_text(
        "[sync]\nquorum = 1\nnum_fragments = 2\npolicy = 'fixed'\nsync_every = 2\n[wire]\ncodec_up = 'fp32'\n"
    )
    words = ["--genesis", write_genesis(tmp_path / "genesis"), "--config", tmp_path / "run.toml"]
    words += ["--run.tokens", "1e9", "--run.learners", "2", "--sync.fragment_sync_delay=1", "--preset", "local"]
    merges = 0
    for number in (signal.SIGKILL, signal.SIGTERM):
        with Running(tmp_path, "syncer", "--run", tmp_path / "run", "--port", "0", *words) as syncer:
            until(lambda pid=syncer.process.pid: status_of(tmp_path / "run").get("pid") == pid, "the syncer")
            status = status_of(tmp_path / "run")
            assert status["merges"] >= merges
            with Puppet(int(status["address"].rpartition(":")[2])) as puppet:
                assert puppet.life == status["epoch"]
                merges += bool(puppet.merge_once())
            syncer.signal(number)
            assert syncer.wait() == (-number if number == signal.SIGKILL else 0), syncer.said
    assert "genesis" not in syncer.said, "it is the one that the run began with"
    assert "skerry: interrupted after 2 merges; the same command goes on from there" in syncer.said


def test_sigterm_while_kernels_are_compiled_ends_a_syncer_with_a_line(tmp_path, monkeypatch):
    """What a signal raises inside the compiler is lost there, or comes out as a failure of the compiler's."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    words = ["--run", tmp_path / "run", "--port", "0", "--genesis", write_genesis(tmp_path / "genesis"), *OPTIONS]
    with Running(tmp_path, "syncer", *words) as syncer:
        until(lambda: "compiling kernels" in syncer.said, "the first kernel to be compiled")
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 0, syncer.said
    assert syncer.refusals == ["skerry: interrupted after 0 merges; the same command goes on from there"]
    assert "Traceback" not in syncer.said


def test_the_workers_of_a_simulation_that_is_killed_end_by_themselves(tmp_path):
    with Running(tmp_path, "simulate", "protocol", "--seeds", "100000", "--jobs", "2") as simulation:
        pid = simulation.process.pid
        until(lambda: len(workers_of(pid)) == 2, "two workers")
        workers = workers_of(pid)
        simulation.signal(signal.SIGTERM)
        simulation.wait()
    until(lambda: not any(map(is_running, workers)), "the workers to end")


def workers_of(pid, named=b"spawn_main"):
    """Processes that were spawned to work for this one, by what stands on their command lines."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if named in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_sigterm_lets_a_lone_learner_hand_over_its_work_and_leave(tmp_path):
    options = ["--run.steps=100000", "--run.learners=1", "--model.preset=tiny", "--learner.step_s=0.05"]
    with Running(tmp_path, "syncer", "--run", tmp_path / "run", "--port", "0", *options) as syncer:
        status = until(lambda: status_of(tmp_path / "run"), "the syncer to come up")
        (tmp_path / "learner").mkdir()
        words = ["learner", "--syncer", status["address"], "--name", "lone", "--json"]
        with Running(tmp_path / "learner", *words) as learner:
            until(lambda: status_of(tmp_path / "run")["merges"] > 2, "merges")
            learner.signal(signal.SIGTERM)
            assert learner.wait() == 0, learner.said
        assert json.loads(learner.out.read_text()) == {"learner": "lone", "run": "skerry"}
        until(lambda: status_of(tmp_path / "run")["learners"]["lone"]["state"] == "left", "the learner to be gone")
        assert status_of(tmp_path / "run")["learners"]["lone"]["unsettled_tokens"] == 0
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 0
    facts = facts_of(tmp_path / "run")
    assert [fact.life for fact in facts if isinstance(fact, LifeStarted)] == [1]
    assert not any(fact.rows for fact in facts if isinstance(fact, Discarded))  # nothing it did is lost


def test_sigterm_ends_a_learner_that_waits_for_a_syncer_in_one_line(tmp_path):
    with Running(tmp_path, "learner", "--syncer", "127.0.0.1:1", "--name", "early", "--json") as learner:
        until(lambda: "connection refused" in learner.said, "the learner to dial")
        learner.signal(signal.SIGTERM)
        assert learner.wait() == 0, learner.said
    assert learner.said.count("interrupted before it had joined; the same command tries again\n") == 1
    assert json.loads(learner.out.read_text()) == {"learner": "early", "run": None}


def test_sigterm_ends_a_learner_whose_node_died_while_no_syncer_is_there(tmp_path):
    """It has trained, so the loop would answer the signal; but it waits for ever for the run's model."""
    options = ["--run.steps=100000", "--run.learners=1", "--model.preset=tiny", "--learner.step_s=0.05"]
    (tmp_path / "learner").mkdir()
    with Running(tmp_path, "syncer", "--run", tmp_path / "run", "--port", "0", *options) as syncer:
        status = until(lambda: status_of(tmp_path / "run"), "the syncer to come up")
        with Running(tmp_path / "learner", "learner", "--syncer", status["address"], "--name", "lone") as learner:
            until(lambda: status_of(tmp_path / "run")["merges"], "a merge")
            syncer.signal(signal.SIGKILL)
            syncer.wait()
            (node,) = workers_of(learner.process.pid, b"skerry.shell.companion")
            os.kill(node, signal.SIGKILL)
            until(lambda: "another takes its place" in learner.said, "the learner to miss its node")
            learner.signal(signal.SIGTERM)
            assert learner.wait() == 0, learner.said
    assert learner.said.count("interrupted before it had joined; the same command tries again\n") == 1


@pytest.mark.parametrize("moment", ["joining", "training"])
def test_children_of_a_killed_supervisor_end_by_themselves(tmp_path, moment):
    run_dir = tmp_path / "run"
    with Running(tmp_path, "train", *SMALL, "--out", run_dir) as train:
        pid = train.process.pid
        if moment == "joining":
            until(lambda: len(children_of(pid)) == 4, "a syncer, its page and two learners to be started")
        else:
            until(lambda: status_of(run_dir).get("merges", 0) > 2, "merges")
            assert len(children_of(pid)) == 4
        os.kill(pid, signal.SIGKILL)
        train.wait()
        until(lambda: not children_of(pid), "the children to end")
