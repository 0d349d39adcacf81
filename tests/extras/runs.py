"""Real runs of the examples: a real syncer, the example as a process of its own, killed and started again."""

import contextlib
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from safetensors.torch import load_file

from e2e.processes import WAIT_S, Syncer, facts_of, skerry, until
from skerry.core.facts import LifeStarted
from skerry.core.state import state_of
from skerry.store import Store

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = ["--run.learners=1", "--sync.quorum=1", "--sync.num_fragments=3"]


def example(name):
    """An example as a module, for its model and its data."""
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    return kept | {"PYTHONUNBUFFERED": "1"} | changes


def alone(folder, name, *words):
    """Run an example without a syncer, to its end; what it printed."""
    command = [sys.executable, EXAMPLES / f"{name}.py", *words]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def life(folder, name, port, number):
    """An example as a learner of the syncer at this port: the process, and the file it prints to."""
    out, env = folder / f"life-{number}.txt", environment(SKERRY_SYNCER=f"127.0.0.1:{port}", SKERRY_NAME="a")
    with out.open("wb") as printed, (folder / f"life-{number}.log").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, EXAMPLES / f"{name}.py"], cwd=folder, env=env, stdout=printed, stderr=said
        )
    try:
        yield process, out
    finally:
        process.kill()
        process.wait()


def told_to_end(folder, name, is_time):
    """A learner that gets SIGTERM when what it has printed says so: how it exits, and what the run has of its work."""
    genesis = folder / "genesis.safetensors"
    alone(folder, name, "--genesis", genesis)
    with Syncer(folder, genesis=genesis, options=["--run.steps=10000", *OPTIONS]) as syncer:
        with life(folder, name, syncer.port, 1) as (process, out):
            until(lambda: is_time(out.read_text()) or process.poll() is not None, "the learner to get going")
            process.terminate()
            code = process.wait(WAIT_S)
        until(lambda: syncer.status["learners"]["a"]["state"] == "left", "the syncer to hear that it left")
        return code, syncer.status["tokens"]


def of_two_processes(folder, name):
    """A run whose one learner is two processes under torchrun, to its end: the steps and tokens that it heard of."""
    genesis, torchrun = folder / "genesis.safetensors", ["-m", "torch.distributed.run", "--standalone"]
    alone(folder, name, "--genesis", genesis)
    with Syncer(folder, genesis=genesis, options=["--run.steps=40", *OPTIONS]) as syncer:
        command = [sys.executable, *torchrun, "--nproc-per-node=2", EXAMPLES / f"{name}.py"]
        env = environment(SKERRY_SYNCER=f"127.0.0.1:{syncer.port}", SKERRY_NAME="a", ACCELERATE_USE_CPU="true")
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        assert syncer.wait() == 0, syncer.said
    with Store.open(syncer.run_dir, readonly=True) as store:
        (account,) = state_of(store.records).ledger.accounts.values()
    return account


def killed_and_resumed(folder, name, is_time, between=lambda: None):
    """A run of one learner, killed when what it has printed says so, and started again, to the run's end.

    Its budget is 200 steps, fewer than an example takes by itself. Returns the first values, the last ones as they
    are exported, and the state that the run ended in.
    """
    genesis, run_dir = folder / "genesis.safetensors", folder / "run"
    alone(folder, name, "--genesis", genesis)
    with Syncer(folder, genesis=genesis, run_dir=run_dir, options=["--run.steps=200", *OPTIONS]) as syncer:
        with life(folder, name, syncer.port, 1) as (process, out):
            until(lambda: is_time(out.read_text()) or process.poll() is not None, "the first life to get going")
            assert process.poll() is None, (folder / "life-1.log").read_text()
        between()
        with life(folder, name, syncer.port, 2) as (process, _):
            assert process.wait(WAIT_S) == 0, (folder / "life-2.log").read_text()
        assert syncer.wait() == 0, syncer.said
    with Store.open(run_dir, readonly=True) as store:
        state = state_of(store.records)
    assert state.phase == "closed"
    assert [fact.learner for fact in facts_of(run_dir) if isinstance(fact, LifeStarted)] == ["a", "a"]
    exported = skerry("export", run_dir, "--out", folder / "model.safetensors")
    assert exported.returncode == 0, exported.stderr
    return load_file(genesis), load_file(folder / "model.safetensors"), state
