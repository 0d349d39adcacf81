"""A summary and a status of a run whose learner trained on while nobody took its work."""

import pytest

from cli.test_status import plain
from node.pair import Pair, config_of
from skerry.cli import live
from skerry.node import telemetry
from skerry.run.history import history_in
from skerry.run.summary import goodput_of, summarise
from skerry.run.tally import tally

STEPS = 40


def test_what_a_learner_did_beyond_the_budget_while_it_was_away_is_merged_and_named(tmp_path, capsys):
    with Pair(tmp_path / "run", config_of(steps=STEPS)) as pair:
        a = pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
        pair.unlink("a")
        pair.until(lambda: a.machine.step_count >= 3 * STEPS)
        pair.link("a")
        pair.close()
        status = telemetry.status(pair.syncer.machine, 0, 0, 0.0)
        told = tally(pair.store)
        result = summarise(told, status, [], {}) | goodput_of(history_in(pair.store), told, [])
    over = a.machine.step_count - STEPS
    assert over >= 2 * STEPS and round(status["over_budget"]) == over
    assert (result["budget"], result["over_budget"]) == ({"steps": STEPS}, status["over_budget"])
    assert result["tokens_merged"] == result["tokens_produced"], "all of it counts"
    late = result["tokens_after_budget"]
    assert list(late) == ["a"] and 0 < late["a"] < result["tokens_merged"]
    assert live.over_budget(result).startswith(
        f"{over} steps more than the {STEPS} asked for: steps that learners took"
    )
    names = ("val_loss_start", "val_loss_end", "val_loss_before_close")
    paths = dict.fromkeys(("model_path", "model_sha256"), "") | {"run_dir": "runs/my run"}
    live.print_summary(result | dict.fromkeys(names, 1.0) | paths)
    said = plain(capsys.readouterr().out)
    assert f"merged after that were {late['a']:,} tokens of a\n" in said
    assert said.endswith("\nlook again with: skerry dashboard 'runs/my run', or: skerry report 'runs/my run'\n")


def test_a_budget_that_is_kept_needs_no_mention(tmp_path):
    with Pair(tmp_path / "run", config_of(run={"minutes": 1e-3, "steps": 0})) as pair:
        pair.join("a")
        pair.until(lambda: pair.syncer.finished == "closed")
        status = telemetry.status(pair.syncer.machine, 0, 0, 0.0)
    assert status["over_budget"] == 0.0 and live.over_budget(status) == ""


def test_how_the_rounds_of_a_stage_went_is_told_with_their_pace(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=STEPS)) as pair:
        pair.join("a")
        pair.until(lambda: pair.syncer.finished == "closed")
        status = telemetry.status(pair.syncer.machine, 0, 0, 0.0)
        told = tally(pair.store)
    stages = summarise(told, status, [], {})["stages"]
    assert sum(stage["merges"] for stage in stages.values()) == sum(bool(merge.fact.stage) for merge in told.merges)
    assert {stage["contributors_mean"] for stage in stages.values() if stage["merges"]} == {1.0}
    for name, stage in stages.items():
        at = [merge.at for merge in told.merges if merge.fact.stage == name]
        if len(set(at)) > 1:
            assert stage["merges_per_s"] * (at[-1] - at[0]) == pytest.approx(len(at) - 1)
    assert any(stage["merges_per_s"] > 0 for stage in stages.values())
