"""skerry rollback, prune and export --version at the command line: what they say, and what they refuse in one line."""

import json
import os
import shutil

import msgspec
import pytest
from safetensors import safe_open

from cli.called import called
from node.pair import Pair, config_of
from skerry.core.events import Interrupted
from skerry.core.facts import Pruned, RolledBack
from skerry.core.state import decode_fact, state_of
from skerry.run.status import status_of
from skerry.store import Store


def train(root, keep_every=0.25, kept=1, record="full"):
    """Until so many versions are kept and a little longer, then ended in order."""
    settings = config_of(steps=200, store={"keep_every": keep_every, "record": record})
    with Pair(root, settings) as pair:
        pair.join("a")
        pair.until(lambda: len(pair.syncer.machine.state.kept) >= kept)
        pair.run(9)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
    return root


@pytest.fixture
def root(tmp_path):
    return train(tmp_path / "run")


def tape_of(root):
    with Store.open(root, readonly=True) as store:
        return [record.body for record in store.history()]


def state_in(root):
    with Store.open(root, readonly=True) as store:
        return state_of(store.records)


def refused(capsys, *words):
    code, out, err = called(capsys, *words, "--json")
    assert code == 2 and err.count("\n") == 1, (out, err)
    line = err.removeprefix("skerry: ").rstrip("\n")
    assert json.loads(out) == {"error": line}
    return line


def answered(capsys, *words):
    code, out, err = called(capsys, *words, "--json")
    assert (code, err) == (0, ""), err
    return json.loads(out)


# ---------------------------------------------------------------------------------------------- rollback


def test_without_a_version_those_that_are_kept_are_listed(capsys, root):
    record = answered(capsys, "rollback", root)
    state = state_in(root)
    assert [kept["version"] for kept in record["kept"]] == [0, 1]
    assert record["kept"][1]["fragment_versions"] == list(state.kept[0].versions)
    code, out, _ = called(capsys, "rollback", root)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 4
    assert lines[1].split() == ["0", "the", "start;", "fragments", "at", "version", "0"]
    assert lines[2].startswith("     1  at  25.") and "fragments at version" in lines[2]
    assert lines[3].endswith(f"go back to one with skerry rollback {root} --to VERSION")
    assert len(tape_of(root)) and status_of(root)["serving"] == "paused"


def test_going_back_says_where_the_run_is_and_how_it_goes_on(capsys, root):
    before = state_in(root)
    code, out, err = called(capsys, "rollback", root, "--to", 1)
    after = state_in(root)
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith(f"{root}: is back at version 1, as version ")
    assert out.splitlines()[1] == f"go on with: skerry syncer --run {root}  (with the options it had)"
    assert [at.version for at in after.fragments] == [at.version + 1 for at in before.fragments]
    assert decode_fact(tape_of(root)[-1]) == RolledBack(after.epoch, 1)
    assert answered(capsys, "replay", root)["identical"]


def test_a_rollback_that_the_tape_has_lost_is_missed(capsys, root):
    """It adds no merge; the status that it leaves tells of its epoch."""
    before = state_in(root)
    answered(capsys, "rollback", root, "--to", 1)
    segment = root / "tape" / "000001.seg"
    data = bytearray(segment.read_bytes())
    data[-40] ^= 1
    segment.write_bytes(data)
    n, epoch = before.merges, before.epoch
    said = f"ends with {n} merges, status.json says {n} in epoch {epoch + 1}, after epoch {epoch} here"
    for words in (["replay", root], ["train", "--resume", root], ["syncer", "--port", 0, "--run", root]):
        assert f"truncated: the tape {said}: restore it" in refused(capsys, *words)
    assert segment.read_bytes() == data


def test_a_kept_version_whose_files_are_gone_is_marked(capsys, root):
    for checkpoint in state_in(root).kept[0].checkpoints[:2]:
        (root / "files" / checkpoint.file).unlink()
    assert [kept["files_missing"] for kept in answered(capsys, "rollback", root)["kept"]] == [0, 2]
    _, out, _ = called(capsys, "rollback", root)
    assert out.splitlines()[2].endswith("; 2 files missing") and "missing" not in out.splitlines()[1]


def test_a_finished_run_keeps_the_date_of_its_end(capsys, tmp_path):
    with Pair(tmp_path / "run", config_of(steps=40)) as pair:
        pair.join("a")
        pair.close()
    ended = answered(capsys, "status", pair.root)
    ended_at = ended["at"]
    with Store.open(pair.root, clock=lambda: ended_at + 1000.0) as store:
        store.commit([msgspec.msgpack.encode(Pruned(1, ()))])
    assert answered(capsys, "status", pair.root)["at"] == ended_at
    (pair.root / "status.json").write_text(json.dumps(ended))
    with Store.open(pair.root, clock=lambda: ended_at + 2000.0) as store:
        store.rotate(msgspec.msgpack.encode(state_of(store.records)))
    assert answered(capsys, "status", pair.root)["at"] == ended_at


def test_of_a_finished_run_a_kept_version_can_be_exported(capsys, tmp_path):
    with Pair(tmp_path / "run", config_of(steps=40)) as pair:
        pair.join("a")
        pair.close()
    _, out, _ = called(capsys, "rollback", pair.root)
    assert out.splitlines()[-1].endswith(f"take the model of one with skerry export {pair.root} --version VERSION")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", 7], "version 7 is not kept: kept are 1, and 0, the start of the run"),
        (["--to", -1], "version -1 is not kept: kept are 1, and 0, the start of the run"),
        (["--to", "one"], "argument --to: invalid whole number value: 'one' (see skerry rollback --help)"),
        (["--store.keep_every", 1], "--store.keep_every: nothing is configured here"),
    ],
)
def test_bad_words_are_refused_and_nothing_is_written(capsys, root, words, says):
    before = tape_of(root)
    assert refused(capsys, "rollback", root, *words) == says
    assert tape_of(root) == before


def test_where_nothing_is_kept_there_is_the_start(capsys, tmp_path):
    root = train(tmp_path / "run", keep_every=0, kept=0)
    assert refused(capsys, "rollback", root, "--to", 1) == (
        "version 1 is not kept: kept are none, and 0, the start of the run"
    )
    assert answered(capsys, "rollback", root, "--to", 0)["version"] == 0


def test_a_served_run_is_left_alone(capsys, root):
    status = status_of(root) | {"pid": os.getpid()}  # as if a syncer answered there
    (root / "status.json").write_text(json.dumps(status))
    with Store.open(root):
        for words in (["rollback", root, "--to", 1], ["prune", root, "--kept", 0]):
            assert f"{root} is served by process" in refused(capsys, *words)
        assert len(answered(capsys, "rollback", root)["kept"]) == 2
        assert answered(capsys, "prune", root, "--kept", 0, "--dry-run")["kept_removed"] == [1]


def test_a_damaged_kept_file_is_named(capsys, root):
    file = root / "files" / state_in(root).kept[0].checkpoints[2].file
    file.write_bytes(b"rotten")
    before = tape_of(root)
    says = f"{file} differs from what was written: restore it from a copy"
    repair = f"or try skerry syncer --run {root} --repair"
    assert refused(capsys, "rollback", root, "--to", 1) == f"kept version 1, fragment 2: {says}, {repair}"
    assert refused(capsys, "export", root, "--version", 1) == f"kept version 1: {says}, {repair}"
    assert tape_of(root) == before and not list(root.glob("*.safetensors*"))


@pytest.mark.parametrize("verb", ["rollback", "prune"])
def test_a_directory_without_a_run_is_refused(capsys, tmp_path, verb):
    words = ["--kept", 1] if verb == "prune" else []
    assert "holds no run: check the path" in refused(capsys, verb, tmp_path / "nothing", *words)


# ---------------------------------------------------------------------------------------------- export


def test_a_kept_version_is_exported_under_its_own_name(capsys, root):
    record = answered(capsys, "export", root, "--version", 1)
    assert (record["version"], record["model_path"]) == (1, str(root / "model-1.safetensors"))
    assert record["model_sha256"] != answered(capsys, "export", root)["model_sha256"]
    with safe_open(record["model_path"], "numpy") as file:
        about = json.loads(file.metadata()["skerry"])
    assert (about["kept"], about["versions"]) == (1, list(state_in(root).kept[0].versions))


def test_what_is_exported_is_what_a_rollback_goes_back_to(capsys, root):
    kept = answered(capsys, "export", root, "--version", 1)
    answered(capsys, "rollback", root, "--to", 1)
    answered(capsys, "export", root)

    def tensors(name):
        with safe_open(root / name, "numpy") as file:
            return {key: file.get_tensor(key).tobytes() for key in file.keys()}  # noqa: SIM118

    assert tensors("model.safetensors") == tensors(kept["model_path"].rpartition("/")[2])


@pytest.mark.parametrize("verb", ["export", "replay"])
@pytest.mark.parametrize(
    "name", ["tape/000001.seg", "files/new", "journal", "lock", "status.json", "linked/000001.seg"]
)
def test_no_model_is_written_over_the_run_itself(capsys, root, verb, name):
    (root / "linked").symlink_to(root / "tape")
    out = root / name
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    refused(capsys, verb, root, "--out", out)
    if name != "journal":
        part = name.split("/")[0].replace("linked", "tape")
        says = f"--out {out}: {root / part} is a part of a run; name another file"
        assert refused(capsys, verb, root, "--out", out) == says
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("verb", ["export", "replay"])
@pytest.mark.parametrize("name", ["tape/model", "journal/model", "files/model", "record/model", "summary.json"])
def test_no_model_is_written_into_another_run(capsys, root, verb, name):
    other = shutil.copytree(root, root.parent / "other")
    before = sorted(other.rglob("*"))
    says = f"--out {other / name}: {other / name.split('/')[0]} is a part of a run; name another file"
    assert refused(capsys, verb, root, "--out", other / name) == says
    assert sorted(other.rglob("*")) == before


def test_a_model_may_lie_beside_the_parts_of_another_run(capsys, root):
    other = shutil.copytree(root, root.parent / "other")
    answered(capsys, "export", root, "--out", other / "model-of-another.safetensors")


def test_a_version_that_is_not_kept_is_not_exported(capsys, root):
    says = "version 5 is not kept: kept are 1, and 0, the start of the run"
    assert refused(capsys, "export", root, "--version", 5) == says


# ---------------------------------------------------------------------------------------------- prune


def test_a_dry_run_says_what_it_would_free_and_removes_nothing(capsys, root):
    before = sorted(path for path in root.rglob("*") if path.is_file())
    words = ["prune", root, "--keep-days", 0]
    told = answered(capsys, *words, "--dry-run")
    assert not told["removed"] and told["frees"]["total"] > 0 and told["kept_removed"] == [1]
    assert sorted(path for path in root.rglob("*") if path.is_file()) == before
    done = answered(capsys, *words)
    assert done == told | {"removed": True}
    assert not list((root / "record").iterdir()) and state_in(root).kept == []
    report = answered(capsys, "replay", root)
    assert report["identical"] is None and report["begins"] and report["recomputed"] == 0
    code, out, err = called(capsys, "replay", root)
    assert code == 0 and err == report["begins"] + "\n" and err.endswith(", and none has followed\n")
    assert out.startswith(
        "nothing was recomputed, for no kept version leads on to a merge that the tape still tells of: "
    )


@pytest.mark.parametrize("words", [[], ["--dry-run"]], ids=["prune", "dry run"])
def test_a_link_that_leads_nowhere_is_no_bigger_than_it_is(capsys, root, words):
    for name in ("tape/000000.seg", f"record/{'a' * 64}", f"files/{'a' * 32}"):
        (root / name).symlink_to(root / "nothing")
    record = answered(capsys, "prune", root, "--keep-days", 0, *words)
    assert record["removed"] == (not words) and record["frees"]["total"] > 0


def test_it_says_what_replay_can_still_do(capsys, root):
    _, out, _ = called(capsys, "prune", root, "--keep-days", 0, "--kept", 1, "--dry-run")
    assert out.splitlines()[1] == "kept: 1, and 0, the start; replay has no merge left to audit or recompute"
    _, out, _ = called(capsys, "prune", root, "--kept", 0)
    assert out.splitlines()[1] == "kept: none, and 0, the start; replay can do all it could"
    code, out, _ = called(capsys, "replay", root)
    assert code == 0 and out.startswith("identical: ") and "sha256" in out


def test_it_says_why_nothing_of_a_tape_of_one_segment_goes(capsys, root):
    before = tape_of(root)
    _, out, _ = called(capsys, "prune", root, "--before", 1)
    assert out.splitlines()[1:] == [
        "the tape stays: segment 1, with which it begins, has merges that replay from version 1 on needs",
        "kept: 1, and 0, the start; replay can do all it could",
    ]
    assert tape_of(root) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing is removed unless it is said what: --keep-days N, --before VERSION or --kept N"),
        (["--keep-days", 3, "--before", 1], "--keep-days and --before both say where the tape is to begin: give one"),
        (["--keep-days", -1], "--keep-days -1: must be from 0 to 36500"),
        (["--keep-days", "nan"], "--keep-days nan: must be from 0 to 36500"),
        (["--kept", -2], "--kept -2: must be 0 or more"),
        (["--before", 9], "version 9 is not kept: kept are 1, and 0, the start of the run"),
    ],
)
def test_bad_words_of_prune_are_refused(capsys, root, words, says):
    before = tape_of(root)
    assert refused(capsys, "prune", root, *words) == says
    assert tape_of(root) == before


@pytest.mark.parametrize("value", [-0.1, 1.5, 0.0001])
def test_a_share_or_a_whole_number_of_versions(capsys, tmp_path, value):
    code, _, err = called(capsys, "plan", "run", f"--store.keep_every={value}")
    assert code == 2 and "store.keep_every" in err and err.count("\n") == 1
