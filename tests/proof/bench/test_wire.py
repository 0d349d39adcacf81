"""skerry bench wire: small payloads get there both ways. Nothing here asserts how long something takes."""

import json

import pytest

from cli.called import called


def test_small_payloads_over_one_stream_and_two(capsys):
    code, out, err = called(capsys, "bench", "wire", "--json", "--mib", "1,2", "--streams", "1,2", "--total", "4")
    rows = json.loads(out)["rows"]
    assert code == 0 and out.count("\n") == 1 and err.startswith("1 MiB, streams 1\n")
    assert [(row["mib"], row["streams"]) for row in rows] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    for row in rows:
        assert min(row["gb_s"], row["cpu_s_per_gb"], row["bare_gb_s"], row["bare_cpu_s_per_gb"]) > 0
        assert row["cpu_ratio_spread"]["min"] <= row["cpu_ratio"] <= row["cpu_ratio_spread"]["max"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--mib", "0"], "'0' must be from 1 to 4096"),
        (["--mib", "1,x"], "'x' is not a number"),
        (["--streams", "65"], "'65' must be from 1 to 64"),
        (["--wire.streams", "2"], "--wire.streams: nothing is configured here"),
    ],
)
def test_bad_options_are_refused_in_one_line(capsys, words, reason):
    code, out, err = called(capsys, "bench", "wire", *words)
    assert (code, out) == (2, "") and reason in err and err.count("\n") == 1


def test_the_same_through_tls(capsys):
    code, out, _ = called(capsys, "bench", "wire", "--tls", "--json", "--mib", "1", "--streams", "2", "--total", "4")
    (row,) = json.loads(out)["rows"]
    assert code == 0 and min(row["cpu_s_per_gb"], row["bare_cpu_s_per_gb"], row["cpu_ratio"]) > 0
