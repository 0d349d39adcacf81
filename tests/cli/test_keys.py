"""skerry keys: what a person types, and which files and lines come of it."""

import json
import stat
from functools import partial

import pytest

from cli.called import called
from e2e.processes import OPTIONS, Syncer, write_genesis
from skerry.run.keys import BOOK, Keys


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return partial(called, capsys, "keys")


def test_one_command_makes_authority_and_key_and_says_what_comes_next(call, tmp_path):
    code, out, err = call("issue", "runs/mine", "gpu-box")
    assert (code, err) == (0, "runs/mine has no run yet: begin it there with skerry syncer --run\n")
    assert out.startswith("gpu-box.key is the key of gpu-box, good until ") and "Copy it to that machine" in out
    assert out.splitlines()[1].endswith(":7077 SKERRY_KEY_FILE=gpu-box.key python train.py")
    assert stat.S_IMODE((tmp_path / "gpu-box.key").stat().st_mode) == 0o600
    assert {path.name for path in (tmp_path / "runs/mine/keys").iterdir()} == {"ca.pem", "issued.json"}


def test_issuing_a_name_again_revokes_the_key_before_it_and_says_so(call):
    call("issue", "run", "a")
    code, _, err = call("issue", "run", "a", "--out", "new.key")
    assert code == 0 and err.startswith("the key that a had is revoked\n")
    _, out, _ = call("list", "run")
    first, second = out.splitlines()
    assert ", revoked on " in first and ", good, until " in second
    assert call("revoke", "run", "a")[1].startswith("the key of a is revoked: where the run is served with keys, a is")


def test_a_machine_is_told_one_object_each_time(call):
    assert json.loads(call("init", "run", "--json")[1])["made"] is True
    assert json.loads(call("init", "run", "--json")[1])["made"] is False
    issued = json.loads(call("issue", "run", "a", "--days", "30", "--json")[1])
    assert issued["file"] == "a.key" and issued["state"] == "good" and issued["replaced"] is None
    assert json.loads(call("revoke", "run", "a", "--json")[1])["state"] == "revoked"
    (row,) = json.loads(call("list", "run", "--json")[1])["keys"]
    assert row["serial"] == issued["serial"] and row["expires"] == issued["expires"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["issue", "run", "A b"], "learner name 'A b': use 1 to 64 of"),
        (["issue", "run", "../a"], "learner name '../a': use 1 to 64 of"),
        (["issue", "run", "--", "-a"], "learner name '-a': use 1 to 64 of"),
        (["issue", "run", "taken"], "taken.key: is in the way: move it, or name another file with --out"),
        (["issue", "run", "a", "--out", "no/a.key"], "no/a.key: cannot be written (No such file or directory)"),
        (["issue", "run", "a", "--days", "0"], "argument --days"),
        (["issue", "run", "a", "--days", "4000"], "argument --days"),
        (["revoke", "run", "nobody"], "nobody: no key of this name was issued (there are keys for known)"),
        (["revoke", "run", "known", "--run.tokens", "3"], "--run.tokens: nothing is configured here"),
        (["list", "none"], "none: has no keys: skerry keys issue none NAME makes the first"),
        (["revoke", "none", "a"], "none: has no keys"),
        (["make", "run"], "argument what: invalid choice: 'make'"),
    ],
)
def test_what_is_refused_changes_nothing(call, tmp_path, words, said):
    call("issue", "run", "known")
    (tmp_path / "taken.key").write_text("")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, out, err = call(*words)
    assert (code, out) == (2, "") and err.startswith(f"skerry: {said}") and err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: folder.chmod(0o755), "others may enter it: chmod 700"),
        (lambda folder: (folder / BOOK).chmod(0o644), "others may read or change it: chmod 600"),
        (lambda folder: (folder / BOOK).unlink(), f"{BOOK}: is missing"),
        (lambda folder: (folder / "ca.pem").unlink(), "ca.pem: is missing"),
        (lambda folder: (folder / "ca.pem").write_text("junk"), "ca.pem: holds no key and certificate"),
    ],
)
def test_a_syncer_that_cannot_use_the_keys_creates_no_run(capsys, tmp_path, spoil, said):
    keys = Keys(tmp_path / "run")
    keys.issue("a")
    spoil(keys.folder)
    there, genesis = sorted(keys.run.rglob("*")), write_genesis(tmp_path / "genesis.safetensors")
    serve = ["syncer", "--run", keys.run, "--port", "0", "--keys", "--genesis", genesis, *OPTIONS]
    code, out, err = called(capsys, *serve)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert sorted(keys.run.rglob("*")) == there


def test_a_syncer_that_is_refused_for_something_else_makes_no_keys(capsys, tmp_path):
    serve = ["syncer", "--run", tmp_path / "run", "--port", "0", "--keys", "--genesis", tmp_path / "none"]
    assert called(capsys, *serve, *OPTIONS)[0] == 2 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", [None, "--keys"])
def test_a_key_for_a_run_that_is_served_without_keys_comes_with_a_word_of_that(call, tmp_path, option):
    with Syncer(tmp_path, *([option] if option else [])) as syncer:
        code, out, err = call("issue", syncer.run_dir, "a")
        record = json.loads(call("issue", syncer.run_dir, "b", "--json")[1])
    said = f"{syncer.run_dir} is being served without keys, and its syncer will not take this one: end it, and "
    assert code == 0 and out.startswith("a.key is the key of a")
    assert record["served_without_keys"] is (option is None)
    assert (err.startswith(said), err.count("\n")) == ((True, 1) if option is None else (False, 0))
    assert json.loads(call("issue", syncer.run_dir, "c", "--json")[1])["served_without_keys"] is False, "nobody does"
