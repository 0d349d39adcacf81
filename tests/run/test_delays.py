"""What a run's own work took, read from its tape."""

import pytest

from node.pair import Pair, config_of
from node.test_measured import LOOK_S, run
from skerry.core.facts import Committed
from skerry.run.delays import NONE, Delays, delays_of
from skerry.run.facts import facts_of
from skerry.store import Store


def test_the_figures_are_means_a_parameter_and_a_merge(tmp_path):
    """Each piece of work took one look at the clock, so the time a parameter is that over the fragments' mean size."""
    pair, facts = run(tmp_path / "run", is_timed=True)
    sizes = [fragment.size for fragment in pair.fragments]
    found = delays_of(facts, sizes)
    merged = [sizes[fact.decision.fragment] for fact in facts if isinstance(fact, Committed)]
    mean_ns = 1e9 * LOOK_S * len(merged) / sum(merged)
    assert found.merge_ns == pytest.approx(2 * mean_ns)  # computed and put
    assert found.inspect_ns == pytest.approx(mean_ns, rel=0.05)
    assert found.encode_ns == pytest.approx(mean_ns, rel=0.05)
    assert found.adopt_ns == pytest.approx(mean_ns, rel=0.05)
    assert found.commit_s > LOOK_S
    assert found.merge_s(1e6) == pytest.approx(2e-3 * mean_ns)


def test_a_tape_that_measured_nothing_has_none(tmp_path):
    with Pair(tmp_path / "run", config_of(2, steps=20)) as pair:
        pair.join("a")
        pair.close()
    with Store.open(tmp_path / "run", readonly=True) as store:
        facts = [fact for _, fact in facts_of(store)]
    assert delays_of(facts, [fragment.size for fragment in pair.fragments]) == NONE == Delays()
