"""What tests launch: a small model without torch, a loop that trains it slowly, and a file that says so."""

import json
import os
import signal
from pathlib import Path

from e2e.processes import is_running, skerry, until, write_genesis

SHAPES = {"mlp.bias": (16,), "mlp.weight": (16, 8)}
LOOP = f"""
import time, numpy as np, skerry
arrays = {{name: np.zeros(shape, np.float32) for name, shape in {SHAPES!r}.items()}}
with skerry.ArrayLearner(arrays, node="thread") as learner:
    while learner.step(tokens=10):
        time.sleep(0.02)
        for array in arrays.values():
            array += 1e-3
"""
RUN = """
[run]
name = "mine"
steps = {steps}
learners = {learners}
[sync]
quorum = 1
num_fragments = 2
policy = "fixed"
sync_every = 4
fragment_sync_delay = 1
[syncer]
genesis = "genesis.safetensors"
"""
ISLAND = """
[[islands]]
name = "{name}"
count = {count}
command = {command}
cpus = 0.1
{more}
"""


def write_launch(folder, *islands, steps=1_000_000, learners=8):
    """A file beside a genesis and a loop; each island as (name, count) and perhaps a command and further lines."""
    write_genesis(folder / "genesis.safetensors", SHAPES)
    (folder / "loop.py").write_text(LOOP)
    file = folder / "run.toml"
    file.write_text(RUN.format(steps=steps, learners=learners) + "".join(_island(*each) for each in islands))
    return file


def _island(name, count, command=("python", "loop.py"), more=""):
    return ISLAND.format(name=name, count=count, command=json.dumps(command), more=more)


def looked(run):
    """name -> member, as skerry ps tells."""
    said = skerry("ps", run, "--json")
    assert said.returncode == 0, said.stderr
    return {member["name"]: member for member in json.loads(said.stdout)["members"]}


def until_merging(run, *names):
    """Until these learners train and something of the run has been merged."""

    def is_so():
        try:
            status = json.loads((run / "status.json").read_bytes())
        except (OSError, ValueError):
            return False
        training = {name for name, each in status["learners"].items() if each["state"] == "training" and each["step"]}
        return status["merges"] > 2 and set(names) <= training and status

    return until(is_so, f"merges with {names}")


def below(pid):
    """Every process below this one."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in file.read_text().split()]
        except OSError:
            continue
        found += [*children, *(further for child in children for further in below(child))]
    return found


def pid_of(member):
    return int(member["where"].removeprefix("process "))


def loop_of(member):
    """The process of a learner's command, below what holds it."""
    return until(lambda: below(pid_of(member)), "its command")[0]


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid), "its end")
