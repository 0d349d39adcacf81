"""Engines side by side: python experiments/engines.py [--engines local,ray] [--steps 1500] [--pairs 2]

Runs of one file on this machine and on a Ray cluster of three nodes here, in turn; with slurm among the engines, on
the Slurm that this machine belongs to as well. How long from the launch to the first step, tokens a second, and what
the exported models are worth on the same held-out windows. With --faults --pace 0.05 one more run on Ray, in which a
worker, an actor, a node and the syncer are killed: goodput as `skerry chaos` reckons it, with the last undisturbed run
on Ray as its twin. It takes learners with a pace: others are faster on a small machine while one of them is dead.
Results stand in docs/LOG.md.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from torch.nn import functional

from skerry.core.facts import Injected
from skerry.core.ledger import MERGED
from skerry.proof.chaos import report
from skerry.store.store import Store

EXAMPLES = Path(__file__).parents[1] / "examples"
NODE = {"num_cpus": 4, "object_store_memory": 80 << 20}
WAIT_S = 900.0
POLL_S = 0.5
NODE_AWAY_S = 10.0  # a removed node stays away this long
NODE_REMOVED = "its node was removed, and another added"


def skerry(*words, timeout=WAIT_S):
    command = [sys.executable, "-P", "-m", "skerry", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(condition, what):
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {WAIT_S:.0f} s for {what}"
        time.sleep(POLL_S)
    return value


def told(run):
    """What the syncer says of the run. To look costs next to nothing, and these cores are the learners' as well."""
    with contextlib.suppress(OSError):
        return json.loads((run / "status.json").read_bytes())
    return {"phase": "created", "epoch": 0, "learners": {}}


def is_gone(run):
    return {member["state"] for member in json.loads(skerry("ps", run, "--json"))["members"]} <= {"ended", "failed"}


def until_over(run):
    until(lambda: told(run)["phase"] == "closed", f"the run {run} to close")
    until(lambda: is_gone(run), f"all of {run} to be gone")


def measured(engine, folder, steps, number):
    """One run to its end."""
    run = folder / f"{engine}-{number}"
    began = time.time()
    words = ["launch", folder / "run-ray.toml", "--engine", engine, "--run", run, "--run.steps", steps]
    skerry(*words, "--json", *(["--http-port", "off"] if engine == "local" else []))
    until_over(run)
    return run, {"engine": engine, "first_step_s": first_step(run) - began} | numbers(folder, run)


def first_step(run):
    return report.read(run)[0].training_at


def numbers(folder, run):
    tally, audit = report.read(run)
    found = report.report(tally, told(run), {}, {})
    return {
        "tokens_per_s": found["tokens_merged"] / found["train_s"],
        "loss": loss(folder, run),
        "balance": found["ledger_balance"],
        "violations": len(audit.violations),
    }


def paced(loop, seconds):
    """The example's loop, whose every step waits as well."""
    step = "            if not learner.step("
    assert loop.count(step) == 1, "the example has another loop: say here where its step ends"
    return loop.replace(step, f"            __import__('time').sleep({seconds})\n{step}")


def loss(folder, run):
    """Of the exported model on windows that are the same each time."""
    model_file = folder / f"{run.name}.safetensors"
    skerry("export", run, "--out", model_file)
    spec = spec_from_file_location("island_loop", EXAMPLES / "island_loop.py")
    loop = module_from_spec(spec)
    spec.loader.exec_module(loop)
    model = loop.next_byte()
    model.load_state_dict(load_file(model_file))
    text = b"".join(path.read_bytes() for path in sorted(Path(torch.__file__).parent.glob("_*.py")))
    data, draw = torch.tensor(list(text)), torch.Generator().manual_seed(1)
    windows = data[torch.randint(len(data) - 9, (8192, 1), generator=draw) + torch.arange(9)]
    with torch.no_grad():
        return functional.cross_entropy(model(windows[:, :8]), windows[:, 8]).item()


# ---------------------------------------------------------------------------------------------- faults


def on_a_spot(text):
    """One island is on the node that goes, and the syncer is not: nodes on one machine have the same address."""
    for commented in ('# where = "disk"', '# where = "spot"'):
        assert text.count(commented) == 1, f"the example has no {commented}"
        text = text.replace(commented, commented.removeprefix("# "))
    return text.replace("on-ray", "faults")


def under_faults(folder, cluster, spot, rates):
    run, done = folder / "faults", []
    words = ["launch", folder / "spot.toml", "--engine", "ray", "--run", run, "--run.steps", 10**6]
    skerry(*words, "--json")
    names = ["single-0", "single-1", "pair-0", "spot-0"]
    until(lambda: {row.learner for row in rows(run)} == set(names), "all to contribute")
    for victim, pid in (("pair-0", rank_of), ("single-0", actor_of)):
        done.append(kill(run, victim, pid(folder, victim)))
    done += lose_a_node(run, folder, cluster, spot, names)
    at, epoch = time.time(), told(run)["epoch"]
    os.kill(told(run)["pid"], signal.SIGKILL)
    until(lambda: told(run)["epoch"] > epoch and merged_in(run, epoch + 1), "merges of the syncer's next life")
    done.append(Injected("kill", "syncer", "its process was killed", at, at))
    time.sleep(30)  # undisturbed, as between the faults of a plan
    skerry("stop", run, "--finish")
    until_over(run)
    with Store.open(run) as store:
        store.commit([msgspec.msgpack.encode(fact) for fact in done])
    tally, audit = report.read(run)
    found = report.report(tally, told(run), rates, {})
    kept = (
        "goodput",
        "goodput_of_capacity",
        "ledger_balance",
        "merge_gap_max_s",
        "recovery_s",
        "syncer_restart_to_merge_s",
        "learner_restarts",
        "syncer_restarts",
    )
    with_node = [fault.target for fault in done if fault.detail == NODE_REMOVED]
    found = {key: found[key] for key in kept} | {"with_node": with_node}
    return found | {"violations": len(audit.violations), "checks": audit.checks}


def kill(run, victim, pid):
    life, at = life_of(run, victim), time.time()
    os.kill(pid, signal.SIGKILL)
    until(lambda: returned(run, victim, life), f"{victim} to return")
    return Injected("kill", victim, f"process {pid} was killed", at, at)


def lose_a_node(run, folder, cluster, spot, names):
    """Ray may have put others there than the island that asked for it: each of them was killed as well."""
    raylet = spot.all_processes["raylet"][0].process.pid
    there = {name: life_of(run, name) for name in names if parent_of(actor_of(folder, name)) == raylet}
    at = time.time()
    cluster.remove_node(spot, allow_graceful=False)
    time.sleep(NODE_AWAY_S)
    cluster.add_node(resources={"spot": 1}, **NODE)
    until(lambda: all(returned(run, name, life) for name, life in there.items()), f"{', '.join(there)} to return")
    return [Injected("kill", name, NODE_REMOVED, at, at) for name in there]


def rows(run):
    with contextlib.suppress(OSError):
        return [row for _, d in report.read(run)[0].merges for row in d.rows if row.fate == MERGED]
    return []


def merged_in(run, epoch):
    return any(decision.epoch >= epoch for _, decision in report.read(run)[0].merges)


def life_of(run, name):
    return told(run)["learners"][name]["life"]


def returned(run, name, life):
    """The whole tape is read only when there is something to find."""
    return life_of(run, name) > life and any(row.learner == name and row.life > life for row in rows(run))


def processes(folder, **wanted):
    """Of a run that was launched from this folder, and of no other on this machine: names are not enough to kill by."""
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            env = dict(part.split("=", 1) for part in path.joinpath("environ").read_text().split("\0") if "=" in part)
            is_ours = path.joinpath("cwd").resolve() == folder.resolve()
            if is_ours and all(env.get(key) == value for key, value in wanted.items()):
                yield int(path.name)


def rank_of(folder, name):
    return next(processes(folder, SKERRY_NAME=name, RANK="1"))


def actor_of(folder, name):
    """The parent of what holds the learner."""
    held = next(processes(folder, SKERRY_NAME=name))
    actor = parent_of(held)
    assert Path(f"/proc/{actor}/cmdline").read_text().startswith("ray::LearnerMember"), "that is no actor"
    return actor


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# ---------------------------------------------------------------------------------------------- both


@contextlib.contextmanager
def ray_cluster():
    """Three nodes here, and the one of them that will be removed."""
    from ray.cluster_utils import Cluster  # not needed where Ray is none of the engines

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(resources={"disk": 1}, **NODE)
    spot = cluster.add_node(resources={"spot": 1}, **NODE)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster, spot
    finally:
        cluster.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500, help="of each learner, on average")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each engine")
    parser.add_argument("--engines", default="local,ray", help="in this order, with commas")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that each step waits beside its work")
    parser.add_argument("--faults", action="store_true")
    options = parser.parse_args()
    engines = options.engines.split(",")
    if options.faults and "ray" not in engines:
        parser.error("--faults are done to a run on Ray: name it in --engines")
    if options.faults and not options.pace:
        parser.error("--faults needs --pace: learners that run as fast as they can are faster while one is dead")
    with tempfile.TemporaryDirectory(prefix="engines-") as made:
        folder = Path(made)
        whole_cores = (EXAMPLES / "run-ray.toml").read_text().replace("cpus = 0.5", "cpus = 1")  # Slurm has no others
        (folder / "run-ray.toml").write_text(whole_cores)
        (folder / "island_loop.py").write_text(paced((EXAMPLES / "island_loop.py").read_text(), options.pace))
        text = (folder / "run-ray.toml").read_text()
        (folder / "spot.toml").write_text(on_a_spot(text))
        subprocess.run([sys.executable, "island_loop.py", "--genesis", "genesis.safetensors"], cwd=folder, check=True)
        with ray_cluster() if "ray" in engines else contextlib.nullcontext((None, None)) as (cluster, spot):
            rates = {}
            for number in range(options.pairs):
                for engine in engines:
                    run, found = measured(engine, folder, options.steps, number)
                    print(json.dumps(found), flush=True)
                    if engine == "ray":
                        rates = report.rates_of(report.read(run)[0])
            if options.faults:
                print(json.dumps(under_faults(folder, cluster, spot, rates)), flush=True)


if __name__ == "__main__":
    main()
