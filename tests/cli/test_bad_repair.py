"""Damaged runs at the command line: one line that names the file, the fragment, its version and the next step."""

import json
import os
import signal

import pytest

from cli.called import called
from e2e.processes import Running, until
from node.pair import Pair, config_of
from skerry import cli
from skerry.core.events import Interrupted
from skerry.core.state import state_of
from skerry.node import telemetry
from skerry.store import Store


@pytest.fixture
def run_dir(tmp_path):
    """A run that was ended in order, whose fragment 1 has lost its files."""
    with Pair(tmp_path / "run", config_of()) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
    for path in files_of(pair.root):
        path.unlink()
    return pair.root


def files_of(run_dir):
    """Of fragment 1, that of the start first and the newest last."""
    with Store.open(run_dir, readonly=True) as store:
        state = state_of(store.records)
    names = dict.fromkeys([state.created.files[1], *(c.file for c in state.fragments[1].checkpoints)])
    return [run_dir / "files" / name for name in names]


def refused(capsys, *words):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(SystemExit) as end:
        cli.main([*map(str, words), "--json"])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    captured = capsys.readouterr()
    assert end.value.code == 2
    lines = [line.removeprefix("skerry: ") for line in captured.err.splitlines() if line.startswith("skerry: ")]
    assert lines == [json.loads(captured.out)["error"]]
    return lines[0]


def tape_of(run_dir):
    with Store.open(run_dir, readonly=True) as store:
        return [record.body for record in store.history()]


def test_a_syncer_over_a_missing_file_says_what_is_missing_and_how_to_go_on(capsys, run_dir):
    tape = tape_of(run_dir)
    assert refused(capsys, "syncer", "--run", run_dir, "--port", 0) == (
        f"fragment 1 version 2: {files_of(run_dir)[-1]} is missing: restore it from a copy, "
        f"or skerry syncer --run {run_dir} --repair (the same version, from a learner)"
    )
    assert tape_of(run_dir) == tape


def test_previous_is_refused_where_there_is_none(capsys, tmp_path):
    with Pair(tmp_path / "run", config_of()) as pair:
        pass
    (file,) = files_of(pair.root)
    file.write_bytes(b"not what it was")
    tape = tape_of(pair.root)
    line = refused(capsys, "syncer", "--run", pair.root, "--port", 0, "--repair", "previous")
    assert line == (
        f"no earlier version can be had: fragment 1 version 0: {file} differs from what was written: restore it from a "
        f"copy, or skerry syncer --run {pair.root} --repair (the same version, from a learner)"
    )
    assert tape_of(pair.root) == tape
    assert "--repair previous" not in refused(capsys, "syncer", "--run", pair.root, "--port", 0)


def test_an_unknown_way_to_repair_is_refused(capsys, run_dir):
    line = refused(capsys, "syncer", "--run", run_dir, "--repair", "somehow")
    assert "--repair: invalid choice: 'somehow'" in line and "previous" in line


def test_a_repair_that_waits_says_for_what_and_can_be_given_up(tmp_path, run_dir):
    tape = tape_of(run_dir)
    with Running(tmp_path, "syncer", "--run", run_dir, "--port", 0, "--repair", "--json") as syncer:
        until(lambda: "waiting on" in syncer.said, "the syncer to say what it waits for")
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 130
    assert "for a learner that holds fragment 1 version 2; 0 connected, 0 wrong copies refused" in syncer.said
    assert "to give up, stop this and restore it from a copy\n" in syncer.said
    assert json.loads(syncer.out.read_text()) == {"error": "interrupted"}
    assert tape_of(run_dir) == tape


def test_resuming_over_a_missing_file_says_the_same(capsys, run_dir):
    assert refused(capsys, "train", "--resume", run_dir).startswith("fragment 1 version 2: ")


@pytest.mark.parametrize("words", [("syncer", "--port", "0", "--run"), ("train", "--resume"), ("replay",)])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_tape_that_was_cut_off_is_never_gone_on_with(capsys, tmp_path, words, left):
    """What the syncer last said of the run shows it; else a new run would begin over the old one."""
    with Pair(tmp_path / "run", config_of()) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 4)
    (pair.root / "status.json").write_text(json.dumps({"merges": sum(pair.versions), "phase": "steady"}))
    segment = pair.root / "tape" / "000001.seg"
    whole = segment.read_bytes()
    segment.write_bytes(whole[: round(left * len(whole))])
    cut = segment.read_bytes()
    line = refused(capsys, *words, pair.root)
    if words[0] != "train" or left:
        assert "truncated: the tape ends" in line and f"status.json says {sum(pair.versions)}" in line
    assert segment.read_bytes() == cut, "it is as it was"


def cut_in_half(root):
    """The tape of a run whose syncer has said how far it was."""
    with Pair(root, config_of(steps=200, store={"keep_every": 0.1})) as pair:
        pair.join("a")
        pair.until(lambda: len(pair.syncer.machine.state.kept) >= 2)
    (root / "status.json").write_text(json.dumps({"merges": sum(pair.versions), "phase": "steady"}))
    segment = root / "tape" / "000001.seg"
    os.truncate(segment, segment.stat().st_size // 2)
    return f"{segment} at byte ", f"truncated: the tape ends with {merges_in(root)} merges, status.json says"


def merges_in(root):
    with Store.open(root, readonly=True) as store:
        return state_of(store.records).merges


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "words",
    [
        ("rollback", "RUN", "--to", "0"), ("prune", "RUN", "--keep-days", "0"),
        ("prune", "RUN", "--kept", "0", "--dry-run"), ("extend", "RUN", "--steps", "999"),
        ("drop", "RUN", "a"), ("set", "RUN", "sync.quorum=1"),
        ("fork", "RUN", "FORK"), ("fork", "RUN", "FORK", "--version", "0"), ("evaluate", "RUN"),
    ],
    ids="-".join,
)  # fmt: skip
def test_a_tape_that_was_cut_off_is_not_written_to_nor_its_model_taken_for_the_newest(capsys, tmp_path, words):
    run = tmp_path / "run"
    where, why = cut_in_half(run)
    before = contents(tmp_path)
    line = refused(capsys, *(tmp_path / word.lower() if word in ("RUN", "FORK") else word for word in words))
    assert line.startswith(where) and why in line
    assert contents(tmp_path) == before and not (tmp_path / "fork").exists()


def test_who_lists_or_reports_a_run_hears_that_its_tape_was_cut_off(capsys, tmp_path):
    run = tmp_path / "run"
    _, why = cut_in_half(run)
    for words in (("rollback", run), ("report", run, "--out", tmp_path / "report.html")):
        code, out, err = called(capsys, *words)
        assert code == 0 and out and err.count("\n") == 1 and why in err
    assert why in json.loads(called(capsys, "rollback", run, "--json")[1])["warning"]


@pytest.mark.parametrize("verb", ["export", "status", "rollback", "evaluate"])
def test_who_only_looks_hears_as_well_that_the_tape_is_gone(capsys, tmp_path, verb):
    with Pair(tmp_path / "run", config_of()) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
    (pair.root / "status.json").write_text(json.dumps({"merges": sum(pair.versions), "phase": "steady"}))
    (pair.root / "tape" / "000001.seg").unlink()
    assert "truncated: the tape ends with 0 merges, status.json says" in refused(capsys, verb, pair.root)
    (pair.root / "tape").rmdir()
    assert f"{pair.root}/tape is missing, and status.json says" in refused(capsys, verb, pair.root)


@pytest.mark.parametrize("words", [("syncer", "--port", "0", "--run"), ("rollback", "--to", "0"), ("status",)])
def test_a_folder_in_place_of_the_lock_is_named(capsys, tmp_path, words):
    with Pair(tmp_path / "run", config_of()) as pair:
        pass
    (pair.root / "lock").unlink()
    (pair.root / "lock").mkdir()
    line = refused(capsys, *words, pair.root)
    assert f"{pair.root}/lock: " in line and ("Is a directory" in line or "is no plain file" in line)


def test_a_closed_run_whose_end_is_cut_off_gets_one_answer(capsys, tmp_path):
    """Serving it again would train on a model whose last word was said; the status says that it was closed."""
    with Pair(tmp_path / "run", config_of(run={"steps": 12})) as pair:
        pair.join("a")
        pair.until(lambda: pair.syncer.finished == "closed")
        merges = pair.syncer.machine.state.merges
    (pair.root / "status.json").write_text(json.dumps({"merges": merges, "phase": "closed"}))
    segment = pair.root / "tape" / "000001.seg"
    whole = segment.read_bytes()
    segment.write_bytes(whole[: whole.rindex(b"closed")])  # checkpoints follow it
    commands = [("syncer", "--port", "0", "--run"), ("train", "--resume"), ("replay",)]
    (line,) = {refused(capsys, *words, pair.root) for words in commands}
    assert f"truncated: the tape ends with {merges} merges, status.json says {merges} and the end of the run" in line


def test_resuming_a_run_that_is_in_use_names_who_uses_it(capsys, tmp_path):
    with Pair(tmp_path / "run", config_of()) as pair:
        status = telemetry.recorded(pair.syncer.machine.state, 0.0) | {"pid": os.getpid()}
        (pair.root / "status.json").write_text(json.dumps(status))
        assert "is in use by process" in refused(capsys, "train", "--resume", pair.root)


def test_the_model_of_a_damaged_recorded_run_can_be_had_from_its_record(capsys, tmp_path):
    """If the start is there, and all of the record."""
    with Pair(tmp_path / "run", config_of(store={"record": "full"})) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
    _, *others = files_of(pair.root)
    for path in others:
        path.unlink()
    for path in (pair.root / "journal").iterdir():
        path.unlink()
    hint = f"or make it from the record: skerry replay {pair.root} --out FILE"
    assert refused(capsys, "export", pair.root).endswith(hint)
    next((pair.root / "record").iterdir()).unlink()
    assert hint not in refused(capsys, "export", pair.root)
