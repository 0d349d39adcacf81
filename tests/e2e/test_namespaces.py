"""Two machines, as two network namespaces with a wire between them: the commands of the README, and who is kept out."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.processes import WAIT_S, command, facts_of, skerry, status_of, until
from skerry.errors import JoinTimeout

EXAMPLE = Path(__file__).parents[2] / "examples/numpy_loop.py"
LOOP = f"""
import sys, time
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import numpy as np, skerry
from numpy_loop import first_values, step
arrays, draw = first_values(), np.random.default_rng(0)
with skerry.ArrayLearner(arrays, join_timeout_s=float(sys.argv[1])) as learner:
    going = True
    while going:
        x = draw.standard_normal((64, 8)).astype(np.float32)
        loss = step(arrays, x, np.sin(x.sum(1, keepdims=True)))
        time.sleep(0.01)
        going = learner.step(tokens=64, loss=loss)
"""
HERE, THERE = "10.77.19.1", "10.77.19.2"


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)


@pytest.fixture
def machines():
    """The names of two namespaces that reach each other at HERE and THERE, and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2, for two network namespaces")
    names = [f"skerry-{os.getpid()}-{side}" for side in ("here", "there")]
    wires = [f"sk{os.getpid() % 100000}{side}" for side in ("a", "b")]
    try:
        for name in names:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
        ip("link", "add", wires[0], "netns", names[0], "type", "veth", "peer", "name", wires[1], "netns", names[1])
        for name, wire, address in zip(names, wires, (HERE, THERE), strict=True):
            for words in (("addr", "add", f"{address}/24", "dev", wire), ("link", "set", wire, "up")):
                if (done := ip("-n", name, *words)).returncode:
                    pytest.skip(f"no wire between namespaces can be made here: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.fixture
def begin(machines, tmp_path):
    """Start a command on one of the machines; its process, whose stderr is beside it."""
    running = []

    def begin(machine, name, *words, **environment):
        with (tmp_path / f"{name}.err").open("wb") as err:
            process = subprocess.Popen(
                ["ip", "netns", "exec", machines[machine], *map(str, words)],
                stdin=subprocess.DEVNULL, stdout=err, stderr=err, env=os.environ | environment, cwd=tmp_path,
            )  # fmt: skip
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()


def said(folder, name):
    return (folder / f"{name}.err").read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.timeout(600)  # a dozen processes, one after the other
def test_the_commands_of_the_readme_between_two_machines(begin, tmp_path):
    subprocess.run([sys.executable, EXAMPLE, "--genesis", tmp_path / "genesis.safetensors"], check=True, timeout=WAIT_S)
    run, address = tmp_path / "runs/mine", f"{HERE}:7077"
    for name in ("gpu-box", "other"):
        assert skerry("keys", "issue", run, name, cwd=tmp_path).returncode == 0
    assert (
        skerry("keys", "issue", tmp_path / "another", "gpu-box", "--out", "foreign.key", cwd=tmp_path).returncode == 0
    )
    serve = ["--genesis", "genesis.safetensors", "--run.tokens", "1e9", "--run.learners", "2", "--sync.quorum", "1"]
    syncer = begin(0, "syncer", *command("syncer", "--run", run, "--host", "0.0.0.0", *serve))
    until(lambda: status_of(run).get("pid"), "the syncer to come up")

    def learner(name, key="", patience_s=60.0, **more):
        variables = {"SKERRY_SYNCER": address} | ({"SKERRY_KEY_FILE": key} if key else {}) | more
        return begin(1, name, sys.executable, "-c", LOOP, patience_s, **variables)

    gpu_box, other = learner("gpu-box", "gpu-box.key"), learner("other", "other.key")
    until(lambda: all(has_merged(run, name) for name in ("gpu-box", "other")), "both to have work in the run")
    keyless, foreign = learner("keyless"), learner("foreign", "foreign.key", patience_s=2.0)
    assert keyless.wait(WAIT_S) and "anybody on the way reads and changes what is sent" in said(tmp_path, "keyless")
    keyless = learner("keyless", SKERRY_INSECURE="1")
    assert keyless.wait(WAIT_S) and "name a key file of the run" in said(tmp_path, "keyless")
    assert foreign.wait(WAIT_S) and JoinTimeout.__name__ in said(tmp_path, "foreign")
    assert "of another run" in said(tmp_path, "foreign")

    life, merges = status_of(run)["learners"]["gpu-box"]["life"], status_of(run)["merges"]
    assert skerry("keys", "revoke", run, "other").returncode == 0
    assert other.wait(WAIT_S) and "RefusedError" in said(tmp_path, "other") and "key" in said(tmp_path, "other")
    until(lambda: status_of(run)["merges"] > merges + 5, "the run to go on")
    assert gpu_box.poll() is None and status_of(run)["learners"]["gpu-box"]["life"] == life
    back = learner("back", "other.key")
    assert back.wait(WAIT_S) and "the key of other is revoked" in said(tmp_path, "back")
    tokens = status_of(run)["tokens"]
    settled = tokens["merged"] + sum(tokens["discarded"].values())
    assert tokens["produced"] == pytest.approx(settled + tokens["pending"])  # sums over fragments, divided
    syncer.terminate()
    syncer.wait(WAIT_S)
    assert skerry("replay", run).returncode == 0  # audits the books
    assert [fact.learner for fact in facts_of(run) if getattr(fact, "what", "") == "expelled"] == ["other"]


def has_merged(run, name):
    """Its steps, by the status, with versions made since it came."""
    status = status_of(run)
    return status.get("merges", 0) > 5 and status.get("learners", {}).get(name, {}).get("step", 0) > 5
