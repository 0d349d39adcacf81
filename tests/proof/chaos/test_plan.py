"""Fault plans: what a seed makes of them, what they never do, and every way to write one wrong."""

import collections

import pytest

from skerry.errors import PlanError
from skerry.proof.chaos.plan import GUARD_S, KINDS, LINK, presets, read_plan, schedule

GOOD = """
name = "mine"
about = "a test"
[[fault]]
kind = "kill"
target = "learner"
at = 0.5
for_s = 4.0
"""


@pytest.fixture
def plan(tmp_path):
    """Read a plan from its text."""

    def read(text):
        (tmp_path / "plan.toml").write_text(text)
        return read_plan(str(tmp_path / "plan.toml"))

    return read


@pytest.fixture
def refused(plan):
    """The one line a text is refused with, without the folder."""

    def read(text, learners=4):
        with pytest.raises(PlanError) as error:
            schedule(plan(text), 2.0, learners, 0)
        assert "\n" not in str(error.value)
        return str(error.value).rpartition("/")[2]

    return read


# ---------------------------------------------------------------------------------------------- presets


def test_the_presets_are_there_and_say_what_they_are():
    assert [p.name for p in presets()] == ["flap", "region", "storm", "throttle", "wan"]
    assert all(p.about and p.minutes == 2.0 and p.learners == 4 for p in presets())


@pytest.mark.parametrize("name", [p.name for p in presets()])
def test_a_seed_makes_the_same_faults_each_time(name):
    first, again, *others = (schedule(read_plan(name), 2.0, 4, seed) for seed in (7, 7, 8, 9, 10, 11))
    assert first == again and first
    assert first == sorted(first, key=lambda f: f.at_s)
    assert (name == "flap") == all(first == other for other in others)  # which draws nothing


def test_storm_strikes_every_five_seconds_with_everything():
    kinds = collections.Counter()
    for seed in range(20):
        faults = schedule(read_plan("storm"), 2.0, 4, seed)
        assert 22 <= len(faults) <= 25
        syncer = collections.Counter(f.kind for f in faults if f.target == "syncer")
        assert syncer == {"kill": 2, "stop": 1, "disk_full": 1}
        kinds.update(f.kind for f in faults)
    assert kinds.keys() == set(KINDS)


def test_region_takes_half_of_the_learners_for_a_third_of_the_run():
    faults = schedule(read_plan("region"), 3.0, 6, 1)
    assert len({f.target for f in faults}) == 3 and {f.kind for f in faults} == {"kill"}
    assert all(f.for_s == pytest.approx(60, abs=0.1) and f.at_s == pytest.approx(59.4) for f in faults)


def test_wan_is_a_climate_for_all_with_drops_on_top():
    faults = schedule(read_plan("wan"), 2.0, 3, 0)
    for kind in ("bandwidth", "delay"):
        assert [(f.target, f.at_s, f.for_s) for f in faults if f.kind == kind] == [
            (f"learner-{n}", 12.0, 108.0) for n in range(3)
        ]
    assert sum(f.kind == "drop" for f in faults) == 7


def test_throttle_and_flap_strike_one_learner():
    (slow,) = schedule(read_plan("throttle"), 2.0, 4, 0)
    assert (slow.kind, slow.at_s, slow.for_s, slow.parameters) == ("slow", 30.0, 60.0, {"speed": 0.25})
    flaps = schedule(read_plan("flap"), 2.0, 4, 0)
    assert {(f.kind, f.target, f.for_s) for f in flaps} == {("kill", "learner-1", 2.0)} and len(flaps) == 14


# ---------------------------------------------------------------------------------------------- what never happens


@pytest.mark.parametrize("learners", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(10))
def test_no_process_has_two_faults_at_once_and_kills_leave_a_learner(learners, seed):
    faults = schedule(read_plan("storm"), 4.0, learners, seed)
    for a in faults:
        for b in faults:
            if a is not b and a.target == b.target and a.at_s <= b.at_s:
                assert b.at_s >= a.at_s + a.for_s + GUARD_S
        assert a.at_s + a.for_s <= 240.0
        if a.kind == "kill" and a.target != "syncer":
            disturbed = {f.target for f in faults if f.at_s < a.at_s + a.for_s and a.at_s < f.at_s + f.for_s}
            assert len(disturbed - {"syncer"} | {a.target}) < learners


def test_what_is_aimed_comes_before_what_is_drawn(plan):
    text = GOOD + '[[fault]]\nkind = "stop"\ntarget = "learner-0"\nat = 0.51\nfor_s = 9\n'
    for seed in range(10):
        assert {f.kind: f.target != "learner-0" for f in schedule(plan(text), 2.0, 3, seed)} == {
            "kill": True,
            "stop": False,
        }
    assert [f.kind for f in schedule(plan(text), 2.0, 2, 0)] == ["stop"]  # a kill would leave nobody


def test_all_may_leave_nobody(plan):
    faults = schedule(plan(GOOD.replace('"learner"', '"all"')), 2.0, 3, 0)
    assert [f.target for f in faults] == ["learner-0", "learner-1", "learner-2"]


def test_a_network_fault_of_the_syncer_is_one_of_every_link(plan):
    text = '[[fault]]\nkind = "partition"\ntarget = "syncer"\nat = 0.5\nfor_s = 1\n'
    assert [f.target for f in schedule(plan(text), 2.0, 2, 0)] == ["learner-0", "learner-1"]


def test_a_fault_ends_with_the_run_and_momentary_ones_at_once(plan):
    (kill,) = schedule(plan(GOOD.replace("0.5", "0.99")), 1.0, 4, 0)
    assert kill.at_s + kill.for_s == pytest.approx(60.0)
    for kind in ("drop", "corrupt", "truncate"):
        (fault,) = schedule(plan(GOOD.replace("kill", kind)), 1.0, 4, 0)
        assert fault.for_s == 0.0 and ("direction" in fault.parameters) == (kind != "drop")


def test_times_may_be_many_and_spans_drawn(plan):
    text = GOOD.replace("at = 0.5", "at = [0.2, 0.1, 0.8]").replace("4.0", "[2.0, 6.0]")
    faults = schedule(plan(text), 2.0, 4, 3)
    assert [f.at_s for f in faults] == [12.0, 24.0, 96.0]
    assert len({f.for_s for f in faults}) == 3 and all(2.0 <= f.for_s <= 6.0 for f in faults)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("kill", "kil"), "plan.toml, fault 1: kind = 'kil': unknown kind 'kil': did you mean kill?"),
        (('"kill"', "3"), "plan.toml, fault 1: kind = 3: unknown kind 3: known are kill, kill_node, stop, slow"),
        (('kind = "kill"', "kinds = []"), "plan.toml, fault 1: kinds = []: write a list of kinds"),
        (('kind = "kill"\n', ""), "plan.toml, fault 1: write either kind or kinds; none is given"),
        (('target = "learner"\n', ""), 'plan.toml, fault 1: target is missing: it must be "learner"'),
        (('"learner"', '"lerner"'), "plan.toml, fault 1: target = 'lerner': must be"),
        (('"learner"', '"learner-9"'), "plan mine, fault 1: target = 'learner-9': the last of 4 is learner-3"),
        (("at = 0.5", "at = 1.5"), "plan.toml, fault 1: at = 1.5: must be from 0 to 1"),
        (("at = 0.5", "at = -0.5"), "plan.toml, fault 1: at = -0.5: must be from 0 to 1"),
        (("at = 0.5", "at = []"), "plan.toml, fault 1: at = []: is empty"),
        (("at = 0.5", 'at = "noon"'), "plan.toml, fault 1: at = 'noon': must be a number"),
        (("at = 0.5", "every_s = 0.1"), "plan.toml, fault 1: every_s = 0.1: must be from 0.5"),
        (("at = 0.5", "at = 0.5\nevery_s = 5"), "plan.toml, fault 1: write either at or every_s; at and every_s is"),
        (("at = 0.5\n", ""), "plan.toml, fault 1: write either at or every_s; none is given"),
        (("at = 0.5", "every_s = 5\nfrom = 0.9\nto = 0.2"), "plan.toml, fault 1: from = 0.9: must be below to = 0.2"),
        (("4.0", "-4.0"), "plan.toml, fault 1: for_s = -4.0: must be from 0"),
        (("4.0", "nan"), "plan.toml, fault 1: for_s = nan: must be a number"),
        (("4.0", "[6.0, 2.0]"), "plan.toml, fault 1: for_s = [6.0, 2.0]: write seconds, or two numbers"),
        (("for_s = 4.0", ""), "plan.toml, fault 1: write either for_s or share, how long kill lasts; none is given"),
        (("for_s = 4.0", "share = 2"), "plan.toml, fault 1: share = 2: must be from 0 to 1"),
        (("4.0", "4.0\nspeed = 0.5"), "plan.toml, fault 1: speed = 0.5: kill cannot take it"),
        (("4.0", '4.0\ndirection = "up"'), "plan.toml, fault 1: direction = 'up': must be"),
        (("kill", "slow"), "plan.toml, fault 1: speed is missing: slow needs it"),
        (("4.0", "4.0\nspede = 1"), "plan.toml, fault 1: unknown key 'spede': did you mean speed?"),
        (("about", "abuot"), "plan.toml: unknown key 'abuot': did you mean about?"),
        (('"mine"', "1"), "plan.toml: name = 1: must be text"),
        (("[[fault]]", "minutes = -1\n[[fault]]"), "plan.toml: minutes = -1: must be from 0.05"),
        (("[[fault]]", "learners = 0\n[[fault]]"), "plan.toml: learners = 0: must be from 1 to 64"),
        (("[[fault]]", "learners = 1.5\n[[fault]]"), "plan.toml: learners = 1.5: must be a whole number"),
        (("[[fault]]", "speeds = [1, 1]\n[[fault]]"), "plan.toml: speeds = [1, 1]: write one number for each of the 4"),
        (("[[fault]]", "[fault]"), "plan.toml: has no fault: write a [[fault]] table"),
        (("[[fault]]", "[[fault]"), "plan.toml: is not valid TOML: "),
    ],
)
def test_a_broken_plan_is_named_in_one_line(refused, change, says):
    assert change[0] in GOOD
    assert refused(GOOD.replace(*change, 1)).startswith(says)


def test_the_table_that_is_wrong_is_the_one_that_is_named(refused):
    line = refused(GOOD + GOOD.partition("[[fault]]")[2].replace("kind", "[[fault]]\nkind").replace("kill", "klil"))
    assert line.startswith("plan.toml, fault 2: kind = 'klil'")


@pytest.mark.parametrize(
    ("kind", "target"), [("slow", "syncer"), ("kill_node", "syncer"), ("disk_full", "learner"), ("disk_full", "all")]
)
def test_faults_that_a_target_cannot_have(refused, kind, target):
    text = GOOD.replace("kill", kind).replace('"learner"', f'"{target}"')
    assert f"target = '{target}': " in refused(text) and "only" in refused(text)


@pytest.mark.parametrize("kind", LINK)
def test_every_network_fault_takes_the_syncer_as_all_links(plan, kind):
    text = GOOD.replace("kill", kind).replace('"learner"', '"syncer"')
    text += {"delay": "delay_s = 0.1", "bandwidth": "mbit = 2"}.get(kind, "")
    assert len(schedule(plan(text), 2.0, 2, 0)) == 2


def test_half_needs_two(refused):
    assert "needs at least 2 learners, not 1" in refused(GOOD.replace('"learner"', '"half"'), learners=1)


def test_a_plan_that_is_not_there(tmp_path):
    with pytest.raises(PlanError, match=r"^unknown plan 'strom': did you mean storm\?"):
        read_plan("strom")
    with pytest.raises(PlanError, match=r"none\.toml: cannot be read \(No such file or directory\): check the path"):
        read_plan(str(tmp_path / "none.toml"))
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan(f"{tmp_path}/")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="is not valid TOML"):
        read_plan(str(tmp_path / "binary.toml"))
