"""Numbers with units: what is read, and what is refused by name."""

import pytest

from skerry.text import (
    Kind,
    amount,
    bits_per_s,
    count,
    counted,
    days,
    lasting,
    mbit_per_s,
    milliseconds,
    near,
    number,
    seconds,
    share,
    size,
)

READ = [
    (count, "1200", 1200),
    (count, "1.2e6", 1.2e6),
    (count, "150k", 150e3),
    (count, " 2.4M ", 2.4e6),
    (count, "5B", 5e9),
    (count, ".5", 0.5),
    (count, "0", 0),
    (seconds, "45", 45),
    (seconds, "45s", 45),
    (seconds, "250ms", 0.25),
    (seconds, "10min", 600),
    (seconds, "2 h", 7200),
    (seconds, "30d", 30 * 86400),
    (seconds, "1y", 365.25 * 86400),
    (bits_per_s, "5Gbit", 5e9),
    (bits_per_s, "5Gbit/s", 5e9),
    (bits_per_s, "1.5e3 kbit", 1.5e6),
    (mbit_per_s, "200", 200e6),
    (mbit_per_s, "200Mbit", 200e6),
    (mbit_per_s, "1Gbit/s", 1e9),
    (milliseconds, "50", 0.05),
    (milliseconds, "50ms", 0.05),
    (milliseconds, "0.2s", 0.2),
    (days, "5", 5),
    (days, "5d", 5),
    (days, "12h", 0.5),
    (share, "0.1", 0.1),
    (share, "10%", 0.1),
    (number, "0.5", 0.5),
]

REFUSED = [
    (count, "many", "'many' is not a number"),
    (count, "", "is not a number"),
    (count, "nan", "is not a number"),
    (count, "inf", "is not a number"),
    (count, "-3", "'-3' is negative"),
    (count, "1e400", "larger than any number"),
    (count, "3x", "unknown unit 'x': known are k, M, G, B, T"),
    (count, "1.2m", "unknown unit 'm'"),  # milli or million: nobody knows
    (count, "1_000", "unknown unit '_000'"),
    (seconds, "3m", "unknown unit 'm'"),  # a minute or a month
    (seconds, "1 year", "unknown unit 'year'"),
    (seconds, "-1s", "negative"),
    (seconds, "1h30min", "unknown unit 'h30min'"),
    (bits_per_s, "5", "has no unit"),
    (bits_per_s, "5GB", "unknown unit 'GB'"),
    (bits_per_s, "fast", "'fast' is not a rate"),
    (
        mbit_per_s,
        "200M",
        "unknown unit 'M': known are kbit, Mbit, Gbit, Tbit; write Mbit/s like 200, or 200Mbit or 1Gbit",
    ),
    (mbit_per_s, "1G", "unknown unit 'G'"),
    (mbit_per_s, "5MB", "unknown unit 'MB'"),
    (milliseconds, "1k", "unknown unit 'k'"),
    (days, "1k", "unknown unit 'k': known are ms, s, min, h, d, w, y; write days like 30, or 30d"),
    (share, "1k", "unknown unit 'k': known are %; write a share like 0.1 or 10%"),
    (number, "2x", "'2x' has the unknown unit 'x': write a plain number like 1 or 0.5"),
    (number, "2k", "unknown unit 'k'"),
]


@pytest.mark.parametrize(("read", "text", "value"), READ)
def test_a_number_with_its_unit(read, text, value):
    assert read(text) == pytest.approx(value)


@pytest.mark.parametrize(("read", "text", "reason"), REFUSED)
def test_what_nobody_can_read_is_refused_by_name(read, text, reason):
    with pytest.raises(ValueError) as refused:
        read(text)
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_one_is_not_many():
    assert [counted(n, "learner") for n in (0, 1, 2)] == ["0 learners", "1 learner", "2 learners"]


def test_bytes_for_people():
    told = {0: "0 B", 999: "999 B", 1000: "1 kB", 999_700: "1 MB", 1.5e9: "1.5 GB", 2e15: "2000 TB"}
    assert {n: size(n) for n in told} == told


def test_times_for_people():
    told = {0: "0.0 ms", 0.0004: "0.4 ms", 0.02: "20 ms", 0.9999: "1.0 s", 9.97: "10 s", 59.6: "1 min", 3590: "1.0 h"}
    told |= {12600: "3.5 h", 2.1 * 86400: "2.1 d"}
    assert {n: lasting(n) for n in told} == told


def test_what_an_option_takes_and_from_where_to_where():
    kind = Kind(seconds, 60, 3600)
    assert kind.value("2min") == 120 and kind.values("1min,1h", 2) == [60, 3600] and kind.values("1h", 3) == [3600] * 3
    with pytest.raises(ValueError, match=r"'2h' must be from 1min to 1h"):
        kind.value("2h")
    with pytest.raises(ValueError, match="2 values for 3 learners"):
        kind.values("1min,1h", 3)
    with pytest.raises(ValueError, match="must be from this to that"):
        Kind(count, 1, 2, "this to that").value("3")


def test_a_word_that_was_probably_meant():
    assert near("synk", ["run", "sync"]) == "did you mean sync?"
    assert near("x", {"run": 1, "sync": 2}) == "known are run, sync"


@pytest.mark.parametrize(
    ("n", "said"),
    [(0, "0"), (940, "940"), (999.6, "1k"), (12_340, "12.3k"), (4_560_000, "4.56M"), (7.89e9, "7.89G"), (2e13, "20T")],
)
def test_an_amount_is_said_in_a_few_letters(n, said):
    assert amount(n) == said
