"""A run on concrete links: what bounds a sync, H and goodput; and what is said about it."""

import re

import pytest

from skerry import config as configs
from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import Tensor, layout_of
from skerry.plan import layouts
from skerry.plan.bandwidth import periods
from skerry.plan.forecast import report
from skerry.plan.syncs import Failures, Island, RunPlan, goodput, quorum_share, sizes_of, stretch
from skerry.run.delays import MEASURED, NONE

N = 24 * 128 * 1000  # 24 fragments of 128,000
DAY = 86400.0


def plan_of(rates=(1e9,) * 4, steps=(1.0,) * 4, rtt=0.0, params=N, tensors=24, failures=None, **overrides):
    """Fixed H, unless told; overrides as sync__quorum=2."""
    keys = {"run__learners": len(rates), "run__steps": 10**5, "sync__policy": "fixed", "sync__num_fragments": 24}
    keys |= overrides
    config = configs.validate(
        configs.resolve(configs.default(), None, [(k.replace("__", "."), v) for k, v in keys.items()])
    )
    islands = tuple(Island(f"learner-{i}", t, b, rtt) for i, (b, t) in enumerate(zip(rates, steps, strict=True)))
    return RunPlan(config, layouts.even(params, tensors), islands, failures)


def steady(plan):
    return stretch(plan, sizes_of(plan), periods(plan.config)[-1])


FRAGMENT_BITS = 8 * payload_bytes("int4", 128_000)
MERGE_S = MEASURED.merge_s(128_000) + 4 * MEASURED.inspect_s(128_000) + MEASURED.commit_s
WORK_S = MEASURED.encode_s(128_000) + MERGE_S + MEASURED.adopt_s(128_000)


def test_a_sync_is_encoding_the_way_up_the_merge_the_way_down_and_adopting():
    plan = plan_of(rates=(1e6, 1e6, 2e6, 4e6), rtt=0.1)
    for sync, rate in zip(steady(plan).syncs, (1e6, 1e6, 2e6, 4e6), strict=True):
        assert sync.sync_s == pytest.approx(0.1 + 2 * FRAGMENT_BITS / rate + WORK_S)
        assert sync.round_s == pytest.approx(sync.sync_s + 0.5)  # and half a step until a boundary
        assert sync.fits == (sync.sync_s <= 2)


def test_whether_it_fits_is_decided_at_tau_steps():
    needed = 2 * FRAGMENT_BITS / (2 - WORK_S)  # bit/s with which two ways and the work take two steps
    slow, fast = (steady(plan_of(rates=(needed * x,) * 4)).syncs[0].fits for x in (0.999, 1.001))
    assert (slow, fast) == (False, True)


def test_more_than_one_fragment_at_a_boundary_go_one_after_the_other():
    at = steady(plan_of(sync__sync_every=4))
    assert at.burst == 6 and at.syncs[0].up_s == pytest.approx(6 * FRAGMENT_BITS / 1e9)
    one, two = (steady(plan_of(sync__sync_every=4, merge__threads=threads)).syncs[0].sync_s for threads in (1, 2))
    assert one - two == pytest.approx(3 * (MERGE_S - MEASURED.commit_s)), "two workers merge them side by side"


def test_h_is_bounded_by_steps_then_by_the_links_of_a_quorum():
    plan = plan_of(sync__quorum=2)
    assert steady(plan).limit == "steps" and steady(plan).period_s == pytest.approx(24)
    cycle = 24 * FRAGMENT_BITS
    slow = plan_of(rates=(cycle / 30, cycle / 30, cycle / 300, cycle / 300), sync__quorum=2)
    assert steady(slow).limit == "links" and steady(slow).period_s == pytest.approx(30)
    all_of_them = slow._replace(config=plan_of(sync__quorum=4).config)
    assert steady(all_of_them).period_s == pytest.approx(300)


def test_a_round_is_one_trip_and_a_learner_is_in_each():
    at = steady(plan_of(rtt=10.0, sync__sync_every=4)._replace(delays=NONE))
    assert at.limit == "trips" and at.period_s == pytest.approx(10 + 0.5, rel=1e-3)
    assert at.period_of(at.syncs[0]) == at.period_s
    hidden = steady(plan_of(rtt=10.0))
    assert hidden.limit == "steps" and hidden.period_s == pytest.approx(24)  # the order came with the last version


def test_who_has_a_longer_way_than_the_quorum_is_in_fewer_merges():
    plan = plan_of(sync__sync_every=4)
    far = plan.islands[3]._replace(rtt_s=11.5)
    at = steady(plan._replace(islands=(*plan.islands[:3], far), delays=NONE))
    assert at.limit == "steps" and at.period_of(at.syncs[0]) == pytest.approx(4)
    assert at.period_of(at.syncs[3]) == pytest.approx(12, rel=1e-3)


def test_a_shared_link_of_the_syncer_is_the_bound_for_all():
    cycle = 24 * FRAGMENT_BITS
    at = steady(plan_of()._replace(syncer_rate=4 * cycle / 50))
    assert at.limit == "links" and at.period_s == pytest.approx(50)


def test_a_bound_on_payloads_is_a_bound_on_every_link():
    cycle_mbit = 24 * FRAGMENT_BITS / 1e6
    at = steady(plan_of(wire__mbit_max_up=cycle_mbit / 40, wire__mbit_max_down=cycle_mbit / 50))
    assert at.limit == "links" and at.period_s == pytest.approx(50)


def test_a_large_model_is_bounded_by_the_syncers_merges():
    at = steady(plan_of(rates=(1e12,) * 4, params=5e9))
    assert at.limit == "syncer"
    merged = 5 * (MEASURED.merge_ns + 4 * MEASURED.inspect_ns)
    assert at.period_s == pytest.approx(merged / 4, rel=1e-3), "by four workers"
    two = steady(plan_of(rates=(1e12,) * 4, params=5e9, merge__threads=2))
    assert two.period_s == pytest.approx(merged / 2, rel=1e-3)


def test_goodput_counts_lost_work_absence_and_loading():
    plan = plan_of(failures=Failures(DAY, 600.0))
    at, sizes = steady(plan), sizes_of(plan)
    lost = at.period_s / 2 + 0.5 + FRAGMENT_BITS / 1e9
    expected = (DAY - lost) / (DAY + 600 + 32 * N / 1e9)
    assert goodput(plan, sizes, [at]) == pytest.approx(expected)
    assert goodput(plan_of(), sizes, [at]) == 1


def test_goodput_is_weighted_by_speed_and_drops_who_cannot_keep_up():
    cycle = 24 * FRAGMENT_BITS
    plan = plan_of(rates=(1e9, 1e9, 1e9, cycle / 100), steps=(1.0, 1.0, 1.0, 3.0))
    at = steady(plan)
    assert at.syncs[3].behind > plan.config.sync.stale_versions_max
    assert goodput(plan, sizes_of(plan), [at]) == pytest.approx(3 / (3 + 1 / 3))
    told = report(plan)
    assert any("learner-3 cannot keep up" in line for line in told["warnings"])
    left_out = "learner-3 cannot keep up with this either, and all of its work is given up"
    assert told["suggested"]["why"][-1].startswith(left_out)
    assert not any("cannot keep up" in line for line in report(plan_of())["suggested"]["why"])


def test_the_quorum_is_there_as_often_as_the_binomial_says():
    fails = Failures(3.0, 1.0)
    plan = plan_of(rates=(1e18,) * 4, failures=fails, sync__quorum=4)
    assert quorum_share(plan, sizes_of(plan)) == pytest.approx(0.75**4)
    shared = plan_of(rates=(1e18,) * 4, failures=fails)  # a share of the ready: one of four
    assert quorum_share(shared, sizes_of(shared)) == pytest.approx(1 - 0.25**4)


def apply(plan, suggested):
    chosen = [(k, v) for k, v in suggested.items() if k != "why"]
    return plan._replace(config=configs.validate(configs.resolve(plan.config, None, chosen)))


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(rates=(20e6,) * 4, params=300e6, tensors=200),
        plan_of(rates=(20e6, 20e6, 5e6, 5e6), params=300e6, tensors=200, sync__quorum=2, sync__policy="auto"),
        plan_of(rates=(50e6,) * 4, params=100e6, tensors=100, wire__codec_up="fp32", wire__codec_down="bf16"),
        plan_of(rates=(1e12,) * 4, params=5e9, tensors=300),
    ],
)
def test_what_is_suggested_gets_through(plan):
    before = report(plan)
    assert any("H becomes" in line for line in before["warnings"])
    better = apply(plan, before["suggested"])
    after = report(better)
    assert not any("H becomes" in line for line in after["warnings"])
    assert sum(x["fits"] for x in after["phases"][-1]["learners"]) >= better.quorum
    again = {k: v for k, v in after["suggested"].items() if k != "why"}
    assert again == {k: v for k, v in before["suggested"].items() if k != "why"}
    assert all("cannot keep up" in line for line in after["suggested"]["why"]), "nothing else is said of it"


@pytest.mark.parametrize("rate", [1e6, 20e6, 1e9])
@pytest.mark.parametrize("step_s", [0.07, 5.0])
@pytest.mark.parametrize("fragments", [0, 24])
@pytest.mark.parametrize(
    "more",
    [
        {"params": 300e6, "rtt": 0.2},
        {"params": 10e6, "rtt": 1.0, "sync__policy": "auto"},
        {"params": 5e9, "tensors": 300, "sync__policy": "auto"},
    ],
)
def test_a_plan_of_what_is_suggested_suggests_the_same(rate, step_s, fragments, more):
    links = {"rates": (rate,) * 4, "steps": (step_s,) * 4, "run__steps": 10**6}
    plan = plan_of(sync__num_fragments=fragments, **links, **more)
    suggested = report(plan)["suggested"]
    again = report(apply(plan, suggested))["suggested"]
    assert suggested and again == suggested | {"why": []}


def test_a_quorum_that_is_suggested_is_reckoned_with():
    plan = plan_of(rates=(20e6,) * 4, steps=(0.1, 0.1, 3.0, 3.0), params=300e6, sync__quorum=4)
    suggested = report(plan)["suggested"]
    assert suggested["sync.quorum"] == 2
    assert report(apply(plan, suggested))["suggested"] == suggested | {"why": []}


@pytest.mark.parametrize("fragments", [8, 24, 30])
def test_a_number_of_fragments_that_works_is_left_as_it_is(fragments):
    assert report(plan_of(tensors=100, sync__num_fragments=fragments))["suggested"]["why"] == []


SHORT = {"rates": (5e6,) * 8, "steps": (0.07,) * 8, "rtt": 0.2, "params": 300e6}


def test_an_h_that_links_stretch_beyond_the_run_is_said():
    said = [line for line in report(plan_of(run__steps=3000, **SHORT))["warnings"] if "merged only once" in line]
    assert said == [
        "run.steps = 3000 is less than H = 3,643 as it becomes in the steady phase: most fragments are merged only "
        "once, at the end"
    ]
    assert not any("merged only once" in line for line in report(plan_of(run__steps=3700, **SHORT))["warnings"])


@pytest.mark.parametrize("length", [{"run__steps": 2000}, {"run__steps": 0, "run__minutes": 2000 * 0.07 / 60}])
def test_a_run_that_is_over_before_any_h_that_works_is_told_what_would_help(length):
    told = report(plan_of(**SHORT, **length))
    assert told["suggested"] == {} and told["goodput"] == pytest.approx(1), "all of it is merged at the end"
    said = told["warnings"][0]
    assert "is too short for these links: with codecs int4 up and int4 down the least H that works" in said
    faster, most = re.search(r"links (\S+) times as fast, .* a run of (\S+) steps and more$", said).groups()
    steps = int(most.replace(",", ""))
    assert report(plan_of(**SHORT, run__steps=steps))["suggested"]["sync.sync_every"] <= steps
    assert not report(plan_of(**SHORT, run__steps=steps - 1))["suggested"]
    quick = SHORT | {"rates": (1.01 * float(faster) * 5e6,) * 8}
    assert report(plan_of(**quick, **length))["suggested"]["sync.sync_every"] <= 2000


LIMIT = 10**6  # of sync.sync_every


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (plan_of(rates=(1e4,) * 4, steps=(0.01,) * 4, params=5e9), "the links of 2 learners, the quorum, cannot carry"),
        (plan_of(rates=(1e4,), steps=(0.01,), params=5e9), "the links of 1 learner, the quorum, cannot carry"),
        (plan_of(rates=(1e14,) * 4, steps=(1e-4,) * 4, params=1e11), "one syncer cannot merge this model"),
    ],
)
def test_what_no_run_can_carry_is_said_and_nothing_is_suggested(plan, named):
    told = report(plan)
    assert told["suggested"] == {} and told["goodput"] == 0
    assert all(x["goodput"] == 0 for phase in told["phases"] for x in phase["learners"])
    assert named in told["warnings"][0] and "sync.sync_every is 1,000,000 at most" in told["warnings"][0]
    close = [line for line in told["warnings"] if "sync.close_timeout_s" in line]
    assert all("set it to" not in line for line in close)


def test_links_as_much_faster_as_was_said_do_carry_it():
    cycle = 24 * FRAGMENT_BITS
    for rate, is_carried in ((cycle / (0.801 * LIMIT), False), (cycle / (0.799 * LIMIT), True)):
        told = report(plan_of(rates=(rate,) * 4, run__steps=2 * LIMIT))
        assert bool(told["suggested"]) == is_carried == (told["goodput"] == 1)
        assert any("cannot carry this model" in line for line in told["warnings"]) != is_carried


@pytest.mark.parametrize("rate", [1e3, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("params", [1e6, 1e9, 1e11])
@pytest.mark.parametrize("learners", [1, 4])
def test_nothing_suggested_is_refused(rate, params, learners):
    steps = (0.01, 1.0, 1.0, 3.0)[:learners]
    plan = plan_of(rates=(rate,) * learners, steps=steps, params=params, tensors=300, sync__policy="auto")
    suggested = report(plan)["suggested"]
    if suggested:
        apply(plan, suggested)  # validates
        assert max(suggested["sync.sync_every"], suggested["sync.warm_every"]) <= LIMIT


def test_a_delay_that_h_cuts_short_is_not_said_to_fit():
    plan = plan_of(rates=(1e6,), steps=(1.0,), tensors=1, sync__cut_tensors=False)  # up and down of all of it at once
    chosen = report(plan)["suggested"]
    assert "sync.fragment_sync_delay = 27, not 2: as long as H allows" in chosen["why"]


def test_more_tensors_than_fragments_there_may_be():
    plan = plan_of(rates=(400.0,) * 4, tensors=10_001)  # that carry H = 42,000
    suggested = report(plan)["suggested"]
    assert suggested["sync.num_fragments"] == 10_000
    apply(plan, suggested)


@pytest.mark.parametrize(
    ("params", "every", "count", "suggested"),
    [
        (N, 24, 6, 0),  # small fragments cost more than smooth traffic gains
        (10_800_000, 24, 12, 0),
        (10_800_000, 8, 12, 8),
        (20 * 2**20, 48, 24, 40),  # as many of them as are large
        (1e9, 48, 24, 48),
    ],
)
def test_fragments_by_size_are_suggested_away_only_for_large_ones_of_one_a_step(params, every, count, suggested):
    plan = plan_of(rates=(1e12,) * 4, steps=(60.0,) * 4, params=params, sync__num_fragments=0, sync__sync_every=every)
    told = report(plan)
    assert (told["fragments"]["count"], told["suggested"]["sync.num_fragments"]) == (count, suggested)
    said = f"sync.num_fragments = {suggested}, not the {count} that follow from its size: "
    assert [line.startswith(said) for line in told["suggested"]["why"]] == [True] * bool(suggested)
    if suggested:
        assert report(apply(plan, told["suggested"]))["fragments"]["count"] == suggested


def test_what_works_is_left_as_it_is():
    told = report(plan_of())
    assert told["suggested"]["why"] == [] and told["warnings"] == [] and told["goodput"] == 1


def test_a_smaller_codec_is_suggested_before_a_longer_h():
    plan = plan_of(rates=(2e6,) * 4, wire__codec_up="bf16", wire__codec_down="int8")
    chosen = report(plan)["suggested"]
    assert (chosen["wire.codec_up"], chosen["wire.codec_down"], chosen["sync.sync_every"]) == ("int8", "int8", 24)


SAID = [
    ({"steps": (30.0,) * 4}, "sync.stall_s = 20"),
    ({"rtt": 12.0}, "a round trip takes 12 s"),
    ({"sync__policy": "auto", "sync__warm_every": 30}, "sync.warm_every = 30 is above"),
    ({"run__steps": 10}, "run.steps = 10 is less than"),
    ({"run__steps": 2399}, "4 learners want 2,400 steps or more, 600 times their number"),
    ({"run__steps": 0, "run__minutes": 39.0}, "this run has 2,340"),
    ({"wire__held_bytes_max": 1 << 20, "params": 1e9}, "wire.held_bytes_max"),
    ({"wire__held_bytes_max": 1 << 20, "params": 1e9, "sync__num_fragments": 0}, "or sync.num_fragments above 24"),
    ({"learner__step_s": 2.0}, "learner.step_s = 2 pads"),
    ({"tensors": 10, "sync__cut_tensors": False}, "10 tensors and with sync.cut_tensors = false none is cut"),
    ({"rates": (1e5,) * 4}, "does not fit under sync.fragment_sync_delay = 2"),
    ({"rates": (1e5,) * 4}, 'learner.adopt = "overwrite" may give'),
    ({"rates": (3e5,) * 4}, "H becomes"),
    ({"rates": (2e6,) * 4}, "sync.close_timeout_s = 30"),
    ({"rates": (1e5,) * 4}, "minutes to load the model"),
    ({"rates": (1e6,) * 4, "failures": Failures(60.0, 1.0)}, "fails more often than it can load"),
    ({"params": 1e9, "rates": (1e11,) * 4, "store__record": "full"}, 'store.record = "full"'),
]


@pytest.mark.parametrize(("settings", "named"), SAID)
def test_contradictions_are_said_in_one_line(settings, named):
    said = [line for line in report(plan_of(**settings))["warnings"] if named in line]
    assert len(said) == 1 and "\n" not in said[0]


def test_a_link_that_cannot_carry_h_is_named_with_the_h_that_it_can_and_what_to_do():
    cycle = 24 * 8 * payload_bytes("int8", 128_000)
    plan = plan_of(rates=(1e9, 1e9, cycle / 40, cycle / 50), wire__codec_up="int8", wire__codec_down="int8")
    (said,) = [line for line in report(plan)["warnings"] if "cannot carry H" in line]
    assert "2 links cannot carry H = 24: learner-2 can carry H = 40, learner-3 can carry H = 50 (" in said
    assert f"it takes sync.sync_every = 50 or wire.codec_up = int4 or links of {cycle / 24 / 1e6:.3g} Mbit/s" in said
    longer = plan._replace(config=configs.resolve(plan.config, None, [("sync.sync_every", 50)]))
    assert not any("cannot carry H" in line for line in report(longer)["warnings"])
    smaller = plan._replace(config=configs.resolve(plan.config, None, [("wire.codec_up", "int4"),
                                                                       ("wire.codec_down", "int4")]))  # fmt: skip
    (left,) = [line for line in report(smaller)["warnings"] if "cannot carry H" in line] or [""]
    assert "learner-2" not in left


def test_a_link_that_is_too_late_for_h_is_named_and_no_codec_would_help():
    plan = plan_of(sync__policy="auto")
    late = plan._replace(islands=(*plan.islands[:3], plan.islands[3]._replace(rtt_s=5.0)))
    (said,) = [line for line in report(late)["warnings"] if "cannot carry H" in line]
    assert "in the warm phase (H = 4) a link cannot carry H = 4: learner-3 can carry H = 6 (" in said
    assert said.endswith("it takes sync.warm_every = 6 or a shorter way to the syncer")


def test_a_thin_link_on_which_a_round_takes_longer_than_the_whole_model_needs_a_better_one():
    """With few fragments the round is the longer of the two, and nearly all of it is on the link."""
    plan = plan_of(rates=(1e9, 1e9, 1e9, 1e5), sync__num_fragments=2, wire__codec_up="int8")
    (said,) = [line for line in report(plan)["warnings"] if "cannot carry H" in line]
    assert " s of it on the link); it takes sync.sync_every = " in said
    assert " or wire.codec_up = int4 or links of " in said and "shorter way" not in said
    mbit = float(said.rpartition("links of ")[2].split()[0])
    better = plan._replace(islands=(*plan.islands[:3], plan.islands[3]._replace(rate=1e6 * mbit)))
    assert not any("cannot carry H" in line for line in report(better)["warnings"])


def test_what_is_enough_or_set_already_is_not_said():
    assert not report(plan_of(run__steps=2400))["warnings"]
    assert "may give" not in " ".join(report(plan_of(rates=(1e5,) * 4, learner__adopt="overwrite"))["warnings"])
    assert "may give" not in " ".join(report(plan_of(rtt=2.9))["warnings"])
    followed = plan_of(rtt=3.1, sync__fragment_sync_delay=4)
    assert [line for line in report(followed)["warnings"] if "may give" in line] == report(followed)["warnings"]
    one_of_many = plan_of(rates=(1e9, 1e9, 1e9, 1e5))
    assert "may give" not in " ".join(report(one_of_many)["warnings"])
    assert "want" not in " ".join(report(plan_of(rates=(1e9,), steps=(1.0,), run__steps=100))["warnings"])
    short = " ".join(report(plan_of(run__steps=10, sync__policy="auto"))["warnings"])
    assert "merged only once" not in short  # the warm phase has H = 4


def test_one_learner_and_many_are_said_as_such():
    one = " ".join(report(plan_of(rates=(1e5,), steps=(1.0,)))["warnings"])
    assert "the links of 1 learner, the quorum" in one and "learner-0 needs" in one
    many = " ".join(report(plan_of(rates=(1e5,) * 8, steps=(1.0,) * 8))["warnings"])
    assert "8 learners (learner-0 to learner-7) need" in many and "takes 8 learners" in many


def test_one_large_tensor_is_cut_or_named():
    layout = layout_of([Tensor("embed", (4096, 512), "embedding")] + [Tensor(f"w{i}", (64, 64)) for i in range(40)])
    told = report(plan_of(sync__cut_tensors=False)._replace(layout=layout))
    (said,) = [line for line in told["warnings"] if "embed (2,097,152 parameters)" in line]
    assert "makes one fragment 22.3 times the mean" in said and "sync.cut_tensors = true" in said
    even = report(plan_of(sync__cut_tensors=True)._replace(layout=layout))
    assert even["fragments"]["count"] == 24 and not even["warnings"]
    assert even["fragments"]["largest"] <= 1.1 * layout.param_count / 24


def test_few_tensors_that_are_cut_are_as_many_fragments_as_asked_for():
    cut = report(plan_of(tensors=1, sync__cut_tensors=True))
    assert cut == report(plan_of()) | {"tensors": 1}
