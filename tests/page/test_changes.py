"""What is sent of a record is enough to have it again, and is small where little has changed."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from skerry.page.changes import applied, changes

scalars = st.none() | st.integers(-5, 5) | st.text(max_size=3)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner, max_size=4)
)
records = st.dictionaries(st.text(max_size=2), values, max_size=5)


def plain(value):
    """As it looks on the wire, whatever the order of keys."""
    return msgspec.json.encode(value, order="deterministic")


@given(records, records)
def test_the_changes_of_any_record_make_any_other_of_it(before, after):
    patch = changes(before, after)
    assert plain(before) == plain(after) if patch is None else plain(applied(before, patch)) == plain(after)


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_a_list_is_sent_from_where_it_differs(before, after):
    patch = changes({"series": before}, {"series": after})
    if patch is not None:
        part = patch["in"]["series"]
        assert before[: part["from"]] == after[: part["from"]]
        assert before[part["from"] : part["from"] + 1] != after[part["from"] : part["from"] + 1]


def test_a_series_that_grows_is_sent_by_its_end():
    before = {"t": list(range(500)), "deep": {"same": [1, 2], "n": 1}}
    after = {"t": [*range(499), 7, 8], "deep": {"same": [1, 2], "n": 2}}
    assert changes(before, after) == {"in": {"t": {"from": 499, "then": [7, 8]}, "deep": {"set": {"n": 2}}}}


def test_a_number_that_there_is_not_has_not_changed():
    assert changes({"loss": math.nan}, {"loss": math.nan}) is None
