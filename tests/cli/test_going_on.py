"""What a run that nobody serves is to go on with: the command that it had, if it was noted in plain words."""

import json
import os
import shlex
from pathlib import Path

import pytest

from cli.called import called
from node.pair import Pair, config_of
from skerry import cli
from skerry.cli import launch
from skerry.cli.going_on import command_for, launched
from skerry.core.events import Interrupted
from skerry.engines import folder
from skerry.run import provenance
from skerry.run.provenance import PROVENANCE

OPTIONS = "--host 0.0.0.0 --port 7377 --token-file 'my token'"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A paused run, of which nothing is noted; it is named by a relative path."""
    monkeypatch.chdir(tmp_path)
    with Pair(tmp_path / "run", config_of(steps=60)) as pair:
        pair.join("a")
        pair.run(9)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
    return pair.root.relative_to(tmp_path)


def note(root, *commands):
    for command in commands:
        provenance.note(root, command)


def test_it_is_the_last_command_that_served_it(root, capsys):
    mine = f"skerry syncer --run run {OPTIONS}"
    note(root, "skerry syncer --run run", mine, "skerry syncer --run run --port 1 --parent 7", "skerry train")
    note(root, "skerry syncer --run run --repair previous")
    assert command_for(root) == mine
    assert f"go on with: {mine}" in called(capsys, "status", root)[1].replace("\n", " ")
    code, out, _ = called(capsys, "set", root, "sync.grace=0.4")
    assert code == 0 and out.endswith(f"the next syncer goes by it: {mine}\n")


def test_in_another_folder_it_says_where_its_paths_are(root, tmp_path, monkeypatch):
    note(root, f"skerry syncer --run=run {OPTIONS}")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    there = tmp_path / "other" / ".." / "run"
    assert command_for(there) == f"skerry syncer --run={there} {OPTIONS}  (in {tmp_path})"


def test_a_run_that_was_moved_is_served_where_it_is(root, tmp_path):
    note(root, f"skerry syncer --run run {OPTIONS}")
    moved = root.rename("a run")
    assert command_for(moved) == f"skerry syncer --run 'a run' {OPTIONS}"


@pytest.mark.parametrize(
    "command",
    [
        "skerry syncer --run run '\x1b[31mred'",
        "skerry syncer --run run; rm -rf /",
        "skerry syncer --run run --port $(id)",
        "skerry syncer --run 'run",
        "skerry syncer --run run 'two\nlines'",
        "skerry syncer --run run " + 5000 * "x",
        "rm -rf /",
        "",
    ],
)
def test_what_nobody_of_ours_has_noted_is_not_shown(root, command, capsys):
    line = {"at": 1.0, "command": command, "versions": {}}
    (root / PROVENANCE).write_text(json.dumps(line) + "\n")
    assert command_for(root) == "skerry syncer --run run  (with the options it had)"
    assert "\x1b" not in called(capsys, "status", root)[1]


def test_nor_is_what_others_could_have_written(root):
    mine = f"skerry syncer --run run {OPTIONS}"
    note(root, mine)
    assert command_for(root) == mine
    os.chmod(root / PROVENANCE, 0o666)
    assert command_for(root) == "skerry syncer --run run  (with the options it had)"


def test_a_folder_with_escape_codes_is_not_shown(root):
    line = {"at": 1.0, "command": "skerry syncer --run run", "versions": {}, "folder": "/\x1b[31m"}
    (root / PROVENANCE).write_text(json.dumps(line) + "\n")
    assert "\x1b" not in command_for(root)


@pytest.mark.parametrize("value", [5, -0.5, 1e9, True, "a b", "it's", "1", "true", "--x", "", "$(id)"])
def test_a_launch_is_said_again_with_its_engine_and_its_overrides_as_they_are_read(tmp_path, value):
    overrides = [("run.steps", 7), ("data.path", value)]
    record = folder.Record(
        engine="slurm", name="mine", folder=str(tmp_path), file="/a b/run.toml", text="", overrides=overrides
    )
    _, verb, *words = shlex.split(launched(record, Path("runs/mine")))
    options, read = cli.parse(launch.parser(), words)
    assert (verb, str(options.file), str(options.run)) == ("launch", "/a b/run.toml", "runs/mine")
    assert options.engine == "slurm" and read == overrides


def test_a_fork_has_had_no_options(root, capsys):
    note(root, f"skerry syncer --run run {OPTIONS}")
    code, out, err = called(capsys, "fork", root, "next one", "--run.steps", 80)
    begins = shlex.join(["skerry", "syncer", "--run", "next one"])
    assert (code, err) == (0, "") and out.endswith(f"begin with: {begins}\n")
    assert called(capsys, "status", "next one")[1].replace("\n", " ").count("with the options it had") == 0
    assert json.loads(called(capsys, "set", "next one", "sync.grace=0.4", "--json")[1])["go_on"] == begins
