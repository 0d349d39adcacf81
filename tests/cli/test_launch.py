"""A launched run on this machine, with real processes: it starts, mends itself, is scaled and ends."""

import contextlib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.called import called
from e2e.processes import Running, is_running, processes_naming, secret, skerry, status_of, until
from engines.launches import below, kill, looked, loop_of, pid_of, until_merging, write_launch
from skerry.core.audit import Audit
from skerry.engines import folder
from skerry.run.facts import entries_of
from skerry.run.tally import tally
from skerry.store import lock
from skerry.store.lock import SUPERVISOR, holder_of
from skerry.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
OFF = ["--http-port", "off"]


def check_books(run):
    """Every fact of the tape is held against the invariants, and nothing that was produced is missing."""
    with Store.open(run, readonly=True) as store:
        audit, t = Audit(), tally(store)
        for _, fact in entries_of(store):
            audit.take(fact)
    assert not audit.violations and t.merged > 0
    return t


def ended(run, code):
    def is_so():
        return run.process.poll() is not None

    until(is_so, "its end")
    assert run.process.returncode == code, run.said


def test_a_run_ends_by_itself_with_its_books_in_order(tmp_path):
    """The syncer, a learner and a learner's process are killed on the way: each comes back and contributes."""
    file, run = write_launch(tmp_path, ("a", 2), ("b", 1)), tmp_path / "run"
    with Running(tmp_path, "launch", file, "--run", run, "--json", *OFF) as launch:
        status = until_merging(run, "a-0", "a-1", "b-0")
        kill(status["pid"])
        before = looked(run)
        kill(pid_of(before["a-0"]))
        kill(loop_of(before["b-0"]))
        until(lambda: (m := looked(run)) and all(m[n]["restarts"] == 1 for n in ("syncer", "a-0", "b-0")), "restarts")
        until_merging(run, "a-0", "a-1", "b-0")
        assert skerry("stop", run, "--finish").returncode == 0
        ended(launch, 0)
    told = json.loads(launch.out.read_text())
    assert (told["phase"], told["engine"], told["go_on"]) == ("closed", "local", f"skerry export {run}")
    # The loop of a-0 outlives the process that was killed, and leaves in order if the syncer is back in time.
    assert told["ledger"]["balance"] == 0 and told["syncer_restarts"] >= 1 and told["learner_restarts"] >= 1
    assert {member["state"] for member in told["members"]} == {"ended"}
    assert {learner["lives"] for learner in told["learners"].values()} >= {1, 2}
    check_books(run)
    assert not processes_naming(str(tmp_path)) and not (run / "token").exists()
    again = skerry("launch", file, "--run", run, *OFF)
    assert again.returncode == 2 and "this run is closed; export it with: skerry export" in again.stderr


def test_a_run_in_the_background_is_scaled_ended_and_gone_on_with(tmp_path):
    file, run = write_launch(tmp_path, ("a", 1), ("b", 1), learners=4), tmp_path / "run"
    begun = skerry("launch", file, "--run", run, "--detach", "--json", *OFF)
    assert begun.returncode == 0, begun.stderr
    assert [member["name"] for member in json.loads(begun.stdout)["members"]][:1] == ["syncer"]
    try:
        until_merging(run, "a-0", "b-0")
        supervisor = holder_of(run / SUPERVISOR).pid
        again = skerry("launch", file, "--run", run, *OFF)
        assert again.returncode == 2 and f"it is up: skerry down {run} first" in again.stderr
        assert skerry("scale", run, "a", 4).stderr.count("the run is for 4 (run.learners): 3 of a at most") == 1

        more = skerry("scale", run, "a", 3, "--json")
        assert json.loads(more.stdout) == {"run": str(run), "island": "a", "before": 1, "count": 3}
        until_merging(run, "a-0", "a-1", "a-2", "b-0")
        assert skerry("scale", run, "a", 1).stdout == "a: 1 learner, where there were 3\n"
        until(lambda: list(looked(run)) == ["syncer", "a-0", "b-0"], "two to leave")
        assert "it left, and all that was still open is settled" in skerry("logs", run, "a-2").stdout
        everything = below(supervisor)
        done = skerry("down", run, "--json")
        assert sorted(json.loads(done.stdout)["ended"]) == ["a-0", "b-0", "syncer"], done.stderr
        assert f"skerry: asked process {supervisor} to end\n" in done.stderr, "it may take minutes"
        assert not any(map(is_running, [supervisor, *everything])) and not processes_naming(str(tmp_path))
        assert {member["state"] for member in looked(run).values()} == {"ended"}
        assert skerry("down", run).stdout == f"{run}: nothing of it was up\n"
        assert f"go on with: skerry launch {file} --run {run}" in skerry("stop", run).stdout
        check_books(run)

        merges = status_of(run)["merges"]
        assert skerry("launch", file, "--run", run, "--detach", *OFF).returncode == 0
        until(lambda: status_of(run).get("merges", 0) > merges, "merges after it goes on")
        other = skerry("launch", file, "--run", run, "--run.steps", 5, *OFF)
        assert other.returncode == 2
        assert f"says something else: go on with skerry launch {file} --run {run}, or" in other.stderr
    finally:
        assert skerry("down", run).returncode == 0
    assert not processes_naming(str(tmp_path))


def test_what_it_is_to_go_on_with_has_its_overrides_and_goes_on_as_it_stands(tmp_path):
    file, run = write_launch(tmp_path, ("a", 1)), tmp_path / "a run"
    words = ["--run.steps", "200000", "--run.name", "k3", "--sync.grace", "0.5"]
    with Running(tmp_path, "launch", file, "--run", run, *words, *OFF) as launch:
        until_merging(run, "a-0")
        launch.signal(signal.SIGINT)
        ended(launch, 130)
    line = shlex.join(["skerry", "launch", str(file), "--run", str(run)])
    line += " --run.steps=200000 --run.name=k3 --sync.grace=0.5"
    assert f"go on with: {line}\n" in launch.said and f"go on with: {line}\n" in skerry("stop", run).stdout
    assert json.loads(skerry("drop", run, "a-0", "--readmit", "--json").stdout)["go_on"] == line
    other = skerry("launch", file, "--run", run, "--run.steps", 5, *OFF)
    assert other.returncode == 2 and f"says something else: go on with {line}, or choose another folder" in other.stderr

    merges = status_of(run)["merges"]
    with Running(tmp_path, *shlex.split(line)[1:], *OFF) as launch:
        until(lambda: status_of(run).get("merges", 0) > merges, "merges after it goes on")
        launch.signal(signal.SIGTERM)
        ended(launch, 130)
    file.write_text(file.read_text() + "\n")
    changed = skerry("launch", *shlex.split(line)[2:], *OFF)
    assert changed.returncode == 2 and f"a launch of {file}, which says something else by now" in changed.stderr


def has_open(pid, path):
    """Whether this process has that file open."""
    files = Path(f"/proc/{pid}/fd")
    with contextlib.suppress(OSError):
        return any(os.path.samefile(file, path) for file in files.iterdir())
    return False


def test_who_scales_waits_for_who_does_so_already(tmp_path):
    """Else the one who reads first and writes last undoes what the other asked for."""
    file, run = write_launch(tmp_path, ("a", 1), ("b", 1)), tmp_path / "run"
    with Running(tmp_path, "launch", file, "--run", run, *OFF) as launch:
        until_merging(run, "a-0", "b-0")
        with contextlib.ExitStack() as ours:
            record = ours.enter_context(folder.changing(run))
            with Running(tmp_path, "scale", run, "a", 2) as other:
                until(lambda: has_open(other.process.pid, run / folder.CHANGING), "it to come to the lock")
                record.counts["b"] = 2
                folder.write(record)
                ours.close()
                assert other.wait() == 0, other.said
        assert folder.read(run).counts == {"a": 2, "b": 2}
        launch.signal(signal.SIGTERM)
        ended(launch, 130)


def test_a_crash_loop_is_shown_and_harms_nobody_else(tmp_path):
    good, bad = ("good", 1), ("bad", 1, ["sh", "-c", r"printf 'no \033[31mdata\n' >&2; exit 3"])
    once, gone = ("once", 1, ["true"]), ("gone", 1, ["false"], 'restart = "never"')
    back = ("back", 1, ["true"], 'restart = "always"')
    file, run = write_launch(tmp_path, good, bad, once, gone, back), tmp_path / "run"
    with Running(tmp_path, "launch", file, "--run", run, *OFF) as launch:
        until_merging(run, "good-0")
        until(lambda: looked(run)["bad-0"]["restarts"] >= 2, "two restarts")
        until(lambda: looked(run)["back-0"]["restarts"] >= 1, "it is brought back though it ended well")
        members = until(lambda: (m := looked(run)) and m["bad-0"]["state"] == "restarting" and m, "its end")
        assert members["bad-0"]["detail"] == "exit 3: no \\x1b[31mdata"
        told = "bad-0 crashed (exit 3): no \\x1b[31mdata (log: "
        until(lambda: told in launch.said, "the reason where it is watched")
        assert "\x1b[31m" not in launch.said
        assert (members["once-0"]["state"], members["once-0"]["restarts"]) == ("ended", 0)
        assert (members["gone-0"]["state"], members["gone-0"]["detail"]) == ("failed", "exit 1: it said nothing")
        assert "bad-0" in (shown := skerry("ps", run).stdout) and "\x1b" not in shown and "restarting" in shown
        said = skerry("logs", run, "bad-0", "--json")
        assert set(json.loads(said.stdout)["lines"]) == {"no \\x1b[31mdata"} and "\x1b[31m" not in said.stdout
        merges = status_of(run)["merges"]
        until(lambda: status_of(run)["merges"] > merges + 2, "merges of the others")
        launch.signal(signal.SIGINT)
        ended(launch, 130)
    assert f"interrupted; go on with: skerry launch {file} --run {run}" in launch.said
    assert not processes_naming(str(tmp_path))


def test_a_run_without_a_learner_left_is_ended_and_says_how_they_ended(tmp_path):
    once, gone = ("once", 1, ["true"]), ("gone", 1, ["sh", "-c", "echo no data; exit 3"], 'restart = "never"')
    run = tmp_path / "run"
    done = skerry("launch", write_launch(tmp_path, once, gone), "--run", run, *OFF)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("skerry: ")]
    assert "no learner is left, and the run is not closed: once-0 ended (exit 0), gone-0 exit 3: no data" in line
    assert f"skerry logs {run} once-0" in line and "skerry scale" in line
    members = looked(run)
    assert members["syncer"]["state"] == "failed" and "no learner is left" in members["syncer"]["detail"]
    assert not processes_naming(str(tmp_path))


def test_what_a_killed_supervisor_leaves_ends_by_itself_and_the_launch_goes_on(tmp_path):
    file, run = write_launch(tmp_path, ("a", 2)), tmp_path / "run"
    with Running(tmp_path, "launch", file, "--run", run, *OFF) as launch:
        until_merging(run, "a-0", "a-1")
        everything = below(launch.process.pid)
        launch.signal(signal.SIGKILL)
        launch.wait()
    until(lambda: not any(map(is_running, everything)), "the end of all that it had")
    assert {m["state"] for m in looked(run).values()} == {"failed"}
    assert "its supervisor was killed" in skerry("ps", run).stdout
    assert skerry("scale", run, "a", 1).returncode == 2
    assert skerry("down", run).returncode == 0 and not (run / "token").exists()
    merges = status_of(run)["merges"]
    with Running(tmp_path, "launch", file, "--run", run, *OFF) as launch:
        until(lambda: status_of(run).get("merges", 0) > merges, "merges after it goes on")
        launch.signal(signal.SIGTERM)
        ended(launch, 130)


def test_who_is_told_to_end_while_it_starts_does_not_come_up(tmp_path):
    """It can be found from when it holds the lock, before it has a syncer; twice is once."""
    file, run = write_launch(tmp_path, ("a", 1)), tmp_path / "run"
    with Running(tmp_path, "launch", file, "--run", run, *OFF) as launch:
        until(lambda: (run / "launch.json").exists(), "its record")
        assert holder_of(run / SUPERVISOR).pid == launch.process.pid
        with Running(tmp_path, "down", run) as first, Running(tmp_path, "down", run) as second:
            assert (first.wait(), second.wait()) == (0, 0), first.said
        ended(launch, 130)
    assert {member["state"] for member in looked(run).values()} == {"ended"}
    assert f"{run}: ended syncer" in first.out.read_text(), "by the one that came first, whichever that was"
    assert not processes_naming(str(tmp_path)) and not (run / "token").exists()


def test_who_is_interrupted_while_it_comes_up_in_the_background_is_told_that_it_does(tmp_path):
    file, run = write_launch(tmp_path, ("a", 1)), tmp_path / "run"
    with Running(tmp_path, "launch", file, "--run", run, "--detach", *OFF) as launch:
        supervisor = until(lambda: (run / SUPERVISOR).exists() and holder_of(run / SUPERVISOR), "its supervisor").pid
        os.kill(supervisor, signal.SIGSTOP)  # so that it is not up before the word comes
        launch.signal(signal.SIGINT)
        ended(launch, 130)
    where = f"look at it with skerry ps {run}, end it with skerry down {run}"
    assert launch.said == f"skerry: interrupted; it goes on in the background: {where}\n"
    os.kill(supervisor, signal.SIGCONT)
    assert skerry("down", run).returncode == 0
    assert not processes_naming(str(tmp_path))


def test_what_ends_in_the_background_ends_who_waits_for_it_with_its_own_code(tmp_path):
    """By which what may do later is told from what must be changed: here another process holds the run directory."""
    file, run = write_launch(tmp_path, ("a", 1)), tmp_path / "run"
    with Running(tmp_path, "launch", file, "--run", run, *OFF) as launch:
        until_merging(run, "a-0")
        launch.signal(signal.SIGTERM)
        ended(launch, 130)
    with (run / lock.LOCK).open("r+") as held:
        assert not lock.take(held.fileno())
        done = skerry("launch", file, "--run", run, "--detach", *OFF)
    assert done.returncode == 75 and "try again in a moment" in done.stderr, done.stderr


def test_a_process_that_is_gone_is_not_said_to_run_by_a_table_that_cannot_be_written(tmp_path):
    """As on a full disk; a number that is another process's by now does not stand for it."""
    file, run = write_launch(tmp_path, ("a", 1), ("b", 1)), tmp_path / "run"
    with Running(tmp_path, "launch", file, "--run", run, *OFF) as launch:
        until_merging(run, "a-0", "b-0")
        (run / "members.json.tmp").mkdir()
        before = looked(run)
        kill(pid_of(before["a-0"]))
        after = looked(run)
        assert (after["a-0"]["state"], after["a-0"]["where"], after["b-0"]) == ("unknown", "", after["b-0"])
        assert f"process {pid_of(before['a-0'])} has ended, and this table is older" in after["a-0"]["detail"]
        assert after["b-0"]["where"] == before["b-0"]["where"] and after["b-0"]["state"] == "running"
        table = json.loads((run / "members.json").read_bytes())
        table[1][3] = f"process {os.getpid()}"
        (run / "members.json").write_bytes(json.dumps(table).encode())
        assert looked(run)["a-0"]["state"] == "unknown"
        launch.signal(signal.SIGTERM)
        ended(launch, 130)


def test_who_comes_second_into_a_folder_changes_nothing_there(tmp_path):
    file, run = write_launch(tmp_path, ("a", 1)), tmp_path / "run"
    run.mkdir()
    with (run / SUPERVISOR).open("w+") as held:
        assert not lock.take(held.fileno())
        done = skerry("launch", file, "--run", run, *OFF)
        assert done.returncode == 2 and "is run by process" in done.stderr and done.stderr.count("\n") == 1
        assert [path.name for path in run.iterdir()] == [SUPERVISOR]


def test_what_a_killed_supervisor_had_is_not_taken_for_what_there_is(tmp_path):
    """Its table still says that a syncer runs: who launches anew in the background waits for their own."""
    file, run = write_launch(tmp_path, ("a", 1)), tmp_path / "run"
    with Running(tmp_path, "launch", file, "--run", run, *OFF) as launch:
        until_merging(run, "a-0")
        everything = below(launch.process.pid)
        launch.signal(signal.SIGKILL)
        launch.wait()
    until(lambda: not any(map(is_running, everything)), "the end of all that it had")
    begun = skerry("launch", file, "--run", run, "--detach", "--json", *OFF)
    try:
        [syncer] = [each for each in json.loads(begun.stdout)["members"] if each["name"] == "syncer"]
        assert syncer["state"] == "running" and is_running(pid_of(syncer))
    finally:
        assert skerry("down", run).returncode == 0


ESCAPES = """
trap '' TERM
kill -9 $PPID
setsid sleep 600 & session=$!
(sleep 600) & child=$!
echo $$ $session $child >> pids
while :; do sleep 1; done
"""


def test_a_command_that_kills_what_holds_it_does_not_escape(tmp_path):
    """Not beside its next life, and not the end of the run."""
    (tmp_path / "escapes.sh").write_text(ESCAPES)
    file, run = write_launch(tmp_path, ("a", 1), ("bad", 1, ["sh", "escapes.sh"])), tmp_path / "run"

    def lives():
        lines = (tmp_path / "pids").read_text().splitlines() if (tmp_path / "pids").exists() else []
        return [[int(word) for word in line.split()] for line in lines]

    with Running(tmp_path, "launch", file, "--run", run, *OFF) as launch:
        until(lambda: len(lives()) >= 2, "its second life")
        assert not any(map(is_running, lives()[0]))
        until_merging(run, "a-0")
        assert skerry("down", run).returncode == 0
        ended(launch, 130)
    assert not any(is_running(pid) for life in lives() for pid in life)
    assert not processes_naming(str(tmp_path))


PAIR = """
import time, torch, torch.distributed as dist, skerry
from torch.nn.parallel import DistributedDataParallel

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Linear(8, 16)

    def forward(self, x):
        return self.mlp(x).square().mean()

dist.init_process_group("gloo")
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
with skerry.Learner(model, optimizer) as learner:
    while True:
        model(torch.ones(8)).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if not learner.step(tokens=10):
            break
"""


def test_an_island_of_two_workers_comes_back_when_one_of_them_is_killed(tmp_path):
    pair = ("pair", 1, ["python", "two_ranks_loop.py"], "workers = 2")
    file, run = write_launch(tmp_path, ("a", 1), pair), tmp_path / "run"
    (tmp_path / "two_ranks_loop.py").write_text(PAIR)
    with Running(tmp_path, "launch", file, "--run", run, *OFF) as launch:
        until_merging(run, "a-0", "pair-0")
        held = below(pid_of(looked(run)["pair-0"]))
        workers = [pid for pid in processes_naming("two_ranks_loop.py") if pid in held and pid != held[0]]
        assert len(workers) == 2, "torchrun's own command line has it too"
        kill(workers[1])
        until(lambda: looked(run)["pair-0"]["restarts"] == 1, "the island to end and come back")
        assert not any(map(is_running, held)), "nothing of its last life is there"
        until(lambda: status_of(run)["learners"]["pair-0"]["life"] == 2, "its second life")
        until_merging(run, "a-0", "pair-0")
        launch.signal(signal.SIGTERM)
        ended(launch, 130)
    assert not processes_naming(str(tmp_path)) and not processes_naming("two_ranks_loop.py")
    check_books(run)


def test_a_run_of_the_built_in_trainer_is_a_launch_too(tmp_path):
    run = tmp_path / "run"
    small = ["--learners", "2", "--model", "tiny", "--step-s", "0.05", "--steps", "100000", *OFF]
    with Running(tmp_path, "train", *small, "--out", run):
        until(lambda: status_of(run).get("merges", 0) > 2, "merges")
        members = looked(run)
        assert list(members) == ["syncer", "learner-0", "learner-1"]
        assert {member["state"] for member in members.values()} == {"running"}
        assert members["learner-0"]["detail"].startswith("training, step ")
        assert "joined" in skerry("logs", run, "syncer").stdout
        assert json.loads(skerry("down", run, "--json").stdout)["ended"] == list(members)
    assert not processes_naming(str(run))
    assert f"skerry train --resume {run}" in skerry("stop", run).stdout


# ---------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return lambda *words: called(capsys, *words)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("machines = 2", "island a: 2 machines a learner, the local engine has one machine: use another engine"),
        ("gpus = 64", "island a: 64 GPUs a worker, this machine has "),
        ("gpus = 32\nworkers = 2", "island a: 32 GPUs a worker, 2 workers, this machine has "),
        ("memory_gib = 99999", "island a: 99999 GiB of memory a worker, this machine has "),
        ('where = "rack-7"', "island a: where = 'rack-7': the local engine has one machine: leave it out"),
        ('folder = "nowhere"', "island a: folder = 'nowhere': there is no folder"),
    ],
)
def test_what_this_machine_has_not_is_refused_before_anything_starts(call, tmp_path, more, said):
    write_launch(tmp_path, ("a", 1, ["python", "loop.py"], more))
    code, out, err = call("launch", "run.toml", "--run", "run", "--json")
    assert code == 2 and said in err and err.count("\n") == 1 and said in json.loads(out)["error"]
    assert not (tmp_path / "run").exists()


def test_cores_and_programs_that_are_not_here_are_refused(call, tmp_path):
    file = write_launch(tmp_path, ("a", 1))
    file.write_text(file.read_text().replace("cpus = 0.1", "cpus = 4000"))
    assert "island a: 4000 cores a worker, this machine has " in call("launch", "run.toml")[2]
    write_launch(tmp_path, ("a", 1, ["no-such-program"]))
    assert "island a: command[0] = 'no-such-program': no such program here: install it" in call("launch", file)[2]


def test_too_few_open_files_for_the_learners_are_refused(tmp_path):
    file, few = write_launch(tmp_path, ("a", 6)), (100, 100)
    done = skerry(
        "launch", file, "--run", tmp_path / "run", *OFF,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few),
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "6 learners, and 100 open files are room for " in done.stderr and "ulimit -n" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch", "none.toml"], "none.toml: cannot be read (No such file or directory): check the path given to"),
        (["launch", "run.toml", "--engine", "moon"], "invalid choice: 'moon'"),
        (["launch", "run.toml", "--run", "taken"], "--run taken: is there already and holds no launch: choose another"),
        (["launch", "run.toml", "--run", "other"], "--run other: was launched with --engine ray: give that, or choose"),
        (["ps", "taken"], "taken: nothing was launched into it: give the folder that skerry launch named"),
        (["logs", "mine", "b-0"], "no member 'b-0' in this run: "),
        (["logs", "mine", "a-1"], "no log of 'a-1' in "),
        (["logs", "mine", "a-0", "-f", "--json"], "--json and --follow: one object has an end"),
        (["scale", "mine", "b", "1"], "no island 'b' in this run: known are a"),
        (["scale", "mine", "a", "-1"], "-1 learners: must be from 0"),
        (["scale", "mine", "a", "1"], "mine: nothing of it is up: launch it first"),
        (["down", "broken"], "launch.json: is damaged ("),
        (["down", "mine", "--sync.quorum", "2"], "--sync.quorum: nothing is configured here"),
    ],
)
def test_other_bad_input_is_refused_in_one_line(call, tmp_path, words, said):
    write_launch(tmp_path, ("a", 1))
    record = {"engine": "local", "name": "mine", "folder": "", "file": "run.toml", "text": "", "counts": {"a": 1}}
    for name, text in (
        ("mine", json.dumps(record)),
        ("other", json.dumps(record | {"engine": "ray"})),
        ("broken", "{"),
    ):
        (tmp_path / name).mkdir()
        secret(tmp_path / name / "launch.json", text)
    (tmp_path / "mine" / "logs").mkdir()
    (tmp_path / "mine" / "logs" / "a-0.log").write_text("hello\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    code, _, err = call(*words)
    assert code == 2 and said in err and err.count("\n") == 1


LAUNCHED = {"engine": "local", "name": "mine", "folder": "", "file": "run.toml", "text": "", "counts": {"a": 1}}


def launched(folder, **more):
    """A folder with a launch of which nothing is up."""
    (folder / "logs").mkdir(parents=True)
    secret(folder / "launch.json", json.dumps(LAUNCHED | more))
    return folder


VERBS = [["ps", "mine"], ["logs", "mine", "a-0"], ["scale", "mine", "a", "2"], ["down", "mine"],
         ["launch", "run.toml", "--run", "mine"], ["launch", "run.toml", "--run", "mine", "--dry-run"]]  # fmt: skip


@pytest.mark.parametrize("words", VERBS)
@pytest.mark.parametrize("what", [".", "launch.json"])
def test_a_launch_that_others_can_write_is_not_obeyed(call, tmp_path, words, what):
    write_launch(tmp_path, ("a", 1))
    path = launched(tmp_path / "mine", engine="ray", handle={"address": "127.0.0.1:1", "run_dir": "/"}) / what
    path.chmod(path.stat().st_mode | 0o020)
    code, _, err = call(*words)
    said = f"{Path('mine') / what}: others may change it: see who did, then chmod go-w"
    assert code == 2 and said in err and err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
@pytest.mark.parametrize("words", VERBS)
@pytest.mark.parametrize("what", [".", "launch.json"])
def test_a_launch_of_another_user_is_not_obeyed(call, tmp_path, words, what):
    """Not by root either, for what is written there would be done as root."""
    write_launch(tmp_path, ("a", 1))
    os.chown(launched(tmp_path / "mine") / what, 12345, -1)
    code, _, err = call(*words)
    assert code == 2 and f"{Path('mine') / what}: belongs to user 12345: act as that user" in err
    assert err.count("\n") == 1


def test_nothing_is_launched_into_a_folder_that_others_can_write(call, tmp_path):
    write_launch(tmp_path, ("a", 1))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "open: others may change it" in call("launch", "run.toml", "--run", "open")[2]
    text = (tmp_path / "run.toml").read_text().replace("[syncer]", f'[syncer]\ndir = "{tmp_path}/open"')
    (tmp_path / "run.toml").write_text(text)
    assert "open: others may change it" in call("launch", "run.toml", "--run", "run", *OFF)[2]
    assert "open: others may change it" in call("train", "--out", "open")[2]
    assert "open: others may change it" in call("train", "--resume", "open")[2]
    assert not any((tmp_path / "open").iterdir())


def test_down_leaves_a_file_called_token_where_no_supervisor_was(call, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "token").write_text("of something else")
    launched(tmp_path / "mine", handle={"run_dir": str(other)})
    assert call("down", "mine")[0] == 0 and (other / "token").exists()
    (other / SUPERVISOR).write_text("999999999\n")  # it was killed
    assert call("down", "mine")[0] == 0 and not (other / "token").exists()


def test_a_launch_nested_beyond_reason_is_damaged(call, tmp_path):
    folder = launched(tmp_path / "mine")
    (folder / "launch.json").write_text('{"more": ' + "[" * 100_000)
    code, _, err = call("ps", "mine")
    assert code == 2 and "launch.json: is damaged (" in err and err.count("\n") == 1


@pytest.mark.parametrize("engine", ["local", "slurm"])
@pytest.mark.parametrize(
    "name", ["../../x", "../x", "a-0/../../x", "a-0.1/../x", "/etc/passwd", "a-x", "a-0.", "", "x\x1b"]
)
def test_a_log_is_that_of_a_member_on_every_engine(call, tmp_path, engine, name):
    (tmp_path / "x.log").write_text("a secret\n")
    launched(tmp_path / "mine", engine=engine)
    code, out, err = call("logs", "mine", name)
    assert code == 2 and "in this run: " in err and err.count("\n") == 1 and "\x1b" not in err and not out


@pytest.mark.parametrize("how", ["pipe", "link", "linked folder"])
def test_a_log_that_is_no_plain_file_is_one_line(call, tmp_path, how):
    log = launched(tmp_path / "mine") / "logs" / "a-0.log"
    (tmp_path / "a-0.log").write_text("a secret\n")
    if how == "linked folder":
        log.parent.rmdir()
        log.parent.symlink_to(tmp_path)
    elif how == "link":
        log.symlink_to(tmp_path / "a-0.log")
    else:
        os.mkfifo(log)
    code, out, err = call("logs", "mine", "a-0")
    assert code == 2 and "mine/logs" in err and err.count("\n") == 1 and "a secret" not in out


HOLDS = """
import fcntl, os, sys, time
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print(os.getpid(), file=file, flush=True)
    print("held", flush=True)
    time.sleep(600)
"""


def test_members_of_strange_names_and_times_are_shown_as_text(call, tmp_path):
    folder = launched(tmp_path / "mine")
    member = ["a\x1b[31m", "a", "running", "", 0, -1e308, ""]
    secret(folder / "members.json", json.dumps([member]))
    holds = [sys.executable, "-c", HOLDS, str(folder / SUPERVISOR)]
    with subprocess.Popen(holds, stdout=subprocess.PIPE, text=True) as supervisor:
        try:
            assert supervisor.stdout.readline() == "held\n"
            code, out, _ = call("ps", "mine")
            assert code == 0 and "running" in out and "0000" not in out and "\x1b" not in out
            code, out, _ = call("down", "mine")
            assert (code, out) == (0, "mine: ended a\\x1b[31m\n")
        finally:
            supervisor.kill()


def test_a_dry_run_tells_each_command_and_touches_nothing(call, tmp_path):
    write_launch(tmp_path, ("a", 2))
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = call("launch", "run.toml", "--run", "run", "--dry-run")
    assert code == 0 and sorted(tmp_path.rglob("*")) == before
    assert "# a-1, brought back when it fails\n" in out and out.rstrip().endswith("loop.py")
    assert f"SKERRY_NAME=a-1 PYTHONUNBUFFERED=1 SKERRY_TOKEN_FILE={tmp_path}/run/token" in out


@pytest.mark.parametrize("run", ["/proc/nobody/run", "run.toml/run"])
def test_a_folder_that_cannot_be_made_is_refused_in_one_line(call, tmp_path, run):
    file = write_launch(tmp_path, ("a", 1))
    code, _, err = call("launch", file, "--run", run, *OFF)
    assert code == 2 and err.count("\n") == 1 and f"{run}: cannot be made here (" in err
    file.write_text(file.read_text().replace("[syncer]", f'[syncer]\ndir = "{(tmp_path / run).absolute()}"'))
    code, _, err = call("launch", file, "--run", "here", *OFF)
    assert code == 2 and err.count("\n") == 1 and "cannot be made here (" in err


def test_first_values_that_are_not_there_are_missed_before_anything_is_made(call, tmp_path):
    """And a launch of which no run has begun may be put right."""
    file = write_launch(tmp_path, ("a", 1))
    genesis = (tmp_path / "genesis.safetensors").rename(tmp_path / "elsewhere")
    code, _, err = call("launch", "run.toml", "--run", "run", *OFF)
    assert code == 2 and err.count("\n") == 1 and "genesis.safetensors: no such file" in err
    assert not (tmp_path / "run").exists()
    genesis.write_bytes(b"none")
    genesis.rename(tmp_path / "genesis.safetensors")
    done = skerry("launch", file, "--run", tmp_path / "run", "--detach", *OFF)
    assert done.returncode == 2 and "genesis.safetensors" in done.stderr, "the syncer's own words"
    assert not processes_naming(str(tmp_path))
    file.write_text(file.read_text() + "\n# put right\n")
    code, _, err = call("launch", "run.toml", "--run", "run", "--dry-run")
    assert code == 0, err
