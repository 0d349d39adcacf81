"""What happens again and again is said once, counted, and forgotten in good time."""

from skerry.wire.repeats import (
    LINES_BURST,
    LINES_PER_S,
    NAME_LINES_BURST,
    NAMED_MAX,
    REASONS_MAX,
    REMEMBERED_MAX,
    SAID_AGAIN_S,
    Lines,
    Repeats,
)


def test_the_same_of_the_same_peer_is_news_once_and_again_after_minutes():
    repeats = Repeats()
    said = [repeats.is_news("fern", "too old", now) for now in (0.0, 1.5, SAID_AGAIN_S - 1, SAID_AGAIN_S, 310.0)]
    assert said == [True, False, False, True, False]
    assert repeats.rows(315.0) == [{"who": "fern", "why": "too old", "count": 5, "ago_s": 5.0}]


def test_another_peer_or_another_reason_is_news_at_once():
    repeats = Repeats()
    pairs = [("fern", "too old"), ("moss", "too old"), ("fern", "wrong token"), ("fern", "too old")]
    assert [repeats.is_news(*pair, 0.0) for pair in pairs] == [True, True, True, False]


def test_who_was_not_met_for_longest_makes_way():
    repeats = Repeats()
    for number in range(REMEMBERED_MAX):
        repeats.is_news(str(number), "no", 0.0)
    repeats.is_news("0", "no", 1.0)
    repeats.is_news("one more", "no", 2.0)
    who = [row["who"] for row in repeats.rows(2.0)]
    assert len(who) == REMEMBERED_MAX and "1" not in who and who[-2:] == ["0", "one more"]


def test_however_many_names_there_are_they_make_no_more_lines_than_a_person_reads():
    repeats = Repeats()
    said = sum(repeats.is_news(f"name {number}", "no", number / 1000) for number in range(10_000))
    assert LINES_BURST <= said <= LINES_BURST + 12 * LINES_PER_S


def test_strangers_are_summed_by_what_they_met_with_and_not_by_what_they_sent():
    repeats = Repeats()
    said = [
        repeats.stranger(f"10.0.{n // 250}.{n % 250}", f"10.0.{n // 250}.{n % 250}", f"no frame: b'{n}'", n / 100)
        for n in range(900)
    ]
    assert said[0] == "10.0.0.0" and len([who for who in said if who]) <= NAMED_MAX
    (row,) = repeats.rows(10.0)
    assert row["who"] == "900 connections from 900 addresses" and (row["why"], row["count"]) == ("no frame", 900)
    assert repeats.stranger("10.0.0.1", "10.0.0.1", "no frame: b'x'", 400.0) == "901 connections from 900 addresses"


def test_strangers_that_all_met_with_the_same_are_told_with_its_numbers():
    repeats = Repeats()
    for number in range(3):
        repeats.stranger(f"{number}", "10.0.0.1", "it speaks protocol 2: upgrade", 0.0)
    assert [row["why"] for row in repeats.rows(0.0)] == ["it speaks protocol 2: upgrade"]
    for number in range(3):
        repeats.stranger("3", "10.0.0.1", f"it speaks protocol {number}: upgrade", 0.0)
    assert [row["why"] for row in repeats.rows(0.0)] == ["it speaks protocol …"]


def test_one_stranger_alone_is_named_in_full():
    repeats = Repeats()
    assert [repeats.stranger("fern at 10.0.0.1", "10.0.0.1", "wrong: do so", 0.0) for _ in range(3)][1:] == ["", ""]
    assert repeats.rows(1.0) == [{"who": "fern at 10.0.0.1", "why": "wrong: do so", "count": 3, "ago_s": 1.0}]


def test_however_many_strangers_there_are_who_proved_something_has_its_line_and_its_row():
    repeats = Repeats()
    for number in range(10_000):
        repeats.stranger(f"{number}", f"{number}", f"reason {'x' * (number % 1000)}", 0.0)
    assert repeats.is_news("fern", "too old", 0.0)
    rows = repeats.rows(0.0)
    assert rows[0]["who"] == "fern" and len(rows) <= 1 + REASONS_MAX


def test_what_was_not_said_for_want_of_a_line_is_said_when_there_is_one_and_counted_until_then():
    repeats = Repeats()
    for number in range(int(LINES_BURST) + 50):
        repeats.is_news(f"name {number}", "no", 0.0)
    assert not repeats.is_news("fern", "no", 0.0) and repeats.is_news("fern", "no", 60.0)
    left_out = repeats.left_out(60.0)
    assert left_out >= 50 and not repeats.left_out(61.0)


def test_one_name_has_few_lines_and_leaves_those_of_others():
    lines = Lines()
    assert sum(lines.has_one("flapper", 0.0) for _ in range(1000)) <= NAME_LINES_BURST + 1
    assert lines.has_one("fern", 0.0) and lines.left_out(0.0) >= 900


def test_what_is_of_one_kind_has_one_row_however_it_is_worded():
    repeats = Repeats()
    assert all(repeats.is_news("fern", f"taken over by life {life}", 0.0, "taken over") for life in range(3))
    assert [(row["why"], row["count"]) for row in repeats.rows(0.0)] == [("taken over by life 2", 3)]
