"""Who holds a run directory for a moment is waited for; who serves it is not."""

import os
import subprocess
import sys

import pytest

from e2e.processes import WAIT_S, Running, Syncer, until
from node.pair import Pair, config_of
from skerry.errors import StoreBusy, StoreInUse
from skerry.run.holding import when_free
from skerry.store import Store
from store.test_lock import HOLDS


@pytest.fixture
def stopped(tmp_path):
    """A run of a syncer that was ended in order."""
    with Syncer(tmp_path) as syncer:
        syncer.process.terminate()
        assert syncer.wait() == 0
    return syncer.run_dir


@pytest.fixture
def holder(stopped):
    """A process that holds the directory, as an order on it does, until its stdin ends."""
    words = [sys.executable, "-c", HOLDS, str(stopped)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_syncer_waits_for_who_holds_its_directory_for_a_moment(tmp_path, stopped, holder):
    syncer = Running(tmp_path, "syncer", "--run", stopped, "--port", "0")
    try:
        until(lambda: f"process {holder.pid} holds {stopped}" in syncer.said, "the line that says whom it waits for")
        holder.stdin.close()
        until(lambda: f"serving {stopped} on" in syncer.said, "the syncer to serve")
    finally:
        syncer.process.kill()
        syncer.process.wait(WAIT_S)


def test_who_waits_in_vain_is_told_to_try_again(tmp_path):
    with Pair(tmp_path / "run", config_of()) as pair:
        said = []
        with pytest.raises(StoreBusy, match=f"held by process {os.getpid()} .* try again in a moment") as error:
            when_free(pair.root, lambda: Store.open(pair.root), said.append, within_s=0.0)
        assert error.value.code == 75


def test_nobody_waits_for_a_syncer(tmp_path):
    with Syncer(tmp_path) as syncer:
        with pytest.raises(StoreInUse, match=f"in use by process {syncer.process.pid}") as error:
            when_free(syncer.run_dir, lambda: Store.open(syncer.run_dir), pytest.fail)
        assert error.value.code == 2
