"""No Python of ours imports what somebody has planted in the folder in which it begins."""

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import skerry
from e2e.processes import WAIT_S, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SOURCE = Path(skerry.__file__).parent
# What our processes import early, and what multiprocessing and a word of shell begin with.
PLANTED = ("msgspec", "xxhash", "numpy", "torch", "multiprocessing", "socket", "pip", "skerry")
SYNCER = ("--preset", "local", "--run.steps", 9, "--model.preset", "tiny", "--sync.num_fragments", 2)
SMALL = ("--learners", 1, "--model", "tiny", "--steps", 4, "--step-s", 0.05, "--sync.num_fragments", 2)
CONSOLE_SCRIPT = """
import sys
from skerry.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""
LAUNCH = """
[syncer]
preset = "local"
[run]
steps = 1000000
[model]
preset = "tiny"
[sync]
num_fragments = 2
[[islands]]
name = "a"
count = 1
"""


@pytest.fixture
def planted(tmp_path):
    """A folder that others may write, with modules of theirs; whoever imports one leaves a line behind."""
    folder = tmp_path / "shared"
    folder.mkdir()
    said = folder / "imported.txt"
    for name in PLANTED:
        said_by = f"open({str(said)!r}, 'a').write(' '.join([__name__, *sys.orig_argv]) + '\\n')"
        (folder / f"{name}.py").write_text(f"import sys\n{said_by}\nraise ImportError('planted')\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "skerry").write_text(CONSOLE_SCRIPT)
    return folder


def argv_of(folder, *words):
    """By the console script, which does not look into the working folder itself."""
    return [sys.executable, folder.with_name("bin") / "skerry", *map(str, words)]


def run_in(folder, *words):
    argv = argv_of(folder, *words)
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=WAIT_S).status == 200
    except OSError:
        return False


def imported(folder):
    said = folder / "imported.txt"
    return said.read_text() if said.exists() else ""


def test_no_child_of_train_imports_what_lies_in_the_working_folder(planted, tmp_path):
    done = run_in(planted, "train", *SMALL, "--http-port", 0, "--out", tmp_path / "run", "--json")
    assert (imported(planted), done.returncode) == ("", 0), done.stderr


def test_no_supervisor_in_the_background_does(planted, tmp_path):
    (planted / "run.toml").write_text(LAUNCH)
    done = run_in(planted, "launch", "run.toml", "--detach", "--http-port", 0, "--run", tmp_path / "run")
    try:
        assert (imported(planted), done.returncode) == ("", 0), done.stderr
    finally:
        run_in(planted, "down", tmp_path / "run")
    assert imported(planted) == ""


def test_neither_the_page_beside_a_syncer_nor_who_makes_its_first_values_does(planted, tmp_path):
    words = ["syncer", "--run", tmp_path / "run", "--port", 0, "--http-port", 0, *SYNCER]
    with open(tmp_path / "said", "wb") as said:
        process = subprocess.Popen(argv_of(planted, *words), cwd=planted, stderr=said)

    def page():
        found = re.search(r"look at it: (http://\S+)", (tmp_path / "said").read_text())
        return process.poll() is not None or imported(planted) or (found and answers(found[1]))

    try:
        until(page, "its page")
        assert (imported(planted), process.poll()) == ("", None), (tmp_path / "said").read_text()
    finally:
        process.terminate()
        process.wait(WAIT_S)


def test_no_process_of_a_pool_does(planted):
    done = run_in(planted, "simulate", "protocol", "--seeds", 2, "--jobs", 2)
    assert (imported(planted), done.returncode) == ("", 0), done.stderr


def test_the_script_of_the_repository_does_not(planted, tmp_path):
    """Its environment is there, so that all it does is start a command."""
    root = tmp_path / "clone"
    (root / ".venv" / "bin").mkdir(parents=True)
    for name in ("run", "pyproject.toml"):
        (root / name).write_bytes((ROOT / name).read_bytes())
    python = root / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    cksum = subprocess.run(
        ["cksum"], stdin=(root / "pyproject.toml").open(), capture_output=True, text=True, check=True
    )
    (root / ".venv" / ".stamp").write_text(f"{root}: {cksum.stdout.strip()}\n")
    env = {key: value for key, value in os.environ.items() if key != "CI"}
    words = ["sh", root / "run", "skerry", "runs", planted]
    done = subprocess.run(words, cwd=planted, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (imported(planted), done.returncode) == ("", 0), done.stderr


def test_there_is_one_place_that_starts_a_python_by_m_or_c():
    by_hand = re.compile(r'(?:executable|"python"), "-[mc]"|\{python\} -[mc]')
    files = [file for file in SOURCE.rglob("*.py") if file != SOURCE / "python.py"]
    assert [file.name for file in files if by_hand.search(file.read_text())] == []
    assert re.findall(r'/python" -m (?:skerry|pip)', (ROOT / "run").read_text()) == []
