"""A real run on a pack of its own vocabulary: trained, evaluated, and closed to a learner with another pack."""

import json

import numpy as np
import pytest

from e2e.processes import Running, skerry, until
from skerry.data import Writer

VOCABULARY = 300
TINY = ["--model", "tiny", "--model.context", "16", "--learners", "2", "--step-s", "0", "--sync.quorum", "1"]


def written(path, seed):
    """Tokens that are easily foreseen: each is the one before it and one, beginning anywhere."""
    starts = np.random.default_rng(seed).integers(0, VOCABULARY, 2000)
    with Writer(path, VOCABULARY, "counting") as pack:
        pack.add(((starts[:, None] + np.arange(20)) % VOCABULARY).ravel())
    return path


@pytest.mark.slow
def test_a_run_on_a_pack(tmp_path):
    pack, run_dir = written(tmp_path / "pack", 0), tmp_path / "run"
    done = skerry("train", "--data", pack, *TINY, "--steps", "60", "--out", run_dir, "--json", timeout=110)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert abs(summary["val_loss_start"] - np.log(VOCABULARY)) < 0.2
    assert summary["val_loss_end"] < summary["val_loss_start"]
    found = json.loads(skerry("evaluate", run_dir, "--json").stdout)
    assert found["figures"]["loss"] == pytest.approx(summary["val_loss_end"])
    refused = skerry("evaluate", run_dir, "--data", written(tmp_path / "other", 1))
    assert refused.returncode == 2 and "other is not the pack that the run trains on: digest" in refused.stderr


def test_a_learner_with_another_pack_is_refused_before_it_joins(tmp_path):
    """The syncer has the index alone."""
    written(tmp_path / "pack", 0)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "index.json").write_bytes((tmp_path / "pack" / "index.json").read_bytes())
    run_dir = tmp_path / "run"
    options = ["--data.path", tmp_path / "index", "--model.preset", "tiny", "--model.context", "16", "--run.steps", "5"]
    with Running(tmp_path, "syncer", "--run", run_dir, "--port", "0", *options) as syncer:
        status = until(lambda: (run_dir / "status.json").exists() or syncer.process.poll(), "the syncer to come up")
        assert status is True, syncer.said
        address = json.loads((run_dir / "status.json").read_bytes())["address"]
        refused = skerry("learner", "--syncer", address, "--data", written(tmp_path / "other", 1))
    assert refused.returncode == 2 and "other is not the pack that the run trains on: digest" in refused.stderr
