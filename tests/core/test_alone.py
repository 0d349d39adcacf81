"""Work that a learner did alone: it is merged like any other, and beyond a bound it spends nothing of the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.hand import TOKENS_PER_STEP, Bench, Desk, config_of, of, only
from skerry.core import admission
from skerry.core.events import Contribute, FastForward, Reported, Unlinked
from skerry.core.facts import Committed, Row, Seen, Stretch
from skerry.core.ledger import STRETCHES_MAX, Ledger, Work
from skerry.core.messages import Report
from skerry.core.state import decode_fact

POSITIONLESS = Report("a", 1, 1, 0, 0, 1.0, "training", ())


def stretch(after, upto):
    return Stretch(after, after * TOKENS_PER_STEP, upto, upto * TOKENS_PER_STEP)


def bounded(bench, bound):
    learner = replace(bench.machine.config.learner, alone_steps_max=bound)
    bench.machine.config = replace(bench.machine.config, learner=learner)


def alone(bound, steps):
    """A learner with a step of its own, then so many without a syncer, then a welcome."""
    bench = Bench(num_fragments=2)
    bounded(bench, bound)
    bench.boundary()
    bench.step(Unlinked())
    for _ in range(steps):
        bench.boundary()
    assert bench.machine.alone_steps == steps
    assert not of(bench.welcome(), FastForward)
    assert bench.machine.alone_steps == 0, "there is a syncer"
    return bench


@pytest.mark.parametrize(
    ("bound", "steps", "said"),
    [(5, 5, Stretch()), (5, 6, stretch(1, 7)), (0, 500, Stretch())],
    ids=["no more than the bound", "beyond it", "no bound"],
)
def test_a_report_says_what_was_done_alone_for_too_long_and_all_of_it_is_contributed(bound, steps, said):
    bench = alone(bound, steps)
    assert bench.report.alone == said
    bench.pull(0)
    c = only(bench.boundary(), Contribute)
    assert (c.from_step, c.to_step) == (0, steps + 2)
    assert bench.report.alone == said, "a report restates it: one may be lost"


def test_the_count_goes_on_over_a_link_that_brought_no_version():
    bench = alone(5, 4)
    bench.step(Unlinked())
    bench.boundary(steps=2)
    assert bench.machine.alone_steps == 6
    bench.welcome()
    assert bench.report.alone == stretch(1, 7)


def test_a_version_on_the_next_link_begins_the_count_anew():
    bench = alone(5, 4)
    bench.publish(1, 1)
    bench.step(Unlinked())
    bench.boundary(steps=5)
    bench.welcome()
    assert bench.report.alone == Stretch()


def test_a_pull_of_another_link_is_not_answered_with_what_nobody_knows_was_done_alone():
    """It could overtake the report that says so, and spend the budget."""
    bench = Bench(num_fragments=2)
    bounded(bench, 2)
    bench.boundary()
    bench.pull(0)
    bench.pull(1)
    bench.step(Unlinked())
    bench.snapshots.pop(1)  # there was no cell for it
    assert not of(bench.boundary(steps=3), Contribute), "its hello may be on its way already"
    bench.welcome()
    assert not of(bench.boundary(), Contribute)
    bench.pull(1)
    assert only(bench.boundary(), Contribute).fragment == 1


def test_it_is_merged_and_the_budget_is_left_for_work_done_together():
    desk = Desk(config_of(run={"learners": 2, "steps": 100}))
    desk.ready("a", "b")
    desk.report("a", 10)
    assert desk.machine.progress == pytest.approx(10 / 200)
    desk.depart("a")
    desk.join("a")
    told = desk.step
    desk.step = lambda event: told(Reported(replace(event.report, alone=stretch(10, 150))))
    desk.report("a", 150)
    desk.step = told
    assert desk.machine.progress == pytest.approx(10 / 200)
    for p in range(2):
        desk.contribute("a", p)
    rows = [row for fact in map(decode_fact, desk.tape) if isinstance(fact, Committed) for row in fact.decision.rows]
    assert {(row.fate, row.from_step, row.to_step) for row in rows} == {("merged", 0, 150)}
    desk.report("a", 160)
    assert desk.machine.progress == pytest.approx(20 / 200)
    desk.start()  # the tape has it
    desk.join("a")
    desk.report("a", 160)
    assert desk.machine.progress == pytest.approx(20 / 200)


def test_what_was_done_alone_and_is_discarded_is_left_out_once():
    ledger = Ledger(fragment_count=1)
    ledger.see(Seen("a", 1, 30, 300, 0, 0, 0.0, stretch(10, 20)))
    assert ledger.kept == Work(20, 200)
    ledger.book([Row("a", 1, 0, 0, 0, 15, 150, "fast-forward")])
    assert ledger.kept == Work(10, 100), "steps 20 to 30, and none of those before"
    ledger.book([Row("a", 1, 0, 15, 150, 30, 300, "merged", 1)])
    assert ledger.kept == Work(10, 100)
    ledger.check()


def test_stretches_that_are_settled_are_let_go_of_and_no_more_than_a_few_stay():
    ledger = Ledger(fragment_count=1)
    for n in range(1, 2 * STRETCHES_MAX):
        ledger.see(Seen("a", 1, 20 * n, 200 * n, 0, 0, 0.0, stretch(20 * n - 10, 20 * n)))
    account = ledger.account("a", 1)
    assert len(account.alone) == STRETCHES_MAX, "more are not believed"
    kept = ledger.kept
    ledger.book([Row("a", 1, 0, 0, 0, account.step, account.tokens, "merged", 1)])
    assert len(account.alone) == 1 and ledger.kept == kept
    ledger.see(
        Seen("a", 1, account.step + 20, account.tokens + 200, 0, 0, 0.0, stretch(account.step, account.step + 20))
    )
    assert ledger.kept == kept, "and there is room again"
    ledger.check()


@given(st.data())
def test_whatever_is_said_of_tokens_no_more_is_left_out_of_the_budget_than_was_done(data):
    """Each draw is legal by itself: how many tokens a step has is the learner's word."""
    ledger, few = Ledger(2), st.integers(0, 20)
    step = tokens = number = 0
    for _ in range(data.draw(st.integers(1, 8))):
        step, tokens = step + 1 + data.draw(few), tokens + data.draw(few)
        last = ledger.seen("a", 1).alone
        edges = [
            data.draw(st.tuples(st.integers(last.to_step, step), st.integers(last.to_tokens, tokens))) for _ in "ab"
        ]
        (after, upto), (least, most) = (sorted(each) for each in zip(*edges, strict=True))
        alone = Stretch(after, least, upto, most) if upto > after + 1 else last
        report = replace(POSITIONLESS, step=step, tokens=tokens, alone=alone)
        assert not admission.illegal(report, ledger, 2, alone_steps_max=1)
        ledger.see(Seen("a", 1, step, tokens, 0, 0, 0.0, alone))
        for p in range(2):
            at, number = ledger.settled("a", 1, p), number + 1
            to_step = data.draw(st.integers(at.step, step))
            to_tokens = tokens if to_step == step else data.draw(st.integers(at.tokens, tokens))
            fate = data.draw(st.sampled_from(["merged", "died"]))
            if to_step > at.step:
                ledger.book([Row("a", 1, p, at.step, at.tokens, to_step, to_tokens, fate, number)])
        ledger.check()
    ledger.book(row for p in range(2) for row in ledger.rest("a", 1, p, "died"))
    ledger.fold("a", 1)
    ledger.check()
