"""skerry stop, on real processes: what serves a run ends in order, and nothing else is ever signalled."""

import json
import signal
import subprocess

import pytest

from e2e.processes import Puppet, Running, Syncer, facts_of, processes_naming, skerry, status_of, until
from skerry.core.facts import Paused
from skerry.store.lock import LOCK, SUPERVISOR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = ["--learners", "2", "--model", "tiny", "--step-s", "0.05", "--steps", "100000"]


@pytest.fixture
def killed(tmp_path):
    """A run directory whose syncer died: its status and its number in the lock are still there."""
    with Syncer(tmp_path) as syncer:
        syncer.signal(signal.SIGKILL)
        syncer.wait()
    return syncer.run_dir


@pytest.fixture
def other():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_syncer_ends_as_by_ctrl_c_and_its_own_command_goes_on_with_the_run(tmp_path):
    with Syncer(tmp_path, "--host", "127.0.0.1") as syncer:
        with Puppet(syncer.port) as puppet:
            puppet.merge_once()
        done = skerry("stop", syncer.run_dir)
        assert (done.returncode, syncer.wait()) == (0, 0), done.stderr
    assert "skerry: interrupted after " in syncer.said
    assert done.stderr == f"skerry: asked process {syncer.process.pid} to end\n"
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{syncer.run_dir}: process {syncer.process.pid} has ended; the run is paused after ")
    assert second.startswith(f"go on with: skerry syncer --run {syncer.run_dir} --port 0 --host 127.0.0.1 --genesis ")
    assert isinstance(facts_of(syncer.run_dir)[-1], Paused)

    again = skerry("stop", syncer.run_dir, "--json")
    record = json.loads(again.stdout)
    assert (again.returncode, record["stopped"], record["serving"]) == (0, None, "paused")
    assert record["go_on"] == second, "also where nobody is there any more to be asked for it"
    assert second in " ".join(skerry("status", syncer.run_dir).stdout.split())  # over several lines of its table
    assert skerry("stop", syncer.run_dir).stdout.startswith(f"{syncer.run_dir}: nothing runs here; the run is paused")


def test_a_local_run_ends_with_its_supervisor_and_leaves_nobody(tmp_path):
    run_dir = tmp_path / "run"
    with Running(tmp_path, "train", *SMALL, "--out", run_dir) as train:
        until(lambda: status_of(run_dir).get("merges", 0) > 4, "merges")
        looked = json.loads(skerry("status", run_dir, "--json").stdout)
        assert looked["supervisor"] == train.process.pid and looked["pid"] != train.process.pid
        done = skerry("stop", run_dir, "--json")
        assert (done.returncode, train.wait()) == (0, 130), done.stderr
    assert not processes_naming(str(run_dir))
    record = json.loads(done.stdout)
    assert (record["stopped"], record["serving"]) == (train.process.pid, "paused")
    assert record["go_on"] == f"go on with: skerry train --resume {run_dir}"
    assert f"interrupted; go on with: skerry train --resume {run_dir}" in train.said


def test_a_supervisor_whose_syncer_is_away_is_found_and_ended(tmp_path):
    run_dir = tmp_path / "run"
    with Running(tmp_path, "train", *SMALL, "--out", run_dir) as train:
        syncer = until(lambda: status_of(run_dir).get("pid"), "the syncer")
        subprocess.run(["kill", "-9", str(syncer)], check=True)
        done = skerry("stop", run_dir, "--json")
        assert (done.returncode, train.wait()) == (0, 130), done.stderr
    assert json.loads(done.stdout)["stopped"] == train.process.pid and not processes_naming(str(run_dir))


@pytest.mark.parametrize("lock", [LOCK, SUPERVISOR])
def test_a_process_that_got_the_number_of_a_dead_one_is_left_alone(killed, other, lock):
    (killed / lock).write_text(f"{other.pid}\n")
    (killed / "status.json").write_text(json.dumps(status_of(killed) | {"pid": other.pid}))
    done = skerry("stop", killed)
    assert done.returncode == 0 and "nothing runs here; the run was left by a syncer that died" in done.stdout
    assert other.poll() is None


def test_a_holder_that_is_not_of_this_machine_is_to_be_stopped_there(tmp_path, other):
    with Syncer(tmp_path) as syncer:
        (syncer.run_dir / LOCK).write_text(f"{other.pid}\n")  # as another machine's number would be
        done = skerry("stop", syncer.run_dir)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"process {other.pid} serves it on another machine" in done.stderr and done.stderr.count("\n") == 1
        assert other.poll() is None and syncer.process.poll() is None


def test_one_that_does_not_end_in_time_is_named(tmp_path):
    with Syncer(tmp_path) as syncer:
        syncer.signal(signal.SIGSTOP)
        done = skerry("stop", syncer.run_dir, "--within", "1s")
        assert done.returncode == 2
        assert f"process {syncer.process.pid} was asked to end and has not within 1 s" in done.stderr
        assert f"kill -9 {syncer.process.pid}" in done.stderr
        syncer.signal(signal.SIGCONT)
        assert syncer.wait() == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere: is no run directory: check the path, or name a syncer as host:port"),
        (["127.0.0.1:1"], "127.0.0.1:1: connection refused: check the address, and that a syncer serves it"),
        (["."], "holds no run: check the path"),
        ([".", "--within", "0"], "'0' must be from 1s to 1d"),
        ([], "the following arguments are required: RUN_DIR"),
    ],
    ids=str,
)
def test_bad_input_is_refused_in_one_line(tmp_path, words, says):
    done = skerry("stop", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr and done.stderr.count("\n") == 1
