"""skerry simulate: what it prints, and what it refuses in one line."""

import json

import pytest

from cli.called import called
from skerry.proof.sim import seeds as sim_run
from skerry.proof.sim.oracle import Violation
from skerry.proof.sim.world import World


def run(capsys, *words):
    """(exit code, stdout, stderr) of a command."""
    return called(capsys, "simulate", *words)


def test_json_is_one_object_with_the_promised_keys(capsys):
    code, out, _ = run(capsys, "protocol", "--seeds", "6", "--jobs", "1", "--json")
    told = json.loads(out)
    assert code == 0 and (told["seeds"], told["violations"]) == (6, 0)
    assert told["events"] > 600 and told["seeds_per_s"] > 0 and told["failures"] == []
    assert set(told["rare"]) == set(sim_run.RARE) and told["rare"]["merge of all"] > 0


def test_a_failing_seed_prints_the_command_that_replays_it(capsys, monkeypatch):
    def fail(self):
        raise Violation("I1 exactly once: planted")

    monkeypatch.setattr(World, "_demand_end", fail)
    code, out, err = run(capsys, "protocol", "--seed", "7", "--json")
    told = json.loads(out)
    assert code == 1 and told["violations"] == 1
    assert told["failures"][0]["replay"] == "skerry simulate protocol --seed 7"
    assert "replay: skerry simulate protocol --seed 7\n" in err and "I1 exactly once: planted" in err


def test_one_seed_tells_everything_that_happens(capsys):
    code, out, err = run(capsys, "protocol", "--seed", "7")
    assert code == 0 and "no violation" in out and len(err.splitlines()) > 100


BAD = [
    ((), "what"),
    (("weather",), "weather"),
    (("protocol", "--seeds", "0"), "--seeds 0"),
    (("protocol", "--seeds", "many"), "many"),
    (("protocol", "--jobs", "0"), "--jobs 0"),
    (("protocol", "--first", "-1"), "--first"),
    (("protocol", "--plan", "stom"), "did you mean storm?"),
    (("protocol", "--plan", "nowhere.toml"), "nowhere.toml"),
    (("protocol", "--sync.quorum", "2"), "sync.quorum"),
    (("protocol", "--sedes", "3"), "did you mean --seeds?"),
]


@pytest.mark.parametrize(("words", "named"), BAD)
def test_bad_input_is_refused_in_one_line(capsys, words, named):
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and err.count("\n") == 1 and named in err
