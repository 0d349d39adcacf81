"""A learner that claims more than anybody can have done neither ends a run nor is the model."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from core.hand import Desk, config_of, of, only
from skerry.core.credit import UNMEASURED_S
from skerry.core.events import Hold, Merge, Reported
from skerry.core.forgone import Forgone
from skerry.core.ledger import Work
from skerry.core.membership import RESEND_S
from skerry.core.messages import Pull, Rejected


def training(**run) -> Desk:
    desk = Desk(config_of({"learners": 2} | run))
    desk.ready("a", "b", "liar")
    for step in range(1, 8):
        desk.now += 1.0
        for name in ("a", "b", "liar"):
            desk.report(name, step)
    return desk


def claim(desk: Desk, steps: int, tokens: int) -> list[object]:
    member = desk.machine.members["liar"]
    desk.now += 1.0
    desk.peers["liar"].number += 1
    number = desk.peers["liar"].number
    return desk.step(Reported(replace(member.report, number=number, step=steps, tokens=tokens)))


@pytest.mark.parametrize("run", [{"steps": 0, "tokens": 10**9}, {"steps": 10**6}])
def test_a_claim_that_nobody_can_have_done_does_not_close_the_run(run):
    desk = training(**run)
    claim(desk, 10**12, 10**15)
    desk.wait(5.0)
    assert desk.machine.state.phase == "training" and desk.machine.progress < 0.05
    assert desk.machine.state.ledger.totals().produced == 3 * 7 * 10 * desk.count, "it is not in the books either"


@pytest.mark.parametrize("run", [{"steps": 0, "tokens": 10**9}, {"steps": 10**6}])
def test_nor_does_it_once_the_syncer_is_started_again(run):
    """Whether who claimed it is there then or not, and also if it is the first that comes back."""
    desk = training(**run)
    claim(desk, 10**12, 10**15)
    desk.start()
    desk.wait(5.0)
    assert desk.machine.state.phase == "training" and desk.machine.progress < 0.05
    desk.join("liar")
    for _ in range(50):
        desk.report("liar", 7)
        claim(desk, 10**12, 10**15)
    desk.ready("a", "b")
    for step in range(8, 30):
        desk.now += 1.0
        desk.report("a", step)
        desk.report("b", step)
        claim(desk, 10**12, 10**15)
    assert desk.machine.state.phase == "training" and desk.machine.progress < 0.05


def test_who_alone_comes_back_to_a_run_that_has_had_others_is_believed_after_a_while():
    desk = training(steps=10**6)
    desk.start()
    desk.join("liar")
    desk.report("liar", 7)
    desk.report("liar", 20_000)
    assert desk.machine.state.ledger.account("liar", 1).step == 7
    desk.wait(UNMEASURED_S)
    desk.report("liar", 20_001)
    assert desk.machine.state.ledger.account("liar", 1).step == 20_001


def test_and_at_once_as_far_as_the_tape_tells_that_it_may_be():
    """A hundred times its learners' pace: who comes back first after an outage has trained on, and stands alone."""
    desk = training(steps=10**6)
    assert of(desk.contribute("b", 0), Merge), "which writes down what was seen of all"
    desk.start()
    desk.join("a")
    desk.report("a", 7)
    desk.report("a", 1600)
    assert not desk.machine.members["a"].is_beyond_belief
    assert desk.machine.state.ledger.account("a", 1).step == 1600
    assert of(desk.arrive(replace(desk.contribution("a", 0), to_step=1600, to_tokens=16_000)), Hold)
    desk.step(Reported(replace(desk.machine.members["a"].report, number=desk.peers["a"].number + 1, state="left")))
    assert desk.machine.state.ledger.totals().produced >= 1600 * 10 * desk.count, "what it leaves with is in the books"


@pytest.mark.parametrize("changes", [{"to_tokens": 10**9}, {"to_step": 10**6, "to_tokens": 10**7}])
def test_a_contribution_that_nobody_can_have_made_is_not_held(changes):
    desk = training()
    c = replace(desk.contribution("liar", 0), **({"to_step": 8} | changes))
    actions = desk.arrive(c)
    assert only(actions, Rejected).reason == "implausible" and not only(actions, Rejected).harmful
    assert not of(actions, Hold)
    assert of(desk.contribute("a", 0), Hold), "others are not concerned"


def test_what_was_done_while_nobody_saw_it_is_credited_in_time():
    """An honest learner comes back with the work of an hour, in a run that is seconds old."""
    desk = training()
    claim(desk, 3607, 36070)
    c = replace(desk.contribution("liar", 0), to_step=3607, to_tokens=36070)
    assert only(desk.arrive(c), Rejected).reason == "implausible"
    assert not of(desk.wait(RESEND_S - 0.5), Pull), "it is not asked for again at once: it would bring the same"
    desk.wait(60.0)
    assert of(desk.arrive(c), Hold)


@pytest.mark.parametrize("names", ["ab", "abc"])
@pytest.mark.parametrize(("steps", "tokens_each"), [(1500, 10), (20, 10**7)], ids=["many steps", "large steps"])
def test_who_all_did_much_while_no_syncer_was_there_are_believed_beside_each_other(names, steps, tokens_each):
    """None of them is one that K counts, so none could be measured if only those were."""
    desk = Desk(config_of({"learners": len(names), "steps": 10**7}))
    desk.ready(*names)
    for step in range(1, 8):
        desk.now += 1.0
        for name in names:
            desk.report(name, step)
    desk.start()
    for name in names:
        desk.join(name)
    for step in range(steps, steps + 6):
        desk.now += 1.0
        for name in names:
            desk.report(name, step, step_tokens=tokens_each)
    assert desk.machine.roster.ready.keys() == set(names)
    for name in names:
        c = replace(desk.contribution(name, 0), to_step=steps, to_tokens=steps * tokens_each)
        assert of(desk.arrive(c), Hold), f"what {name} brings is refused"


def test_before_anybody_was_measured_nobody_ends_a_run_that_has_several_learners():
    desk = Desk(config_of({"learners": 2, "steps": 10**5}))
    desk.ready("a", "liar")
    claim(desk, 10**6, 10**7)
    assert desk.machine.state.phase == "training" and desk.machine.progress < 0.01


def test_a_first_word_of_who_is_not_ready_yet_is_held_against_the_others_too():
    """Newer reports take the place of older ones that wait, so the first that is heard of it may be its claim."""
    desk = Desk(config_of({"learners": 2, "steps": 10**7}))
    desk.ready("a")
    for step in range(1, 5):
        desk.now += 1.0
        desk.report("a", step)
    desk.join("liar")
    desk.report("liar", 10**9)
    for step in range(5, 30):
        desk.now += 1.0
        desk.report("a", step)
        desk.report("liar", 10**9)
    assert desk.machine.state.phase == "training" and desk.machine.progress < 0.01


def test_nor_does_it_make_rounds_come_any_sooner():
    """Half of the fastest's steps make a fragment due: steps that nobody can have taken are not among them."""

    def spans(claims: bool) -> list[int]:
        desk, found = Desk(config_of({"learners": 4, "steps": 10**6}, sync_every=8, quorum=0.5)), []
        desk.ready("a", "b", "c", "liar")
        for step in range(1, 60):
            desk.now += 1.0
            for name in ("a", "b", "c"):
                desk.report(name, step)
            desk.report("liar", step * 10**7 if claims and step > 5 else step)
            for name in ("a", "b", "c"):
                for p in range(desk.count):
                    if p in desk.machine.members[name].asked and name not in desk.machine.held[p]:
                        found.append(step - desk.peers[name].marks[p])
                        desk.contribute(name, p)
        return found[len(found) // 3 :]

    honest, beside_a_liar = spans(False), spans(True)
    assert sum(beside_a_liar) / len(beside_a_liar) > 0.8 * sum(honest) / len(honest) > 5


def test_a_learner_that_is_alone_is_believed():
    desk = Desk(config_of({"learners": 2, "steps": 100}))
    desk.ready("a")
    desk.report("a", 200)
    assert desk.machine.state.phase == "closing"


def test_one_that_claims_to_do_next_to_nothing_keeps_nobodys_work_out():
    desk = Desk(config_of({"learners": 2}))
    desk.ready("a", "liar")
    for step in range(1, 30):
        desk.now += 1.0
        desk.report("a", 10 * step)
        claim(desk, step, 1)
    assert of(desk.contribute("a", 0), Hold)


@pytest.mark.parametrize("said", [2**53, 7])
def test_a_claim_of_long_rounds_does_not_put_off_those_of_who_was_in_none_yet(said):
    """As many as it can have taken on its link, or more than that."""
    desk = training(**{"steps": 10**6})
    machine, liar = desk.machine, desk.machine.members["liar"]
    configured = machine.sync_every
    desk.now += 1.0
    desk.step(Reported(replace(liar.report, number=liar.report.number + 1, step=8, tokens=80, round_steps=said)))
    assert liar.round_steps == (None if said > 8 else said)
    assert machine.sync_every == configured


def test_after_a_rollback_a_claim_of_tokens_without_steps_takes_no_more_from_progress_than_it_is_booked_with():
    forgone, desk = Forgone(), training(**{"steps": 0, "tokens": 10**6})
    report = desk.machine.members["liar"].report
    positions = tuple(replace(at, mark_step=1, mark_tokens=10**14) for at in report.positions)
    forgone.note(replace(report, tokens=10**14, positions=positions), desk.machine.state.fragments)
    assert forgone.work(desk.machine.state.ledger) == Work(1 * desk.count, 70 * desk.count)
