"""Backup, restore, fork, export and evaluate on a served run under load, as real processes."""

import contextlib
import hashlib
import json
import signal
import socket

import pytest

from e2e.processes import Syncer, facts_of, skerry, until
from skerry.core.facts import Committed, RunCreated

pytest.importorskip("torch")

from fixtures.learner import learner, model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OPTIONS = [
    "--run.name=kept", "--run.steps=1000000", "--run.learners=2", "--sync.num_fragments=3", "--sync.policy=fixed",
    "--sync.sync_every=4", "--store.record=full", "--store.segment_bytes=65536", "--store.checkpoint_every=2",
    "--store.keep_every=10",
]  # fmt: skip
JUDGE = "def norm(tensors):\n    return float(sum((each.astype('float64') ** 2).sum() for each in tensors.values()))\n"


@pytest.fixture
def genesis(tmp_path):
    import skerry as package

    package.save_genesis(model(), tmp_path / "genesis.safetensors")
    (tmp_path / "judge.py").write_text(JUDGE)
    return tmp_path / "genesis.safetensors"


def answered(*words, **options):
    done = skerry(*words, "--json", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_everything_that_keeps_a_run_works_while_it_is_served_and_disturbs_nobody(tmp_path, genesis):
    run, folder = tmp_path / "run", tmp_path / "backups"
    with contextlib.ExitStack() as stack:
        syncer = stack.enter_context(Syncer(tmp_path, genesis=genesis, options=OPTIONS))
        for n in range(2):
            stack.enter_context(learner(syncer.port, n))
        until(lambda: len(answered("rollback", run)["kept"]) > 2, "two kept versions")
        before = syncer.status["merges"]
        made = [answered("backup", run, folder) for _ in range(2)]
        for version in ("newest", 0, 1):
            which = [] if version == "newest" else ["--version", version]
            exported = answered("export", run, *which, "--out", tmp_path / f"{version}.safetensors")
            assert exported["model_sha256"] == sha256(tmp_path / f"{version}.safetensors")
            assert answered("evaluate", run, *which, "--with", "judge:norm", cwd=tmp_path)["figures"]
        curve = answered("evaluate", run, "--every-kept", "--with", "judge:norm", cwd=tmp_path)
        assert len(curve["versions"]) >= 4 and curve["left_out"] == []
        norms = [next(iter(each["figures"].values())) for each in curve["versions"]]
        assert len(set(norms)) == len(norms), "each is another model"
        forked = answered("fork", run, tmp_path / "fork", "--version", 1, "--run.steps", 50)
        assert "is served, and its newest model changes" in skerry("fork", run, tmp_path / "no").stderr
        until(lambda: syncer.status["merges"] > before + 20, "the run to go on")
        assert {each["state"] for each in syncer.status["learners"].values()} == {"training"}
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 0

    assert made[0]["merges"] <= made[1]["merges"]
    assert made[1]["copied_bytes"] < made[1]["bytes"]
    tape = facts_of(run)
    for each in made:
        again = tmp_path / f"again-{each['backup']}"
        answered("restore", folder, again, "--at", each["backup"])
        assert (said := answered("replay", again))["identical"] and said["merges"] == each["merges"]
        restored = facts_of(again)
        assert restored == tape[: len(restored)], "it is the run as it was, to the fact"
        assert sum(isinstance(fact, Committed) for fact in restored) == each["merges"]
        answered("export", again, "--version", 1, "--out", again / "one.safetensors")
        assert sha256(again / "one.safetensors") == sha256(tmp_path / "1.safetensors")
    lineage = next(fact for fact in facts_of(tmp_path / "fork") if isinstance(fact, RunCreated)).lineage
    assert lineage.kept == 1 and forked["lineage"]["commit"] == lineage.head.hex()


def test_a_restored_run_turns_away_who_is_ahead_and_goes_on_with_who_begins_anew(tmp_path, genesis):
    port = free_port()
    with contextlib.ExitStack() as stack:
        syncer = stack.enter_context(Syncer(tmp_path, "--port", port, genesis=genesis, options=OPTIONS))
        islands = [stack.enter_context(learner(port, n)) for n in range(2)]
        until(lambda: syncer.status["merges"] > 20, "merges")
        made = answered("backup", tmp_path / "run", tmp_path / "backups")
        until(lambda: syncer.status["merges"] > made["merges"] + 20, "merges that the backup does not have")
        syncer.signal(signal.SIGKILL)
        syncer.wait()
        answered("restore", tmp_path / "backups", tmp_path / "again")
        with Syncer(tmp_path, "--port", port, run_dir=tmp_path / "again") as restored:
            ahead = until(lambda: len(restored.status["ahead"]) == 2 and restored.status["ahead"], "both turned away")
            assert ahead.keys() == {"learner-0", "learner-1"} and restored.status["merges"] == made["merges"]
            assert [each.poll() for each in islands] == [None, None], "they train on"
            for each in islands:
                each.kill()
                each.wait()
            for n in range(2):
                stack.enter_context(learner(port, n))
            until(lambda: restored.status["merges"] > made["merges"] + 10, "merges of those that began anew")
            restored.signal(signal.SIGTERM)
            assert restored.wait() == 0
    assert answered("replay", tmp_path / "again")["identical"]


def test_a_fork_is_served_and_trained(tmp_path, genesis):
    options = [each for each in OPTIONS if "run.steps" not in each] + ["--run.steps=40"]
    with Syncer(tmp_path, genesis=genesis, options=options) as syncer, learner(syncer.port, 0), learner(syncer.port, 1):
        assert syncer.wait() == 0
    assert answered("status", tmp_path / "run")["phase"] == "closed"
    answered("fork", tmp_path / "run", tmp_path / "fork", "--run.steps", 60)
    with Syncer(tmp_path, run_dir=tmp_path / "fork") as syncer:
        port = syncer.port
        by_wire = answered("status", f"127.0.0.1:{port}")
        assert by_wire["lineage"]["run"] == "kept" and by_wire["progress"] == 0.0
        assert "forked from" in skerry("status", tmp_path / "fork").stdout
        with learner(port, 0), learner(port, 1):
            assert syncer.wait() == 0
    said = answered("replay", tmp_path / "fork")
    assert said["identical"] and said["lineage"] == by_wire["lineage"]
