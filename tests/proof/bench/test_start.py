"""skerry bench start: a small run comes up twice. Nothing here asserts how long it takes."""

import json

import pytest

from cli.called import called
from skerry.plan.layouts import even
from skerry.proof.bench.start import _write_genesis
from skerry.run.genesis import read_genesis


def test_a_small_run_comes_up_and_again(capsys):
    code, out, err = called(capsys, "bench", "start", "--json", "--parameters", "10k,20k", "--sync.num_fragments", "3")
    rows = json.loads(out)["rows"]
    assert code == 0 and out.count("\n") == 1 and "a start after SIGKILL" in err
    assert [row["parameters"] for row in rows] == [10_000, 20_000]
    for row in rows:
        assert row["fresh_s"] > 0 and row["again_s"] > 0
        assert row["disk_bytes"] > 4 * row["parameters"]
        assert row["bytes_per_parameter"] == pytest.approx(row["disk_bytes"] / row["parameters"])
        assert {"fresh_peak_bytes", "again_peak_bytes"} <= row.keys()


def test_a_genesis_that_was_written_in_pieces_is_one(tmp_path):
    _write_genesis(tmp_path / "genesis.safetensors", even(1000, 3))
    layout, arrays = read_genesis(tmp_path / "genesis.safetensors")
    assert layout == even(1000, 3) and all(0.5 < array.std() < 1.5 for array in arrays.values())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--parameters", "3"], "--parameters 3: fewer than the 6 fragments"),
        (["--parameters", "90G"], "--parameters 90000000000: needs"),
        (["--sync.bogus", "9"], "unknown key sync.bogus"),
    ],
)
def test_bad_options_are_refused_in_one_line(capsys, words, reason):
    code, out, err = called(capsys, "bench", "start", *words)
    assert (code, out) == (2, "") and reason in err and err.count("\n") == 1
