"""skerry bench learner: plain and attached stretches of one loop, with the learner's work on cores that are not its."""

import json
import os

import pytest

pytest.importorskip("torch")

from e2e.processes import skerry
from skerry.proof.bench import cores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
WORDS = ["bench", "learner", "--model", "tiny", "--batch", "2", "--steps", "12", "--pairs", "3", "--json"]


def measured(*more):
    return json.loads(skerry(*WORDS, *more).stdout)


@pytest.mark.skipif(not cores.can_pin() or len(os.sched_getaffinity(0)) < 2, reason="nothing can be pinned here")
def test_a_learner_with_a_core_of_its_own_is_measured_beside_itself_alone():
    found = measured("--cores", "1")
    assert (found["cores"], found["pairs"], found["steps"], found["node"]) == (1, 3, 12, "process")
    assert found["ratio_min"] <= found["ratio"] <= found["ratio_max"]
    assert found["merges"] > 0, "the attached stretches merged nothing"
    for step in (found["plain_step"], found["attached_step"], found["boundary"]):
        assert 0 < step["p50_s"] <= step["p99_s"] <= step["p999_s"] <= step["max_s"]


def test_ranks_of_an_island_take_the_same_stretches():
    found = measured("--island", "ddp", "--ranks", "2")
    assert (found["island"], found["ranks"], found["merges"] > 0) == ("ddp", 2, True)
