"""The audit's second version of the rules: it agrees with what decides, and shows what is subtly wrong there.

The wrong rules are planted in the machine, in every module that uses them; each shows within a few simulated worlds.
"""

import math
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry import config as configs
from skerry.core import expected, quorum, schedule
from skerry.core.expected import Brought, HowFar
from skerry.core.facts import Row
from skerry.core.ledger import MERGED
from skerry.core.vocabulary import STAGES
from skerry.proof.sim.seeds import run_seed

SHARES = st.sampled_from([n / 100 for n in range(1, 100)])
POSITIONS = st.tuples(st.integers(0, 1000), st.integers(0, 300))  # progress in thousandths, steps


def config_of(policy="auto", warm_share=0.2, cool_share=0.1, rule="nesterov"):
    return configs.Config(
        run=configs.Run(learners=3, steps=100),
        sync=configs.Sync(policy=policy, warm_share=warm_share, cool_share=cool_share, warm_steps=20),
        outer=configs.Outer(rule=rule),
    )


# ------------------------------------------------------------------------------------------ what the words say


def test_a_share_of_the_ready_is_rounded_up_and_a_number_is_never_lowered():
    def quorums(configured, ready):
        return [k for k in range(10) if expected.is_quorum(k, configured, ready)]

    assert quorums(0.5, 3) == [2] and quorums(0.5, 4) == [2] and quorums(0.99, 4) == [4]
    assert quorums(0.5, 0) == [1] and quorums(0.1, 1) == [1]
    assert quorums(3, 1) == [3]
    assert quorums(0.1, 10) == [1, 2], "the float of 0.1 is a trace more than a tenth"


def test_the_stages_follow_each_other_by_progress_and_steps():
    def stages(since, now, **changes):
        return expected.stages(config_of(**changes), HowFar(*since), HowFar(*now))

    assert stages((0.0, 0), (0.1, 59)) == {"warm"}
    assert stages((0.0, 0), (0.1, 60)) == {"warm", "steady"}, "20 steps of each of 3 learners"
    assert stages((0.1, 60), (0.1, 61)) == {"steady"}
    assert stages((0.2, 0), (0.3, 1)) == {"steady"}, "never beyond a fifth of the budget"
    assert stages((0.3, 70), (0.95, 90)) == {"steady", "cool"}
    assert stages((0.91, 80), (0.95, 90)) == {"cool"}
    assert stages((0.0, 0), (0.95, 90)) == {"warm", "steady", "cool"}
    assert stages((0.0, 0), (0.95, 90), policy="fixed") == {"steady"}


def test_what_spans_versions_counts_for_one_of_them_but_for_no_less_than_h_steps():
    def gain(*brought):
        return expected.gain([Brought(10 * steps, steps, versions) for steps, versions in brought], sync_every=24)

    assert gain((24, 1), (30, 1)) == 1
    assert gain((48, 2)) == Fraction(1, 2)
    assert gain((30, 2)) == Fraction(24, 30)
    assert gain((12, 2)) == 1
    assert gain((24, 1), (24, 1), (48, 2)) == Fraction(3, 4)
    assert not expected.is_gain(math.nan, [Brought(10, 1, 1)], 24)


# ------------------------------------------------------------------------------------------ the two versions agree


@given(st.one_of(st.integers(1, 9), SHARES), st.integers(0, 300))
def test_the_quorum_is_the_machines(configured, ready):
    assert expected.is_quorum(quorum.quorum_size(configured, ready), configured, ready)


@given(st.lists(POSITIONS, min_size=2, max_size=5), SHARES, SHARES, st.sampled_from(["auto", "fixed"]))
def test_a_round_opened_at_any_moment_between_the_two_is_of_a_stage_that_may_be(positions, warm, cool, policy):
    config = config_of(policy, warm, min(cool, 1 - warm))
    progresses, steps = (sorted(values) for values in zip(*positions, strict=True))
    moments = [HowFar(progress / 1000, step) for progress, step in zip(progresses, steps, strict=True)]
    possible = expected.stages(config, moments[0], moments[-1])
    assert {schedule.stage_at(config, *moment) for moment in moments} <= possible


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 90), st.integers(0, 9)), min_size=1), st.integers(1, 50))
def test_the_gain_is_the_machines(brought, every):
    rows = [Row(str(n), 1, 0, 0, 0, steps, tokens, MERGED, 1) for n, (tokens, steps, _) in enumerate(brought)]
    merged_in = {str(n): 10 - versions for n, (_, _, versions) in enumerate(brought) if versions}
    gain = schedule.gain_of(rows, merged_in, 10, every)
    assert expected.is_gain(gain, [Brought(t, s, max(1, k)) for t, s, k in brought], every)


@given(st.integers(1, 10**9), st.integers(1, 10**6))
def test_the_weight_is_the_machines_to_the_bit(tokens, steps):
    assert expected.weight(tokens, steps) == schedule.weight_of(tokens, steps)


@pytest.mark.parametrize("rule", ["nesterov", "sgd", "delayed"])
@pytest.mark.parametrize("stage", [*STAGES, None])
def test_recipe_and_h_are_the_machines(stage, rule):
    config = config_of(rule=rule)
    assert expected.recipe(config, stage) == schedule.recipe_of(config, stage)
    assert expected.sync_every(config.sync, stage) == schedule.sync_every_in(config.sync, stage)


# ------------------------------------------------------------------------------------------ what is wrong is found


def no_floor(rows, merged_in, version, sync_every):
    """A gain that counts 1/k of what spans k versions, also of the slow, who bring no more than their due."""
    merged = [row for row in rows if row.fate == MERGED]
    parts = (row.tokens / (version - merged_in.get(row.learner, version - 1)) for row in merged)
    return math.fsum(parts) / sum(row.tokens for row in merged)


def one_step_late(config, progress, steps, stage_at=schedule.stage_at):
    """A warm stage that is a step of each learner too long."""
    return stage_at(config, progress, max(0, steps - config.run.learners))


def momentum_at_the_end(config, stage, recipe_of=schedule.recipe_of):
    """A cool stage that merges as the steady one."""
    return recipe_of(config, "steady" if stage == "cool" else stage)


def rounded_down(quorum, ready):
    """A share of the ready learners that may be one too few."""
    return quorum if isinstance(quorum, int) else max(1, math.floor(quorum * ready))


def tokens_alone(tokens, steps):
    """A weight that does not ask how many tokens a step had."""
    return float(tokens)


def long_warm_rounds(sync, stage):
    """H of the steady stage from the beginning."""
    return sync.sync_every


WRONG = {
    schedule.weight_of: (tokens_alone, "weighs"),
    schedule.gain_of: (no_floor, "of its delta"),
    schedule.stage_at: (one_step_late, "a warm merge"),
    schedule.recipe_of: (momentum_at_the_end, "merged by"),
    quorum.quorum_size: (rounded_down, "I11"),
    schedule.sync_every_in: (long_warm_rounds, "H = "),
}
SEEDS = range(300)


def plant(monkeypatch, right, wrong):
    """Wherever a module of the core has this rule by its name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("skerry.core.") and getattr(module, right.__name__, None) is right:
            monkeypatch.setattr(module, right.__name__, wrong)


@pytest.mark.parametrize("right", WRONG, ids=lambda right: right.__name__)
def test_a_rule_that_is_subtly_wrong_in_the_machine_is_found(right, monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    wrong, says = WRONG[right]
    plant(monkeypatch, right, wrong)
    found = next(filter(None, (run_seed(seed).failure for seed in SEEDS)), "no seed shows it")
    assert found.startswith("Violation") and says in found, found
