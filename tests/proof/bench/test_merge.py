"""skerry bench merge | codec: small ones give records that add up. Nothing here asserts how long something takes."""

import json
import math

import pytest

from cli.called import called
from skerry.algo.codecs import CODECS
from skerry.errors import Refusal
from skerry.proof.bench import codec, merge
from skerry.proof.bench.reference import Spread, check_memory, spread

LOAD = merge.Load(sizes=(3_000, 70_001), rules=("rda", "mean"), codecs=("int4",), threads=(1, 2), learners=3)


def numbers_in(record) -> list[float]:
    if isinstance(record, dict):
        return [n for value in record.values() for n in numbers_in(value)]
    return [record] if isinstance(record, int | float) else []


@pytest.fixture(scope="module")
def rows():
    return merge.measure(LOAD, lambda text: None)


def test_every_size_rule_and_number_of_threads_has_a_row(rows):
    assert [(row.parameters, row.rule, row.threads) for row in rows] == [
        (size, rule, threads) for size in LOAD.sizes for rule in LOAD.rules for threads in LOAD.threads
    ]
    assert {(row.codec, row.learners, row.fragments) for row in rows} == {("int4", 3, 24)}


def test_what_is_told_of_a_merge_hangs_together(rows):
    for row in rows:
        assert row.of_bandwidth == row.of_bandwidth_spread.median and row.close_ms == row.close_ms_spread.median
        assert set(row.ns_per_parameter) == {*merge.STAGES, "all"}
        per_parameter = row.gb_s * 1e9 / row.parameters_per_s
        assert per_parameter == pytest.approx(3 * 0.53125 + 24 + 2 + 0.53125, rel=0.05)  # padded, the small one more


def test_a_round_has_as_much_for_each_of_the_most_threads_and_no_more_than_it_needs():
    load = merge.Load(sizes=(), rules=(), codecs=(), threads=(1, 2, 5), learners=1)
    assert [load.fragments(size) for size in (1_000, 450_000, 4_000_000, 16_000_000)] == [20, 20, 5, 5]


def test_versions_follow_each_other():
    work, *_ = merge._works(LOAD, 3_000, "rda", "int4")
    before = [array.copy() for array in work.version]
    taken = work.merge()
    assert taken.close_s > 0 and set(taken.cpu_s) == set(merge.STAGES)
    assert all((new != old).any() for new, old in zip(work.version, before, strict=True))


def test_merge_rows_as_json(capsys):
    words = ["--sizes=10k", "--learners=2", "--threads=1,2", "--rules=rda,consensus", "--codecs=int8,int2"]
    code, out, err = called(capsys, "bench", "merge", "--json", *words)
    rows = json.loads(out)["rows"]
    assert code == 0 and out.count("\n") == 1 and "10000 parameters, rda, int8" in err
    assert len(rows) == 8
    for row in rows:
        assert {"rule", "codec", "threads", "gb_s", "of_bandwidth", "close_ms"} <= set(row)
        assert all(math.isfinite(number) and number > 0 for number in numbers_in(row))


def test_codec_rows_as_json(capsys):
    code, out, err = called(capsys, "bench", "codec", "--json", "--sizes", "10k,200k", "--threads", "1,2")
    rows = json.loads(out)["rows"]
    assert code == 0 and out.count("\n") == 1 and "10000 parameters, fp32" in err
    assert [(row["parameters"], row["codec"], row["threads"]) for row in rows] == [
        (size, name, threads) for size in (10_000, 200_000) for name in CODECS for threads in (1, 2)
    ]
    for row in rows:
        assert set(row) == set(codec.Row.__struct_fields__)
        assert all(math.isfinite(number) and number > 0 for number in numbers_in(row))


@pytest.mark.parametrize("subject", ["merge", "codec"])
def test_a_table_for_people(capsys, subject):
    code, out, _ = called(capsys, "bench", subject, "--sizes", "10k")
    assert code == 0 and "0.01M" in out and "of a copy" in out and "int4" in out


def test_a_spread_is_the_middle_and_both_ends():
    assert spread([3.0, 1.0, 2.0, 5.0, 4.0]) == Spread(3.0, 1.0, 5.0)


def test_what_does_not_fit_into_memory_is_refused_with_the_numbers():
    check_memory(1.0, "--sizes")
    with pytest.raises(Refusal, match=r"--sizes: needs 1e\+06 TB of memory, and .* are free here"):
        check_memory(1e18, "--sizes")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--sizes", "0"], "'0' must be from 1 to"),
        (["--sizes", "4M,1.5"], "'1.5' is not a whole number"),
        (["--sizes", "10G"], "of memory, and"),
        (["--threads", "0"], "'0' must be from 1 to 1024"),
        (["--threads", "1,x"], "'x' is not a number"),
        (["--codecs", "int5"], "'int5' is unknown: did you mean int"),
        (["--merge.threads", "2"], "--merge.threads: nothing is configured here"),
    ],
)
@pytest.mark.parametrize("subject", ["merge", "codec"])
def test_bad_options_are_refused_in_one_line(capsys, subject, words, reason):
    code, out, err = called(capsys, "bench", subject, *words)
    assert (code, out) == (2, "") and reason in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--learners", "0"], "'0' must be from 1 to 4096"),
        (["--rules", "median"], "'median' is unknown: did you mean mean?"),
    ],
)
def test_bad_options_of_a_merge_are_refused_in_one_line(capsys, words, reason):
    code, out, err = called(capsys, "bench", "merge", *words)
    assert (code, out) == (2, "") and reason in err and err.count("\n") == 1
