"""The example packs text and trains a loop of its own on it, alone and as two learners of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.processes import WAIT_S, Syncer, facts_of, skerry
from skerry.core.facts import Committed, LifeStarted

EXAMPLE = Path(__file__).parents[2] / "examples" / "packed_loop.py"
LINES_MAX = 60


@pytest.fixture
def pack(tmp_path):
    done = skerry("data", "pack", "stdlib", "--out", tmp_path / "pack")
    assert done.returncode == 0, done.stderr
    return tmp_path / "pack"


def started(*words, **changes):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    words = [sys.executable, str(EXAMPLE), *map(str, words)]
    return subprocess.Popen(words, env=kept | changes, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process):
    with process:
        try:
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, err
    return out.splitlines()


def test_it_is_short_and_learns_alone(pack):
    assert len(EXAMPLE.read_text().splitlines()) <= LINES_MAX
    losses = [float(line.split()[-1]) for line in said(started(pack))]
    assert len(losses) == 6 and losses[-1] < losses[0] - 1


def test_two_learners_of_a_run_train_on_it(pack, tmp_path):
    genesis = tmp_path / "genesis.safetensors"
    said(started(pack, "--genesis", genesis))
    options = ["--run.steps=60", "--run.learners=2", "--sync.quorum=1"]
    with Syncer(tmp_path, genesis=genesis, options=options) as syncer:
        address = f"127.0.0.1:{syncer.port}"
        learners = [started(pack, SKERRY_SYNCER=address, SKERRY_NAME=name) for name in ("a", "b")]
        for learner in learners:
            said(learner)
        assert syncer.wait() == 0
    facts = facts_of(syncer.run_dir)
    assert syncer.status["phase"] == "closed" and any(isinstance(fact, Committed) for fact in facts)
    assert {fact.index for fact in facts if isinstance(fact, LifeStarted)} == {0, 1}  # each has a lane of its own
