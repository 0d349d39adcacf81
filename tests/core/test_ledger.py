"""The ledger: whatever is booked in whatever order, produced = merged + discarded + pending, to the token."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.core.facts import Row, Seen
from skerry.core.ledger import MERGED, Ledger

FATES = [MERGED, "died", "fast-forward", "absent at close"]
TOKENS = 7


def row(life: int, fragment: int, start: int, end: int, fate: str = MERGED, seq: int = 0) -> Row:
    return Row("a", life, fragment, start, start * TOKENS, end, end * TOKENS, fate, seq)


def seen(life: int, step: int) -> Seen:
    return Seen("a", life, step, step * TOKENS, 0, 0, 0.0)


moves = st.lists(
    st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(0, 9), st.sampled_from([*FATES, "seen", "rest"])),
    max_size=30,
)


@given(moves)
def test_balance_holds_and_rows_tile(moves):
    """Sightings, rows and rests in any order; a plain count of steps by fate is the slow obvious version."""
    ledger, counted = Ledger(3), dict.fromkeys(FATES, 0)
    for life, fragment, steps, what in moves:
        at = ledger.settled("a", life, fragment).step
        if what == "seen":
            ledger.see(seen(life, at + steps))
        elif what == "rest":
            rows = ledger.rest("a", life, fragment, "died")
            counted["died"] += sum(r.steps for r in rows)
            ledger.book(rows)
            assert ledger.rest("a", life, fragment, "died") == []
        else:
            counted[what] += steps
            ledger.book([row(life, fragment, at, at + steps, what)])
        ledger.check()
    totals = ledger.totals()
    assert totals.merged == counted[MERGED] * TOKENS
    discarded = sum(counted[fate] for fate in FATES if fate != MERGED)
    assert sum(totals.discarded.values()) == discarded * TOKENS and ledger.discarded_steps == discarded
    assert totals.produced == totals.merged + sum(totals.discarded.values()) + totals.pending
    assert ledger.kept.tokens == ledger.kept.steps * TOKENS == totals.merged + totals.pending


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_a_row_that_does_not_begin_where_the_last_ended_is_our_bug(settled, start, end):
    ledger = Ledger(1)
    ledger.book([row(1, 0, 0, settled)])
    if start == settled <= end:
        ledger.book([row(1, 0, start, end)])
        return
    with pytest.raises(AssertionError):
        ledger.book([row(1, 0, start, end)])


@given(st.lists(st.integers(0, 20), min_size=1))
def test_produced_never_goes_back(steps):
    ledger = Ledger(2)
    for n, step in enumerate(steps):
        ledger.see(seen(1, step))
        assert ledger.account("a", 1).step == max(steps[: n + 1])


def test_settled_seq_never_goes_back():
    ledger = Ledger(1)
    ledger.book([row(1, 0, 0, 2, seq=5), row(1, 0, 2, 3, "fast-forward")])
    assert ledger.settled("a", 1, 0).seq == 5


def test_the_whole_is_plain_data():
    ledger = Ledger(2)
    ledger.book([row(1, 0, 0, 2, seq=5), row(1, 1, 0, 3, "died")])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ledger), type=Ledger) == ledger
