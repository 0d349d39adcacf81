"""skerry replay as a person or a script meets it: what it prints, its exit codes, and every refusal in one line."""

import hashlib
import json
import shutil
import struct

import msgspec
import pytest
from safetensors.numpy import load_file

from e2e.processes import facts_of, skerry
from node.pair import Pair, config_of
from skerry import cli
from skerry.core.facts import Committed, Kept
from skerry.store import Store

KEYS = {
    "identical", "note", "merges", "recomputed", "record", "checks", "violations", "violated", "first_difference",
    "left_out", "skipped", "begins", "lineage", "model_sha256", "run_dir",
}  # fmt: skip


def grown(root, record="full"):
    with Pair(root, config_of(learners=2, store={"record": record}, wire={"codec_up": "int4"})) as pair:
        pair.join("a")
        pair.join("b", every=2)
        pair.run(40)
    return root


@pytest.fixture
def run_dir(tmp_path):
    return grown(tmp_path / "run")


@pytest.fixture
def call(capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def run(*words):
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run


@pytest.fixture
def refused(call, tmp_path):
    """A command that must be refused, with and without --json, changing nothing; its one line."""

    def run(*words):
        before = tree(tmp_path)
        code, out, err = call("replay", *words)
        assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("skerry: ")
        line = err.removeprefix("skerry: ").rstrip("\n")
        assert call("replay", *words, "--json")[:2] == (2, json.dumps({"error": line}, separators=(",", ":")) + "\n")
        assert tree(tmp_path) == before
        return line

    return run


def tree(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------ what it says


def test_json_is_one_object_with_every_promised_key(call, run_dir):
    code, out, err = call("replay", run_dir, "--json")
    said = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1) and said.keys() == KEYS
    merges = sum(isinstance(fact, Committed) for fact in facts_of(run_dir))
    assert said["identical"] is True and said["merges"] == said["recomputed"] == merges > 0
    assert (said["violations"], said["violated"], said["first_difference"]) == (0, [], None)
    assert said["record"] == "full" and said["note"] == ""


def test_people_read_a_short_summary(call, run_dir, tmp_path):
    code, out, err = call("replay", run_dir)
    assert (code, err) == (0, "") and out.startswith("identical: ") and "merges recomputed" in out
    decided = grown(tmp_path / "decided", "decisions")
    code, out, _ = call("replay", decided)
    assert code == 0 and out.startswith("nothing was recomputed, for this run kept no contributions")
    said = json.loads(call("replay", decided, "--json")[1])
    assert said["identical"] is None and said["note"] + "\n" == out


def test_an_excluded_learner_and_the_model_without_it(call, run_dir, tmp_path):
    out_file = tmp_path / "without.safetensors"
    code, out, _ = call("replay", run_dir, "--exclude", "b", "--out", out_file, "--json", "--threads", 2)
    said = json.loads(out)
    gone = said["excluded"]
    assert code == 0 and said.keys() == KEYS | {"excluded"}
    assert gone["learner"] == "b" and gone["contributions"] > 0 and gone["tokens"] > 0
    assert gone["merges_changed"] + gone["merges_skipped"] == gone["contributions"] and gone["relative_change"] > 0
    assert hashlib.sha256(out_file.read_bytes()).hexdigest() == gone["model_sha256"] != said["model_sha256"]
    assert set(load_file(out_file)) == {"bias", "emb.weight", "scale", "mlp.weight"}
    assert "the others trained on versions that held the work of b" in gone["note"]
    _, out, _ = call("replay", run_dir, "--exclude", "b")
    assert "without b: " in out and "this is not the run that would have been" in out


def test_without_exclude_out_is_what_export_writes(call, run_dir, tmp_path):
    assert call("replay", run_dir, "--out", tmp_path / "replayed")[0] == 0
    assert call("export", run_dir, "--out", tmp_path / "exported")[0] == 0
    assert (tmp_path / "replayed").read_bytes() == (tmp_path / "exported").read_bytes()


def shape(commit):
    return commit.decision.fragment, [part.codec for part in commit.decision.parts]


def test_what_differs_is_said_and_exits_with_one(call, run_dir, tmp_path):
    """A merge whose recorded contributions were exchanged for another's, every hash made to fit."""
    facts = facts_of(run_dir)
    commits = [n for n, fact in enumerate(facts) if isinstance(fact, Committed)]
    sixth = facts[commits[5]]
    others = (facts[n] for n in commits[6:])
    other = next(c for c in others if shape(c) == shape(sixth))
    result = msgspec.structs.replace(sixth.result, payloads=other.result.payloads)
    facts[commits[5]] = Committed(sixth.decision, result)
    shutil.rmtree(run_dir / "tape")
    with Store.open(run_dir) as store:
        store.commit([msgspec.msgpack.encode(fact) for fact in facts])

    code, out, _ = call("replay", run_dir, "--json")
    said = json.loads(out)
    assert code == 1 and said["identical"] is False and said["recomputed"] == 5 and said["model_sha256"] is None
    assert "tape/000001.seg record " in said["first_difference"]
    code, out, err = call("replay", run_dir)
    assert code == 1 and out.startswith("not identical: 5 of ") and err == said["first_difference"] + "\n"
    code, out, err = call("replay", run_dir, "--out", tmp_path / "model")
    assert code == 2 and not (tmp_path / "model").exists() and said["first_difference"] in err


def test_what_a_tape_says_does_not_reach_the_terminal_as_it_is(call, run_dir):
    facts = facts_of(run_dir)
    fragments = 1 + max(fact.decision.fragment for fact in facts if isinstance(fact, Committed))
    kept = Kept(1, (0,) * fragments, ("\x1b[31m\n",) * fragments, 0.5, 1.0)
    shutil.rmtree(run_dir / "tape")
    with Store.open(run_dir) as store:
        store.commit([msgspec.msgpack.encode(fact) for fact in [*facts, kept]])
    code, _, err = call("replay", run_dir)
    assert code == 2 and r"'\x1b[31m\n' is no file digest" in err and err.replace("\n", "").isprintable()


# ------------------------------------------------------------------------------------------ refusals


def test_no_run_there(refused, tmp_path):
    assert "holds no run" in refused(tmp_path / "nowhere")
    Store.open(tmp_path / "empty").close()
    assert "holds no run: check the path" in refused(tmp_path / "empty")


def test_an_unknown_learner(refused, run_dir):
    assert refused(run_dir, "--exclude", "z") == "--exclude z: this run has no such learner, but a, b"


def test_excluding_needs_the_contributions(refused, tmp_path):
    run_dir = grown(tmp_path / "decided", "decisions")
    assert "begin one with --store.record full" in refused(run_dir, "--exclude", "a")
    assert "begin one with --store.record full" in refused(run_dir, "--out", tmp_path / "model")


def test_an_out_that_is_there_or_has_no_folder(refused, run_dir, tmp_path):
    (tmp_path / "there").write_text("precious")
    assert "is there already" in refused(run_dir, "--out", tmp_path / "there")
    assert "is not a folder" in refused(run_dir, "--out", tmp_path / "no" / "model")


@pytest.mark.parametrize("threads", ["0", "-1", "257", "many"])
def test_threads(refused, run_dir, threads):
    assert "--threads" in refused(run_dir, "--threads", threads)


def test_damage_is_named_at_its_first_bad_record(refused, run_dir):
    segment = run_dir / "tape" / "000001.seg"
    whole = segment.read_bytes()
    middle = len(whole) // 2
    segment.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert "tape/000001.seg is damaged from record " in refused(run_dir)
    segment.write_bytes(whole[:middle])
    (run_dir / "summary.json").write_text('{"merges": 10000}')
    assert "truncated: the tape ends with " in refused(run_dir)
    segment.write_bytes(whole[:8] + b"\x07" + whole[9:])
    assert "tape/000001.seg has format 7" in refused(run_dir)
    segment.write_bytes(whole)
    (run_dir / "summary.json").unlink()
    payloads = next(fact.result.payloads for fact in facts_of(run_dir) if isinstance(fact, Committed))
    (run_dir / "record" / payloads).unlink()
    line = refused(run_dir)
    assert f"record/{payloads} is missing" in line and "tape/000001.seg record " in line


def test_a_torn_tail_is_no_violation_and_is_said(call, run_dir, tmp_path):
    segment = run_dir / "tape" / "000001.seg"
    size = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b"half a commit")
    code, out, _ = call("replay", run_dir, "--json")
    said = json.loads(out)
    assert code == 0 and said["identical"] is True
    line = f"{segment}: 13 bytes after the last whole commit, from byte {size} on, are left out: "
    assert said["left_out"].startswith(line)
    code, out, err = call("replay", run_dir)
    assert code == 0 and out.startswith("identical: ") and err == said["left_out"] + "\n"
    code, out, err = call("export", run_dir, "--out", tmp_path / "model")
    assert code == 0 and err == said["left_out"] + "\n"
    assert json.loads(call("export", run_dir, "--out", tmp_path / "model", "--json")[1])["left_out"] == said["left_out"]


def test_a_choice_of_record_that_is_none(call):
    code, out, err = call("train", "--record", "some", "--steps", 5)
    assert (code, out) == (2, "") and "--record" in err and err.count("\n") == 1


# ------------------------------------------------------------------------------------------ a real run


@pytest.mark.slow
def test_a_real_run_replays_and_its_model_is_the_one_that_was_exported(tmp_path):
    run_dir = tmp_path / "run"
    done = skerry(
        "train", "--learners", 2, "--model", "tiny", "--steps", 24, "--step-s", 0.05, "--record", "full",
        "--out", run_dir, "--json", "--sync.num_fragments", 4, "--sync.sync_every", 4,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    replayed = skerry("replay", run_dir, "--exclude", "learner-1", "--json")
    assert replayed.returncode == 0, replayed.stderr
    said = json.loads(replayed.stdout)
    assert said["identical"] and said["merges"] == said["recomputed"] == summary["merges"] > 0
    assert said["model_sha256"] == summary["model_sha256"]
    assert said["excluded"]["tokens"] == summary["learners"]["learner-1"]["tokens_merged"] > 0


@pytest.mark.parametrize("at", [float("nan"), float("-inf"), 1e300])
def test_a_commit_at_no_time_is_a_damaged_tape_to_every_reader(call, run_dir, tmp_path, at):
    segment = run_dir / "tape" / "000001.seg"
    data = bytearray(segment.read_bytes())
    start = data.rindex(b"\xf5GRP")
    struct.pack_into("<d", data, start + 16, at)
    data[-32:] = hashlib.sha256(data[start:-32]).digest()
    segment.write_bytes(data)
    for words in (("replay",), ("status",), ("report", "--out", tmp_path / "report.html")):
        code, _, err = call(*words, run_dir)
        assert code == 2 and err.count("\n") == 1, err
        assert f"{segment} is damaged at byte {start}: its time stamp" in err
