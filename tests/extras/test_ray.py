"""The Ray engine on a real cluster of three nodes on this machine: what happens to its parts, a run gets over.

The nodes pretend to have four CPUs each. Every wait is on a condition: a machine may be slow, and is not timed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ray: ./run test-extras")

from ray.cluster_utils import Cluster

from e2e.processes import command, status_of
from skerry.core.ledger import MERGED
from skerry.proof.chaos import report

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(1200)]

EXAMPLES = Path(__file__).parents[2] / "examples"
WAIT_S = 180.0
NODE = {"num_cpus": 4, "object_store_memory": 80 << 20}

LOOP = """
import time
import numpy as np
import skerry

arrays = {"weight": np.zeros((64, 8), np.float32), "bias": np.zeros(8, np.float32)}
if __name__ == "__main__":
    with skerry.ArrayLearner(arrays) as learner:
        while learner.step(tokens=10):
            arrays["weight"] += 0.001
            print("a step", flush=True)
            time.sleep(0.05)
"""


def until(condition, what):
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {WAIT_S:.0f} s for {what}"
        time.sleep(0.2)
    return value


@pytest.fixture(scope="module")
def cluster():
    nodes = Cluster()
    nodes.add_node(**NODE)
    nodes.add_node(**NODE)
    nodes.spot = nodes.add_node(resources={"spot": 1}, **NODE)
    yield nodes
    nodes.shutdown()


@pytest.fixture
def folder(tmp_path, cluster):
    """Where launched files lie; whatever a test launched is down when it ends."""
    yield tmp_path
    for launched in tmp_path.glob("*/launch.json"):
        said(cluster, "down", launched.parent)


def said(cluster, *words):
    env = os.environ | {"RAY_ADDRESS": cluster.address}
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=WAIT_S, env=env)


def done(cluster, *words):
    """What a command says as JSON."""
    answer = said(cluster, *words, "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def refused(cluster, *words):
    answer = said(cluster, *words)
    assert answer.returncode == 2 and answer.stderr.count("\n") == 1, (answer.returncode, answer.stderr)
    return answer.stderr


def states(cluster, run):
    return {member["name"]: member["state"] for member in done(cluster, "ps", run)["members"]}


def numpy_run(folder, islands, run="", name="tiny"):
    (folder / "loop.py").write_text(LOOP)
    code = "import loop, skerry; skerry.save_arrays(loop.arrays, 'genesis.safetensors')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    file = folder / "run.toml"
    head = f'[run]\nname = "{name}"\nsteps = 1000000\nlearners = 4\n{run}\n[sync]\nquorum = 1\nnum_fragments = 2\n'
    file.write_text(head + '[syncer]\ngenesis = "genesis.safetensors"\n' + islands)
    return file


ONE = '[[islands]]\nname = "one"\ncommand = ["python", "loop.py"]\n'


def decisions(run):
    return [decision for _, decision in report.read(run)[0].merges]


def merged(run):
    """(learner, life) of everybody who is in a merge."""
    return {(row.learner, row.life) for decision in decisions(run) for row in decision.rows if row.fate == MERGED}


def life_of(run, name):
    return max((life.life for _, life in report.read(run)[0].lives if life.learner == name), default=0)


def contributes(run, name, after=0):
    """Whether a life after that one is in a merge."""
    return any(learner == name and life > after for learner, life in merged(run))


def processes(run, **wanted):
    """Of this run, and of no other on this machine; parents first.

    Names are not enough: somebody else's learner may be called the same, and these are found to be killed. The folder
    of its key is named after the launch.
    """
    launch, found = json.loads((run / "launch.json").read_bytes())["handle"]["id"], []
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            env = dict(part.split("=", 1) for part in path.joinpath("environ").read_text().split("\0") if "=" in part)
            is_ours = Path(env.get("SKERRY_KEY_FILE", "")).parent.name.endswith(f"-{launch}")
            if is_ours and all(env.get(key) == value for key, value in wanted.items()):
                found.append(int(path.name))
    return found


def actor_of(run, name):
    """A learner's actor is the parent of what holds it."""
    actor = parent_of(processes(run, SKERRY_NAME=name)[0])
    assert Path(f"/proc/{actor}/cmdline").read_text().startswith("ray::LearnerMember"), "that is no actor"
    return actor


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_gone(pid):
    return not Path(f"/proc/{pid}").exists()


def named_actors(cluster):
    code = (
        "import ray, json, os; ray.init(os.environ['RAY_ADDRESS'], namespace='skerry', logging_level=40); "
        "print(json.dumps([a['name'] for a in ray.util.list_named_actors(all_namespaces=True)]))"
    )
    env = os.environ | {"RAY_ADDRESS": cluster.address}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    return json.loads(out.splitlines()[-1])


# ---------------------------------------------------------------------------------------------- the whole story

STORY = """
[run]
name = "story"
steps = 1000000
gather_s = 60
[sync]
quorum = 2
[syncer]
genesis = "genesis.safetensors"
[[islands]]
name = "single"
count = 2
command = ["python", "island_loop.py"]
[[islands]]
name = "pair"
command = ["python", "island_loop.py"]
workers = 2
[[islands]]
name = "spot"
command = ["python", "island_loop.py"]
where = "spot"
preemptible = true
"""


def test_whatever_is_killed_or_taken_away_returns_and_contributes(folder, cluster):
    (folder / "island_loop.py").write_text((EXAMPLES / "island_loop.py").read_text())
    (folder / "story.toml").write_text(STORY)
    genesis = [sys.executable, "island_loop.py", "--genesis", "genesis.safetensors"]
    subprocess.run(genesis, cwd=folder, check=True)
    run = folder / "run"
    done(cluster, "launch", folder / "story.toml", "--engine", "ray", "--run", run)
    learners = ["single-0", "single-1", "pair-0", "spot-0"]
    until(lambda: {name for name, _ in merged(run)} == set(learners), "all four islands to contribute")

    rank = processes(run, SKERRY_NAME="pair-0", RANK="1")[0]
    life = life_of(run, "pair-0")
    os.kill(rank, signal.SIGKILL)
    until(lambda: contributes(run, "pair-0", life), "the island of two to return after one of its workers was killed")

    before, life = processes(run, SKERRY_NAME="single-0"), life_of(run, "single-0")
    os.kill(actor_of(run, "single-0"), signal.SIGKILL)
    until(lambda: contributes(run, "single-0", life), "a learner to return after its actor was killed")
    assert all(map(is_gone, before)), "a process of it was left behind"

    life = life_of(run, "spot-0")
    cluster.remove_node(cluster.spot, allow_graceful=False)
    until(lambda: states(cluster, run)["spot-0"] == "waiting", "the learner of the lost node to wait")
    cluster.spot = cluster.add_node(resources={"spot": 1}, **NODE)
    until(lambda: contributes(run, "spot-0", life), "it to return on the node that joined")

    epoch = decisions(run)[-1].epoch
    os.kill(status_of(run)["pid"], signal.SIGKILL)
    for name in learners:
        until(lambda name=name: contributes_to(run, epoch, name), f"{name} to find the syncer's next life")

    assert said(cluster, "stop", run, "--finish").returncode == 0
    until(lambda: set(states(cluster, run).values()) == {"ended"}, "everything of the closed run to be gone")
    assert named_actors(cluster) == []
    tally, audit = report.read(run)
    assert audit.violations == [] and audit.checks > 1000
    assert report.report(tally, status_of(run), {}, {})["ledger_balance"] == 0
    assert "Traceback" not in "".join(log.read_text() for log in (run / "logs").glob("single-1.log"))


def contributes_to(run, epoch, name):
    """Whether it is in a merge of a life of the syncer after that one."""
    later = (decision for decision in decisions(run) if decision.epoch > epoch)
    return any(row.learner == name and row.fate == MERGED for decision in later for row in decision.rows)


# ---------------------------------------------------------------------------------------------- verbs


def test_a_run_is_scaled_looked_at_ended_and_gone_on_with(folder, cluster):
    file, run = numpy_run(folder, ONE + "count = 1\n"), folder / "run"
    done(cluster, "launch", file, "--engine", "ray", "--run", run)
    assert "is up on this cluster already" in refused(cluster, "launch", file, "--engine", "ray", "--run", run)
    until(lambda: contributes(run, "one-0"), "the first to contribute")
    assert "a step" in done(cluster, "logs", run, "one-0")["lines"]

    done(cluster, "scale", run, "one", 2)
    until(lambda: contributes(run, "one-1"), "the second to contribute")
    done(cluster, "scale", run, "one", 1)
    assert list(states(cluster, run)) == ["syncer", "one-0"]
    until(lambda: status_of(run)["learners"]["one-1"]["state"] == "left", "it to have left in order")
    assert sorted(named_actors(cluster)) == ["tiny-one-0", "tiny-syncer"]

    pids = processes(run, SKERRY_NAME="one-0")
    done(cluster, "down", run)
    assert set(states(cluster, run).values()) == {"ended"} and named_actors(cluster) == []
    assert all(map(is_gone, pids))
    assert status_of(run)["learners"]["one-0"]["state"] == "left"

    life = life_of(run, "one-0")
    done(cluster, "launch", file, "--engine", "ray", "--run", run)
    until(lambda: contributes(run, "one-0", life), "the run to go on")


def test_learners_are_spread_over_the_machines_so_that_one_of_them_takes_few(folder, cluster):
    run, names = folder / "run", ["one-0", "one-1", "one-2"]
    done(cluster, "launch", numpy_run(folder, ONE + "count = 3\n"), "--engine", "ray", "--run", run)
    until(lambda: {name for name, _ in merged(run)} == set(names), "all three to contribute")
    raylets = {parent_of(actor_of(run, name)) for name in names}
    assert len(raylets) == 3, "two of them are on one node"


def test_an_island_that_crashes_stops_nobody_and_says_why(folder, cluster):
    bad = '[[islands]]\nname = "bad"\ncommand = ["python", "-c", "raise SystemExit(\'no such thing\')"]\n'
    run = folder / "run"
    done(cluster, "launch", numpy_run(folder, ONE + bad), "--engine", "ray", "--run", run)
    until(lambda: contributes(run, "one-0"), "the other to contribute")

    def crashed():
        (member,) = (m for m in done(cluster, "ps", run)["members"] if m["name"] == "bad-0")
        return member if member["restarts"] > 1 else None

    member = until(crashed, "it to have failed twice")
    assert member["state"] in ("restarting", "running", "starting")
    until(lambda: "no such thing" in crashed()["detail"], "ps to show its last line")


def test_a_learner_of_two_machines_begins_again_as_a_whole(folder, cluster):
    (folder / "island_loop.py").write_text((EXAMPLES / "island_loop.py").read_text())
    genesis = [sys.executable, "island_loop.py", "--genesis", "genesis.safetensors"]
    subprocess.run(genesis, cwd=folder, check=True)
    text = STORY.partition("[[islands]]")[0].replace("story", "wide").replace("quorum = 2", "quorum = 1")
    island = '[[islands]]\nname = "wide"\ncommand = ["python", "island_loop.py"]\nmachines = 2\n'
    (folder / "wide.toml").write_text(text + island)
    run = folder / "run"
    done(cluster, "launch", folder / "wide.toml", "--engine", "ray", "--run", run)
    until(lambda: contributes(run, "wide-0"), "the two machines to contribute as one learner")
    life = life_of(run, "wide-0")
    os.kill(processes(run, SKERRY_NAME="wide-0", RANK="1")[0], signal.SIGKILL)
    until(lambda: contributes(run, "wide-0", life), "both to begin again")
    done(cluster, "down", run)
    assert named_actors(cluster) == [] and processes(run, SKERRY_NAME="wide-0") == []


def test_a_job_takes_the_files_along_and_what_it_started_outlives_it(folder, cluster, tmp_path_factory):
    file, run = numpy_run(folder, ONE), tmp_path_factory.mktemp("stays") / "run"
    (folder / "here").mkdir()
    for name in ("loop.py", "run.toml", "genesis.safetensors"):
        (folder / name).rename(folder / "here" / name)
    job = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", folder / "here"]
    job += ["--address", f"http://{cluster.head_node.webui_url}", "--"]
    launch = [*map(str, command("launch", file.name, "--engine", "ray", "--run"))]
    submitted = subprocess.run([*job, *launch, "run"], capture_output=True, text=True, timeout=WAIT_S)
    assert "is removed with this job" in submitted.stdout + submitted.stderr
    try:
        submitted = subprocess.run([*job, *launch, str(run)], capture_output=True, text=True, timeout=WAIT_S)
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        until(lambda: contributes(run, "one-0"), "the learner to contribute")
        life = life_of(run, "one-0")
        os.kill(actor_of(run, "one-0"), signal.SIGKILL)
        until(lambda: contributes(run, "one-0", life), "it to return with the job's files, after the job")
    finally:
        said(cluster, "down", run)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("islands", "words"),
    [
        (ONE + "gpus = 8\n", "island one: 8 GPUs on one machine, the largest has 0"),
        (ONE + "workers = 3\ncpus = 2\n", "island one: 6 CPUs on one machine, the largest has 4"),
        (ONE + "machines = 4\n", "island one: 4 machines with 1 CPU, the cluster has 3 such"),
        (ONE + 'where = "spots"\n', "where = 'spots': no machine of the cluster has this resource"),
    ],
)
def test_resources_that_nobody_has_are_refused_with_what_there_is(folder, cluster, islands, words):
    assert words in refused(cluster, "launch", numpy_run(folder, islands), "--engine", "ray", "--run", folder / "run")
    assert not (folder / "run").exists()


def test_a_cluster_that_brings_machines_is_asked_for_them(folder, cluster):
    file = numpy_run(folder, ONE + "gpus = 8\n" + ONE.replace("one", "two") + "[ray]\nautoscales = true\n")
    done(cluster, "launch", file, "--engine", "ray", "--run", folder / "run")
    (member,) = (m for m in done(cluster, "ps", folder / "run")["members"] if m["name"] == "one-0")
    assert member["state"] == "waiting" and "no machine has 1 CPU, 8 GPUs" in member["detail"]


def test_what_the_syncer_cannot_have_is_refused_before_anything_is_made(folder, cluster):
    file, words = numpy_run(folder, ONE), ("--engine", "ray", "--run", folder / "run")
    file.write_text(file.read_text().replace("[syncer]", '[syncer]\ndir = "/dev/null/run"'))
    assert "cannot write to /dev/null/run" in refused(cluster, "launch", file, *words)
    file.write_text(file.read_text().replace("/dev/null/run", "run"))
    assert "syncer.dir = 'run': give it from the root" in refused(cluster, "launch", file, *words)
    file.write_text(file.read_text().replace('dir = "run"\n', "").replace("genesis.s", "other.s"))
    assert "has no file" in refused(cluster, "launch", file, *words)
    assert named_actors(cluster) == []


def test_a_name_is_up_once_in_a_cluster(folder, cluster):
    file = numpy_run(folder, ONE)
    done(cluster, "launch", file, "--engine", "ray", "--run", folder / "run")
    assert "run.name = 'tiny': is up on this cluster" in refused(
        cluster, "launch", file, "--engine", "ray", "--run", folder / "other"
    )
