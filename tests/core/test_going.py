"""Who goes, as the syncer sees it: who left in order, who was lost, and what becomes of work that was given up."""

import pytest

from core.hand import TOKENS_PER_STEP, Desk, of
from skerry.core.events import Hold, Merge, Record
from skerry.core.facts import Discarded, Witnessed
from skerry.core.vocabulary import Sight


@pytest.fixture
def desk():
    """A learner with four steps on both fragments, beside another that trains on."""
    desk = Desk(num_fragments=2, quorum=2)
    desk.ready("a", "b")
    for name in "ab":
        desk.report(name, 4)
    return desk


def sights(actions) -> list[tuple[str, Sight]]:
    facts = [action.fact for action in of(actions, Record)]
    return [(fact.learner, fact.what) for fact in facts if isinstance(fact, Witnessed)]


def given_up(actions):
    """Rows that were booked so."""
    facts = [action.fact for action in of(actions, Record)]
    return [(row.fragment, row.from_step, row.to_step, row.fate) for fact in facts if isinstance(fact, Discarded)
            for row in fact.rows]  # fmt: skip


def pending(desk):
    return desk.machine.state.ledger.totals().pending // TOKENS_PER_STEP


def test_who_leaves_with_nothing_more_to_bring_has_left_once(desk):
    assert sights(desk.report("a", 4, "left", marks=[4, 4])) == [("a", "left")]
    assert sights(desk.depart("a")) == [], "its link ends with that"


def test_who_can_wait_no_longer_is_lost_with_the_rest(desk):
    actions = desk.report("a", 4, "left", marks=[4, 2])
    assert sights(actions) == [("a", "lost")] and given_up(actions) == [(0, 0, 4, "fast-forward")]


def test_what_one_that_leaves_gave_up_has_its_fate_at_once(desk):
    """No contribution of it would say so, and its name may never come again."""
    before = pending(desk)
    actions = desk.report("a", 4, "left", marks=[4, 4])
    assert given_up(actions) == [(0, 0, 4, "fast-forward"), (1, 0, 4, "fast-forward")]
    assert pending(desk) == before - 8 and not desk.machine.state.ledger.rest("a", 1, 0, "died")


def test_what_is_held_of_one_that_left_is_merged_and_the_rest_is_given_up_behind_it(desk):
    assert of(desk.contribute("a", 0, 3), Hold)
    actions = desk.report("a", 4, "left", marks=[4, 4])
    assert given_up(actions) == [(1, 0, 4, "fast-forward")]
    actions = desk.contribute("b", 0, 4) + desk.wait(60.0)
    assert [row.learner for merge in of(actions, Merge) for row in merge.decision.rows][:2] == ["a", "b"]
    assert given_up(actions) == [(0, 3, 4, "fast-forward")]
