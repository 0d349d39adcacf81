"""JAX as a learner's framework: the adapter against numpy, a run of its own, and one together with PyTorch."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: ./run test-extras")
import jax.numpy as jnp  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import skerry  # noqa: E402
import skerry.jax  # noqa: E402
from e2e.processes import WAIT_S, Syncer, facts_of, until  # noqa: E402
from skerry.adapters.arrays import ByElements  # noqa: E402
from skerry.adapters.jax import JaxElements, named  # noqa: E402
from skerry.core.facts import Committed  # noqa: E402
from skerry.proof.conformance import check  # noqa: E402
from skerry.run.genesis import read_genesis  # noqa: E402

pytestmark = pytest.mark.extras

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_loop.py"
OPTIONS = ["--sync.num_fragments=2", "--sync.sync_every=4", "--wire.codec_up=fp32", "--wire.codec_down=fp32"]


def attach(arrays):
    elements = JaxElements({name: jnp.asarray(array) for name, array in arrays.items()})
    return ByElements(elements), lambda: {name: np.asarray(leaf) for name, leaf in elements.leaves.items()}


def test_arrays_of_jax_conform():
    check(attach)


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from skerry.adapters.arrays import ByElements
from skerry.adapters.jax import JaxElements
from skerry.proof.conformance import check

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
specs = {"c.matrix": P("a"), "d.cube": P(None, "b"), "e.wide": P("a", "b")}

def attach(arrays):
    placed = {n: jax.device_put(v, NamedSharding(mesh, specs.get(n, P()))) for n, v in arrays.items()}
    elements = JaxElements(placed)
    return ByElements(elements), lambda: {n: np.asarray(v) for n, v in elements.leaves.items()}

check(attach)
before = {n: v.sharding for n, v in attach({"c.matrix": np.zeros((4, 4), np.float32)})[0].elements.leaves.items()}
attached, _ = attach({"c.matrix": np.zeros((4, 4), np.float32)})
attached.elements.add("c.matrix", 2, np.ones(5, np.float32))
assert attached.elements.leaves["c.matrix"].sharding == before["c.matrix"], "it is sharded as it was"
print(len(jax.devices()), "devices")
"""


def test_sharded_arrays_conform_and_stay_sharded():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "4 devices\n", done.stderr


def test_what_cannot_take_part_is_refused_by_name():
    with pytest.raises(skerry.ModelError, match=r"parameter a\.0 is bfloat16: keep parameters in float32"):
        skerry.jax.Learner({"a": [jnp.zeros(3, jnp.bfloat16)]}, "host:1")
    with pytest.raises(TypeError, match=r"a is a float: give arrays of JAX"):
        skerry.jax.Learner({"a": 1.0}, "host:1")
    with pytest.raises(skerry.ModelError, match="has no leaf"):
        skerry.jax.Learner({}, "host:1")


def run_example(*words, **env):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    words = [sys.executable, str(EXAMPLE), *map(str, words)]
    done = subprocess.run(words, env=kept | env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done


def test_the_example_learns_alone_and_as_a_learner_that_was_killed_once(tmp_path):
    alone = [float(line.split()[-1]) for line in run_example().stdout.splitlines()]
    assert alone[-1] < alone[0] / 2
    genesis = tmp_path / "genesis.safetensors"
    run_example("--genesis", genesis)
    options = ["--run.steps=500", "--run.learners=1", *OPTIONS]
    with Syncer(tmp_path, genesis=genesis, options=options) as syncer:
        env = {"SKERRY_SYNCER": f"127.0.0.1:{syncer.port}", "SKERRY_NAME": "a"}
        with subprocess.Popen([sys.executable, str(EXAMPLE)], env=os.environ | env, stdout=subprocess.PIPE) as first:
            until(lambda: syncer.status["learners"].get("a", {}).get("step", 0) > 20, "steps")
            first.kill()
        while syncer.process.poll() is None:
            run_example(**env)
        assert syncer.wait() == 0
    with_syncer = skerry_export(tmp_path)
    x = jax.random.normal(jax.random.key(9), (512, 8))
    assert loss_of(with_syncer, x) < alone[0] / 2


def skerry_export(tmp_path):
    out = tmp_path / "model.safetensors"
    subprocess.run([sys.executable, "-m", "skerry", "export", str(tmp_path / "run"), "--out", str(out)], check=True)
    return read_genesis(out)[1]


def loss_of(model, x):
    hidden = np.maximum(x @ model["hidden.kernel"] + model["hidden.bias"], 0)
    guess = hidden @ model["out.kernel"] + model["out.bias"]
    return float(((guess - np.sin(x.sum(1, keepdims=True))) ** 2).mean())


def test_a_torch_and_a_jax_learner_train_one_model(tmp_path):
    """Both contribute to the same merges, and the loss of the model falls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    genesis = tmp_path / "genesis.safetensors"
    skerry.save_genesis(model, genesis)
    options = ["--run.steps=400", "--run.learners=2", "--run.gather_s=60", "--sync.quorum=2", *OPTIONS]
    with Syncer(tmp_path, genesis=genesis, options=options) as syncer:
        address = f"127.0.0.1:{syncer.port}"
        params = {n: {"weight": jnp.zeros((o, i)), "bias": jnp.zeros(o)} for n, i, o in (("0", 8, 32), ("2", 32, 1))}
        jax_learner = skerry.jax.Learner(params, address, name="jax", wait=False)
        learner = skerry.Learner(model, None, address, name="torch", wait=False)
        jax_learner.wait_for_start()
        learner.wait_for_start()
        params = jax_learner.params
        np.testing.assert_array_equal(np.asarray(params["0"]["weight"]), model[0].weight.detach().numpy())
        first = torch_loss(model).item()
        slope = jax.jit(jax.grad(jax_loss))
        number = 0
        while learner.is_running and jax_learner.is_running:
            number += 1
            torch_loss(model, number).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.02 * parameter.grad
                    parameter.grad = None
            learner.step(tokens=64)
            x = jax.random.normal(jax.random.key(number), (64, 8))
            params = jax.tree.map(lambda p, s: p - 0.02 * s, params, slope(params, x))
            params = jax_learner.step(params, tokens=64)
        other = threading.Thread(target=jax_learner.close)
        other.start()  # at the same time: each takes part in the other's last merges
        learner.close()
        other.join()
        assert syncer.wait() == 0
    merges = [fact for fact in facts_of(tmp_path / "run") if isinstance(fact, Committed)]
    assert sum({row.learner for row in fact.decision.rows} == {"jax", "torch"} for fact in merges) > len(merges) / 2
    assert torch_loss(model).item() < first / 2
    for name, leaf in named(jax_learner.params).items():
        np.testing.assert_allclose(np.asarray(leaf), model.state_dict()[name].numpy(), rtol=0, atol=1e-5)


def torch_loss(model, seed=0):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
    return ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()


def jax_loss(params, x):
    hidden = jax.nn.relu(x @ params["0"]["weight"].T + params["0"]["bias"])
    guess = hidden @ params["2"]["weight"].T + params["2"]["bias"]
    return ((guess - x.sum(1, keepdims=True)) ** 2).mean()
