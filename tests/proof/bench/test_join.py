"""skerry bench join: a small model gets there, directly and through a link. Nothing here asserts how long it takes."""

import json

import pytest

from cli.called import called
from skerry.cli import bench
from skerry.proof.bench.join import Joined, Link


@pytest.mark.parametrize("link", [[], ["--rtt", "20", "--rate", "100"]])
def test_a_small_model_gets_there(capsys, link):
    words = ["--json", "--parameters", "300k", "--sync.num_fragments", "6", *link]
    code, out, _ = called(capsys, "bench", "join", *words)
    found = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert (found["parameters"], found["fragments"], found["model_bytes"]) == (300_000, 6, 1_200_000)
    assert found["wire_bytes"] > found["model_bytes"] and found["joined_s"] > 0
    assert found["needed_s"] == (pytest.approx(1_200_000 * 8 / 100e6) if link else None)


def test_what_the_syncer_has_in_memory_is_said_with_its_parts_and_never_less_than_they_are():
    found = Joined(302_000_000, 24, Link(), 1_208_000_000, 1_209_000_000, 2.0, None, 201e6, 1_400e6, 1_410e6, 3e9)
    assert bench._joined(found).splitlines()[1] == (
        "syncer's memory: 1.4 GB before the learner came, of which the model's values are 1.21 GB; "
        "at most 10 MB more while it joined (no more than 201 MB of them are on the way at a time)"
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--parameters", "3"], "--parameters 3: fewer than the 6 fragments"),
        (["--rtt", "-1"], "'-1' is negative"),
        (["--rate", "0"], "'0' must be from 1kbit to 1Tbit"),
        (["--sync.bogus", "9"], "unknown key sync.bogus"),
    ],
)
def test_bad_options_are_refused_in_one_line(capsys, words, reason):
    code, out, err = called(capsys, "bench", "join", *words)
    assert (code, out) == (2, "") and reason in err and err.count("\n") == 1
