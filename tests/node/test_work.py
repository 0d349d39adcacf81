"""Work that takes its time: what the syncer's node does while merges and inspections are under way, and as they end."""

import queue

import msgspec
import numpy as np
import pytest

from node.pair import Pair, config_of
from skerry.core.audit import Audit
from skerry.core.events import Interrupted
from skerry.core.facts import Committed, Paused, PhaseChanged
from skerry.core.messages import FULL, Publication
from skerry.core.state import RunState, decode_fact
from skerry.node.algebra import FLOAT32
from skerry.node.syncer import Version
from skerry.node.work import AtOnce
from skerry.shell.workers import Workers
from skerry.store import Store


class ByHand:
    """A pool whose merges end when a test says so, in the order it says; inspections end at once."""

    def __init__(self):
        self._ended, self.merges = [], []

    def submit(self, work, rank="long"):
        ended = work()
        (self.merges if isinstance(ended, Version) else self._ended).append(ended)

    def ended(self):
        taken, self._ended = self._ended, []
        return taken

    def end(self, *versions):
        for version in versions or list(self.merges):
            self.merges.remove(version)
            self._ended.append(version)


class InStep(Workers):
    """Real threads, and a node that waits for them: as fast as none, so that the course of a run is the same."""

    def __init__(self, count):
        self._begun, self._done = 0, queue.SimpleQueue()
        super().__init__(count, lambda: self._done.put(None))

    def submit(self, work, rank="long"):
        self._begun += 1
        super().submit(work, rank)

    def ended(self):
        for _ in range(self._begun):
            self._done.get(timeout=60)
        self._begun = 0
        return super().ended()


@pytest.fixture
def pair(tmp_path):
    """Two learners that step, and a syncer whose merges are in a test's hands."""
    with Pair(tmp_path / "run", config_of(2, steps=40)) as pair:
        pair.syncer.pool = ByHand()
        for name in "ab":
            pair.join(name)
        yield pair


def until_merging(pair, count):
    pair.until(lambda: len(pair.syncer.pool.merges) == count)


def facts_of(pair):
    with Store.open(pair.root, readonly=True) as store:
        return [decode_fact(record.body) for record in store.history()]


def audited(facts):
    audit = Audit()
    for fact in facts:
        audit.take(fact)
    return audit.violations


def test_nothing_has_happened_until_a_merge_has_ended(pair):
    """A learner that joins meanwhile gets the version before, and what is merged stays held."""
    until_merging(pair, 1)
    (version,) = pair.syncer.pool.merges
    p = version.decision.fragment
    assert pair.syncer.machine.state.merges == 0 and len(pair.syncer.held) >= 2
    pair.publications.clear()
    pair.join("late")
    got = [m for name, m in pair.publications if (name, m.fragment, m.base_version) == ("late", p, FULL)]
    assert [(m.version, m.digest) for m in got] == [(0, FLOAT32.digest(pair.genesis[p]))]
    np.testing.assert_array_equal(pair.loops["late"].node.bases[p], pair.genesis[p])
    pair.syncer.pool.end()
    pair.run(2)
    assert pair.syncer.machine.state.fragments[p].version == 1 and (("a", p) not in pair.syncer.held)


def test_merges_that_end_together_share_a_commit_and_nothing_leaves_before_it(pair, monkeypatch):
    until_merging(pair, 3)
    groups, sent = [], []
    commit, send = pair.store.commit, pair.send
    monkeypatch.setattr(pair.store, "commit", lambda records, *more: (groups.append(records), commit(records, *more)))
    monkeypatch.setattr(pair, "send", lambda *words: (sent.append((len(groups), words[2])), send(*words)))
    pair.syncer.pool.end(*reversed(pair.syncer.pool.merges))
    pair.syncer.finish(pair.now)
    merged = [decode_fact(record) for record in groups[0]]
    assert [fact.decision.fragment for fact in merged if isinstance(fact, Committed)] == [2, 1, 0], "as they ended"
    published = [at for at, message in sent if isinstance(message, Publication)]
    assert len(published) == 6 and min(published) >= 1, "both learners, every fragment, behind the commit"


def test_the_tape_has_the_order_in_which_the_machine_applied(pair):
    """The closing begins as two merges end together, and names the newest files as it then knows them."""
    until_merging(pair, 2)
    pair.syncer.machine.state.progress = 1.0  # the budget is spent
    pair.syncer.pool.end()
    pair.syncer.look(pair.now)
    facts = facts_of(pair)
    assert {Committed, PhaseChanged} <= {type(fact) for fact in facts[-3:]}
    assert audited(facts) == []


def test_an_interrupt_drops_what_is_under_way_and_it_is_merged_after_the_restart(pair):
    until_merging(pair, 2)
    pair.syncer.handle(Interrupted(), pair.now)
    assert pair.syncer.finished == "interrupted"
    pair.syncer.pool.end()
    pair.syncer.finish(pair.now)
    facts = facts_of(pair)
    assert isinstance(facts[-1], Paused) and not any(isinstance(fact, Committed) for fact in facts)
    steps = {seen.learner: seen.step for seen in facts[-1].seen}
    assert steps == {name: pair.loops[name].machine.step_count for name in "ab"}, "the dropped decisions had them too"
    pair.restart()
    pair.run(20)
    assert pair.syncer.machine.state.merges >= 3
    assert audited(facts_of(pair)) == []


def test_a_contribution_is_counted_until_it_was_looked_at(tmp_path, monkeypatch):
    with Pair(tmp_path / "run", config_of()) as pair:
        waiting = []
        monkeypatch.setattr(pair.syncer, "pool", AtOnce())
        monkeypatch.setattr(pair.syncer.pool, "submit", lambda work, rank="long": waiting.append(work))
        pair.join("a")
        pair.until(lambda: waiting)
        assert pair.syncer.unseen_bytes > 0
        monkeypatch.undo()
        for work in waiting:
            pair.syncer.pool.submit(work)
        pair.syncer.finish(pair.now)
        assert pair.syncer.unseen_bytes == 0


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_tape(tmp_path, count):
    tapes = []
    for name, pool in (("plain", AtOnce()), ("threads", InStep(count))):
        config = config_of(3, steps=30, wire={"codec_up": "int4", "codec_down": "int4"}, merge={"rule": "rda"})
        with Pair(tmp_path / name, config) as pair:
            pair.syncer.pool = pool
            for learner in "abc":
                pair.join(learner)
            pair.close()
            facts = [fact for fact in facts_of(pair) if not isinstance(fact, RunState)]
            tapes.append([msgspec.msgpack.encode(fact) for fact in facts])
    pool.close()
    assert len(tapes[0]) > 20 and sorted(tapes[0]) == sorted(tapes[1])
