"""Bad input about faults and failures: one line that says what, where and what to do, and nothing written."""

import json

import pytest

from e2e.processes import Puppet, Syncer, facts_of, status_of, until
from skerry import cli
from skerry.core.facts import LifeStarted

PLAN = '[[fault]]\nkind = "kill"\ntarget = "learner-1"\nat = 0.5\nfor_s = 4.0\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of a user, holding a good plan and a bad one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.toml").write_text(PLAN)
    (tmp_path / "bad.toml").write_text(PLAN.replace("kill", "kil"))
    (tmp_path / "junk.toml").write_text("[[fault")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    return tmp_path


@pytest.fixture
def refused(folder, capsys):
    """Run a command that must be refused and return its one line."""

    def run(*words):
        before = sorted(folder.rglob("*"))
        with pytest.raises(SystemExit) as end:
            cli.main([*map(str, words), "--json"])
        out, err = capsys.readouterr()
        assert end.value.code == 2 and err.count("\n") == 1 and err.startswith("skerry: ")
        line = err.removeprefix("skerry: ").rstrip("\n")
        assert json.loads(out) == {"error": line} and out.count("\n") == 1
        assert sorted(folder.rglob("*")) == before, "something was written"
        return line

    return run


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no plan: name a preset (skerry chaos --list) or the path of a .toml file"),
        (["strom"], "unknown plan 'strom': did you mean storm?"),
        (["none.toml"], "none.toml: cannot be read (No such file or directory): check the path of the plan"),
        (["junk.toml"], "junk.toml: is not valid TOML: "),
        (["bad.toml"], "bad.toml, fault 1: kind = 'kil': unknown kind 'kil': did you mean kill?"),
        (["good.toml", "--learners", "1"], "fault 1: target = 'learner-1': the last of 1 is learner-0"),
        (["good.toml", "--speeds", "1,fast"], "--speeds '1,fast': write numbers"),
        (["good.toml", "--learners", "3", "--speeds", "1,1"], "2 speeds for 3 learners"),
        (["good.toml", "--minutes", "0"], "--minutes 0: a budget is above zero"),
        (["good.toml", "--minutes", "-1"], "run.minutes = -1.0: must be from"),
        (["good.toml", "--run.steps", "5"], "exactly one of run.tokens, run.steps and run.minutes"),
        (["good.toml", "--sync.quroum", "2"], "did you mean quorum?"),
        (["good.toml", "--twin-s", "-1"], "--twin-s -1.0: must be 0 or more seconds"),
        (["good.toml", "--twin-s", "nan"], "--twin-s nan: must be 0 or more seconds"),
        (["good.toml", "--model", "huge"], "huge"),
        (["good.toml", "--out", "taken"], "--out taken: is there already"),
        (["good.toml", "--data", "nowhere"], "nowhere"),
        (["good.toml", "--mintues", "2"], "did you mean --minutes?"),
        (["good.toml", "--run.evaluate_every", "0.1"], "run.evaluate_every = 0.1: evaluating would take time from"),
        (["table", "--run.evaluate_every", "0.1"], "is measured here: give --run.evaluate_every 0"),
    ],
)
def test_a_chaos_command_nobody_can_run(refused, words, says):
    assert says in refused("chaos", *words)


def test_the_presets_are_listed(folder, capsys):
    for words in (["chaos", "--list"], ["chaos", "--list", "--json"]):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        out = capsys.readouterr().out
        assert end.value.code == 0
        assert all(name in out for name in ("flap", "region", "storm", "throttle", "wan"))
    assert json.loads(out)["region"] == "half of the learners are gone for a third of the run"


def test_of_two_learners_with_one_identity_the_second_is_let_in_when_the_first_is_gone(tmp_path):
    with Syncer(tmp_path) as syncer:
        with Puppet(syncer.port, "twin") as first:
            with pytest.raises(AssertionError, match="learner twin is in use by another process"):
                Puppet(syncer.port, "twin")
            assert first.merge_once() >= 1
        until(lambda: _state(tmp_path / "run", "twin") == "lost", "the syncer to notice that the first one is gone")
        with Puppet(syncer.port, "twin") as second:
            assert second.merge_once() >= 1
    assert [(f.learner, f.life) for f in facts_of(tmp_path / "run") if isinstance(f, LifeStarted)] == [
        ("twin", 1),
        ("twin", 2),
    ]


def _state(run_dir, learner):
    return status_of(run_dir).get("learners", {}).get(learner, {}).get("state")


@pytest.mark.parametrize("words", [["syncer", "--port", "0", "--run"], ["export"]])
def test_a_tape_from_a_newer_version_is_named(refused, folder, words):
    with Syncer(folder, run_dir=folder / "run") as syncer:
        pass
    segment = syncer.run_dir / "tape" / "000001.seg"
    whole = bytearray(segment.read_bytes())
    whole[8] = 9
    segment.write_bytes(whole)
    (folder / "run" / "status.json").unlink()
    line = refused(*words, folder / "run")
    assert "tape/000001.seg has format 9; Skerry " in line and line.endswith(": use a later version")
