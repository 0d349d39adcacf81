"""The paper's claims and the design's rules, a test each, with the section it comes from.

[P §n] is the paper (arXiv 2604.21428), Alg. and eq. its algorithms and equations; "design" is a rule of this
implementation that the paper leaves open. `Desk` and `Bench` (hand.py) play everything around one machine.
"""

from __future__ import annotations

import pytest

from core.hand import TOKENS_PER_STEP, Bench, Desk, config_of, of, only
from skerry.core.events import (
    Adopt,
    Closing,
    Contribute,
    Dismiss,
    FastForward,
    Finish,
    Hold,
    Interrupted,
    Linked,
    Merge,
    Publish,
    Record,
    Resend,
    SayHello,
    SendReport,
    Snapshot,
    Spoiled,
    Ticked,
    Told,
    Unlinked,
    Unusable,
)
from skerry.core.facts import Discarded, LifeStarted, Paused, PhaseChanged
from skerry.core.messages import FULL, Done, Pull, Rejected, Stop, Welcome
from skerry.core.quorum import grace_s
from skerry.core.schedule import due_at


def rounds(desk: Desk) -> list[int]:
    return sorted(desk.machine.rounds.open)


def facts(actions: list[object], kind: type) -> list:
    return [a.fact for a in of(actions, Record) if isinstance(a.fact, kind)]


def open_round(desk: Desk, *names: str, step: int = 4) -> None:
    """Everyone takes `step` steps on fragment 0; its round opens and everyone is pulled."""
    for name in names:
        desk.report(name, step)
    assert 0 in desk.machine.rounds.open


# ---------------------------------------------------------------------------------------------- learner, Alg. 1


def test_alg1_learner_never_waits():
    """[P §3.1] Steps go on with the syncer gone; nothing the machine orders could hold a step up."""
    bench = Bench()
    bench.step(Unlinked())
    for _ in range(100):
        assert bench.boundary() == []
    assert bench.machine.step_count == 100
    assert [p.mark_step for p in bench.machine.positions] == [0] * len(bench.machine.positions)


def test_alg1_learner_sends_its_position_every_step():
    """[P §3.1] Metadata is pushed, tensors are pulled: a step alone sends a report and no contribution."""
    bench = Bench()
    actions = bench.boundary()
    assert of(actions, SendReport)
    report = bench.report
    assert (report.step, report.tokens) == (1, TOKENS_PER_STEP)
    assert not of(actions, Contribute)


def test_design_reports_are_limited_and_kept_up():
    """At most one per 50 ms while things happen, at least one a second while nothing does."""
    bench = Bench()
    bench.boundary()
    assert not of(bench.step(Ticked()), SendReport)
    bench.now += 0.06
    assert not of(bench.step(Ticked()), SendReport)
    bench.now += 1.0
    assert of(bench.step(Ticked()), SendReport)


def test_design_contribution_is_taken_at_the_next_boundary():
    bench = Bench()
    bench.boundary()
    assert of(bench.pull(0), Snapshot)
    c = only(bench.boundary(), Contribute)
    assert (c.from_step, c.to_step, c.base_version) == (0, 2, 0)


def test_design_one_outstanding_and_the_same_bytes_again():
    bench = Bench()
    bench.boundary()
    bench.contribute(0)
    assert of(bench.pull(0, lacking_seq=1), Resend)
    assert not of(bench.boundary(), Contribute)
    assert bench.machine.positions[0].outstanding.seq == 1


def test_design_a_pull_that_crosses_a_contribution_does_not_double_it():
    """The syncer asked before it could know of the contribution, so it is no sign that it was lost."""
    bench = Bench()
    bench.boundary()
    bench.contribute(0)
    assert not of(bench.pull(0), Resend) + of(bench.boundary(), Contribute)


def test_design_no_contribution_without_work():
    bench = Bench()
    assert not of(bench.pull(0), Snapshot)


def test_design_adoption_settles_and_moves_the_mark():
    """The contribution named by settled_seq leaves the drift; steps taken meanwhile stay unsettled."""
    bench = Bench()
    bench.boundary()
    c = bench.contribute(0)
    bench.boundary()
    adopt = only(bench.publish(0, 1, settled_seq=c.seq, settled_step=c.to_step), Adopt)
    assert adopt.take_out == c.seq
    position = bench.machine.positions[0]
    assert (position.base_version, position.mark_step, position.outstanding) == (1, 2, None)
    assert bench.machine.step_count == 3


def test_design_a_contribution_that_is_not_settled_stays_in_the_drift():
    bench = Bench()
    bench.boundary()
    bench.contribute(0)
    assert only(bench.publish(0, 1), Adopt).take_out == 0
    assert bench.machine.positions[0].outstanding is not None
    assert bench.machine.positions[0].mark_step == 0


def test_p_alpha_zero_gives_up_the_steps_since_the_contribution():
    """[P] The new version replaces the fragment: what is contributed next begins where that happened."""
    bench = Bench()
    bench.boundary()
    c = bench.contribute(0)
    bench.boundary()
    bench.publish(0, 1, settled_seq=c.seq, settled_step=c.to_step)
    bench.boundary(overwritten=(0,))
    assert [(p.mark_step, p.mark_tokens) for p in bench.machine.positions] == [(4, 4 * TOKENS_PER_STEP), (0, 0)]
    bench.boundary()
    following = bench.contribute(0)
    assert (c.to_step, following.from_step, following.to_step) == (2, 4, 6)


def test_design_an_overwrite_leaves_what_is_outstanding_to_the_syncer():
    """Its bytes may be merged yet: the same ones again, and no mark beyond it before it is settled."""
    bench = Bench()
    bench.boundary()
    c = bench.contribute(0)
    bench.publish(0, 1)
    bench.boundary(overwritten=(0,))
    assert of(bench.pull(0, lacking_seq=c.seq), Resend)
    assert bench.machine.positions[0].outstanding == c and bench.machine.positions[0].mark_step == 0
    bench.publish(0, 2, settled_seq=c.seq, settled_step=c.to_step)
    assert not bench.machine.discards
    bench.boundary(overwritten=(0,))
    assert bench.machine.positions[0].outstanding is None and bench.machine.positions[0].mark_step == 4


def test_design_a_pull_that_meets_an_overwrite_is_answered_a_step_later():
    """There was nothing left to contribute; unanswered, it would be repeated only after seconds."""
    bench = Bench()
    bench.boundary()
    bench.pull(0)
    bench.publish(0, 1)
    assert of(bench.boundary(overwritten=(0,)), Snapshot)
    assert not of(bench.pull(0), Snapshot), "it is on its way"
    c = only(bench.boundary(), Contribute)
    assert (c.base_version, c.from_step, c.to_step) == (1, 2, 3)


def test_design_a_pull_that_meets_an_overwrite_is_not_answered_after_the_last_step():
    bench = Bench()
    bench.boundary()
    bench.step(Closing())
    bench.pull(0)
    bench.publish(0, 1)
    assert not of(bench.boundary(0, overwritten=(0,)), Snapshot)
    assert not of(bench.boundary(0), Contribute) and bench.machine.positions[0].mark_step == 1


def test_design_versions_are_adopted_only_upwards():
    bench = Bench()
    bench.publish(0, 1)
    assert not of(bench.publish(0, 1), Adopt)
    assert not of(bench.publish(0, 0, base_version=FULL), Adopt)


def test_design_delta_only_on_exactly_its_base():
    bench = Bench()
    assert not of(bench.publish(0, 2), Adopt)
    assert of(bench.publish(0, 2, base_version=FULL), Adopt)


def test_design_damaged_publication_is_asked_for_whole():
    """... and keeps being asked for, whatever deltas come in between."""
    bench = Bench()
    bench.step(Unusable(0))
    bench.publish(0, 5)
    assert bench.report.positions[0].want_full
    bench.publish(0, 5, base_version=FULL)
    assert not bench.report.positions[0].want_full


def test_design_messages_of_an_older_epoch_or_life_are_ignored():
    bench = Bench()
    bench.boundary()
    bench.welcome(epoch=3)
    assert not of(bench.pull(0, epoch=2), Snapshot)
    bench.step(Told(Pull(3, 2, 0, 0, False, 0.0)))
    assert not bench.snapshots


def test_design_harmful_rejection_is_a_fast_forward_with_marks_now():
    bench = Bench()
    bench.boundary()
    c = bench.contribute(0)
    actions = bench.step(Told(Rejected(1, 1, 0, c.seq, "not finite", True)))
    assert of(actions, FastForward)
    assert bench.machine.positions[0].outstanding is None
    bench.boundary()
    assert {p.mark_step for p in bench.machine.positions} == {3}


def test_design_harmless_rejection_changes_nothing():
    bench = Bench()
    bench.boundary()
    c = bench.contribute(0)
    assert not of(bench.step(Told(Rejected(1, 1, 0, c.seq, "full", False))), FastForward)
    assert bench.machine.positions[0].outstanding.seq == c.seq


def test_design_stale_learner_fast_forwards_once():
    """More than stale_versions_max behind: the whole learner at once, not once a fragment."""
    bench = Bench(stale_versions_max=3)
    bench.boundary()
    assert not of(bench.publish(0, 3, base_version=FULL), FastForward)
    assert of(bench.publish(0, 7, base_version=FULL), FastForward)
    assert not of(bench.publish(1, 7, base_version=FULL), FastForward)
    assert bench.machine.discards == ["stale"]


def test_design_settled_work_that_is_not_at_hand_is_a_fast_forward():
    bench = Bench()
    bench.boundary()
    assert of(bench.publish(0, 1, settled_seq=9, settled_step=1), FastForward)


def test_design_connection_loss_does_not_end_a_life():
    """The same process resumes it, drift, marks and outstanding contribution."""
    bench = Bench()
    bench.boundary()
    c = bench.contribute(0)
    bench.step(Unlinked())
    bench.boundary()
    assert only(bench.step(Linked()), SayHello).life == 1
    bench.welcome()
    assert bench.report.positions[0].outstanding_seq == c.seq
    assert of(bench.pull(0, lacking_seq=c.seq), Resend)


def test_design_a_round_that_saw_an_outage_says_nothing_about_the_link():
    """H is asked for by what rounds take: the steps of an outage are not among them."""
    bench, found = Bench(), []
    for version, (is_outage, steps) in enumerate([(False, 1), (True, 50), (False, 3)], 1):
        bench.boundary()
        c = bench.contribute(0)
        if is_outage:
            bench.step(Unlinked())
            bench.boundary(steps)
            bench.welcome()
        else:
            bench.boundary(steps)
        bench.publish(0, version, settled_seq=c.seq, settled_step=c.to_step)
        found.append(bench.report.round_steps)
    assert found == [2, 2, 4]


def test_design_what_a_round_takes_is_without_the_time_its_work_lay_waiting():
    """Ten steps of a second passed until the version came, for six and a half of them the work lay at the syncer."""
    bench = Bench()
    bench.boundary()
    c = bench.contribute(0)
    bench.boundary(9)
    bench.publish(0, 1, settled_seq=c.seq, settled_step=c.to_step, lay_s=6.5)
    assert bench.report.round_steps == 4


def test_design_a_version_says_how_long_the_work_in_it_lay_waiting():
    """The quick one's waits for the other, whose round it is too; that one's does not wait."""
    desk = Desk(num_fragments=1, sync_every=4, quorum=2)
    desk.ready("a", "b")
    desk.report("a", 4), desk.report("b", 4)
    desk.contribute("a", 0)
    desk.now += 3.0
    published = of(desk.contribute("b", 0), Publish)
    assert {action.learner: action.lay_s for action in published} == {"a": 3.0, "b": 0.0}


def test_design_an_order_is_carried_out_at_its_step_and_ends_with_its_link():
    """Unasked, when so many steps are unsettled; the version that settles them brings the next."""
    bench = Bench()
    bench.publish(0, 1, order=2)
    assert not of(bench.boundary(), Contribute)
    c = only(bench.boundary(), Contribute)
    assert (c.from_step, c.to_step, c.base_version) == (0, 2, 1)
    bench.boundary()
    bench.publish(0, 2, settled_seq=c.seq, settled_step=2, order=1)
    assert only(bench.boundary(), Contribute).from_step == 2, "it was overdue when it came"
    bench.publish(1, 1, order=1)
    bench.step(Unlinked())
    assert not of(bench.boundary(), Contribute)


def test_design_an_order_counts_from_a_mark_that_moved():
    """What a fast-forward gave up is not waited for, and what was ordered is due as many steps later."""
    bench = Bench()
    bench.publish(0, 1, order=3)
    bench.boundary(steps=2)
    bench.step(Spoiled(1, "w"))
    bench.boundary()
    assert not of(bench.boundary(steps=2), Contribute)
    assert only(bench.boundary(), Contribute).from_step == 3


def test_design_several_spoiled_fragments_of_one_boundary_are_one_fast_forward():
    bench = Bench()
    bench.boundary()
    assert of(bench.step(Spoiled(0, "w")), FastForward) == [FastForward("not finite", "w", True)]
    assert not of(bench.step(Spoiled(1, "v")), FastForward) and bench.machine.discards == ["not finite"]
    bench.boundary()
    assert of(bench.step(Spoiled(1, "v")), FastForward), "and the next that is spoiled is another"


def test_design_stop_is_obeyed_after_the_step():
    bench = Bench()
    bench.step(Told(Stop(1, 1)))
    assert bench.machine.state == "training"
    bench.step(Closing())
    assert bench.machine.state == "stopped"


# ---------------------------------------------------------------------------------------------- syncer: quorum, Alg. 2


def test_p4_k_equal_m_waits_for_all():
    """[P §4] K = M reproduces synchronous behaviour."""
    desk = Desk(quorum=3)
    desk.ready("a", "b", "c")
    open_round(desk, "a", "b", "c")
    assert not of(desk.contribute("a", 0) + desk.contribute("b", 0) + desk.wait(60), Merge)
    assert len(only(desk.contribute("c", 0), Merge).contributions) == 3


def test_p4_k_one_never_blocks():
    """[P §4] One learner alive is enough."""
    desk = Desk(quorum=1)
    desk.ready("a", "b", "c")
    desk.depart("b")
    desk.depart("c")
    open_round(desk, "a")
    assert of(desk.contribute("a", 0), Merge)


def test_design_share_is_reevaluated_downwards_within_a_round():
    desk = Desk(quorum=0.9)
    desk.ready("a", "b", "c")
    open_round(desk, "a", "b", "c")
    desk.contribute("a", 0)
    assert not of(desk.contribute("b", 0), Merge)
    decision = only(desk.depart("c"), Merge).decision
    assert (decision.quorum, decision.ready, decision.reason) == (2, 2, "all in")


def test_design_a_number_is_never_lowered():
    desk = Desk(quorum=2)
    desk.ready("a", "b")
    open_round(desk, "a", "b")
    desk.contribute("a", 0)
    assert not of(desk.depart("b") + desk.wait(10), Merge)
    assert "1 ready, quorum 2" in desk.machine.waiting


def test_design_a_stalled_learner_does_not_count():
    desk = Desk(quorum=0.9, stall_s=5.0)
    desk.ready("a", "b")
    open_round(desk, "a", "b")
    desk.contribute("a", 0)
    for step in range(5, 20):
        desk.wait(1)
        desk.report("a", step)
    assert desk.machine.state.merges >= 1


def test_design_a_pause_of_the_syncer_stalls_nobody():
    """It heard nothing because it was away: the quorum does not shrink to whoever is held already."""
    desk = Desk(quorum=0.9, stall_s=5.0)
    desk.ready("a", "b")
    open_round(desk, "a", "b")
    desk.contribute("a", 0)
    desk.now += 60
    assert not of(desk.step(Ticked()), Merge)


def test_p32_merge_is_in_learner_order_whatever_the_arrival():
    desk = Desk(quorum=3)
    desk.ready("a", "b", "c")
    open_round(desk, "a", "b", "c")
    actions = desk.contribute("c", 0) + desk.contribute("a", 0) + desk.contribute("b", 0)
    assert [c.learner for c in only(actions, Merge).contributions] == ["a", "b", "c"]


# ---------------------------------------------------------------------------------------------- grace window, eq. 3


def test_eq3_grace_is_gamma_times_the_slack():
    """ξ_grace = γ max(0, τ ξ_step − ξ_quorum − ξ_sync)."""
    assert grace_s(0.8, 2, 1.0, 0.5, 0.75) == pytest.approx(0.8 * (2 * 1.0 - 0.5 - 0.75))


def test_eq3_grace_is_at_most_one_step_and_never_negative():
    assert grace_s(0.9, 10, 1.0, 0.0, 0.0) == 1.0
    assert grace_s(0.9, 1, 1.0, 5.0, 5.0) == 0.0


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_eq3_no_grace_before_everything_was_measured(missing):
    measured = [1.0, 0.1, 0.1]
    measured[missing] = None
    assert grace_s(0.8, 2, *measured) == 0.0


def grace_desk() -> Desk:
    """Three learners with steps of 1 s, all times measured as small: a window of 0.8 (2 - small), at most 1 s."""
    desk = Desk(grace=0.8, num_fragments=1)
    desk.ready("a", "b", "c")
    open_round(desk, "a", "b", "c")
    desk.machine.rounds.quorum_s = desk.machine.rounds.sync_s = 0.1
    for member in desk.machine.members.values():
        member.answer_s = 0.3
    return desk


def test_eq3_grace_waits_for_who_can_make_it_and_closes_when_it_is_over():
    desk = grace_desk()
    assert not of(desk.contribute("a", 0), Merge)
    assert desk.machine.waiting == "fragment 0: grace for b, c"
    assert only(desk.wait(1.0), Merge).decision.reason == "grace over"


def test_eq3_grace_ends_when_all_are_in():
    desk = grace_desk()
    actions = desk.contribute("a", 0) + desk.contribute("b", 0) + desk.contribute("c", 0)
    assert only(actions, Merge).decision.reason == "all in"


def test_design_grace_ends_early_when_the_rest_cannot_make_it():
    desk = grace_desk()
    for name in "bc":
        desk.machine.members[name].answer_s = 30.0
    assert only(desk.contribute("a", 0), Merge).decision.reason == "the rest cannot make it"


def test_p4_a_late_contribution_is_merged_in_the_next_round():
    """[P §4] Late ones are weighted in the next sync; it costs age, not work."""
    desk = Desk(num_fragments=1)
    desk.ready("a", "b")
    open_round(desk, "a", "b")
    late = desk.contribution("b", 0)
    desk.contribute("a", 0)
    assert of(desk.arrive(late), Hold) and not desk.machine.rounds.open
    assert late in only(desk.wait(5), Merge).contributions


# ---------------------------------------------------------------------------------------------- schedule, eq. 2


def test_eq2_first_rounds_are_staggered():
    """[P §2] Fragments have distinct offsets in (0, H]."""
    desk = Desk(num_fragments=4, sync_every=8, fragment_sync_delay=8)
    desk.ready("a")
    first = {}
    for step in range(1, 12):
        desk.now += 1
        desk.report("a", step)
        for p in rounds(desk):
            first.setdefault(p, step)
            desk.contribute("a", p)
    assert first == {0: 2, 1: 4, 2: 6, 3: 8}


def test_p51_p_equal_h_opens_one_fragment_a_step():
    """[P §5.1] With P = H every step one fragment is sent and one received."""
    desk = Desk(num_fragments=6, sync_every=6, fragment_sync_delay=1)
    desk.ready("a")
    merged = []
    for step in range(1, 25):
        desk.now += 1
        desk.report("a", step)
        merged.append([m.decision.fragment for p in rounds(desk) for m in of(desk.contribute("a", p), Merge)])
    assert all(len(fragments) == 1 for fragments in merged[1:])
    assert [f for (f,) in merged[6:12]] == [f for (f,) in merged[12:18]], "each fragment every H steps"


def test_design_openings_are_paced_after_an_outage():
    """Everything is due at once, but the allowance is 2 max(1, P/H), then P/H a step."""
    desk = Desk(num_fragments=8, sync_every=8, fragment_sync_delay=8)
    desk.ready("a")
    for step in range(1, 9):
        desk.now += 1
        desk.report("a", step)
        for p in rounds(desk):
            desk.contribute("a", p)
    desk.depart("a")
    desk.now += 100
    desk.join("a", "a1", 1)
    desk.now += 0.1
    desk.report("a", 108)
    assert len(rounds(desk)) <= 2
    desk.now += 1.0
    desk.report("a", 109)
    assert len(rounds(desk)) <= 4


def test_design_a_link_that_is_slow_may_have_every_fragment_on_its_way():
    """Openings are paced, at P/H a step, and each fragment has one; how many are open depends on how long they take."""
    desk = Desk(num_fragments=8, sync_every=8, fragment_sync_delay=2)
    desk.ready("a")
    open_at = []
    for step in range(1, 20):
        desk.now += 1
        desk.report("a", step)
        open_at.append(len(rounds(desk)))
    assert open_at[:8] == list(range(1, 9)) and open_at[-1] == 8


def test_design_h_follows_what_rounds_take_and_whether_merges_stand_in_line():
    """A round takes the K quickest 5.5 steps where 4 are configured; with twice as many merges as workers, 11."""
    desk = Desk(num_fragments=1, sync_every=4, quorum=1)
    desk.ready("a")
    assert desk.machine.sync_every == 4
    member = desk.machine.members["a"]
    member.round_steps = 5.5
    desk.machine.roster.update(member, desk.now)
    assert desk.machine.sync_every == 6
    desk.machine.rounds.under_way = 2.0 * desk.config.merge.threads
    assert desk.machine.sync_every == 11
    member.round_steps = 1.0
    desk.machine.roster.update(member, desk.now)
    assert desk.machine.sync_every == 4, "never shorter than what is configured"


def test_design_the_fastest_may_lead_by_2h():
    """K = 3, one fast learner: due when it has 2H unsettled steps and two others at least one."""
    desk = Desk(num_fragments=1, sync_every=4, quorum=3)
    desk.ready("a", "b", "c")
    desk.report("b", 1)
    desk.report("c", 1)
    desk.report("a", 7)
    assert rounds(desk) == []
    desk.report("a", 8)
    assert rounds(desk) == [0]


def test_design_h_counts_steps_not_time():
    desk = Desk(num_fragments=1, sync_every=4)
    desk.ready("a")
    desk.report("a", 3)
    desk.wait(15)
    assert rounds(desk) == []


def test_design_warm_phase_then_steady_then_cool():
    """A plain mean, outer step 1 and no momentum until warm_share and from 1 - cool_share; at first H = warm_every."""
    config = config_of({"learners": 1, "steps": 100}, num_fragments=1, sync_every=8, policy="auto", warm_every=2)
    desk = Desk(config)
    desk.ready("a")
    seen = []
    for step in range(1, 100):
        desk.now += 1
        desk.report("a", step)
        for p in rounds(desk):
            seen += [merge.decision for merge in of(desk.contribute("a", p), Merge)]
    warm = [d for d in seen if d.stage == "warm"]
    steady = [d for d in seen if d.stage == "steady"]
    cool = [d for d in seen if d.stage == "cool"]
    assert {(d.rule, d.outer, d.lr, d.momentum, d.sync_every) for d in warm} == {("mean", "sgd", 1.0, 0.0, 2)}
    assert {(d.rule, d.outer, d.lr, d.momentum, d.sync_every) for d in steady} == {("rda", "nesterov", 0.4, 0.85, 8)}
    assert {(d.rule, d.outer, d.lr, d.momentum, d.sync_every) for d in cool} == {("mean", "sgd", 1.0, 0.0, 8)}
    assert all(d.rows[0].steps == 2 for d in warm) and all(d.rows[0].steps == 8 for d in steady[1:])
    assert max(d.progress for d in warm) < 0.2 <= min(d.progress for d in steady)
    assert max(d.progress for d in steady) <= 0.9 < min(d.progress for d in cool)
    assert len(warm) + len(steady) + len(cool) == len(seen)


def test_design_the_warm_stage_lasts_the_versions_that_so_many_steps_make_and_no_longer():
    """20 steps at H = 4 are five versions."""
    config = config_of({"learners": 2, "steps": 1000}, num_fragments=1, sync_every=8, policy="auto", warm_steps=20)
    desk = Desk(config)
    desk.ready("a", "b")
    stages = {}
    for step in range(1, 60):
        desk.now += 1
        for name in ("a", "b"):
            desk.report(name, step)
        for p in rounds(desk):
            decisions = [m.decision for name in ("a", "b") for m in of(desk.contribute(name, p), Merge)]
            stages |= {d.version: d.stage for d in decisions}
    assert {stage for version, stage in stages.items() if version <= 5} == {"warm"}
    assert {stage for version, stage in stages.items() if version > 5} == {"steady"}


# ---------------------------------------------------------------------------------------------- settlement


def test_design_duplicates_are_refused_without_a_word():
    desk = Desk(num_fragments=1, quorum=2)
    desk.ready("a", "b")
    open_round(desk, "a", "b")
    c = desk.contribution("a", 0)
    desk.arrive(c)
    assert desk.arrive(c) == []
    desk.contribute("b", 0)
    assert desk.arrive(c) == []
    assert desk.machine.refused == {"duplicate": 2}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"from_step": 2, "from_tokens": 20}, "overlap"),
        ({"from_tokens": 45}, "tokens without steps"),
        ({"to_step": 4}, "no work"),
        ({"base_version": 9}, "unknown base"),
    ],
)
def test_design_what_cannot_be_booked_is_refused_as_harmful(changes, reason):
    desk = Desk(num_fragments=1)
    desk.ready("a")
    open_round(desk, "a")
    desk.contribute("a", 0)
    desk.report("a", 8)
    rejected = only(desk.arrive(desk.contribution("a", 0, **changes)), Rejected)
    assert (rejected.reason, rejected.harmful) == (reason, True)


def test_design_a_gap_was_given_up_and_is_booked_so():
    desk = Desk(num_fragments=1)
    desk.ready("a")
    open_round(desk, "a")
    desk.report("a", 6, marks=[3])
    rows = only(desk.contribute("a", 0), Merge).decision.rows
    assert [(r.from_step, r.to_step, r.fate) for r in rows] == [(0, 3, "fast-forward"), (3, 6, "merged")]


def test_design_full_memory_is_no_reason_to_stop():
    """Beyond held_bytes_max a contribution is refused and asked for later; the oldest round is always let in."""
    desk = Desk(quorum=2)
    desk.ready("a", "b")
    desk.report("a", 4)
    desk.report("b", 4)
    desk.now += 2
    desk.report("a", 5)
    desk.report("b", 5)
    assert rounds(desk) == [0, 1]
    room = desk.config.wire.held_bytes_max
    desk.arrive(desk.contribution("a", 1), payload_bytes=room)
    assert only(desk.arrive(desk.contribution("b", 1), payload_bytes=room), Rejected).reason == "full"
    assert of(desk.arrive(desk.contribution("a", 0), payload_bytes=room), Hold)
    assert of(desk.arrive(desk.contribution("b", 0), payload_bytes=room), Merge)


def test_design_pull_waits_for_the_learner_to_know_what_is_settled():
    desk = Desk(num_fragments=1)
    desk.ready("a")
    open_round(desk, "a")
    desk.adopts = False
    desk.contribute("a", 0)
    desk.wait(10)
    assert not of(desk.report("a", 9), Pull)
    assert of(desk.report("a", 9, marks=[4], versions=[1]), Pull)


def test_design_pulls_are_repeated_until_answered():
    desk = Desk(num_fragments=1)
    desk.ready("a")
    open_round(desk, "a")
    assert not of(desk.wait(9), Pull), "of one that is silent nothing is known to be lost"
    pulls = []
    for _ in range(18):
        desk.wait(0.5)
        pulls += of(desk.report("a", 4), Pull)
    assert len(pulls) >= 3


# ---------------------------------------------------------------------------------------------- durability


def test_design_a_version_is_recorded_before_it_is_published():
    """Merge stands before every publication of its version; the node commits what stands before a send."""
    desk = Desk(num_fragments=1)
    desk.ready("a", "b")
    open_round(desk, "a", "b")
    actions = desk.contribute("a", 0)
    merge = only(actions, Merge)
    assert all(actions.index(merge) < actions.index(p) for p in of(actions, Publish))
    assert {p.learner for p in of(actions, Publish)} == {"a", "b"}
    assert [p.settled_seq for p in of(actions, Publish)] == [1, 0]


def test_design_a_life_is_recorded_before_the_welcome():
    desk = Desk()
    actions = desk.join("a")
    kinds = [type(a.fact) if isinstance(a, Record) else type(getattr(a, "message", a)) for a in actions]
    assert kinds.index(LifeStarted) < kinds.index(Welcome)


def test_design_settlement_survives_a_syncer_crash():
    """Crash between commit and broadcast: the publication after the restart names what was settled before it."""
    desk = Desk(num_fragments=1)
    desk.ready("a")
    open_round(desk, "a")
    desk.adopts = False
    c = desk.contribution("a", 0)
    desk.arrive(c)
    desk.start()
    desk.join("a", "a1", 1)
    publish = only(desk.report("a", 6), Publish)
    assert (publish.version, publish.settled_seq, publish.settled_step) == (1, c.seq, 4)
    assert desk.arrive(c) == [] and desk.machine.refused == {"duplicate": 1}


def test_design_held_contributions_are_asked_for_again_after_a_crash():
    """With the same seq: the learner still has its bytes, and the syncer knows of nothing settled."""
    desk = Desk(num_fragments=1, quorum=2)
    desk.ready("a", "b")
    open_round(desk, "a", "b")
    c = desk.contribution("a", 0)
    desk.arrive(c)
    desk.start()
    for name in "ab":
        desk.join(name, f"{name}1", 1)
    pulls = of(desk.report("a", 5) + desk.report("b", 5) + desk.wait(1), Pull)
    assert {p.settled_seq for p in pulls} == {0} and len(pulls) == 2
    assert of(desk.arrive(c), Hold)


def test_design_an_interrupted_syncer_writes_what_it_saw():
    desk = Desk()
    desk.ready("a")
    desk.report("a", 3)
    actions = desk.step(Interrupted())
    assert facts(actions, Paused)[0].seen[0].step == 3
    assert only(actions, Finish).reason == "interrupted"
    desk.start()
    assert desk.machine.state.ledger.account("a", 1).step == 3


# ---------------------------------------------------------------------------------------------- lives


def test_design_a_newcomer_gets_whole_fragments_and_is_ready_when_it_has_all():
    desk = Desk()
    desk.join("a")
    publications = of(desk.report("a", 0), Publish)
    assert [(p.fragment, p.base_version) for p in publications] == [(0, FULL), (1, FULL)]
    member = desk.machine.members["a"]
    desk.report("a", 0, versions=[0, FULL])
    assert not member.is_ready(desk.now, 20.0)
    desk.report("a", 0, versions=[0, 0])
    assert member.is_ready(desk.now, 20.0)


def test_design_a_lost_publication_is_sent_again():
    desk = Desk()
    desk.ready("a")
    desk.adopts = False
    open_round(desk, "a")
    desk.contribute("a", 0)
    desk.now += 1
    assert not of(desk.report("a", 5), Publish)
    desk.now += 2
    publish = only(desk.report("a", 6), Publish)
    assert (publish.fragment, publish.base_version, publish.version) == (0, 0, 1)


def test_design_the_newest_process_wins_and_the_old_one_is_told():
    desk = Desk()
    desk.ready("a")
    actions = desk.join("a", "a2")
    dismiss = only(actions, Dismiss)
    assert dismiss.life == 1 and dismiss.why == "taken over"
    assert only(actions, Welcome).life == 2
    assert only(desk.join("a", "a1", life=1), Dismiss).why == "taken over"


def test_design_a_live_name_is_taken_over_only_with_its_key():
    desk = Desk()
    desk.ready("a")
    away = only(desk.join("a", "a2", has_key=False), Dismiss)
    assert (away.life, away.why) == (0, "in use") and "is in use by another process" in away.text
    assert desk.machine.members["a"].connected and desk.machine.state.lives["a"].life == 1
    desk.depart("a")
    assert only(desk.join("a", "a2", has_key=False), Welcome).life == 2, "it is gone, and its name is free"
    assert only(desk.join("a", "a3", has_key=True), Welcome).life == 3, "it has the key"


def test_design_what_anybody_says_of_a_name_turns_nobody_away_who_has_it():
    """A hello in a life from the future: the learner that has the name can still come back on another link."""
    desk = Desk()
    desk.ready("a")
    for is_there in (True, False):
        assert only(desk.join("a", "stranger", life=9), Dismiss).why == "ahead"
        assert bool(desk.machine.ahead) != is_there
        desk.depart("a")
    assert only(desk.join("a", "a1", life=1), Welcome).life == 1


def test_design_a_replaced_life_died_except_for_what_is_held():
    """Its held contribution still merges, later bytes are refused, the rest of its work is booked."""
    desk = Desk(num_fragments=1, quorum=2)
    desk.ready("a", "b")
    open_round(desk, "a", "b")
    held = desk.contribution("a", 0)
    desk.arrive(held)
    desk.report("a", 6)
    late = desk.contribution("a", 0)
    assert not facts(desk.join("a", "a2"), Discarded)
    assert desk.arrive(late) == [] and desk.machine.refused == {"old life": 1}
    actions = desk.contribute("b", 0)
    assert held in only(actions, Merge).contributions
    [row] = facts(actions, Discarded)[0].rows
    assert (row.life, row.from_step, row.to_step, row.fate) == (1, 4, 6, "died")


def test_design_the_next_life_knows_what_the_earlier_ones_did():
    desk = Desk()
    desk.ready("a")
    desk.report("a", 7)
    welcome = only(desk.join("a", "a2"), Welcome)
    assert (welcome.prior_steps, welcome.prior_tokens, welcome.index) == (7, 70, 0)


def test_design_a_learner_ahead_of_the_tape_is_turned_away_but_not_for_good():
    """A life, or a version, that this syncer never handed out: it is the syncer that lost something."""
    desk = Desk()
    away = only(desk.join("a", "a9", life=4), Dismiss)
    assert away.why == "ahead"
    assert "says it is in life 4, this syncer knows of 0: its run directory is an older" in away.text
    desk.ready("b")
    away = only(desk.report("b", 9, versions=[3, 1]), Dismiss)
    assert away.why == "ahead" and "holds version 3 of fragment 0, this syncer knows of 0 (4 merges" in away.text
    assert not desk.machine.members["b"].connected
    assert desk.machine.ahead.keys() == {"a", "b"}


def test_design_a_learner_ahead_stays_out_until_its_process_or_the_syncers_is_another():
    """Others may make as many versions again; those of the same number are not the same."""
    desk = Desk()
    desk.ready("a")
    desk.report("a", 9, versions=[1, 0])
    away = only(desk.join("a", desk.machine.state.lives["a"].process, life=1), Dismiss)
    assert away.why == "ahead" and away.text == desk.machine.ahead["a"].why
    assert only(desk.join("a", "another"), Welcome).life == 2
    assert desk.machine.ahead == {}


def test_design_a_reconnecting_life_keeps_its_number():
    desk = Desk()
    desk.ready("a")
    desk.depart("a")
    assert only(desk.join("a", "a1", life=1), Welcome).life == 1
    assert desk.machine.state.lives["a"].life == 1


# ---------------------------------------------------------------------------------------------- the end


BUDGETS = {
    "steps": {"learners": 2, "steps": 5},
    "tokens": {"learners": 2, "tokens": 10 * TOKENS_PER_STEP},
    "minutes": {"learners": 2, "minutes": 0.5},
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_design_budget_in_steps_tokens_or_minutes(budget):
    desk = Desk(config_of(BUDGETS[budget], num_fragments=1, sync_every=100))
    desk.ready("a", "b")
    desk.report("a", 4)
    desk.report("b", 5)
    if budget == "minutes":
        desk.wait(29)
    assert desk.machine.state.phase == "training"
    actions = desk.wait(2) if budget == "minutes" else desk.report("a", 5)
    assert facts(actions, PhaseChanged)[0].phase == "closing"
    assert len(of(actions, Stop)) == 2


def closing_desk() -> Desk:
    desk = Desk(config_of({"learners": 2, "steps": 5}, num_fragments=1, sync_every=100, close_timeout_s=10.0))
    desk.ready("a", "b")
    desk.report("a", 4)
    desk.report("b", 6)
    return desk


def test_design_the_last_merge_is_a_lossless_mean_with_outer_step_one():
    desk = closing_desk()
    pulls = of(desk.report("a", 5, state="stopped") + desk.report("b", 6, state="stopped"), Pull)
    assert len(pulls) == 2 and all(p.lossless for p in pulls)
    assert not of(desk.contribute("a", 0), Merge), "waits for b"
    actions = desk.contribute("b", 0)
    decision = only(actions, Merge).decision
    assert (decision.rule, decision.outer, decision.lr, decision.momentum) == ("mean", "sgd", 1.0, 0.0)
    assert decision.is_closing and decision.codec == "fp32" and decision.reason == "the last work"
    assert [f.phase for f in facts(actions, PhaseChanged)] == ["closed"]
    assert len(of(actions, Done)) == 2 and only(actions, Finish).reason == "closed"
    totals = desk.machine.state.ledger.totals()
    assert (totals.produced, totals.merged, totals.pending) == (110, 110, 0)


def test_design_what_has_not_come_is_absent_at_close():
    desk = closing_desk()
    desk.report("a", 5, state="stopped")
    desk.contribute("a", 0)
    actions = desk.wait(11)
    assert len(only(actions, Merge).contributions) == 1
    assert desk.machine.state.ledger.totals().discarded == {"absent at close": 60}
    assert desk.machine.state.phase == "closed"


def test_design_the_rest_of_a_learner_that_is_there_does_not_wait_for_one_that_is_not():
    """With b away, a's contribution from before the stop is settled at once, so that a can hand over what followed."""
    desk = closing_desk()
    desk.contribute("a", 0, to=4)
    assert not of(desk.report("a", 5, state="stopped"), Merge), "b is there: merged alone, a would count too much"
    assert of(desk.depart("b"), Merge)
    desk.report("a", 5, state="stopped")
    desk.contribute("a", 0)
    desk.wait(11)
    assert desk.machine.state.ledger.totals().discarded == {"absent at close": 60}


def test_design_what_was_given_up_is_booked_at_the_end():
    desk = closing_desk()
    desk.report("b", 6, state="stopped", marks=[6])
    assert desk.machine.state.ledger.totals().discarded == {"fast-forward": 60}


def test_design_a_closed_run_stays_closed():
    """Reports, contributions and newcomers after the end change no books; a learner that missed the end is told."""
    desk = closing_desk()
    desk.report("a", 5, state="stopped")
    desk.wait(11)
    closed = desk.machine.state.ledger.totals()
    desk.report("b", 50)
    desk.arrive(desk.contribution("b", 0))
    assert desk.machine.state.ledger.totals() == closed and closed.pending == 0
    assert only(desk.join("c"), Dismiss).why == "closed"
    assert of(desk.join("b", "b1", life=1), Done)


def test_design_leaving_hands_over_everything_first():
    """SIGTERM: pulled at once on every fragment; if everyone leaves, merged at once."""
    desk = Desk()
    desk.ready("a")
    desk.report("a", 3)
    actions = desk.report("a", 3, state="leaving")
    assert {p.fragment for p in of(actions, Pull)} >= {1}
    merges = of(desk.contribute("a", 0) + desk.contribute("a", 1), Merge)
    assert [m.decision.fragment for m in merges] == [0, 1]
    desk.report("a", 3, state="left")
    assert not desk.machine.members["a"].connected
    assert desk.machine.state.ledger.totals().pending == 0


def test_design_a_jump_of_h_is_staggered():
    """Where the warm phase ends, fragments come due one after the other, not all together H steps later."""
    assert [due_at(p, 4, sync_every=16, sync_every_before=4) for p in range(4)] == [4, 8, 12, 16]
    assert [due_at(p, 4, sync_every=16, sync_every_before=16) for p in range(4)] == [16] * 4
