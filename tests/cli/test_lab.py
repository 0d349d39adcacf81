"""skerry lab: what it runs, shows and refuses, with the real laboratory on a tiny model where something is run."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.called import called
from e2e.processes import Running, skerry, until
from proof.lab.fake import result_of, study_of
from skerry.proof.lab.job import run
from skerry.proof.lab.results import Results
from skerry.proof.lab.study import Stint, read

TINY = """
name = "tiny"
seeds = [0, 1]
baseline = "dp"
[common]
run = { learners = 2, steps = 3 }
model.preset = "tiny"
sync = { sync_every = 2, num_fragments = 2, fragment_sync_delay = 1 }
lab = { held_out = 1, points = 2 }
[variants.dp]
lab.data_parallel = true
[variants.defaults]
"""


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the command in this process, in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        return called(capsys, "lab", *words)

    return call


@pytest.fixture
def known(tmp_path):
    """A study with results: `base` of all seeds, `tried` of one, `wild` of one that diverged."""
    study = study_of(tmp_path, "base", "tried", "wild", "none", baseline="base")
    results = Results(tmp_path / "results.jsonl")
    for job in study.jobs:
        if job.variant == "base" or (job.variant in ("tried", "wild") and job.seed == 0):
            loss = {"base": 2.0 + job.seed / 10, "tried": 2.05, "wild": float("nan")}[job.variant]
            results.append(result_of(job, loss=loss, diverged=job.variant == "wild"))
    return study


# ---------------------------------------------------------------------------------------------- showing


def test_the_table_says_how_sure_it_is(call, known):
    code, out, err = call("trial.toml", "--table")
    lines = {line.split()[0]: " ".join(line.split()) for line in out.splitlines()}
    assert (code, err) == (0, "")
    assert lines["base"] == "base 3 2.1000 ± 0.2484 baseline 0.1 50.0 3.50 10.0% 12"
    assert lines["tried"] == "tried 1 2.0500 (one seed) +2.50 % (one seed) 0.1 50.0 3.50 10.0% 12"
    assert lines["wild"] == "wild 1 diverged – – – – – –"
    assert lines["none"] == "none 0 – – – – – – –"
    assert "missing: tried, seeds 1, 2" in out and "missing: none, seeds 0, 1, 2" in out


def test_the_table_as_one_json_object(call, known):
    code, out, _ = call("trial.toml", "--table", "--json", "--only", "tried,wild", "--seeds", "0,2")
    told = json.loads(out)
    assert code == 0 and (told["study"], told["baseline"]) == ("trial", "base")
    tried, wild = told["variants"]
    assert tried["losses"] == [2.05] and tried["against"] == pytest.approx(0.025)
    assert tried["interval"] is None and tried["bytes_per_parameter"] == 50
    assert wild["losses"] == [None] and wild["diverged"] == 1 and wild["loss"] is None
    assert told["missing"] == [{"variant": "tried", "seed": 2}, {"variant": "wild", "seed": 2}]
    study_of(Path.cwd(), "base", name="second")
    code, out, _ = call("trial.toml", "second.toml", "--table", "--json")
    assert [study["study"] for study in json.loads(out)["studies"]] == ["trial", "second"]


def test_the_table_needs_no_torch_and_loads_none(tmp_path, known, call, monkeypatch):
    script = (
        "import sys\nfrom skerry import cli\n"
        "try:\n    cli.main(['lab', 'trial.toml', '--table'])\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    done = skerry_script(script, tmp_path)
    assert done.returncode == 0 and "tried" in done.stdout and not done.stderr
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = call("trial.toml")
    assert (code, out) == (2, "")
    assert err == "skerry: skerry lab without --table: needs torch: pip install 'skerry[torch]'\n"
    assert call("trial.toml", "--only", "base")[0] == 0  # all of it is there already


def skerry_script(script, folder):
    return subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=90)


def test_plots_are_drawn_the_same_each_time(call, known, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = call("trial.toml", "--table", "--plot", "figures", "--json")
    names = ["trial-tokens.png", "trial-tokens.svg", "trial-bytes.png", "trial-bytes.svg"]
    assert code == 0 and json.loads(out)["plots"] == [f"figures/{name}" for name in names]
    first = {name: (tmp_path / "figures" / name).read_bytes() for name in names}
    assert all(first[name].startswith(b"\x89PNG") for name in names if name.endswith("png"))
    for variant in ("base", "tried"):
        assert all(variant.encode() in first[name] for name in names if name.endswith("svg"))
    call("trial.toml", "--table", "--plot", "figures")
    assert {name: (tmp_path / "figures" / name).read_bytes() for name in names} == first


def test_plots_without_matplotlib_say_what_to_install(call, known, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = call("trial.toml", "--table", "--plot", "figures")
    assert (code, out, err) == (2, "", "skerry: --plot: needs matplotlib: pip install 'skerry[plot]'\n")


def test_a_result_that_counts_no_more_is_named_before_its_job_runs_again(call, known, tmp_path):
    study_of(tmp_path, "base", "tried", more="sync.grace = 0.5")
    _, _, err = call("trial.toml", "--table", "--only", "tried")
    assert err == "skerry: trial/tried seed 0: its result is of another configuration: sync.grace was 0.8, is 0.5\n"


# ---------------------------------------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nosuch.toml"], "nosuch.toml: cannot be read (No such file"),
        (["trial.toml", "trial.toml"], "trial.toml: another study given here is called trial too"),
        (["trial.toml", "--only", "tryed"], "--only tryed: in none of the studies: did you mean tried?"),
        (["trial.toml", "--seeds", "7"], "--seeds 7: in none of the studies: known are 0, 1, 2"),
        (["trial.toml", "--seeds", "a"], "--seeds 'a': write whole numbers"),
        (["trial.toml", "--jobs", "0"], "--jobs 0: must be at least 1"),
        (["trial.toml", "--minutes", "nan"], "--minutes nan: must be above 0"),
        (["trial.toml", "--sync.quorum", "2"], "--sync.quorum: a study says what is configured: write it there"),
        (["trial.toml", "--device", "cuda:99"], "--device cuda:99: this machine has"),
        (["trial.toml", "--device", "abacus"], "--device abacus: the laboratory runs on cpu or cuda"),
        (["trial.toml", "--device", "meta"], "--device meta: the laboratory runs on cpu or cuda"),
        (["trial.toml", "--table", "--plot", "trial.toml"], "--plot trial.toml: not a folder to draw into"),
        (["trial.toml", "--results", "trial.toml/x"], "trial.toml/x: cannot be read (Not a directory)"),
        (["lost.toml"], "lost.toml: baseline = 'other:base': not in results.jsonl: run that study first, or give both"),
        (["textless.toml"], "textless/nosuch.txt does not exist"),
    ],
)
def test_bad_input_is_one_line(call, known, tmp_path, words, says):
    study_of(tmp_path, "base", name="lost", baseline="other:base")
    study_of(tmp_path, "base", name="textless", more='[variants.a]\ndata.path = "textless/nosuch.txt"')
    before = (tmp_path / "results.jsonl").read_bytes()
    code, out, err = call(*words)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1
    assert (tmp_path / "results.jsonl").read_bytes() == before


# ---------------------------------------------------------------------------------------------- running


def test_a_study_is_run_once_and_shown(call, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    code, out, err = call("tiny.toml", "--device", "cpu", "--seeds", "0", "--json")
    told = json.loads(out)
    assert code == 0 and told["failed"] == told["missing"] == []
    assert "tiny/dp seed 0: loss " in err and "tiny/defaults seed 0: loss " in err
    dp, defaults = told["variants"]
    assert defaults["against"] == pytest.approx(defaults["loss"] / dp["loss"] - 1)
    assert defaults["bytes_per_parameter"] > 0 == dp["bytes_per_parameter"]
    lines = (tmp_path / "results.jsonl").read_bytes()
    again = call("tiny.toml", "--device", "cpu", "--seeds", "0", "--json")
    assert again == (0, out, "") and (tmp_path / "results.jsonl").read_bytes() == lines
    assert str(tmp_path).encode() not in lines  # a committed file says nothing about the machine's folders


def test_a_job_that_fails_is_told_and_the_others_go_on(call, tmp_path):
    (tmp_path / "short.txt").write_text("too short a text")
    (tmp_path / "tiny.toml").write_text(TINY.replace("[variants.dp]", '[variants.dp]\ndata.path = "short.txt"'))
    code, out, err = call("tiny.toml", "--device", "cpu", "--seeds", "1", "--json")
    told = json.loads(out)
    assert code == 1 and [(f["variant"], f["seed"]) for f in told["failed"]] == [("dp", 1)]
    assert "tiny/dp seed 1: failed: DataError: short.txt holds 16 bytes of text, too few" in err
    assert told["missing"] == [{"variant": "dp", "seed": 1}] and told["variants"][1]["seeds"] == [1]


def test_jobs_that_the_time_does_not_suffice_for_are_saved_and_gone_on_with(call, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY.replace("steps = 3", "steps = 100000000"))
    words = ("tiny.toml", "--device", "cpu", "--only", "defaults", "--seeds", "0", "--minutes", "0.001", "--json")
    for _ in range(2):
        code, out, err = call(*words)
        assert code == 0 and {"variant": "defaults", "seed": 0} in json.loads(out)["missing"]
        assert "tiny/defaults seed 0: its time was up, and it is saved: the same command goes on with it" in err
        (save,) = (tmp_path / "results.saves").iterdir()
    save.write_bytes(save.read_bytes()[:-1])
    code, _, err = call(*words)
    assert code == 1 and "is no save of this version" in err and err.count("\n") == 1 and save.exists()


def test_a_save_is_gone_once_there_is_a_result(call, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    job = next(job for job in read(tmp_path / "tiny.toml").jobs if job.variant == "defaults")
    save = Results(tmp_path / "results.jsonl").save_of(job)
    assert run(job, "cpu", stint=Stint(save, until=0.0)) is None and save.exists()
    code, _, _ = call("tiny.toml", "--device", "cpu", "--only", "defaults", "--seeds", "0")
    assert code == 0 and not save.exists() and Results(tmp_path / "results.jsonl").of(job) is not None


def test_ctrl_c_ends_the_workers_and_keeps_what_is_done(tmp_path):
    endless = "\n[variants.endless]\nrun.steps = 100000000\n"
    (tmp_path / "tiny.toml").write_text(TINY + endless)
    results = tmp_path / "results.jsonl"
    with Running(tmp_path, "lab", tmp_path / "tiny.toml", "--device", "cpu", "--json") as command:
        until(lambda: results.is_file() and results.read_bytes().count(b"\n") == 2, "two results")
        children = until(lambda: children_of(command.process.pid), "a worker")
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130
    assert "interrupted; what was done is kept: the same command goes on" in command.said
    assert json.loads(command.out.read_text()) == {"error": "interrupted"}
    until(lambda: not any(map(is_alive, children)), "the workers to be gone")
    done = skerry("lab", tmp_path / "tiny.toml", "--table", "--json")
    assert [row["seeds"] for row in json.loads(done.stdout)["variants"]] == [[0], [0], []]


def children_of(pid):
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_alive(pid):
    return Path(f"/proc/{pid}").exists()
