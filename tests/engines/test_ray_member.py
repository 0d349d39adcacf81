"""What a Ray actor holds, without Ray: a process that ends in order however its holder goes, and one life at a time."""

import os
import signal
import stat
import sys

import pytest

from e2e.processes import until
from skerry.engines import last_line_of, ray
from skerry.engines.folder import Record
from skerry.engines.ray_member import Home, Process
from skerry.errors import Refusal

LEAVES = (
    "import pathlib, signal, sys; "
    "signal.signal(15, lambda *_: (pathlib.Path('left').touch(), sys.exit(3))); "
    "print('up', flush=True); signal.pause()"
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Home("mine", "0123", "gpu-0")


def begun(home, folder, statement, goes_on=lambda: True):
    """A life of this statement, once it is up."""
    with home.locked(goes_on) as lock:
        if lock is None:
            return None
        return Process([sys.executable, "-c", statement], {}, folder, home.file("log"), lock, 20.0)


def is_up(home):
    return home.file("log").exists() and last_line_of(home.file("log")) == "up"


@pytest.mark.parametrize(
    ("statement", "ended_with"),
    [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)],
)
def test_it_ends_as_its_command_ended(home, tmp_path, statement, ended_with):
    assert begun(home, tmp_path, statement).popen.wait(60) == ended_with


def test_it_is_asked_to_leave_in_order(home, tmp_path):
    process = begun(home, tmp_path, LEAVES)
    until(lambda: is_up(home), "the command to be up")
    assert process.end() == 3 and (tmp_path / "left").exists()


def killed_by_ray(process):
    """As a worker does with its children, before it ends itself."""
    os.kill(process.popen.pid, signal.SIGKILL)
    process.popen.stdin.close()


def without_its_actor(process):
    """As when the worker itself is killed: all that its child hears is the end of the pipe."""
    process.popen.stdin.close()


@pytest.mark.parametrize("is_lost", [killed_by_ray, without_its_actor])
def test_a_command_whose_actor_is_gone_leaves_in_order_and_then_the_next_begins(home, tmp_path, is_lost):
    process = begun(home, tmp_path, LEAVES)
    until(lambda: is_up(home), "the command to be up")
    assert begun(home, tmp_path, "pass", goes_on=lambda: False) is None, "two lives at a time"
    is_lost(process)
    assert begun(home, tmp_path, "pass").popen.wait(60) == 0
    assert (tmp_path / "left").exists(), "the next began before it had left"


def test_its_folder_is_its_users_alone_and_goes_when_it_has_ended(home, tmp_path):
    assert stat.S_IMODE(home.path.stat().st_mode) == stat.S_IMODE(home.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(home.key_file(b"secret").stat().st_mode) == 0o600
    home.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_write_to_is_not_used(home):
    home.path.chmod(0o777)
    with pytest.raises(PermissionError, match="not a folder of this user's alone"):
        Home("mine", "0123", "gpu-1")


@pytest.mark.parametrize("name", ["../../x", "x", "one-0./../../x", "one-0.1/x", "one-", "two-0"])
def test_logs_are_of_members_of_this_launch_alone(tmp_path, name):
    """It is refused before any cluster is asked."""
    (tmp_path / "run" / "logs" / "one-0.").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "run", tmp_path / "run" / "logs"):
        (folder / "x.log").write_text("not for this")
    (tmp_path / "run" / "logs" / "two-0.log").write_text("not for this")
    handle = {"run_dir": str(tmp_path / "run"), "address": "nowhere"}
    record = Record(
        engine="ray", name="mine", folder=str(tmp_path), file="run.toml", text="", counts={"one": 1}, handle=handle
    )
    with pytest.raises(Refusal, match=r"no member .* in this run"):
        list(ray.logs(record, name, False))
