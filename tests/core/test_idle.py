"""Who steps and brings nothing does not hold the others up, and a learner is not simply believed how quick it is."""

from __future__ import annotations

import pytest

from core.hand import Desk, config_of, of, only
from core.views import member
from skerry.core import admission
from skerry.core.admission import places
from skerry.core.audit import Audit
from skerry.core.events import Dismiss, Merge
from skerry.core.membership import CLOCKED_STEPS, OUT_OF_LINE, Member
from skerry.core.messages import FragmentPosition, Report, Welcome
from skerry.core.roster import NEWCOMERS_TRUSTED
from skerry.core.state import decode_fact

HONEST, IDLE = ("a", "b"), ("w", "x", "y", "z")
STALL_S = 5.0


def train(desk: Desk, seconds: int, idle: tuple[str, ...] = IDLE, honest: tuple[str, ...] = HONEST) -> int:
    """Everyone takes a step a second, the honest contribute whatever they are asked for; how many merges there were."""
    merges = 0
    for _ in range(seconds):
        desk.now += 1.0
        for name in (*honest, *idle):
            merges += len(of(desk.report(name, desk.peers[name].step + 1), Merge))
        for name in honest:
            for p in range(desk.count):
                if desk.peers[name].step > desk.peers[name].marks[p] and name not in desk.machine.held[p]:
                    merges += len(of(desk.contribute(name, p), Merge))
    return merges


def desk_with(*names: str, **sync) -> Desk:
    desk = Desk(config_of(None, **({"quorum": 0.5, "sync_every": 2, "stall_s": STALL_S} | sync)))
    desk.ready(*names)
    return desk


def test_who_steps_and_never_contributes_does_not_count_for_long():
    """Two of six are honest and K is half: while the others count, nothing merges; once they do not, all is as ever."""
    desk = desk_with(*HONEST, *IDLE)
    assert train(desk, 4) == 0 and desk.machine.quorum == 3
    train(desk, 12)
    assert desk.machine.quorum == 1 and sorted(desk.machine.roster.ready) == list(HONEST)
    assert "nothing comes from w, x, y and 1 more, not counted" in desk.machine.waiting
    assert train(desk, 20) >= train(desk_with(*HONEST), 20, idle=()) - 2 > 10


def test_it_counts_again_as_soon_as_something_of_it_is_held():
    desk = desk_with(*HONEST, "w")
    train(desk, 20, idle=("w",))
    assert "w" in desk.machine.roster.idle
    desk.contribute("w", 0)
    assert "w" in desk.machine.roster.ready and not desk.machine.roster.idle


def test_another_process_of_the_name_and_another_link_are_no_way_out():
    desk = desk_with(*HONEST, "w")
    train(desk, 20, idle=("w",))
    desk.depart("w")
    for process, life in (("w1", 1), ("w2", 0)):
        desk.join("w", process, life)
        desk.report("w", 0 if life == 0 else desk.peers["w"].step)
        desk.report("w", desk.peers["w"].step + 1)
        assert "w" in desk.machine.roster.idle and "w" not in desk.machine.roster.ready


def test_new_names_are_no_way_out_either():
    """After enough of them nobody new counts before it has brought something."""
    desk = desk_with(*HONEST)
    for n in range(0, NEWCOMERS_TRUSTED, 4):
        names = tuple(f"w{n + i}" for i in range(4))
        desk.ready(*names)
        train(desk, 20, idle=names)
        for name in names:
            desk.depart(name)
    desk.ready("new")
    assert "new" in desk.machine.roster.idle and desk.machine.quorum == 1
    train(desk, 4, idle=(), honest=(*HONEST, "new"))
    assert "new" in desk.machine.roster.ready


def test_a_quorum_that_is_a_number_is_never_lowered_but_says_whom_it_waits_for():
    desk = desk_with(*HONEST, "w", quorum=3)
    assert train(desk, 30, idle=("w",)) == 0
    assert desk.machine.quorum == 3 and desk.machine.waiting.endswith("nothing comes from w")


def test_a_name_counts_once_however_many_processes_have_it():
    desk = desk_with(*HONEST)
    for n in range(2, 6):
        desk.join("a", f"a{n}")
        desk.report("a", 0)
        desk.report("a", 0)
    assert sorted(desk.machine.roster.ready) == list(HONEST)


def test_a_run_has_so_many_places_and_names_that_left_take_none():
    desk = Desk(config_of({"learners": 2}))
    here = [f"l{n}" for n in range(places(2))]
    desk.ready(*here)
    away = only(desk.join("one-more"), Dismiss)
    assert away.why == "full" and "6 learners are here" in away.text
    assert "(run.learners and half as many more, 4 more at least)" in away.text
    assert only(desk.join("l0", "l02"), Welcome).life == 2, "it has its place"
    for n in range(20):
        desk.depart(here[n])
        here.append(f"m{n}")
        assert of(desk.join(here[-1]), Welcome)


def test_names_that_never_took_a_step_make_way_in_the_books_after_a_while(monkeypatch):
    """Joined once each, they would else shut a run for every name that comes later."""
    monkeypatch.setattr(admission, "NAMES_MIN", 0)
    desk = Desk(config_of({"learners": 1}))
    desk.ready("a")
    desk.report("a", 4)
    for n in range(admission.names_max(1) - 1):
        desk.join(f"n{n}")
        desk.depart(f"n{n}")
    away = only(desk.join("late"), Dismiss)
    assert away.why == "full" and "make way after 10 min" in away.text
    desk.wait(admission.FORGOTTEN_S + 1)
    desk.report("a", 5)
    assert only(desk.join("late"), Welcome).index == admission.names_max(1)
    assert len(desk.machine.state.lives) == admission.names_max(1) and "n0" not in desk.machine.state.lives
    assert "a" in desk.machine.state.lives and "n0" not in desk.machine.members
    desk.start()  # from the tape alone
    assert "n0" not in desk.machine.state.lives and "late" in desk.machine.state.lives
    audit = Audit()
    for record in desk.tape:
        audit.take(decode_fact(record))
    assert not audit.violations


def test_who_has_work_in_the_model_comes_back_though_others_have_filled_the_places():
    desk = Desk(config_of({"learners": 2}))
    desk.ready("a")
    desk.report("a", 4)
    desk.contribute("a", 0)
    desk.depart("a")
    desk.ready(*(f"l{n}" for n in range(places(2))))
    assert only(desk.join("a", life=1), Welcome).life == 1


# ---------------------------------------------------------------------------------------------- its clock


def reports(made: Member, steps: int, every_s: float, step_s: float) -> float:
    """So many, a step and so many seconds apart, that say a step takes `step_s`; what is believed in the end."""
    position, begun = (FragmentPosition(0, 0, 0, 0),) * 2, made.report
    assert begun is not None
    for n in range(1, steps + 1):
        step, number = begun.step + n, begun.number + n
        report = Report(made.learner, 1, number, step, 10 * step, step_s, "training", position)
        made.take_report(report, n * every_s)
    assert made.step_s is not None
    return made.step_s


@pytest.mark.parametrize(("said_s", "believed_s"), [(1e-6, 0.5 / OUT_OF_LINE), (3600.0, 0.5 * OUT_OF_LINE), (0.2, 0.2)])
def test_a_step_time_out_of_line_with_how_steps_come_in_is_not_believed(said_s, believed_s):
    made = member("a")
    made.step_s = None
    assert reports(made, 6 * CLOCKED_STEPS, 0.5, said_s) == pytest.approx(believed_s, rel=0.1)


def test_steps_that_came_together_after_an_outage_are_clocked_with_it():
    made = member("a")
    made.step_s = None
    reports(made, 2 * CLOCKED_STEPS, 0.5, 0.5)
    begun = made.report
    report = Report("a", 1, begun.number + 1, begun.step + 200, 1, 0.5, "training", begun.positions)
    made.take_report(report, made.reported_at + 100.0)
    assert made.clocked_s == pytest.approx(0.5) and made.step_s == pytest.approx(0.5)
