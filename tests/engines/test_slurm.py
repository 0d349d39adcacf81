"""A run on Slurm, with a stand-in for Slurm's commands that runs the generated scripts as real processes.

`tests/extras/test_slurm.py` does the same on a real one, where it is installed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.processes import processes_naming, skerry, status_of, until
from skerry.core.state import state_of
from skerry.engines import slurm, spec
from skerry.engines.folder import record_of
from skerry.engines.jobs import TEND, jobs_of, printed
from skerry.errors import Refusal
from skerry.store import Store

pytestmark = pytest.mark.timeout(300)

SINFO = "cpu|cpu*|16|64000|(null)|amd,big\ngpu|gpu|32|256000|gpu:a100:4(S:0-1)|a100\ngpu|gpu|8|64000|gpu:2|(null)\n"
RUN = """
[run]
name = "mine"
steps = {steps}
gather_s = 5
learners = 4

[sync]
quorum = 1

[model]
preset = "tiny"

[learner]
step_s = 0.05

[[islands]]
name = "one"
count = 2
restart = "{restart}"
"""
# A command that says what it was told, in a file of its own, and ends as it is asked to.
TELLER = """
import json, os, signal, sys, time
from pathlib import Path
with open(os.environ["TOLD"], "a") as file:
    print(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}), file=file)
if "stay" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    Path(os.environ["TOLD"] + ".up").touch()
    time.sleep(600)
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder that is first on the PATH, with Slurm's commands in it; no job is left behind."""
    bin, root = tmp_path / "bin", tmp_path / "stand-in"
    bin.mkdir()
    root.mkdir()
    code = Path(__file__).with_name("slurm_stand_in.py").read_text()
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun"):
        (bin / name).write_text(f"#!{sys.executable} -S\n{code}")
        (bin / name).chmod(0o755)
    (bin / "hostname").write_text("#!/bin/sh\necho 127.0.0.1\n")
    (bin / "hostname").chmod(0o755)
    (root / "sinfo").write_text(SINFO)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(root))
    yield root
    for state in root.glob("*.state"):
        (root / f"{state.stem}.again").unlink(missing_ok=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid := json.loads(state.read_text())["pid"]:
                os.killpg(pid, signal.SIGKILL)


def read(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return spec.read(file)


def file_of(tmp_path, **values):
    (tmp_path / "run.toml").write_text(RUN.format(**{"steps": 100000, "restart": "failure"} | values))
    return tmp_path / "run.toml"


def ps(run):
    done = skerry("ps", run, "--json")
    assert done.returncode == 0, done.stderr
    return {member["name"]: member for member in json.loads(done.stdout)["members"]}


def ledger_of(run):
    with Store.open(run, readonly=True) as store:
        return state_of(store.records)


# ------------------------------------------------------------------------------------------------------- a life


def test_a_launch_trains_scales_and_goes_down_in_order(cluster, tmp_path):
    file, run = file_of(tmp_path), tmp_path / "a run's 100% folder"
    done = skerry("launch", file, "--engine", "slurm", "--run", run, "--json")
    assert done.returncode == 0, done.stderr
    assert [m["name"] for m in json.loads(done.stdout)["members"]] == ["syncer", "one-0", "one-1"]
    until(lambda: status_of(run).get("merges", 0) > 2, "merges")
    assert all(m["state"] == "running" and m["where"] == "here" for m in ps(run).values())
    assert all((run / "keys" / f"one-{i}.key").stat().st_mode & 0o077 == 0 for i in range(2))

    up = skerry("launch", file, "--engine", "slurm", "--run", run)
    assert up.returncode == 2 and "it is up: skerry down" in up.stderr

    assert skerry("scale", run, "one", "3").returncode == 0
    until(lambda: status_of(run)["learners"].get("one-2", {}).get("state") == "training", "the third learner")
    assert skerry("scale", run, "one", "1").returncode == 0
    learners = status_of(run)["learners"]
    assert {name: one["state"] for name, one in learners.items() if name != "one-0"} == {
        "one-1": "left",
        "one-2": "left",
    }
    assert [m["name"] for m in ps(run).values()] == ["syncer", "one-0"]

    said = skerry("logs", run, "one-1")
    assert "told to end: one-1 leaves in order" in said.stdout
    strange = skerry("logs", run, "one-9")
    assert strange.returncode == 2 and "no member 'one-9' in this run" in strange.stderr

    down = skerry("down", run, "--json")
    assert down.returncode == 0, down.stderr
    assert json.loads(down.stdout)["ended"] == ["syncer", "one-0"]
    assert all(m["state"] == "ended" for m in ps(run).values())
    assert not processes_naming(str(run))
    audit = skerry("replay", run, "--json")
    assert audit.returncode == 0, audit.stderr
    assert not any(one["unsettled_tokens"] for one in status_of(run)["learners"].values())

    again = skerry("launch", file, "--engine", "slurm", "--run", run)
    assert again.returncode == 0, again.stderr
    merges = status_of(run)["merges"]
    until(lambda: status_of(run).get("merges", 0) > merges, "the run to go on")
    assert ps(run)["one-0"]["restarts"] == 1 and "one-1" not in ps(run), "with as many learners as were last asked for"
    assert skerry("down", run).returncode == 0


def test_what_dies_comes_back_and_a_syncer_that_moves_is_found(cluster, tmp_path):
    file, run = file_of(tmp_path), tmp_path / "run"
    assert skerry("launch", file, "--engine", "slurm", "--run", run).returncode == 0
    until(lambda: all(learner(run, f"one-{i}").get("state") == "training" for i in range(2)), "both learners")
    first, pid = (run / "slurm" / "address").read_text(), status_of(run)["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: status_of(run).get("pid", pid) != pid, "another syncer")
    assert (run / "slurm" / "address").read_text() != first
    until(lambda: all(learner(run, f"one-{i}").get("state") == "training" for i in range(2)), "both learners again")
    merges = status_of(run)["merges"]
    until(lambda: status_of(run)["merges"] > merges, "merges after the syncer's return")
    assert all(learner(run, f"one-{i}")["life"] == 1 for i in range(2)), "they were not restarted: they found it"

    os.kill(process_of(run, "one-1"), signal.SIGKILL)
    until(lambda: learner(run, "one-1").get("life") == 2, "the learner's next life")
    assert ps(run)["one-1"]["restarts"] == 1
    assert "one-1 ended with 137: it is started again in 2 s" in (run / "logs" / "one-1.log").read_text()

    element = next(path.stem for path in cluster.glob("*_0.state"))
    subprocess.run(["scancel", "--batch", "--signal=TERM", element], check=True)  # as if its time were nearly over
    until(lambda: learner(run, "one-0").get("life") == 2, "the learner to be queued again")
    assert "one-0 is queued again: its time here is over" in (run / "logs" / "one-0.log").read_text()
    assert learner(run, "one-1")["life"] == 2, "it alone, and no other of its array"
    assert skerry("down", run).returncode == 0
    assert not processes_naming(str(run))
    assert skerry("replay", run).returncode == 0


def learner(run, name):
    return status_of(run).get("learners", {}).get(name, {})


def process_of(run, name):
    for pid in processes_naming("skerry\0learner"):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        if f"SKERRY_NAME={name}" in words and f"SKERRY_SYNCER=@{run}/slurm/address" in words:
            return pid
    raise AssertionError(f"no process of {name}")


@pytest.mark.parametrize("restart", ["failure", "always"])
def test_a_run_that_is_closed_ends_everywhere_and_queues_nobody_again(cluster, tmp_path, restart):
    file, run = file_of(tmp_path, steps=60, restart=restart), tmp_path / "run"
    assert skerry("launch", file, "--engine", "slurm", "--run", run).returncode == 0
    until(lambda: (run / "slurm" / "closed").exists(), "the run to be closed")
    until(lambda: all(json.loads(p.read_text())["state"] == "COMPLETED" for p in cluster.glob("*.state")), "all to end")
    assert all(member["state"] == "ended" for member in ps(run).values())
    assert ledger_of(run).phase == "closed"


# ----------------------------------------------------------------------------------------------- scripts and quoting


def tried(tmp_path, island, extra=""):
    """The script of this island, as it is, run as an element 0 with a command that says what it was told."""
    teller, told = tmp_path / "tell er.py", tmp_path / "told"
    teller.write_text(TELLER)
    text = f'[run]\nname = "mine"\nsteps = 10\n{extra}\n[[islands]]\nname = "one"\n{island}\n'
    return read(tmp_path, text.replace("TELLER", str(teller)).replace("TOLD_FILE", str(told))), told


def run_script(launch, folder, island="one"):
    made = slurm._made(folder)
    slurm._put(made / "tend.sh", TEND.read_text())
    job = next(job for job in jobs_of(launch, folder) if job.name == island)
    script = made / f"{island}.sh"
    slurm._put(script, job.script)
    env = os.environ | {
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "7",
        "SKERRY_TOKEN_FILE": "of-the-shell",
    }
    return subprocess.Popen(["bash", str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


HOSTILE = "a 'b' \"c\" $(touch INJECTED) `touch INJECTED` ; touch INJECTED\n#SBATCH --wrap=x \\ % * é"
IN_A_LINE = HOSTILE.replace("\n", " ")  # an environment variable alone may have several


def test_hostile_values_reach_the_command_as_they_are(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = json.dumps(HOSTILE)
    island = (
        f'command = ["python", "TELLER", {json.dumps(IN_A_LINE)}]\n'
        f'[islands.env]\nTOLD = "TOLD_FILE"\nHOSTILE = {value}\nname = "x"\ncommand = "y"\ncode = "z"\nslurm = "w"'
    )
    launch, told = tried(tmp_path, island)
    process = run_script(launch, tmp_path / "a $(touch INJECTED) 'run'")
    assert process.wait(60) == 0, process.stdout.read()
    said = json.loads(told.read_text())
    assert said["argv"] == [IN_A_LINE] and said["env"]["HOSTILE"] == HOSTILE
    assert [said["env"][key] for key in ("name", "command", "code", "slurm")] == ["x", "y", "z", "w"]
    assert said["env"]["SKERRY_NAME"] == "one-0" and "SKERRY_TOKEN_FILE" not in said["env"]
    assert said["env"]["SKERRY_SYNCER"] == f"@{tmp_path}/a $(touch INJECTED) 'run'/slurm/address"
    assert not list(tmp_path.rglob("INJECTED"))


def test_no_path_in_what_a_dry_run_prints_ends_a_comment(cluster, tmp_path):
    """Where it is refused, and where one is shown all the same: the next line would be a command."""
    launch, _ = tried(tmp_path, "count = 1")
    folder = tmp_path / "run\ntouch INJECTED"
    with pytest.raises(Refusal, match="no control character"):
        slurm.dry(launch, folder)
    job = jobs_of(launch, tmp_path / "run")[1]
    comments = printed(folder, job).partition(job.script)[0].splitlines()
    assert comments and all(line.startswith("#") for line in comments)


@pytest.mark.parametrize("word", ["A=b", "-c", "exit"])
def test_the_first_word_of_a_command_is_a_program_whatever_it_looks_like(cluster, tmp_path, word):
    program = tmp_path / "bin" / word
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$*" "$SKERRY_NAME" > "$TOLD"\n')
    program.chmod(0o755)
    launch, told = tried(tmp_path, f'command = ["{word}", "echo", "hi"]\nenv = {{TOLD = "TOLD_FILE", name = "x"}}')
    process = run_script(launch, tmp_path / "run")
    process.communicate(timeout=60)
    assert told.read_text() == "echo hi\none-0\n"


def test_sigterm_is_passed_on_once_and_the_script_ends_with_it(cluster, tmp_path):
    launch, _ = tried(tmp_path, 'command = ["python", "TELLER", "stay"]\nrestart = "never"\nenv = {TOLD = "TOLD_FILE"}')
    process = run_script(launch, tmp_path / "run")
    until((tmp_path / "told.up").exists, "the command")
    process.terminate()
    assert process.wait(60) == 0 and "one-0 leaves in order" in process.stdout.read()
    assert (tmp_path / "run" / "slurm" / "members" / "one-0").read_text().startswith("ended 1 0 ")


@pytest.mark.parametrize(
    ("restart", "code", "lives"), [("never", 3, 1), ("failure", 0, 1), ("failure", 3, 2), ("always", 0, 2)]
)
def test_a_policy_says_what_is_brought_back(cluster, tmp_path, restart, code, lives):
    """Whoever is brought back is ended by the wish that it be gone, which is looked for before each start."""
    island = f'command = ["python", "TELLER"]\nrestart = "{restart}"\nenv = {{TOLD = "TOLD_FILE", CODE = "{code}"}}'
    launch, told = tried(tmp_path, island)
    process = run_script(launch, tmp_path / "run")
    until(lambda: told.exists() and len(told.read_text().splitlines()) == lives, f"{lives} lives")
    slurm._wish(tmp_path / "run", "gone/one-0")
    assert process.wait(60) == code, process.stdout.read()
    assert len(told.read_text().splitlines()) >= lives


def test_each_element_has_its_own_speed(cluster, tmp_path):
    launch, _ = tried(tmp_path, "count = 3\nspeed = [1.0, 0.5]")
    script = jobs_of(launch, tmp_path / "run")[1].script.replace('. "$slurm/tend.sh"', 'echo "${command[@]}"')
    said = [
        subprocess.run(
            ["bash", "-c", script], env=os.environ | {"SLURM_ARRAY_TASK_ID": at}, capture_output=True, text=True
        )
        for at in "012"
    ]
    assert [one.stdout.partition("--speed ")[2].strip() for one in said] == ["1", "0.5", "0.5"]


def test_machines_of_a_learner_meet_by_their_ranks_without_a_pickle(cluster, tmp_path):
    """torchrun says who it is to what it starts; its rendezvous c10d would number machines as they come."""
    island = (
        'command = ["python", "TELLER"]\nmachines = 2\nworkers = 2\nrestart = "never"\n'
        'env = {TOLD = "TOLD_FILE", LOGLEVEL = "INFO"}'
    )
    launch, told = tried(tmp_path, island)
    process = run_script(launch, tmp_path / "run")
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert said.count("rdzv_backend             : static") == 2 and "c10d_rendezvous" not in said
    workers = [json.loads(line)["env"] for line in told.read_text().splitlines()]
    assert sorted((each["GROUP_RANK"], each["RANK"]) for each in workers) == [
        ("0", "0"), ("0", "1"), ("1", "2"), ("1", "3"),
    ]  # fmt: skip
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in workers} == {("127.0.0.1", "20007")}


def test_every_script_is_one_that_bash_can_read(cluster, tmp_path):
    two = 'name = "two"\nmachines = 2\nworkers = 4\ncommand = ["python", "t.py"]'
    text = f'[slurm]\nsetup = ["module load x"]\n[[islands]]\n{two}'
    launch, _ = tried(tmp_path, "count = 3", text)
    for job in jobs_of(launch, tmp_path / "run"):
        subprocess.run(["bash", "-n"], input=job.script, text=True, check=True)
    subprocess.run(["bash", "-n", TEND], check=True)
    shown = slurm.dry(launch, tmp_path / "run")
    assert "--array=0-2" in shown and "--nnodes 2" in shown and "--nodes=2" in shown and "module load x" in shown
    assert not (tmp_path / "run").exists(), "nothing is touched"


# ------------------------------------------------------------------------------------------------------- refusals

BAD = [
    ('[slurm]\npartition = "gpo"', "count = 1", "no partition 'gpo' here: did you mean gpu?"),
    ('[slurm]\npartition = "gpu"', "gpus = 8", "island one: 8 GPUs on a machine, the largest machine has 4"),
    ('[slurm]\npartition = "gpu"', "gpus = 0.5", "island one: 0.5 GPUs a machine: Slurm gives whole ones"),
    ("", "cpus = 17", "island one: 17 cores on a machine, the largest machine has 16"),
    ("", "gpus = 1", "island one: 1 GPUs on a machine, the largest machine has 0"),
    ("", "memory_gib = 100", "island one: 102400 MiB of memory on a machine, the largest machine has 64000"),
    ("", 'where = "a100"', "no machine has the feature 'a100': there are amd, big"),
    ("", 'where = "partition=gpu h100"', "no machine has the feature 'h100': there are a100"),
    ("", 'where = "a b"', "where = 'a b': write a constraint of sbatch"),
    ("", "count = 101", "island one: 101 learners, and an array has 100 here: make two islands of it"),
    ("[syncer]\ncpus = 20", "count = 1", "syncer: 20 cores on a machine, the largest machine has 16"),
    ('[slurm]\ntime = "soon"', "count = 1", "slurm.time = 'soon': write it as Slurm does"),
    ('[slurm]\ntime = "5"', "count = 1", "slurm.time = '5': too short"),
    ('[slurm]\naccount = "a b"', "count = 1", "slurm.account = 'a b'"),
    ('[slurm]\noptions = ["--wrap=rm -rf x"]', "count = 1", "write --name or --name=value, without spaces"),
    ('[slurm]\noptions = ["--wrap=x"]', "count = 1", "--wrap is said by skerry launch"),
    ('[slurm]\noptions = ["--arr=0-99"]', "count = 1", "--arr is said by skerry launch"),
    ('[slurm]\noptions = ["other.sh"]', "count = 1", "'other.sh': write --name or --name=value"),
    ("", 'env = {UID = "5"}', "island one: env.UID is bash's own, in which jobs begin, and cannot be said"),
    ('[syncer]\nenv = {RANDOM = "5"}', "count = 1", "syncer: env.RANDOM is bash's own"),
]


@pytest.mark.parametrize(("tables", "island", "said"), BAD)
def test_what_cannot_be_had_is_refused_in_one_line_before_anything_is_submitted(
    cluster, tmp_path, tables, island, said
):
    launch, _ = tried(tmp_path, island, tables)
    problem = next(slurm.problems(launch), "")
    assert said in problem and "\n" not in problem


def test_what_the_cluster_has_is_no_problem(cluster, tmp_path):
    text = '[slurm]\ntime = "1-0"\noptions = ["--qos=high", "--exclusive"]\n[syncer]\nwhere = "big"'
    island = 'count = 100\ngpus = 4\ncpus = 8\nmemory_gib = 100\nwhere = "partition=gpu a100"'
    launch, _ = tried(tmp_path, island, text)
    assert list(slurm.problems(launch)) == []
    options = jobs_of(launch, tmp_path / "run")[1].options
    assert {"--gres=gpu:4", "--mem=102400M", "--partition=gpu", "--constraint=a100", "--qos=high"} <= set(options)


@pytest.mark.parametrize("name", ["../../x", "../x", "x", "one-0/../../../x", "one-", "one-²", "two-0"])
def test_logs_are_of_members_of_this_launch_alone(cluster, tmp_path, name):
    run, logs = tmp_path / "run", tmp_path / "run" / "logs"
    (logs / "one-0").mkdir(parents=True)
    for other in (tmp_path / "x.log", run / "x.log", logs / "x.log", logs / "two-0.log", logs / "one-.log"):
        other.write_text("not for this\n")
    (logs / "one-7.log").write_text("gone before\n")
    record = record_of(read(tmp_path, file_of(tmp_path).read_text()), "slurm", run)
    assert list(slurm.logs(record, "one-7", False)) == ["gone before"], "of a learner that is wanted no more"
    with pytest.raises(Refusal, match=r"no member .* in this run"):
        list(slurm.logs(record, name, False))


def test_a_machine_without_slurm_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    launch, _ = tried(tmp_path, "count = 1")
    with pytest.raises(Refusal, match="sinfo is not on the PATH: launch from a machine with Slurm's commands"):
        list(slurm.problems(launch))


def test_a_slurm_that_does_not_answer_is_one_line(cluster, tmp_path, monkeypatch):
    (cluster / "hangs").touch()
    monkeypatch.setattr(slurm, "ASK_S", 0.5)
    launch, _ = tried(tmp_path, "count = 1")
    with pytest.raises(Refusal, match="sinfo had no answer within 0 s: is slurmctld up"):
        list(slurm.problems(launch))


def test_a_launch_that_sbatch_refuses_leaves_nothing_in_the_queue(cluster, tmp_path):
    launch, _ = tried(tmp_path, "count = 1", '[slurm]\naccount = "bad"')
    with pytest.raises(Refusal, match="sbatch: error: Batch job submission failed: Invalid account"):
        slurm.start(launch, tmp_path / "run")
    assert not list(cluster.glob("*.state"))
