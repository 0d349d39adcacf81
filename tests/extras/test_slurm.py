"""A run on a real Slurm of this machine: its two machines are two slurmd here, which the test configures and ends.

It needs Debian's packages slurmctld, slurmd and slurm-client, and root, for slurmd starts jobs as their user.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.processes import processes_naming, skerry, status_of, until

HAS_SLURM = all(shutil.which(name) for name in ("slurmctld", "slurmd", "sbatch")) and os.getuid() == 0
pytestmark = [
    pytest.mark.extras,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HAS_SLURM, reason="needs root, and apt-get install slurmctld slurmd slurm-client"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
END_S = 30.0
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ports[0]}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=5
NodeName=a NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=8000 Feature=left State=UNKNOWN
NodeName=b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory=8000 Feature=right State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
RUN = """
[run]
name = "real"
steps = 1000000
gather_s = 30
learners = 4

[sync]
quorum = 1

[syncer]
genesis = "genesis.safetensors"

[[islands]]
name = "single"
folder = "{examples}"
command = ["python", "island_loop.py"]

[[islands]]
name = "pair"
folder = "{examples}"
command = ["python", "island_loop.py"]
workers = 2
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    root = tmp_path / "slurm"
    for name in ("state", "spool.a", "spool.b"):
        (root / name).mkdir(parents=True)
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for sock in (one, two, three):
            sock.bind(("127.0.0.1", 0))
        ports = [sock.getsockname()[1] for sock in (one, two, three)]
    conf = root / "slurm.conf"
    conf.write_text(CONF.format(root=root, host=socket.gethostname().partition(".")[0], ports=ports))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    daemons = [["slurmctld", "-D", "-f", conf], *(["slurmd", "-D", "-N", node, "-f", conf] for node in "ab")]
    processes = [
        subprocess.Popen([*map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for words in daemons
    ]
    try:
        until(lambda: told("sinfo", "-h", "-o", "%D %T").strip() == "2 idle", f"two idle machines, see {root}/*.log")
        yield root
    finally:
        told("scancel", "--user=root")
        deadline = time.monotonic() + END_S
        while told("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in reversed(processes):
            process.terminate()
            process.wait(END_S)


def told(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout


def ps(run):
    done = skerry("ps", run, "--json")
    assert done.returncode == 0, done.stderr
    return {member["name"]: member for member in json.loads(done.stdout)["members"]}


def id_of(name):
    return told("squeue", "-h", "-r", "-o", "%i", "-n", name).strip()


def learner(run, name):
    return status_of(run).get("learners", {}).get(name, {})


def ranks_of(run, name):
    """Process ids of this learner's ranks, by number."""
    found = {}
    for pid in processes_naming("island_loop.py"):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        own = dict(word.partition("=")[::2] for word in words)
        if own.get("SKERRY_NAME") == name and str(run) in own.get("SKERRY_SYNCER", "") and "RANK" in own:
            found[own["RANK"]] = pid
    return found


def test_a_run_on_slurm_from_its_launch_to_its_end(cluster, tmp_path):
    subprocess.run(
        [sys.executable, EXAMPLES / "island_loop.py", "--genesis", tmp_path / "genesis.safetensors"],
        check=True,
    )
    file, run = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(RUN.format(examples=EXAMPLES))
    done = skerry("launch", file, "--engine", "slurm", "--run", run)
    assert done.returncode == 0, done.stderr
    until(lambda: status_of(run).get("merges", 0) > 10, "merges")
    assert {m["state"] for m in ps(run).values()} == {"running"} and ps(run)["pair-0"]["where"] in "ab"

    # a rank that is killed ends its island, which comes back in the same job
    os.kill(ranks_of(run, "pair-0")["1"], signal.SIGKILL)
    until(lambda: learner(run, "pair-0").get("life") == 2, "the island's next life")
    assert ps(run)["pair-0"]["restarts"] == 1

    # Slurm's own SIGTERM reaches every process, and torchrun passes it on once more: it leaves in order all the same
    until(lambda: learner(run, "pair-0").get("state") == "training" and learner(run, "pair-0")["step"] > 20, "steps")
    told("scancel", id_of("real-pair"))
    until(lambda: ps(run)["pair-0"]["state"] == "ended", "the island to be gone")
    assert " 0 not: it left, and all that was still open is settled" in (run / "logs" / "pair-0.log").read_text()
    assert skerry("scale", run, "pair", "1").returncode == 0, "which brings back what was cancelled"
    until(lambda: learner(run, "pair-0").get("life") == 3, "the island again")

    # the syncer's process is killed: learners find it at its next address, and lose nothing
    life, pid = learner(run, "single-0")["life"], status_of(run)["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: status_of(run).get("pid", pid) != pid, "another syncer")
    until(lambda: learner(run, "single-0").get("state") == "training", "the learner to find it")
    merges = status_of(run)["merges"]
    until(lambda: status_of(run)["merges"] > merges, "merges after its return")
    assert learner(run, "single-0")["life"] == life and ps(run)["syncer"]["restarts"] == 1

    # more of them, and fewer
    assert skerry("scale", run, "single", "2").returncode == 0
    until(lambda: learner(run, "single-1").get("step", 0) > 0, "the second learner")
    assert skerry("scale", run, "single", "1").returncode == 0
    assert learner(run, "single-1")["state"] == "left" and "single-1" not in ps(run)

    # its time is nearly over: it leaves in order, and is queued again; Slurm lets it wait for two minutes
    told("scancel", "--batch", "--signal=TERM", id_of("real-single"))
    until(lambda: ps(run)["single-0"]["state"] == "waiting", "the learner to be in the queue")
    assert learner(run, "single-0")["unsettled_tokens"] == 0
    assert "steps merged, 0 not" in "".join(skerry("logs", run, "single-0").stdout)

    down = skerry("down", run)
    assert down.returncode == 0, down.stderr
    assert {m["state"] for m in ps(run).values()} == {"ended"} and not told("squeue", "-h")
    assert not processes_naming(str(run))
    audit = skerry("replay", run)
    assert audit.returncode == 0, audit.stderr
    tokens = json.loads(skerry("status", run, "--json").stdout)["tokens"]
    assert tokens["produced"] == tokens["merged"] + sum(tokens["discarded"].values()) + tokens["pending"]
    assert tokens["pending"] == 0
