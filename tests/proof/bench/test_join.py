"""skerry bench join: a small model gets there, directly and through a link. Nothing here asserts how long it takes."""

import json

import pytest

from cli.called import called


@pytest.mark.parametrize("link", [[], ["--rtt", "20", "--rate", "100"]])
def test_a_small_model_gets_there(capsys, link):
    words = ["--json", "--parameters", "300k", "--sync.num_fragments", "6", *link]
    code, out, _ = called(capsys, "bench", "join", *words)
    found = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert (found["parameters"], found["fragments"], found["model_bytes"]) == (300_000, 6, 1_200_000)
    assert found["wire_bytes"] > found["model_bytes"] and found["joined_s"] > 0
    assert found["needed_s"] == (pytest.approx(1_200_000 * 8 / 100e6) if link else None)


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
