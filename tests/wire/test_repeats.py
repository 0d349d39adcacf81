"""What happens again and again is said once, counted, and forgotten in good time."""

from skerry.wire.repeats import REMEMBERED_MAX, SAID_AGAIN_S, Repeats


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
