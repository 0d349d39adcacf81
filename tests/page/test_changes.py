"""What is sent of a record is enough to have it again, and is small where little has changed."""

import math
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry import page
from skerry.page.changes import applied, changes

STATIC = Path(page.__file__).parent / "static"

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


def test_what_a_page_is_told_is_read_into_tables_without_a_prototype():
    said = {file.name: file.read_text() for file in STATIC.glob("*.js")}
    assert [name for name, text in said.items() if "JSON.parse(" in text or ".json()" in text] == ["changes.js"]


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript beside a browser here")
def test_a_name_that_is_a_property_of_all_tables_is_a_name_like_any_other(tmp_path):
    (tmp_path / "changes.mjs").write_text((STATIC / "changes.js").read_text())
    (tmp_path / "page.mjs").write_text("""
        import { applied, parsed } from "./changes.mjs";
        let record = parsed('{"learners": {"a": {"steps": 1}}}');
        record = applied(record, parsed('{"in": {"learners": {"set": {"__proto__": {"steps": 5}}}}}'));
        record = applied(record, parsed('{"in": {"learners": {"in": {"__proto__": {"set": {"steps": 6}}}}}}'));
        const steps = Object.entries(record.learners).map(([name, each]) => `${name} ${each.steps}`);
        applied(record, parsed('{"in": {"learners": {"gone": ["__proto__"]}}}'));
        console.log(steps.join(), Object.keys(record.learners).join(), ({}).steps);
    """)
    found = subprocess.run(["node", tmp_path / "page.mjs"], capture_output=True, text=True, check=True)
    assert found.stdout == "a 1,__proto__ 6 a undefined\n"
