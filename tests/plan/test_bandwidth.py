"""Links: rate and utilisation are each other's inverse, codecs weigh what they weigh, the paper's table comes out."""

import pytest

from skerry import config as configs
from skerry.algo.codecs import payload_bytes
from skerry.plan import bandwidth, paper
from skerry.plan.bandwidth import Question, answer


def config_of(**overrides):
    return configs.resolve(configs.default(), None, [(k.replace("__", "."), v) for k, v in overrides.items()])


FIXED = {"sync__policy": "fixed", "sync__num_fragments": 24}


def test_the_papers_table_within_what_was_promised():
    table = paper.table()
    assert len(table["cells"]) == 60 and table["cells_counted"] == 56
    counted = [c for c in table["cells"] if not c["left_out"]]
    assert all(abs(c["deviation"]) <= 0.15 for c in counted)
    assert all(abs(c["deviation"]) <= 0.03 for c in counted if c["method"] == paper.DP)
    assert table["deviation_max"] == max(abs(c["deviation"]) for c in counted) < 0.07
    assert table["deviation_mean"] < 0.02


def test_what_is_left_out_is_named_and_still_shown():
    table = paper.table()
    out = [c for c in table["cells"] if c["left_out"]]
    assert [(c["method"], c["utilisation"]) for c in out] == [(paper.DP, 0.99)] * 4
    assert "99 %" in table["left_out"][0]["why"] and all(c["ours"] > 0 for c in out)


@pytest.mark.parametrize("utilisation", [0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("overrides", [{}, FIXED, {"sync__warm_share": 0.5}, {"wire__codec_up": "bf16"}])
def test_a_link_of_the_needed_rate_gives_the_utilisation(utilisation, overrides):
    config = config_of(**overrides)
    need = answer(Question(5e9, 1.0, 4, 8, utilisation), config)
    for method, ours in (("data_parallel", need["data_parallel"]), ("skerry", need["skerry"])):
        link = answer(Question(5e9, 1.0, 4, 8, 0.5, 1e9 * ours["gbit_s"]), config)["at_link"]
        assert link[method] == pytest.approx(utilisation, rel=1e-6)


def test_real_bits_both_ways_block_scales_included():
    told = answer(Question(24 * 128e4, 1.0, 8, 8, 0.95), config_of(**FIXED, wire__codec_down="bf16"))
    phase = told["skerry"]["phases"][0]
    assert told["skerry"]["bits_per_param_up"] == 4.25 and told["skerry"]["bits_per_param_down"] == 16
    assert phase["gbit_per_step_up"] * 1e9 == 8 * payload_bytes("int4", 128 * 10**4)
    assert phase["gbit_per_step_down"] * 1e9 == 8 * payload_bytes("bf16", 128 * 10**4)
    assert phase["gbit_s"] == pytest.approx(0.95 * phase["gbit_per_step_down"])  # the busier way counts


def test_fragments_follow_the_models_size_unless_their_number_is_given():
    told = [answer(Question(params, 1.0, 8, 8, 0.95), config_of())["fragments"] for params in (3e6, 10.8e6, 5e9)]
    assert told == [6, 12, 24]
    assert answer(Question(3e6, 1.0, 8, 8, 0.95), config_of(**FIXED))["fragments"] == 24


def test_the_warm_phase_is_in_the_runs_need_by_its_share():
    fixed = answer(Question(5e9, 1.0, 8, 8, 0.95), config_of(**FIXED))["skerry"]
    warm = answer(Question(5e9, 1.0, 8, 8, 0.95), config_of())["skerry"]
    assert [(p["phase"], p["sync_every"], p["share"]) for p in warm["phases"]] == [
        ("warm", 4, pytest.approx(0.2)),
        ("steady", 24, pytest.approx(0.8)),
    ]
    assert warm["phases"][0]["gbit_s"] == pytest.approx(6 * fixed["gbit_s"])
    assert fixed["gbit_s"] < warm["gbit_s"] < warm["phases"][0]["gbit_s"]
    # by hand: a fifth of the run at D = 5.3125/B, the rest at 1: mean 1/0.95
    assert warm["gbit_s"] == pytest.approx(5.3125 / (1 + (1 / 0.95 - 1) / 0.2), rel=1e-4)


def test_learners_of_one_site_share_its_link_and_the_syncers_site_carries_the_others():
    alone = answer(Question(1e9, 1.0, 8, 8, 0.9), config_of())["skerry"]
    shared = answer(Question(1e9, 1.0, 2, 8, 0.9), config_of())["skerry"]
    assert shared["gbit_s"] == pytest.approx(4 * alone["gbit_s"])
    assert alone["syncer_site_gbit_s"] == pytest.approx(7 * alone["gbit_s"])
    assert shared["syncer_site_gbit_s"] == pytest.approx(4 * alone["gbit_s"])


def test_too_slow_a_link_stretches_h():
    told = answer(Question(5e9, 1.0, 8, 8, 0.95, 0.8854e9 / 2), config_of(**FIXED))
    assert told["skerry"]["phases"][0]["sync_every_effective"] == pytest.approx(48, rel=1e-3)
    assert told["at_link"]["skerry"] == pytest.approx(0.5, rel=1e-3)


def test_a_delay_of_one_step_needs_both_ways_within_it():
    one, two = (
        answer(Question(5e9, 1.0, 8, 8, 0.95), config_of(**FIXED, sync__fragment_sync_delay=d))["skerry"]["gbit_s"]
        for d in (1, 2)
    )
    assert one == pytest.approx(2 * two)


def test_the_warm_period_is_at_its_longest_unless_the_steps_are_known():
    assert bandwidth.periods(config_of()) == [("warm", 0.2, 4), ("steady", 0.8, 24)]
    assert bandwidth.periods(config_of(run__steps=1000)) == [("warm", 0.2, 4), ("steady", 0.8, 24)]
    assert bandwidth.periods(config_of(run__steps=10_000)) == [("warm", 0.05, 4), ("steady", 0.95, 24)]
    assert bandwidth.periods(config_of(**FIXED)) == [("steady", 1.0, 24)]
