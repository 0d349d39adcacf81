"""skerry evaluate at the command line: losses, functions of one's own, and what is refused in one line."""

import json
import sys

import pytest

from cli.called import called
from e2e.processes import Running, Syncer, facts_of, skerry
from node.pair import Pair, config_of
from skerry import config as configs
from skerry.cli.syncer import make_genesis
from skerry.core.facts import Evaluated
from skerry.core.state import state_of
from skerry.store import Store

OWN = ["--name", "a", "--precision", "bf16", "--micro-batch", "3"]  # a learner's own way to compute
HOOK = """
def count(tensors):
    assert all(str(array.dtype) == "float32" for array in tensors.values())
    return {"values": sum(array.size for array in tensors.values()), "nothing": float("nan")}

def largest(tensors):
    return max(abs(array).max() for array in tensors.values())

def broken(tensors):
    return tensors["no such tensor"]

def strange(tensors):
    return list(tensors)

def leaves(tensors):
    raise SystemExit
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of somebody with a function of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "judge.py").write_text(HOOK)
    yield tmp_path
    sys.modules.pop("judge", None)


@pytest.fixture
def own(folder):
    """A closed run of a model that is not the built-in one."""
    with Pair(folder / "own", config_of(steps=60, store={"keep_every": 0.25})) as pair:
        pair.join("a")
        pair.until(lambda: pair.syncer.machine.state.kept)
        pair.close()
    return folder / "own"


@pytest.fixture
def built_in(folder):
    """A run of the built-in model that nobody has trained yet."""
    pytest.importorskip("torch")
    from skerry.train.loop import model_of
    from skerry.train.start import create

    config = configs.Config(
        run=configs.Run(steps=100),
        model=configs.Model(preset="tiny"),
        data=configs.Data(bytes_max=1 << 20, held_out_batches=2),
    )
    create(folder / "built-in", config, model_of(config))
    return folder / "built-in"


def test_every_kept_version_is_measured_and_one_that_cannot_be_had_is_named(capsys, own):
    said = answered(capsys, own, "--every-kept", "--with", "judge:largest")
    assert [each["version"] for each in said["versions"]] == [0, 1, 2, 3, None] and said["left_out"] == []
    progress = [each["progress"] for each in said["versions"]]
    assert progress == sorted(progress) and (progress[0], progress[-1]) == (0.0, 1.0)
    for each in said["versions"][:-1]:
        one = answered(capsys, own, "--version", each["version"], "--with", "judge:largest")
        assert one["figures"] == each["figures"]
    _, out, _ = called(capsys, "evaluate", own, "--every-kept", "--with", "judge:largest")
    assert [line.split()[1:3] for line in out.splitlines()][:2] == [["the", "start"], ["kept", "version"]]
    with Store.open(own, readonly=True) as store:
        file = state_of(store.records).kept[1].checkpoints[0].file
    (own / "files" / file).unlink()
    code, out, _ = called(capsys, "evaluate", own, "--every-kept", "--with", "judge:largest", "--json")
    said = json.loads(out)
    assert code == 0 and [each["version"] for each in said["versions"]] == [0, 1, 3, None]
    assert said["left_out"][0].startswith("kept version 2: ") and file in said["left_out"][0]
    for words in (["--watch"], ["--version", 1]):
        assert "--every-kept: is every version" in refused(capsys, own, "--every-kept", *words)


def answered(capsys, *words):
    code, out, err = called(capsys, "evaluate", *words, "--json")
    assert (code, err) == (0, ""), err
    return json.loads(out)


def refused(capsys, *words):
    code, out, err = called(capsys, "evaluate", *words, "--json")
    assert code == 2 and err.count("\n") == 1, (out, err)
    line = err.removeprefix("skerry: ").rstrip("\n")
    assert json.loads(out) == {"error": line}
    return line


# ---------------------------------------------------------------------------------------------- the built-in model


def test_the_loss_of_the_built_in_model(capsys, built_in):
    newest, start = answered(capsys, built_in), answered(capsys, built_in, "--version", 0)
    assert newest["figures"] == start["figures"] and newest["figures"]["loss"] == pytest.approx(5.545, abs=0.2)
    assert (newest["version"], start["version"], newest["progress"]) == (None, 0, 0.0)
    assert set(newest["fragment_versions"]) == {0}
    code, out, err = called(capsys, "evaluate", built_in, "--device", "cpu", "--threads", 1)
    assert (code, err) == (0, "") and out.startswith(f"{built_in}: newest model, at 0.0% of the budget: loss 5.")


def test_the_text_may_lie_elsewhere(capsys, built_in, folder):
    assert "none.txt does not exist" in refused(capsys, built_in, "--data", "none.txt")
    (folder / "text.txt").write_text("to be, or not to be; " * 2000)
    assert answered(capsys, built_in, "--data", "text.txt")["figures"] != answered(capsys, built_in)["figures"]


def test_a_device_that_is_not_there(capsys, built_in):
    assert refused(capsys, built_in, "--device", "abacus").startswith("--device abacus: ")


# ---------------------------------------------------------------------------------------------- a function of one's own


def test_a_function_says_what_any_model_is_worth(capsys, own):
    found = answered(capsys, own, "--with", "judge:count")
    assert found["figures"] == {"values": 557.0, "nothing": None} and found["progress"] == 1.0
    kept = answered(capsys, own, "--with", "judge:largest", "--version", 1)
    assert kept["version"] == 1 and kept["figures"]["value"] > 0
    assert kept["fragment_versions"] < found["fragment_versions"]
    code, out, _ = called(capsys, "evaluate", own, "--with", "judge:count")
    assert code == 0 and out == f"{own}: newest model, at 100.0% of the budget: values 557, nothing not finite\n"


def test_its_error_is_shown_as_its_own(capsys, own):
    code, out, err = called(capsys, "evaluate", own, "--with", "judge:broken", "--json")
    assert code == 2 and json.loads(out) == {"error": "judge:broken raised KeyError: 'no such tensor'"}
    assert "judge.py" in err and 'return tensors["no such tensor"]' in err
    assert err.splitlines()[-1] == "skerry: judge:broken raised KeyError: 'no such tensor'"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "its model is not the built-in one: give --with module:function"),
        (["--with", "judge"], "'judge' names no function: write module:function"),
        (["--with", "judge:none"], "judge has no function none"),
        (["--with", "judge:strange"], "judge:strange returned a list: return a number, or a dict of numbers"),
        (["--with", "judge:leaves"], "judge:leaves called sys.exit(None): return a number, or raise an error"),
        (["--with", "judge:count", "--version", 9], "version 9 is not kept: kept are 1"),
        (
            ["--with", "judge:count", "--device", "cpu"],
            "--device: is for the built-in model; judge:count has its own way",
        ),
        (["--with", "judge:count", "--watch"], "is closed, there is nothing to watch: leave --watch out"),
        (["--with", "judge:count", "--watch", "--version", 1], "--version: a kept version does not change"),
        (["--with", "judge:count", "--every", 2], "'2' must be from 0.001 to 1"),
        (["--sync.quorum", 2], "--sync.quorum: nothing is configured here"),
    ],
)
def test_what_is_refused(capsys, own, words, says):
    assert says in refused(capsys, own, *words)


def test_no_run_and_no_rhythm(capsys, folder, built_in):
    assert "holds no run: check the path" in refused(capsys, folder / "nowhere")
    assert "the run has no run.evaluate_every: give --every" in refused(capsys, built_in, "--watch")


# ---------------------------------------------------------------------------------------------- a run that goes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whoever_sees_the_directory_may_watch_a_served_run(folder):
    """A run of `skerry syncer`: the watcher ends with it, and has put what a function found on its tape."""
    pytest.importorskip("torch")
    options = ["--run.steps=80", "--run.learners=1", "--model.preset=tiny", "--learner.step_s=0.1"]
    for name in ("syncer", "watcher", "learner"):
        (folder / name).mkdir()
    run = folder / "run"
    genesis = folder / "genesis.safetensors"
    make_genesis(configs.resolve(configs.default(), None, [("model.preset", "tiny")]), genesis)
    with (
        Syncer(folder / "syncer", run_dir=run, genesis=genesis, options=options) as syncer,
        Running(
            folder / "watcher", "evaluate", run, "--watch", "--every", "30%", "--with", "judge:count", "--json"
        ) as watcher,
        Running(folder / "learner", "learner", "--syncer", f"127.0.0.1:{syncer.port}", *OWN) as learner,
    ):
        assert (learner.wait(), syncer.wait(), watcher.wait()) == (0, 0, 0), watcher.said
        curve = json.loads(watcher.out.read_text())["curve"]
    found = [fact for fact in facts_of(run) if isinstance(fact, Evaluated)]
    assert [point["progress"] for point in curve] == [fact.progress for fact in found]
    assert len(found) >= 2 and found[-1].progress == 1.0 and found[-1].figures == {"values": 104216.0, "nothing": None}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_run_is_evaluated_while_it_goes(tmp_path):
    """By a process beside it; the curve is in the summary and on the tape, and the tape still adds up."""
    run = tmp_path / "run"
    done = skerry(
        "train", "--learners", 2, "--model", "tiny", "--step-s", 0.1, "--steps", 150, "--run.evaluate_every", 0.2,
        "--record", "full", "--out", run, "--json", timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    curve = summary["curve"]
    assert len(curve) >= 3, (run / "logs" / "evaluator.log").read_text()
    assert curve[0] == {"progress": 0.0, "tokens": 0, "figures": {"loss": summary["val_loss_start"]}}
    assert curve[-1]["figures"] == {"loss": summary["val_loss_end"]} and curve[-1]["progress"] == 1.0
    for key in ("progress", "tokens"):
        values = [point[key] for point in curve]
        assert values == sorted(values)
    assert curve[0]["figures"]["loss"] > curve[-1]["figures"]["loss"]
    found = [fact for fact in facts_of(run) if isinstance(fact, Evaluated)]
    assert [fact.figures for fact in found] == [point["figures"] for point in curve]
    assert not (run / "evaluations.jsonl").exists()
    assert skerry("replay", run).returncode == 0
