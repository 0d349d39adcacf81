"""What a status says of learners: who is behind and why, and what is not settled of their work."""

import msgspec
import pytest

from node.pair import Pair, config_of
from skerry.node import telemetry


@pytest.fixture
def pair(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=1000, wire={"mbit_max_up": 0.5})) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
        yield pair


def status_of(pair):
    return telemetry.status(pair.syncer.machine, 0, 0, 0.0)


def test_who_is_behind_is_named_with_the_bound_that_the_run_itself_has_set(pair):
    assert status_of(pair)["behind"] == ""
    pair.syncer.machine.members["a"].round_steps = 77.0
    said = status_of(pair)["behind"]
    assert (
        "for a (77 steps): their links (which wire.mbit_max_up = 0.5 bounds), or this syncer, cannot carry it" in said
    )


def test_a_learner_that_has_not_come_back_to_a_new_syncer_is_listed_as_away(pair):
    pair.join("b")
    pair.until(lambda: min(pair.versions) >= 4)
    before = status_of(pair)["learners"]["b"]
    del pair.loops["b"]  # it died with the syncer
    pair.restart()
    books = msgspec.to_builtins(pair.syncer.machine.state)
    there = status_of(pair)["learners"]
    assert {name: row["state"] for name, row in there.items()} == {"a": "training", "b": "away"}
    assert there["b"]["life"] == 1 and 0 < there["b"]["steps"] <= before["steps"]
    assert msgspec.to_builtins(pair.syncer.machine.state) == books, "who looks changes nothing"


def test_what_is_not_settled_is_in_tokens_and_no_more_than_were_produced(pair):
    pair.unlink("a")
    learner = status_of(pair)["learners"]["a"]
    assert 0 < learner["unsettled_tokens"] <= learner["tokens"]
