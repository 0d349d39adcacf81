"""Recorded runs of every format there was: this version's are read and gone on with, older ones refused in one line."""

import hashlib
import json
import signal
import tarfile
from pathlib import Path

import pytest

from e2e.processes import Syncer, skerry, until
from skerry.store import Store
from skerry.store.tape import FORMAT_VERSION

FIXTURES = Path(__file__).parent.parent / "fixtures"
RUNS = ("run-closed", "run-paused")
EXPORTS = {
    "run-closed": "f66399c5c80819a69ebd3dac7f0750d15cbdbc8537fbfb647d6fe3211dc0e830",
    "run-paused": "d5b7a913a8d2e15c52de347e1a6edf93ae34fb08d9d80198e5e486c9a3c70ec1",
}


KEPT = {  # of which run, which version
    ("run-kept", None): "85c0630563c2b28471ada3185bcb53817fcc9a9c9ab881ecbdb25845dbea7acb",
    ("run-kept", 2): "25f31626cf8bec22d7496ebf937349fe6daa44bc93348d931edb57ee21cc74de",
    ("run-fork", None): "47b67b1d6e9f9d5cc3e4fdbe605b1e864b04f1724cefa231b4dc13d444689a2e",
}


@pytest.fixture
def runs(tmp_path):
    """Both runs of a version, as it left them."""

    def unpacked(version, what="run"):
        with tarfile.open(FIXTURES / f"{what}-{version}.tar.gz") as packed:
            packed.extractall(tmp_path, filter="data")
        return tmp_path

    return unpacked


def contents(run_dir):
    """Every byte of a run; the lock is nobody's word."""
    return {path: path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file() and path.name != "lock"}


# ---------------------------------------------------------------------------------------------- formats 1 and 2


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("version", "format"), [("0.1", 1), ("0.2", 2)])
def test_a_run_of_an_older_format_is_refused_in_one_line_that_names_who_reads_it(runs, run, version, format):
    run_dir = runs(version) / run
    before = contents(run_dir)
    serve, export = ["syncer", "--run", run_dir, "--port", "0"], ["export", run_dir, "--out", run_dir / "model"]
    for words in (serve, export, ["replay", run_dir]):
        done = skerry(*words)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and done.stdout == "", words
        assert line.startswith(f"skerry: {run_dir}/tape/0000")
        assert line.endswith(
            f"was written by Skerry {version} (format {format}); Skerry 0.3 reads format 3: "
            f"export or finish this run with Skerry {version}"
        )
        assert contents(run_dir) == before, "nothing was touched"


# ---------------------------------------------------------------------------------------------- format 3


def test_the_newest_fixture_is_of_the_format_that_is_written():
    assert FORMAT_VERSION == 3, "freeze a run of the new format (tests/fixtures/README.md), and keep reading this one"


@pytest.mark.parametrize("run", RUNS)
def test_a_run_of_format_3_exports_to_the_same_bytes_and_replays(runs, run, tmp_path):
    run_dir, model = runs("0.3") / run, tmp_path / "model.safetensors"
    with Store.open(run_dir, readonly=True) as store:
        assert len({record.segment for record in store.history()}) > 2
    assert skerry("export", run_dir, "--out", model).returncode == 0
    assert hashlib.sha256(model.read_bytes()).hexdigest() == EXPORTS[run]
    done = skerry("replay", run_dir, "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 0 and said["identical"] and said["recomputed"] == said["merges"] > 150
    assert said["model_sha256"] == EXPORTS[run]


def test_a_paused_run_of_format_3_is_gone_on_with(runs, tmp_path):
    pytest.importorskip("torch")
    from fixtures.learner import learner

    run_dir = runs("0.3") / "run-paused"
    before = json.loads(skerry("replay", run_dir, "--json").stdout)
    with Syncer(tmp_path, run_dir=run_dir) as syncer, learner(syncer.port, 0):
        until(lambda: syncer.status["merges"] >= before["merges"] + 5, "merges on top of the recorded ones")
        assert syncer.status["epoch"] == 3 and syncer.status["learners"]["learner-0"]["life"] == 2
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 0
    after = json.loads(skerry("replay", run_dir, "--json").stdout)
    assert after["identical"] and after["merges"] >= before["merges"] + 5


# ---------------------------------------------------------------------------------------------- what is kept of runs


def answered(*words):
    done = skerry(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kept_versions_forks_and_keys_of_0_3_are_read(runs, tmp_path):
    folder = runs("0.3", "kept")
    assert [each["version"] for each in answered("rollback", folder / "run-kept")["kept"]] == [0, 1, 2, 3]
    for (run, version), digest in KEPT.items():
        which = [] if version is None else ["--version", version]
        assert answered("export", folder / run, *which, "--out", tmp_path / "model")["model_sha256"] == digest
    said = answered("replay", folder / "run-fork")
    assert said["violations"] == 0 and (said["lineage"]["run"], said["lineage"]["version"]) == ("kept", 2)
    with Store.open(folder / "run-kept", readonly=True) as parent:
        assert said["lineage"]["commit"] == parent.tape.head.hex()
    (folder / "run-kept" / "keys").chmod(0o700)  # unpacking gives folders the modes that are usual here
    keys = answered("keys", "list", folder / "run-kept")["keys"]
    assert [each["name"] for each in keys] == ["island-a", "island-b"] and keys[1]["revoked"]


def test_a_backup_of_0_3_is_restored_and_gone_on_with(runs, tmp_path):
    pytest.importorskip("torch")
    from fixtures.learner import learner

    folder = runs("0.3", "kept")
    made = answered("restore", folder / "backups", tmp_path / "again")
    assert (made["backup"], made["merges"]) == (1, 84) and answered("replay", tmp_path / "again")["violations"] == 0
    with Syncer(tmp_path, run_dir=tmp_path / "again") as syncer, learner(syncer.port, 0):
        until(lambda: syncer.status["merges"] >= made["merges"] + 5, "merges on top of the restored ones")
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 0
    assert answered("backup", tmp_path / "again", folder / "backups")["backup"] == 2
