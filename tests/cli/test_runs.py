"""skerry runs: every run of a folder has its row, a damaged one too."""

import json
import os
import shutil
import subprocess

import pytest

from cli.called import called
from e2e.processes import Syncer
from node.pair import Pair, config_of
from skerry.core.events import Interrupted
from skerry.run import listing
from skerry.run.listing import taken


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a closed run, a paused one and other things."""
    runs = tmp_path / "runs"
    with Pair(runs / "closed", config_of(steps=40)) as pair:
        pair.join("a")
        pair.close()
    with Pair(runs / "paused", config_of(steps=10**6)) as pair:
        pair.join("a")
        pair.join("b")
        pair.run(40)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
    (runs / "notes").mkdir()
    (runs / "file").write_text("")
    (runs / "notes" / "tape").write_text("a file of this name makes no run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(capsys, *words):
    code, out, err = called(capsys, "runs", *words, "--json")
    assert (code, err) == (0, ""), err
    return {row["run_dir"]: row for row in json.loads(out)["runs"]}


def test_each_run_has_its_row(capsys, folder):
    rows = rows_of(capsys)
    assert rows.keys() == {"runs/closed", "runs/paused"}
    closed, paused = rows["runs/closed"], rows["runs/paused"]
    assert (closed["phase"], closed["serving"], closed["progress"]) == ("closed", "closed", 1.0)
    assert (paused["serving"], paused["learners"], paused["training"]) == ("paused", 2, 0)
    assert paused["merges"] > 0 and paused["bytes"] > 0 and not paused["damaged"]
    assert rows_of(capsys, "runs/closed").keys() == {"runs/closed"}
    assert rows_of(capsys, folder / "runs").keys() == {str(folder / "runs" / name) for name in ("closed", "paused")}


def test_folders_in_folders_without_end_hide_no_run(capsys, folder, monkeypatch):
    """Deeper than Python counts, and deeper than a path may be long."""
    whole = rows_of(capsys)["runs/paused"]
    evil = folder / "runs" / "evil"
    shutil.copytree(folder / "runs" / "paused", evil)
    with monkeypatch.context() as inside:
        inside.chdir(evil)
        for _ in range(3000):
            os.mkdir("a")
            os.chdir("a")
    try:
        rows = rows_of(capsys)
    finally:
        subprocess.run(["rm", "-rf", evil], check=True)  # Python's own way would end like the listing that counted so
    assert rows.keys() == {"runs/closed", "runs/paused", "runs/evil"}
    deep = rows["runs/evil"]
    assert (deep["merges"], deep["damaged"]) == (whole["merges"], "") and deep["bytes"] > 0


def test_files_without_end_are_reckoned_as_far_as_a_run_has_any(tmp_path, monkeypatch):
    for name in range(40):
        (tmp_path / str(name)).write_bytes(bytes(5000))
    whole = taken(tmp_path)
    monkeypatch.setattr(listing, "ENTRIES_MAX", 20)
    assert 0 < taken(tmp_path) < whole


def test_a_run_that_is_served_says_so(capsys, folder):
    with Syncer(folder, run_dir=folder / "runs" / "live") as syncer:
        row = rows_of(capsys)["runs/live"]
        assert (row["serving"], row["phase"], row["learners"]) == ("served", "created", 0)
        _, out, _ = called(capsys, "runs")
        assert next(line for line in out.splitlines() if line.startswith("runs/live")).split()[-1] == "yes"
        assert syncer.process.poll() is None


def test_damaged_runs_are_named_and_the_others_are_told_of(capsys, folder):
    segment = folder / "runs" / "paused" / "tape" / "000001.seg"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    shutil.rmtree(folder / "runs" / "closed" / "tape")
    (folder / "runs" / "closed" / "status.json").write_text(json.dumps({"merges": 7}))
    with Pair(folder / "runs" / "well", config_of(steps=40)) as pair:
        pair.join("a")
    rows = rows_of(capsys)
    assert "damaged" in rows["runs/paused"]["damaged"] and "tape is missing" in rows["runs/closed"]["damaged"]
    assert not rows["runs/well"]["damaged"]
    code, out, _ = called(capsys, "runs")
    assert code == 0 and out.count("damaged") >= 2 and "runs/well" in out and "restore it from a copy" in out


def test_a_pipe_in_a_run_is_not_waited_for_and_the_run_is_named(capsys, folder):
    """Somebody may have given the folder to us: no command hangs at what lies in it."""
    for name in ("status.json", "summary.json", "evaluations.jsonl", "commands.jsonl", "local.json"):
        (folder / "runs" / "paused" / name).unlink(missing_ok=True)
        os.mkfifo(folder / "runs" / "paused" / name)
    (folder / "runs" / "closed" / "lock").unlink()
    os.mkfifo(folder / "runs" / "closed" / "lock")
    rows = rows_of(capsys)
    assert "summary.json: is a link or no plain file" in rows["runs/paused"]["damaged"]
    assert "lock: cannot be read (is no plain file)" in rows["runs/closed"]["damaged"]
    code, out, _ = called(capsys, "status", "runs/paused", "--json")
    assert code == 0 and json.loads(out)["serving"] == "paused"
    code, _, err = called(capsys, "status", "runs/closed")
    assert code == 2 and err.count("\n") == 1 and "is no plain file" in err
    assert called(capsys, "report", "runs/paused", "--out", folder / "report.html")[0] == 0
    assert called(capsys, "replay", "runs/paused")[0] == 0


def test_a_folder_without_runs_and_one_that_is_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rows_of(capsys) == {}
    assert called(capsys, "runs")[1].startswith("no run in .: skerry train")
    code, out, _ = called(capsys, "runs", "nowhere", "--json")
    assert code == 2 and "nowhere: cannot be read" in json.loads(out)["error"]
