"""An operator's orders to the machines: what each changes, what it refuses, and that nothing of it is lost."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from core.hand import Bench, Desk, committed, config_of, of, only
from skerry import config as configs
from skerry.core.audit import Audit
from skerry.core.events import (
    Arrived,
    Dismiss,
    Expelled,
    Finish,
    Merge,
    MergeDone,
    OrderGiven,
    Readmitted,
    Record,
    Reply,
    Told,
)
from skerry.core.facts import Change, Ordered, Paused, PhaseChanged
from skerry.core.messages import (
    DropLearner,
    ExtendRun,
    FinishRun,
    PauseRun,
    Publication,
    Pull,
    ReadmitLearner,
    SetKeys,
    Stop,
    Welcome,
)
from skerry.core.orders import carry_out
from skerry.core.state import Checkpoint, KeptVersion, decode_fact, fold

BY = "admin.token"


def give(desk, order):
    """The facts and the outcome of an order, which is told behind what it changes."""
    actions = desk.step(OrderGiven(order, BY, 7))
    reply = only(actions, Reply)
    facts = [action.fact for action in actions if isinstance(action, Record)]
    assert reply.ticket == 7
    assert all(actions.index(a) < actions.index(reply) for a in of(actions, Record) if isinstance(a.fact, Ordered))
    return facts, reply.outcome


def trained(**run):
    """Two learners with some steps behind them."""
    desk = Desk(replace(config_of(run or None), wire=configs.Wire(codec_up="fp32")))
    desk.ready("a", "b")
    for name in "ab":
        desk.report(name, 4)
    return desk


def audited(desk):
    audit = Audit()
    for record in desk.tape:
        audit.take(decode_fact(record))
    assert not audit.violations, audit.violations
    return audit


def test_a_quorum_that_is_set_is_asked_for_from_the_next_merge_on_and_after_a_restart():
    desk = trained()
    assert of(desk.contribute("a", 0), Merge)[0].decision.quorum == 1
    facts, outcome = give(desk, SetKeys({"sync.quorum": 2}))
    assert outcome.is_done and facts[0].changes == (Change("sync.quorum", "1", "2"),)
    desk.report("a", 9), desk.report("b", 9)
    assert not of(desk.contribute("a", 0) + desk.wait(5), Merge) and desk.machine.quorum == 2
    merge = only(desk.contribute("b", 0) + desk.wait(5), Merge)
    assert (merge.decision.quorum, merge.decision.orders) == (2, 1)
    desk.start()
    assert desk.machine.quorum == 2
    audited(desk)


def test_what_is_so_already_is_done_without_a_word_on_the_tape():
    desk = trained()
    for order in (SetKeys({"sync.quorum": 1}), ExtendRun(steps=10**6), ReadmitLearner("a")):
        facts, outcome = give(desk, order)
        assert outcome.is_done and not facts and not msgspec.json.decode(outcome.record)["changed"]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (SetKeys({"sync.quorum": 4}), "more than the 3 learners"),
        (SetKeys({"sync.quorum": 2, "wire.codec_up": "int8"}), "wire.codec_up cannot be changed"),
        (SetKeys({"nonsense": 4}), "unknown key nonsense: what may change is sync.sync_every, "),
        (ExtendRun(tokens=10**9), "the run's budget is in steps, and --tokens was given"),
        (ExtendRun(), "the run's budget is in steps, and nothing was given"),
        (ExtendRun(steps=2), "2 steps are no more than the"),
        (DropLearner("z"), "no learner 'z' has joined this run"),
        (ReadmitLearner("z"), "no learner 'z' was dropped"),
    ],
    ids=str,
)
def test_what_is_refused_changes_nothing(order, says):
    desk = trained()
    before = msgspec.msgpack.encode(desk.machine.state)
    facts, outcome = give(desk, order)
    assert not outcome.is_done and says in outcome.text and not facts
    assert msgspec.msgpack.encode(desk.machine.state) == before


def test_an_extended_run_is_less_far_and_goes_on_to_the_end_of_the_longer_budget():
    desk = trained(steps=6)  # of three learners: 8 of 18 steps are taken
    assert desk.machine.progress == pytest.approx(8 / 18)
    facts, outcome = give(desk, ExtendRun(steps=12))
    assert outcome.is_done and desk.machine.progress == pytest.approx(8 / 36)
    assert (facts[0].progress_before, facts[0].progress) == pytest.approx((8 / 18, 8 / 36))
    desk.report("a", 10), desk.report("b", 8)
    assert desk.machine.closing is None and desk.machine.state.budgets == 1
    desk.start()
    assert desk.machine.state.budgets == 1 and desk.machine.progress < 0.6
    welcome = only(desk.join("a", "a2"), Welcome)
    assert welcome.budget == 1 and configs.decode(welcome.config).run.steps == 12
    audited(desk)


def test_versions_are_kept_by_shares_of_the_longer_budget():
    desk = trained(steps=6)
    state = desk.machine.state
    state.last_kept = KeptVersion(1, (Checkpoint(0, "f", b"", b""),) * 2, 0.4, 1.0)
    state.kept.append(state.last_kept)
    give(desk, ExtendRun(steps=12))
    assert state.last_kept.progress == state.kept[0].progress == pytest.approx(0.2)


def test_a_learner_takes_a_lower_progress_with_another_budget_and_not_without():
    bench = Bench()
    told = Pull(1, 1, 0, 0, False, 0.6)
    bench.step(Told(told))
    bench.step(Told(replace(told, progress=0.5)))
    assert bench.machine.progress == 0.6
    bench.step(Told(replace(told, progress=0.3, budget=1)))
    assert (bench.machine.progress, bench.machine.budget) == (0.3, 1)
    late = Publication(1, 1, 0, 1, 0, "fp32", b"", 0, 0, 0.7)  # it left before the order
    bench.step(Told(late))
    assert bench.machine.progress == 0.3
    bench.step(Told(replace(told, progress=0.35, budget=1)))
    bench.step(Told(Welcome("run", 2, "a", 1, 0, b"", b"", 0, 0, 0.2, budget=2)))  # of a syncer that was started again
    assert (bench.machine.progress, bench.machine.budget) == (0.2, 2)


def test_a_run_that_is_finished_closes_as_at_its_end_and_takes_no_other_order():
    desk = trained()
    facts, outcome = give(desk, FinishRun())
    assert outcome.is_done and isinstance(facts[0], Ordered)
    assert [fact.phase for fact in facts[1:] if isinstance(fact, PhaseChanged)] == ["closing"]
    assert desk.machine.closing is not None
    assert of(desk.wait(3), Stop)
    facts, outcome = give(desk, FinishRun())
    assert outcome.is_done and not facts
    for order in (SetKeys({"sync.quorum": 2}), ExtendRun(steps=10**7)):
        _, outcome = give(desk, order)
        assert not outcome.is_done and "the run is closing" in outcome.text
    desk.wait(40)
    assert desk.machine.state.phase == "closed" and desk.machine.state.ledger.totals().pending == 0
    for order in (FinishRun(), ExtendRun(steps=10**7), DropLearner("a")):
        _, outcome = give(desk, order)
        assert not outcome.is_done and "skerry fork" in outcome.text
    audited(desk)


def test_a_finish_that_only_the_tape_knows_of_is_carried_out_by_the_next_process():
    desk = trained()
    progress = desk.machine.progress
    fact = Ordered("finish", "the run directory", desk.machine.elapsed_s, progress_before=progress, progress=progress)
    desk.tape.append(msgspec.msgpack.encode(fact))
    desk.start()
    assert desk.machine.closing is not None
    audited(desk)


def test_a_run_without_a_step_is_not_finished():
    desk = Desk()
    _, outcome = give(desk, FinishRun())
    assert not outcome.is_done and "nobody has taken a step yet" in outcome.text


def test_who_is_dropped_stays_out_over_a_restart_until_it_is_readmitted():
    desk = trained()
    desk.contribute("a", 0)
    facts, outcome = give(desk, DropLearner("b"))
    assert outcome.is_done and {row.fate for fact in facts[1:] for row in getattr(fact, "rows", ())} == {"expelled"}
    assert only(desk.join("b", "b2"), Dismiss).why == "expelled"
    desk.start()
    assert only(desk.join("b", "b2"), Dismiss).why == "expelled"
    give(desk, ReadmitLearner("b"))
    assert only(desk.join("b", "b2"), Welcome).life == 2
    audited(desk)


def test_who_is_dropped_and_has_lost_its_key_needs_both_to_come_back():
    desk = trained()
    give(desk, DropLearner("b"))
    desk.step(Expelled("b", "its key is revoked"))
    desk.step(Readmitted("b"))
    assert "skerry drop" in only(desk.join("b", "b2"), Dismiss).text
    desk.step(Expelled("b", "its key is revoked"))
    give(desk, ReadmitLearner("b"))
    assert "its key is revoked" in only(desk.join("b", "b2"), Dismiss).text
    desk.step(Readmitted("b"))
    assert only(desk.join("b", "b2"), Welcome)


def test_a_pause_is_answered_and_ends_the_process_after_which_no_order_is_taken():
    desk = trained()
    actions = desk.step(OrderGiven(PauseRun(), BY, 7))
    assert only(actions, Reply).outcome.is_done and only(actions, Finish)
    assert [a.fact.by for a in of(actions, Record) if isinstance(a.fact, Paused)] == [BY]
    _, outcome = give(desk, SetKeys({"sync.quorum": 2}))
    assert not outcome.is_done and "this syncer is ending" in outcome.text


def test_an_h_that_is_set_longer_does_not_belie_the_round_that_is_open():
    desk = trained(steps=10**6)
    give(desk, SetKeys({"sync.sync_every": 40}))
    merge = only(desk.contribute("a", 0), Merge)  # of a round that was due at four steps
    assert merge.decision.sync_every == 40
    audited(desk)


def tape_with_orders():
    desk = trained(steps=6)
    desk.contribute("a", 0)
    give(desk, SetKeys({"sync.quorum": 2}))
    give(desk, ExtendRun(steps=12))
    give(desk, DropLearner("b"))
    give(desk, ReadmitLearner("b"))
    return [decode_fact(record) for record in desk.tape]


def first(facts, verb):
    return next(n for n, fact in enumerate(facts) if isinstance(fact, Ordered) and fact.verb == verb)


@pytest.mark.parametrize(
    ("verb", "changes", "says"),
    [
        ("set", {"by": ""}, "I23"),
        ("set", {"changes": ()}, "I23"),
        ("set", {"changes": (Change("sync.quorum", "1", "3"),)}, "I23"),
        ("set", {"verb": "extend"}, "I23"),
        ("set", {"config": b"{"}, "I23"),
        ("set", {"progress": 0.9}, "budget"),
        ("extend", {"progress": 0.4}, "budget"),
        ("extend", {"progress_before": 2.0}, "clock"),
        ("drop", {"learner": "z"}, "I23"),
        ("drop", {"learner": ""}, "I23"),
        ("readmit", {"learner": "a"}, "I23"),
        ("drop", {"elapsed_s": float("nan")}, "clock"),
    ],
    ids=str,
)
def test_the_audit_sees_an_order_that_is_not_what_it_says(verb, changes, says):
    facts = tape_with_orders()
    at = first(facts, verb)
    facts[at] = replace(facts[at], **changes)
    audit = Audit()
    for fact in facts:
        audit.take(fact)
    assert audit.violations and audit.violations[0].startswith(says), audit.violations


def test_a_fold_has_what_orders_left_and_a_tape_without_any_means_what_it_meant():
    facts = tape_with_orders()
    state = fold(facts)
    assert state.orders == 4 and state.budgets == 1 and configs.decode(state.config).sync.quorum == 2
    again = decode_fact(msgspec.msgpack.encode(state))
    assert again == state and fold([again]).config == state.config
    audit = Audit()
    for fact in (*facts, state):
        audit.take(fact)
    assert not audit.violations
    plain = fold(fact for fact in facts if not isinstance(fact, Ordered))
    assert plain.config == plain.created.config and (plain.orders, plain.budgets, plain.dropped) == (0, 0, {})


def test_a_merge_that_was_decided_under_another_budget_says_nothing_of_this_one():
    """Its share is of the budget that was: taken for one of the new budget, the run would seem nearly over."""
    desk = trained(learners=2, steps=10)
    (merge,) = of(desk.machine.step(Arrived(desk.contribution("a", 0), 10, None), desk.now), Merge)
    assert merge.decision.progress == pytest.approx(0.4)
    desk.step(OrderGiven(ExtendRun(steps=1000), BY, 7))
    assert desk.machine.progress == pytest.approx(0.004)
    desk.step(MergeDone(committed(merge)))
    assert desk.machine.progress == pytest.approx(0.004)
    assert fold(map(decode_fact, desk.tape)).progress == pytest.approx(0.004)
    audited(desk)


class Looked(dict):
    """Counts how often somebody goes through all of it."""

    times = 0

    def __iter__(self):
        Looked.times += 1
        return super().__iter__()


def test_the_audit_of_an_order_does_not_go_through_those_before_it():
    """Else a tape with a hundred thousand of them would take minutes to be judged."""
    desk, audit = Desk(), Audit()
    facts = [decode_fact(record) for record in desk.tape]
    state = fold(facts)
    for fact in facts:
        audit.take(fact)
    audit._eras = Looked(audit._eras)
    for n in range(50):
        fact = carry_out(SetKeys({"sync.grace": 0.5 + n % 2 / 4}), state, "admin.token", 0.0).fact
        state.apply(fact)
        audit.take(fact)
    assert not audit.violations and audit.state.orders == 50 and Looked.times == 0


def test_the_answer_to_a_drop_says_when_too_few_are_left_for_the_quorum():
    desk = trained()
    assert "quorum" not in give(desk, DropLearner("b"))[1].text, "one is enough"
    desk = trained()
    give(desk, SetKeys({"sync.quorum": 2}))
    text = give(desk, DropLearner("b"))[1].text
    assert "1 learner that ever joined may take part now, for a quorum of 2" in text and "sync.quorum=1" in text
    assert "sync.quorum" not in give(desk, DropLearner("a"))[1].text, "there is no quorum of nobody"
