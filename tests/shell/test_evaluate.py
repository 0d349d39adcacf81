"""Watching a run: one evaluation a share of the budget, those that come too late left out, the curve on the tape."""

import pytest

from node.pair import Pair, config_of
from skerry.errors import FileDamaged
from skerry.run.evaluations import read, waiting
from skerry.shell import evaluate
from skerry.shell.evaluate import finish, follow, looks, shares


@pytest.fixture
def pair(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=200)) as pair:
        pair.join("a")
        yield pair


def going(pair, *until):
    """What somebody sees who looks at the run when it is that far."""
    for progress in until:
        pair.until(lambda at=progress: pair.syncer.machine.state.progress >= at)
        yield {"progress": progress, "serving": "served"}


def test_one_evaluation_for_each_share_that_was_seen(pair, tmp_path):
    said = []
    statuses = going(pair, 0.0, 0.02, 0.15, 0.16, 0.55, 0.6)
    follow(tmp_path / "run", 0.1, lambda model: {"loss": float(len(said))}, statuses, said.append)
    found = waiting(tmp_path / "run")
    assert [one.figures["loss"] for one in found] == [0, 1, 2, 3], "0, 0.15, 0.55 and 0.6"
    progress = [one.progress for one in found]
    assert progress == sorted(progress) and progress[0] == 0.0 and progress[-1] >= 0.6
    assert len(said) == 4 and said[0] == "  0 %  loss 0"
    assert [one.tokens for one in found] == sorted(one.tokens for one in found)


def test_who_comes_back_goes_on_where_the_curve_ends(pair, tmp_path):
    follow(tmp_path / "run", 0.1, lambda model: {"loss": 1.0}, going(pair, 0.0, 0.31), lambda _: None)
    follow(tmp_path / "run", 0.1, lambda model: {"loss": 2.0}, going(pair, 0.32, 0.52), lambda _: None)
    assert [one.figures["loss"] for one in waiting(tmp_path / "run")] == [1.0, 1.0, 2.0]


def test_a_model_that_cannot_be_read_is_left_out_and_said(pair, tmp_path, monkeypatch):
    def damaged(root):
        raise FileDamaged("gone")

    said = []
    monkeypatch.setattr(evaluate, "read", damaged)
    follow(tmp_path / "run", 0.1, lambda model: {"loss": 1.0}, going(pair, 0.0), said.append)
    monkeypatch.setattr(evaluate, "read", read)
    follow(tmp_path / "run", 0.1, lambda model: {"loss": 1.0}, going(pair, 0.2), said.append)
    assert said[0] == "left out: gone" and len(waiting(tmp_path / "run")) == 1


def test_a_closed_run_ends_the_looking_and_its_curve_goes_on_the_tape(pair, tmp_path):
    root = tmp_path / "run"
    follow(root, 0.1, lambda model: {"loss": 2.0}, going(pair, 0.3), lambda _: None)
    pair.close()
    pair.__exit__()
    follow(root, 0.1, lambda model: {"loss": 1.0}, looks(root), lambda _: None)
    curve = finish(root, lambda model: {"loss": 1.0}, lambda _: None)
    assert [one.figures["loss"] for one in curve] == [2.0, 1.0] and curve[-1].progress == 1.0
    assert waiting(root) == [] and list(looks(root)) == []


def test_shares_are_counted_as_people_do():
    assert [shares(at, 0.05) for at in (0.0, 0.049, 0.05, 0.15, 0.3, 0.7, 1.0)] == [0, 0, 1, 3, 6, 14, 20]
