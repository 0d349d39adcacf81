"""Numpy arrays as a learner's model, and the check for adapters that it is built on."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import skerry
from e2e.processes import WAIT_S, Syncer, until, write_genesis
from skerry.adapters.arrays import ByElements, NumpyElements, layout_of_arrays
from skerry.proof.conformance import check
from skerry.run.genesis import read_genesis

EXAMPLE = Path(__file__).parents[2] / "examples" / "numpy_loop.py"


def arrays_of(path):
    _, values = read_genesis(path)
    return {name: values[name].copy() for name in values}


def test_numpy_arrays_conform():
    check(lambda arrays: (ByElements(NumpyElements(arrays)), lambda: arrays))


def test_arrays_that_do_not_lie_together_conform():
    def attach(arrays):
        strided = {name: a.T.copy().T for name, a in arrays.items()}
        return ByElements(NumpyElements(strided)), lambda: strided

    check(attach)


class Forgetful(NumpyElements):
    """Leaves out the last element of what it adds."""

    def add(self, name, start, values):
        super().add(name, start, values[:-1])


class Careless(ByElements):
    """Never says that it is done with a cell."""

    def read(self, fragment, cell, mark):
        super().read(fragment, cell, mark + 1)


def test_an_adapter_that_does_something_else_is_found_out():
    with pytest.raises(AssertionError, match="after add"):
        check(lambda arrays: (ByElements(Forgetful(arrays)), lambda: arrays))
    with pytest.raises(AssertionError, match="did not mark its cell"):
        check(lambda arrays: (Careless(NumpyElements(arrays)), lambda: arrays))


def test_what_cannot_take_part_is_refused_by_name():
    good = np.zeros((2, 2), np.float32)
    still = good.copy()
    still.flags.writeable = False
    for arrays, why in [
        ({"w": good.astype(np.float64)}, "array w is float64: make it float32"),
        ({"w": np.zeros((0, 2), np.float32)}, r"array w is empty, of shape \(0, 2\)"),
        ({"w": still}, "array w is read-only"),
        ({}, "there is no array"),
    ]:
        with pytest.raises(skerry.ModelError, match=why):
            layout_of_arrays(arrays)
    with pytest.raises(TypeError, match="w is a list: give a numpy array"):
        layout_of_arrays({"w": [1.0]})
    with pytest.raises(skerry.ModelError, match="embeddings: there is no array v"):
        layout_of_arrays({"w": good}, ["v"])


def test_a_loop_over_arrays_is_a_learner_and_ends_with_what_the_run_has(tmp_path):
    options = ["--run.steps=40", "--run.learners=1", "--sync.num_fragments=2", "--wire.codec_up=fp32"]
    genesis = write_genesis(tmp_path / "genesis.safetensors")
    with Syncer(tmp_path, genesis=genesis, options=options) as syncer:
        arrays = {name: values + 1 for name, values in arrays_of(genesis).items()}
        with skerry.ArrayLearner(arrays, f"127.0.0.1:{syncer.port}", name="here", embeddings=["emb.weight"]) as learner:
            for name, values in arrays_of(genesis).items():
                np.testing.assert_array_equal(arrays[name], values, "it begins with what the run has")
            while learner.is_running:
                for array in arrays.values():
                    array += 0.01
                learner.step(tokens=10)
        assert syncer.wait() == 0
    out = tmp_path / "model.safetensors"
    subprocess.run([sys.executable, "-m", "skerry", "export", str(tmp_path / "run"), "--out", str(out)], check=True)
    for name, values in arrays_of(out).items():
        np.testing.assert_allclose(arrays[name], values, rtol=0, atol=1e-5)
        assert (values > arrays_of(genesis)[name]).all()


def test_the_example_learns_alone_and_as_a_learner(tmp_path):
    def run(*words, **env):
        bare = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
        words = [sys.executable, str(EXAMPLE), *map(str, words)]
        return subprocess.run(words, env=bare | env, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout

    losses = [float(line.split()[-1]) for line in run().splitlines()]
    assert len(losses) == 6 and losses[-1] < losses[0]
    genesis = tmp_path / "genesis.safetensors"
    run("--genesis", genesis)
    with Syncer(tmp_path, genesis=genesis, options=["--run.steps=120", "--run.learners=1"]) as syncer:
        run(SKERRY_SYNCER=f"127.0.0.1:{syncer.port}", SKERRY_NAME="a")
        assert syncer.wait() == 0, "its steps are the run's, which is over"


def test_arrays_that_are_another_since_are_refused_by_name(tmp_path):
    with Syncer(tmp_path) as syncer:
        arrays = arrays_of(tmp_path / "genesis.safetensors")
        learner = skerry.ArrayLearner(arrays, f"127.0.0.1:{syncer.port}", name="here", embeddings=["emb.weight"])
        arrays["mlp.bias"] = arrays["mlp.bias"][:3]
        with pytest.raises(skerry.ModelError, match=r"array mlp\.bias is of shape \(3,\) instead of \(16,\)"):
            while learner.step(tokens=1):
                pass
        arrays["mlp.bias"] = np.zeros(16, np.float32)
        learner.close()
        until(lambda: syncer.status["learners"].get("here", {}).get("state") == "left", "it to leave")


def test_a_list_of_arrays_is_refused():
    with pytest.raises(TypeError, match=r"^arrays is a list: give a dict of numpy arrays"):
        skerry.ArrayLearner([np.zeros(3, np.float32)], "127.0.0.1:1")
