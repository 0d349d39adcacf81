"""The resilience table: two rows measured on real processes, the arithmetic behind them, and bad input."""

import json
import os

import pytest

from e2e.processes import processes_naming, skerry
from skerry import cli
from skerry.cli import chaos_table
from skerry.errors import RunFailed
from skerry.proof.chaos import ddp, versus
from skerry.proof.chaos.plan import Fault

pytestmark = pytest.mark.timeout(240)  # two cores that others use start a dozen processes slowly

SECONDS = 3


# ---------------------------------------------------------------------------------------------- two rows, measured


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    (folder / "tmp").mkdir()
    done = skerry(
        "chaos", "table", "--faults", "throttling,failed learner", "--model", "tiny", "--learners", "2",
        "--step-s", "0.1", "--seconds", SECONDS, "--sync.sync_every", "4", "--sync.num_fragments", "4",
        "--out", folder / "out", "--json",
        timeout=200, env=os.environ | {"TMPDIR": str(folder / "tmp")},
    )  # fmt: skip
    assert not processes_naming(str(folder)), "something is left running"
    assert not list((folder / "tmp").glob("skerry*")), "logs of ranks are left"
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rows(measured):
    return {row["fault"]: row for row in measured["rows"]}


@pytest.mark.chaos
@pytest.mark.slow
def test_the_table_holds_what_is_promised(measured, rows):
    assert list(rows) == ["failed learner", "throttling"]
    assert (measured["seconds"], measured["learners"], measured["model"], measured["step_s"]) == (3.0, 2, "tiny", 0.1)
    assert measured["parameters"] > 1e5 and measured["cores"] >= 1 and measured["hardware"]
    assert measured["rate_set"] == pytest.approx(2 * 4 * 64 / 0.1)
    assert measured["wall_s"] > 2 * 2 * 2 * SECONDS
    for row in rows.values():
        for half in (row["skerry"], row["ddp"]):
            assert half["impact"] == pytest.approx(1 - half["rate_during"] / half["rate_before"])
            left = half["rate_before"] * (1 - row["share_lost"])
            assert half["impact_beyond"] == pytest.approx(1 - half["rate_during"] / left)
        assert row["ddp"]["measured"] and not row["ddp"]["is_bound"] and row["ddp"]["what_happened"]
        assert row["skerry"]["violations"] == 0
    assert measured["violations"] == 0 and measured["violated"] == []


@pytest.mark.chaos
@pytest.mark.slow
def test_a_failed_learner_stops_ddp_and_costs_skerry_that_learner(rows):
    row = rows["failed learner"]
    assert row["ddp"]["impact"] == 1.0 and row["share_lost"] == 0.5
    assert row["skerry"]["impact_beyond"] < 0.5 * row["ddp"]["impact_beyond"]
    assert row["skerry"]["merges_during"] > 0 and row["skerry"]["merged_share"] > 0.5


@pytest.mark.chaos
@pytest.mark.slow
def test_a_throttled_learner_slows_ddp_and_costs_skerry_its_own_work(rows):
    row = rows["throttling"]
    assert row["share_lost"] == pytest.approx(3 / 8)
    assert row["skerry"]["impact"] > 0.1, "nobody was slowed down"
    assert row["skerry"]["impact_beyond"] < 0.5 * row["ddp"]["impact_beyond"]
    assert row["skerry"]["merges_during"] > 0 and row["skerry"]["merged_share"] == 1.0


# ---------------------------------------------------------------------------------------------- arithmetic


def test_what_a_fault_takes_away_by_itself():
    shares = {fault: versus.share_lost(fault, 4) for fault in ddp.FAULTS}
    assert shares == {"failed learner": 1 / 4, "regional outage": 1 / 2, "throttling": 3 / 16, "wan": 0.0}
    assert versus.share_lost("regional outage", 5) == 2 / 5


def test_whom_a_fault_strikes():
    def struck(fault, learners=4, delay_s=0.0):
        return versus.faults_of(fault, learners, 22.0, 20.0, delay_s)

    assert struck("failed learner") == [Fault("kill", "learner-3", 22.0, 20.0, {})]
    assert [f.target for f in struck("regional outage", 5)] == ["learner-3", "learner-4"]
    assert struck("throttling") == [Fault("slow", "learner-3", 22.0, 20.0, {"speed": 0.25})]
    assert [(f.kind, f.parameters) for f in struck("wan", 2)] == [("bandwidth", {"mbit": 2.0})] * 2
    assert [f.kind for f in struck("wan", 2, 0.025)] == ["bandwidth", "bandwidth", "delay", "delay"]


def test_a_rate_is_of_the_looks_in_the_window_and_a_stall_lowers_it():
    looks = [(9.5, 0), (10.5, 100), (12.0, 400), (13.0, 400), (14.5, 400), (15.5, 9999)]
    assert versus.rate_of(looks, 10.0, 15.0) == 300 / 4
    with pytest.raises(RunFailed, match="measure for longer"):
        versus.rate_of(looks, 10.0, 11.0)


def test_what_is_lost_beyond_the_fault():
    assert versus.impact_of(100.0, 75.0, 0.25) == {
        "impact": 0.25, "impact_beyond": 0.0, "rate_before": 100.0, "rate_during": 75.0
    }  # fmt: skip
    assert versus.impact_of(100.0, 78.0, 0.25)["impact_beyond"] == pytest.approx(-0.04)


# ---------------------------------------------------------------------------------------------- for people


def test_a_person_sees_bounds_and_what_was_not_measured(capsys):
    half = {"impact": 0.25, "impact_beyond": -0.004, "merged_share": 0.991}
    bound = {"measured": True, "impact": 0.93, "impact_beyond": 0.93, "is_bound": True, "what_happened": "hang"}
    unmeasured = {"measured": False, "why_not": "not measured here: no tc"}
    chaos_table.print_table({
        "rows": [
            {"fault": "failed learner", "share_lost": 0.25, "skerry": half, "ddp": bound},
            {"fault": "wan", "share_lost": 0.0, "skerry": half, "ddp": unmeasured},
        ],
        "seconds": 20.0, "learners": 4, "step_s": 0.3, "parameters": 1000, "cores": 2, "hardware": "x", "wall_s": 9.0,
        "rate_set": 6827.0, "out": "runs/t", "violations": 1, "violated": ["wan: learner-1 crashed"],
    })  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[1].split()) == "failed learner 25.0% 25.0% -0.4% 99.1% ≥ 93.0% ≥ 93.0% hang"
    assert lines[2].endswith("not measured here: no tc")
    assert lines[-1] == "wan: learner-1 crashed"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--faults", "failed learner,throtling"], "--faults: unknown fault 'throtling': did you mean throttling?"),
        (["--faults", ""], "--faults: unknown fault '': known are failed learner, regional outage"),
        (["--seconds", "0"], "--seconds 0: must be 2 or more"),
        (["--seconds", "nan"], "--seconds nan: must be 2 or more"),
        (["--seconds", "2", "--step-s", "0.5"], "--seconds 2: at learner.step_s = 0.5 5 or more make a rate"),
        (["--learners", "1"], "run.learners = 1: one may fail, so 2 or more are needed"),
        (["--step-s", "0"], "learner.step_s = 0: both halves run at one set pace; set it, like 0.3"),
        (["--run.minutes", "9"], "run.minutes = 9: a row's length is set with --seconds"),
        (["--model", "huge"], "model.preset = 'huge': known are "),
        (["--data", "nowhere"], "nowhere"),
        (["--out", "taken"], "--out taken: is there already"),
        (["--second", "5", "--lerners", "3"], "did you mean --learners?"),
    ],
)
def test_a_table_nobody_can_measure(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(SystemExit) as end:
        cli.main(["chaos", "table", *words, "--json"])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and err.count("\n") == 1 and says in err
    assert json.loads(out) == {"error": err.removeprefix("skerry: ").rstrip("\n")}
    assert [path.name for path in tmp_path.iterdir()] == ["taken"], "something was written"
