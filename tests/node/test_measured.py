"""What the nodes measure of their own work stands on the tape, and decides nothing."""

import itertools

import msgspec
import pytest

from node.pair import Pair, config_of
from skerry.core.facts import Committed, Sampled
from skerry.core.ledger import MERGED
from skerry.core.state import decode_fact
from skerry.store import Store

LOOK_S = 0.001  # that passes whenever a node reads its clock


def run(root, is_timed):
    """A run to its end and the facts of its tape; its nodes' clocks go on with every look, or stand while they work."""
    with Pair(root, config_of(2, steps=200)) as pair:
        looks = itertools.count()
        if is_timed:
            pair.syncer.clock = lambda: pair.now + LOOK_S * next(looks)
        for name in "ab":
            loop = pair.join(name)
            if is_timed:
                loop.node.clock = lambda: pair.now + LOOK_S * next(looks)
        pair.close()
        with Store.open(root, readonly=True) as store:
            return pair, [decode_fact(record.body) for record in store.history()]


def test_a_commit_says_what_its_merge_took_and_a_sample_what_its_learners_node_did(tmp_path):
    pair, facts = run(tmp_path / "run", is_timed=True)
    for fact in facts:
        if isinstance(fact, Committed):
            merged = sum(row.fate == MERGED for row in fact.decision.rows)
            assert fact.took.inspect_s == pytest.approx(merged * LOOK_S)
            told = [fact.took.merge_s, fact.took.put_s, fact.took.commit_s]
            assert told == pytest.approx([LOOK_S] * 3)
            assert fact.took.wait_s > 0 and fact.took.taken_s > 0
    samples = [sample for fact in facts if isinstance(fact, Sampled) for sample in fact.samples]
    for name in pair.loops:
        mine = [sample for sample in samples if sample.learner == name]
        sizes = [pair.fragments[c.fragment].size for c, _ in pair.contributions.values() if c.learner == name]
        sums = list(itertools.accumulate(sizes))
        sent = sums.index(sum(one.encoded for one in mine)) + 1
        assert sent >= len(sizes) - len(pair.fragments), "those of the closing may be behind the last report"
        assert sum(one.encode_s for one in mine) == pytest.approx(LOOK_S * sent)
        versions = len([1 for whom, _ in pair.publications if whom == name])
        assert 0 < sum(one.adopt_s for one in mine) <= LOOK_S * versions + 1e-6
        assert sum(one.adopted for one in mine) > 0


def test_nothing_is_decided_by_it(tmp_path):
    """But for what they measured, the tapes are the same."""
    tapes = []
    for is_timed in (False, True):
        _, facts = run(tmp_path / str(is_timed), is_timed)
        tapes.append([_without_times(fact) for fact in facts[1:]])  # the first names the run, which is drawn
    assert tapes[0] == tapes[1] and len(tapes[0]) > 10


def _without_times(fact):
    if isinstance(fact, Committed):
        return msgspec.structs.replace(fact, took=None)
    if isinstance(fact, Sampled):
        kept = (msgspec.structs.replace(one, encode_s=0.0, adopt_s=0.0) for one in fact.samples)
        return msgspec.structs.replace(fact, samples=tuple(kept))
    return fact
