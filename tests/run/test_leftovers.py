"""What a killed command left beside the name of what it was making goes with the next, and only that."""

import os
import signal
import subprocess
import sys

import pytest

from cli.called import called
from node.pair import Pair, config_of
from skerry.run.leftovers import held, making, remove_left
from skerry.store.files import is_temporary, temporary


@pytest.fixture
def root(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=40)) as pair:
        pair.join("a")
        pair.close()
    return pair.root


def left_in(folder):
    return [path.name for path in folder.iterdir() if is_temporary(path.name)]


def test_what_nobody_holds_goes_and_what_somebody_is_at_work_on_or_has_put_there_stays(tmp_path):
    path = tmp_path / "made"
    file, ours, tree, empty, theirs, link, other = (temporary(path) for _ in range(7))
    file.write_text("half")
    ours.write_text("half")
    (tree / "tape").mkdir(parents=True)
    empty.mkdir()
    (theirs / "letters").mkdir(parents=True)
    link.symlink_to(theirs)
    elsewhere = temporary(tmp_path / "another")
    elsewhere.write_text("half")
    with making(other), making(ours), held(theirs):  # `other` is not there: nothing holds it, and nothing ends of that
        remove_left(path)
    assert sorted(tmp_path.iterdir()) == sorted([ours, theirs, link, elsewhere])
    remove_left(path)
    assert sorted(tmp_path.iterdir()) == sorted([theirs, link, elsewhere])


def test_nothing_is_to_be_removed_where_there_is_no_folder(tmp_path):
    remove_left(tmp_path / "none" / "made")


KILLED = """
import os, signal, sys
from skerry import cli
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
cli.main(sys.argv[1:])
"""
MAKING = [["export", "--out"], ["fork"]]


def words_of(making, root, made):
    return [making[0], root, *making[1:], made]


@pytest.mark.parametrize("making", MAKING, ids=lambda making: making[0])
def test_what_a_killed_command_left_goes_with_the_next(capsys, root, tmp_path, making):
    words = words_of(making, root, tmp_path / "made")
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL and len(left_in(tmp_path)) == 1, done.stderr
    code, _, err = called(capsys, *words)
    assert code == 0, err
    assert (tmp_path / "made").exists() and not left_in(tmp_path)


@pytest.mark.parametrize("making", MAKING, ids=lambda making: making[0])
def test_a_command_that_is_told_to_end_takes_away_what_it_has_not_finished(capsys, root, tmp_path, monkeypatch, making):
    """SIGTERM is what a service manager, a shutdown and `timeout` say; afterwards it means what it meant."""
    monkeypatch.setattr(os, "fsync", lambda fd: signal.raise_signal(signal.SIGTERM))
    code, _, err = called(capsys, *words_of(making, root, tmp_path / "made"))
    assert (code, err) == (143, "skerry: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
