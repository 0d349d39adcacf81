"""Who holds a run directory: whoever has the file open and locked, whatever number stands in it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from skerry.errors import StoreInUse
from skerry.store import DiskFiles
from skerry.store.lock import LOCK, Holder, holder_of

HOLDS = """
import sys
import threading
from pathlib import Path
from pathlib import Path
from skerry.store import DiskFiles
files = DiskFiles(Path(sys.argv[1]))
files.lock()
print("held", flush=True)
sys.stdin.read()
files.close()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the directory; its stdin's end makes it let go, in order."""
    words = [sys.executable, "-c", HOLDS, str(tmp_path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with process:
        yield process
        process.kill()


@pytest.fixture
def other():
    """A process that has nothing to do with any run."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def test_a_live_holder_is_named_and_keeps_others_out(tmp_path, holder):
    assert holder_of(tmp_path / LOCK) == Holder(holder.pid, is_here=True)
    files = DiskFiles(tmp_path)
    with pytest.raises(StoreInUse, match=f"in use by process {holder.pid}"):
        files.lock()
    files.close()


@pytest.mark.parametrize("end", ["in order", "killed"])
def test_a_holder_that_has_gone_is_none(tmp_path, holder, end):
    holder.kill() if end == "killed" else holder.stdin.close()
    holder.wait()
    assert (tmp_path / LOCK).read_text() == (f"{holder.pid}\n" if end == "killed" else "")
    assert holder_of(tmp_path / LOCK) is None


def test_nobody_holds_what_is_not_there_and_a_look_makes_nothing(tmp_path):
    assert holder_of(tmp_path / LOCK) is None and not os.listdir(tmp_path)


def test_a_number_that_has_become_another_processs_is_nobody(tmp_path, other):
    (tmp_path / LOCK).write_text(f"{other}\n")
    assert holder_of(tmp_path / LOCK) is None


def test_a_holder_that_is_not_under_its_number_here_is_elsewhere(tmp_path, holder, other):
    """So it looks when another machine, or a container with numbers of its own, holds a directory that is shared."""
    (tmp_path / LOCK).write_text(f"{other}\n")
    assert holder_of(tmp_path / LOCK) == Holder(other, is_here=False)


def test_a_look_takes_nothing_away(tmp_path, holder):
    for _ in range(3):
        holder_of(tmp_path / LOCK)
    holder.stdin.close()
    holder.wait()
    holder_of(tmp_path / LOCK)
    files = DiskFiles(tmp_path)
    files.lock()
    files.close()


LOOKS = """
import sys
import threading
from pathlib import Path
from pathlib import Path
from skerry.store.lock import holder_of
print("looks", flush=True)
while True:
    holder_of(Path(sys.argv[1]))
"""


def test_who_looks_without_end_does_not_keep_the_next_from_taking_it(tmp_path):
    """A look at what a dead process held locks it for a moment, and a page looks again and again."""
    path = tmp_path / LOCK
    path.write_text("999999999\n")
    with subprocess.Popen([sys.executable, "-c", LOOKS, str(path)], stdout=subprocess.PIPE) as looking:
        try:
            assert looking.stdout.readline() == b"looks\n"
            for _ in range(200):
                files = DiskFiles(tmp_path)
                files.lock()
                files.close()
                path.write_text("999999999\n")  # as a kill leaves it
        finally:
            looking.kill()


DYING = (
    """
import ctypes, platform, threading
def hold():
"""
    + "".join(f"    {line}\n" for line in HOLDS.strip().splitlines())
    + """
threading.Thread(target=hold).start()
ctypes.CDLL(None).syscall(93 if platform.machine() == "aarch64" else 60, 0)  # the first thread ends, and it alone
"""
)


def test_a_process_that_is_being_cleared_away_is_not_taken_for_one_elsewhere(tmp_path):
    """While other threads of it are there, it has nothing open by its own number, and the lock is held still."""
    words = [sys.executable, "-c", DYING, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as dying:
        try:
            assert dying.stdout.readline() == b"held\n"
            while Path(f"/proc/{dying.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert dying.poll() is None
            threading.Timer(0.1, dying.stdin.close).start()
            assert holder_of(tmp_path / LOCK) is None
        finally:
            dying.kill()
