"""skerry simulate goodput: what it prints, what it draws, and what it refuses in one line."""

import importlib.util
import json
import sys

import pytest

from cli.called import called
from skerry import cli
from skerry.cli import simulate_goodput


def run(capsys, *words):
    """(exit code, stdout, stderr) of a command."""
    return called(capsys, "simulate", "goodput", *words)


def told(capsys, *words):
    code, out, err = run(capsys, *words, "--json")
    assert code == 0 and out.count("\n") == 1, err
    return json.loads(out)


def test_a_fleet_is_simulated_with_intervals(capsys):
    found = told(capsys, "--chips", "1.2e6", "--learners", "8", "--days", "3", "--trials", "10")
    assert found["goodput"]["low"] < found["goodput"]["mean"] < found["goodput"]["high"]
    assert found["goodput"]["mean"] == pytest.approx(0.88, abs=0.03) and found["uptime"]["mean"] > 0.999
    assert found["failures_per_day"] == pytest.approx(1.2e6 / 365.25, rel=0.1) and found["learners"] == 8
    assert told(capsys, "--chips", "1.2M", "--rigid", "--days", "3", "--trials", "4")["mode"] == "rigid"


def test_every_option_does_something(capsys):
    """Each makes the fleet worse than the plain one."""
    short = ("--chips", "300k", "--learners", "4", "--days", "4", "--trials", "6")
    plain = told(capsys, *short)["goodput"]["mean"]
    for words in (
        ("--mtbi", "60d"), ("--slice", "4096"), ("--repair", "8h"), ("--reconfigure", "2min"), ("--rigid",),
        ("--quorum", "4"), ("--quorum", "4", "--speeds", "1,1,1,0.5"), ("--quorum", "4", "--speed-variance", "0.3"),
        ("--regions", "2", "--region-mtbi", "2d", "--region-repair", "12h"), ("--mtbi", "1y,1y,1y,10d"),
    ):  # fmt: skip
        assert told(capsys, *short, *words)["goodput"]["mean"] < plain - 0.005, words
    rigid = told(capsys, *short, "--rigid")["goodput"]["mean"]
    assert told(capsys, *short, "--rigid", "--checkpoint", "10min")["goodput"]["mean"] < rigid - 0.05
    assert told(capsys, *short, "--rigid", "--restart", "1h")["goodput"]["mean"] < rigid - 0.05
    night = told(capsys, *short, "--scavenged", "2", "--night", "12h")
    assert night["relative_time"]["mean"] == pytest.approx(2 / 3, abs=0.02)
    waiting = told(capsys, *short, "--quorum", "2", "--grace", "0.8", "--speeds", "1,1,0.8,0.8")
    assert 2 < waiting["contributors_mean"] <= 4


def test_the_papers_sixty_cells_are_printed_beside_ours(capsys):
    found = told(capsys, "--paper")
    assert len(found["cells"]) == 60 and found["deviation_max"] <= 3 and found["deviation_mean"] <= 1
    assert found["deviation_max"] == pytest.approx(max(abs(c["ours"] - c["paper"]) for c in found["cells"]))
    assert [round(one["night_s"] / 3600, 1) for one in found["scavenging"]] == [10.7, 9.6, 8.0, 4.8]
    assert "no evidence" in found["scavenging_note"] and len(found["unequal"]) == 3 and found["sensitivity"]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra plot")
def test_a_picture_is_drawn_as_png_and_svg(capsys, tmp_path):
    found = told(capsys, "--chips", "100k", "--days", "1", "--trials", "2", "--plot", str(tmp_path / "picture.png"))
    assert [name.rsplit("/", 1)[1] for name in found["plots"]] == ["picture.png", "picture.svg"]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_without_matplotlib_the_extra_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "--plot", str(tmp_path / "picture"))
    assert code == 2 and "skerry[plot]" in err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra plot")
def test_the_picture_shows_the_number_that_is_printed(capsys, tmp_path):
    short = ("--days", "1", "--trials", "2", "--plot", str(tmp_path / "picture"))
    for words in (("--quorum", "8"), ("--chips", "1000,200000", "--slice", "100", "--rigid"), ("--rigid",)):
        found = told(capsys, *words, *short)
        picture = (tmp_path / "picture.svg").read_text()
        assert f"this fleet: {100 * found['goodput']['mean']:.1f}" in picture
        assert f">{100 * found['uptime']['mean']:.1f}<" in picture and ">halved<" in picture


def test_people_get_a_table(capsys):
    code, out, _ = run(capsys, "--chips", "100k", "--days", "1", "--trials", "2")
    assert code == 0 and "goodput" in out and "95 %" in out and "100,096 chips" in out and "100,000 asked" in out


def test_people_are_told_that_the_papers_night_is_not_known(capsys):
    code, out, _ = run(capsys, "--paper")
    text = " ".join(out.split())
    assert code == 0 and "does not say how long its night is" in text and "no evidence" in text and "10.7 h" in text


def test_what_was_simulated_is_echoed(capsys):
    found = told(capsys, "--chips", "1000,3000", "--slice", "256,512", "--mtbi", "10d,20d", "--speeds", "1,2",
                 "--scavenged", "1", "--night", "8h", "--days", "1", "--trials", "2")  # fmt: skip
    assert found["chips_asked"] == 4000 and found["chips"] == 4 * 256 + 6 * 512
    fleet = found["fleet"]
    assert fleet["chips"] == [1024, 3072] and fleet["slice_chips"] == [256, 512] and fleet["speeds"] == [1, 2]
    assert fleet["mtbi_s"] == [864e3, 1728e3] and (fleet["scavenged"], fleet["night_s"]) == (1, 8 * 3600)
    assert fleet["regions"] == 0 and fleet["region_mtbi_s"] is None


def test_a_share_lies_between_nothing_and_all(capsys):
    """Two trials, one of which has an outage: a wide interval around almost 1."""
    for seed in range(8):
        found = told(capsys, "--chips", "10k", "--learners", "2", "--mtbi", "30d", "--days", "1", "--trials", "2",
                     "--seed", str(seed))  # fmt: skip
        for one in (found["goodput"], found["uptime"]):
            assert 0 <= one["low"] <= one["mean"] <= one["high"] <= 1


def test_who_waits_is_told_how_long(capsys, monkeypatch):
    monkeypatch.setattr(simulate_goodput, "QUIET_S", 0.0)
    code, out, err = run(capsys, "--chips", "100k", "--days", "1", "--trials", "2", "--json")
    assert code == 0 and json.loads(out) and "simulating: about" in err


def test_the_help_names_the_other_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    assert "skerry simulate goodput --help" in " ".join(capsys.readouterr().out.split())


def test_a_unit_may_stand_where_the_option_has_one(capsys):
    words = ("--chips", "100k", "--trials", "2", "--quorum", "4", "--grace")
    plain = told(capsys, *words, "0.5", "--days", "2", "--speed-variance", "0.1")
    assert told(capsys, *words, "50%", "--days", "2d", "--speed-variance", "10%") | {"seconds": 0} == plain | {
        "seconds": 0
    }


BAD = [
    (("--speeds", "2k,1"), "write a plain number like 1 or 0.5"),
    (("--days", "5M"), "--days 5M"),
    (("--chips", "-5"), "--chips -5"),
    (("--chips", "many"), "--chips many"),
    (("--chips", "1e12"), "must be from"),
    (("--chips", "10M", "--mtbi", "0s"), "--mtbi 0s"),
    (("--mtbi", "1parsec"), "unknown unit 'parsec'"),
    (("--repair", "5Gbit"), "unknown unit 'Gbit'"),
    (("--learners", "8", "--chips", "1000"), "more than the 3 slices"),
    (("--learners", "0"), "--learners 0"),
    (("--learners", "2.5"), "whole number"),
    (("--quorum", "9", "--learners", "8"), "--quorum 9: more than the 8 learners"),
    (("--speeds", "1,2", "--learners", "3"), "2 values for 3 learners"),
    (("--chips", "1k,2k", "--learners", "3"), "lists 2 learners"),
    (("--chips", "100,2k"), "not one slice"),
    (("--checkpoint", "10min"), "--rigid"),
    (("--rigid", "--elastic"), "not allowed with"),
    (("--night", "8h"), "--scavenged"),
    (("--region-mtbi", "8d"), "--regions"),
    (("--scavenged", "8"), "--scavenged 8"),
    (("--speed-variance", "2"), "--speed-variance 2"),
    (("--grace", "7"), "--grace 7"),
    (("--days", "0"), "--days 0"),
    (("--trials", "1"), "--trials 1"),
    (("--trials", "1e5", "--days", "30000"), "lower --days, --trials"),
    (("--chips", "1e10", "--days", "30", "--trials", "2"), "s a command may take"),
    (("--chips", "10M", "--learners", "4096", "--days", "0.001", "--trials", "1e5"), "s a command may take"),
    (("--regions", "8", "--region-mtbi", "1h", "--days", "36525", "--trials", "1e4"), "s a command may take"),
    (("--chips", "1e9", "--learners", "1", "--days", "30", "--trials", "2", "--step", "1ms"), "GB of memory"),
    (("--chips", "100M", "--trials", "8", "--plot", "picture"), "leave out --plot"),
    (("--restart", "5min"), "--restart 5min: only a --rigid"),
    (("--rigid", "--reconfigure", "5s"), "--reconfigure 5s: a --rigid"),
    (("--rigid", "--repair", "1h"), "--repair 1h: a --rigid"),
    (("--chips", "100", "--learners", "1"), "--chips 100: less than one slice of 256"),
    (("--mtbi", "5s"), "must be from 1min to 10000y"),
    (("--seed", "-1"), "--seed -1"),
    (("--paper", "--mtbi", "1y"), "--mtbi"),
    (("--plot", ""), "names no file"),
    (("--plot", "/nowhere/at/all"), "--plot /nowhere/at/all"),
    (("--sync.quorum", "2"), "sync.quorum"),
    (("--chps", "3"), "did you mean --chips?"),
]


@pytest.mark.parametrize(("words", "named"), BAD)
def test_bad_input_is_refused_in_one_line(capsys, words, named):
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and err.count("\n") == 1 and named in err, err


BAD_RUNS = [
    ((), "RUN_DIR"),
    (("nowhere",), "nowhere holds no run"),
    (("nowhere", "--seeds", "0"), "--seeds 0"),
    (("nowhere", "--sync.quorum", "2"), "sync.quorum"),
]


@pytest.mark.parametrize(("words", "named"), BAD_RUNS)
def test_a_twin_of_nothing_is_refused_in_one_line(capsys, tmp_path, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "run", *words])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1 and named in said.err
    assert not list(tmp_path.iterdir())
