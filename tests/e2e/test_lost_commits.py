"""A run whose last commits are lost while a learner holds their versions: real processes, files and sockets."""

import shutil
import signal
import threading

import numpy as np
import pytest

from e2e.processes import SHAPES, WAIT_S, Syncer, skerry, until
from node.pair import NumpyParameters
from skerry.algo.fragments import Tensor, layout_of
from skerry.core.state import state_of
from skerry.node.training import ByHand
from skerry.shell.learner import LearnerShell
from skerry.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Island:
    """A real learner in this process, stepping in a thread of its own until it is left."""

    def __init__(self, port):
        layout = layout_of(Tensor(n, s, "embedding" if "emb" in n else "other") for n, s in SHAPES.items())
        self.parameters, self.steps, self.end = NumpyParameters(), 0, threading.Event()
        self.shell = LearnerShell("island", layout, ByHand(self.parameters), "127.0.0.1", port, None)
        self.thread = threading.Thread(target=self._train)
        self.thread.start()

    def _train(self):
        self.shell.start(WAIT_S)
        while not self.end.wait(0.01):
            for values in self.parameters.values.values():
                values += np.float32(1e-3)
            assert self.shell.step(10), "the run wants no more of it"
            self.steps += 1
        self.shell.close(timeout_s=0.0)

    @property
    def versions(self):
        return [change.version for _, change in sorted(self.shell.training.applied.items())]

    def keeps_stepping(self):
        until(lambda before=self.steps: self.steps > before + 20, "the learner to step on")
        assert self.thread.is_alive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end.set()
        self.thread.join()


def end_in_the_last_commit_of(run_dir, held):
    """Damage the last commit of a version that the learner holds, and lose what follows."""
    with Store.open(run_dir, readonly=True) as store:
        records = list(store.history())
    versions = [versions_after(records[: n + 1]) for n in range(len(records))]
    commits = [n for n in range(1, len(records)) if versions[n] != versions[n - 1]]
    last = max(n for n in commits if all(np.array(versions[n]) <= held))
    segment = run_dir / "tape" / "000001.seg"
    segment.write_bytes(segment.read_bytes()[: records[last].offset + 40])
    (run_dir / "status.json").unlink()  # it would know better, and the syncer would not start


def versions_after(records):
    return [fragment.version for fragment in state_of(record.body for record in records).fragments]


def test_a_learner_ahead_of_a_damaged_tape_steps_on_and_merges_again_once_it_is_restored(tmp_path):
    run_dir = tmp_path / "run"
    with Syncer(tmp_path) as syncer, Island(syncer.port) as island:
        until(lambda: min(syncer.status["versions"]) >= 2, "two versions of each fragment")
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 0
        merges, whole = syncer.status["merges"], shutil.copytree(run_dir / "tape", tmp_path / "whole")
        end_in_the_last_commit_of(run_dir, island.versions)

        with Syncer(tmp_path, "--port", syncer.port) as damaged:
            why = until(lambda: damaged.status.get("ahead"), "the learner to be turned away")["island"]
            island.keeps_stepping()
            until(lambda: "1 ahead of this tape" in damaged.status["waiting"], "the status to say so")
            island.keeps_stepping()
            assert damaged.status["merges"] < merges
            damaged.signal(signal.SIGTERM)
            assert damaged.wait() == 0
        assert "after the last whole commit" in damaged.said and (run_dir / "tape" / "000001.1.cut").exists()
        assert "learner island holds version " in why and "restore the newest copy" in why
        assert damaged.said.count(f"dismissed: {why}") == 1, "it comes again and again, and is said once"

        shutil.rmtree(run_dir / "tape")
        shutil.copytree(whole, run_dir / "tape")
        with Syncer(tmp_path, "--port", syncer.port) as restored:
            until(lambda: restored.status["merges"] > merges + 2, "merges after what was lost")
            assert restored.status["ahead"] == {} and restored.status["learners"]["island"]["life"] == 1
            island.keeps_stepping()
    assert skerry("replay", run_dir).returncode == 0
