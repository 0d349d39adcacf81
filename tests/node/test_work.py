"""Work that takes its time: what the syncer's node does while merges and inspections are under way, and as they end."""

import queue

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from node.pair import Pair, config_of
from skerry import config as configs
from skerry.core.audit import Audit
from skerry.core.events import Interrupted
from skerry.core.facts import Checkpointed, Committed, Paused, PhaseChanged
from skerry.core.messages import FULL, Publication
from skerry.core.state import RunState, decode_fact
from skerry.node.algebra import FLOAT32
from skerry.node.syncer import SAYS_S, Version
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


class SlowDisk:
    """A writer that is looked at so many times before a piece of writing is done; by itself, or when a test says so."""

    def __init__(self, looks):
        self.looks, self.looked, self.under_way, self._ended = looks, 0, None, []

    def submit(self, work, rank="long"):
        assert self.under_way is None, "one piece of writing at a time"
        self.under_way, self.looked = work, 0

    def ended(self):
        self.looked += 1
        if self.under_way and self.looked > self.looks:
            self.write()
        taken, self._ended = self._ended, []
        return taken

    def write(self):
        work, self.under_way = self.under_way, None
        self._ended.append(work())


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
    facts[0] = replace(facts[0], config=configs.encode(config_of(2, steps=1)))  # by what was done, it is
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


def test_large_fragments_are_merged_one_at_a_time_and_none_is_left_waiting(pair, monkeypatch):
    """What a merge works in grows with its fragment: a model of billions of parameters has memory for one."""
    monkeypatch.setattr("skerry.node.syncer.MERGING_ELEMENTS", max(each.size for each in pair.fragments))
    under_way = set()
    for tick in range(300):
        pair.tick()
        under_way.add(len(pair.syncer.pool.merges))
        if tick % 3 == 0:
            pair.syncer.pool.end()
    assert under_way == {0, 1}
    assert min(pair.versions) >= 2, "each fragment had its turn"
    assert audited(facts_of(pair)) == []


# ------------------------------------------------------------------------------------------ a disk that takes its time


@pytest.fixture
def slow(tmp_path):
    """Two learners that step, and a syncer whose disk writes when a test says so; a merge waits for it."""
    with Pair(tmp_path / "run", config_of(2, outer={"rule": "nesterov", "momentum": 0.9})) as pair:
        for name in "ab":
            pair.join(name)
        pair.syncer.log.pool = SlowDisk(looks=float("inf"))
        pair.until(lambda: pair.versions[1] == 1 and pair.syncer.log.waiting_bytes)
        yield pair


def test_no_byte_of_a_version_leaves_before_it_is_durable(slow):
    """And whatever the machine decides meanwhile stands behind it."""
    slow.publications.clear()
    slow.run(5)
    assert slow.publications == [] and (1, 1) not in durable(slow), "nor is it on the tape"
    while slow.syncer.log.waiting_bytes:
        slow.syncer.log.pool.write()
        slow.tick()
        assert {(m.fragment, m.version) for _, m in slow.publications} <= durable(slow)
    assert {name for name, m in slow.publications if (m.fragment, m.version) == (1, 1)} == {"a", "b"}


def durable(pair):
    """The versions that the tape has."""
    decisions = [fact.decision for fact in facts_of(pair) if isinstance(fact, Committed)]
    return {(d.fragment, d.version) for d in decisions}


def test_merges_wait_for_a_disk_that_is_slower_and_it_is_said(slow, monkeypatch, caplog):
    monkeypatch.setattr("skerry.node.syncer.BEHIND_BYTES", 0)
    merges, began_at = slow.syncer.machine.state.merges, slow.now
    slow.run(30)
    assert slow.syncer.is_disk_behind and slow.syncer.machine.state.merges == merges, "no further merge was begun"
    said = [line for line in caplog.messages if line.startswith("the disk is slower than the merges")]
    assert said == ["the disk is slower than the merges: 1 wait for it"], "not again so soon"
    slow.until(lambda: slow.now > began_at + 2 * SAYS_S)
    said = [line for line in caplog.messages if line.startswith("the disk is slower than the merges")]
    assert 2 <= len(said) <= 3, "again every now and then"
    slow.syncer.log.pool.looks = 0
    slow.until(lambda: min(slow.versions) >= 2)
    assert audited(facts_of(slow)) == []


def test_nothing_is_lost_to_a_slow_disk(tmp_path, monkeypatch):
    """The same work is merged, in other versions: each of them is durable before it is heard of, up to the last."""
    monkeypatch.setattr("skerry.node.syncer.BEHIND_BYTES", 0)
    with Pair(tmp_path / "run", config_of(2, steps=40)) as pair:
        for name in "ab":
            pair.join(name)
        disk = pair.syncer.log.pool = SlowDisk(looks=40)
        behind = set()
        monkeypatch.setattr(pair.syncer.observer, "event_done", lambda _: behind.add(pair.syncer.is_disk_behind))
        pair.close()
        assert behind == {True, False} and disk.under_way is None
        state = pair.syncer.machine.state
        totals = state.ledger.totals()
        assert totals.pending == totals.balance == 0 and totals.discarded == {}
        for p in range(len(pair.fragments)):
            booked = pair.genesis[p] + pair.booked_work(p) + pair.rounding(p)
            np.testing.assert_allclose(pair.master(p), booked, rtol=0, atol=1e-5)
        assert audited(facts_of(pair)) == []


def test_an_interrupt_waits_for_what_is_being_written_and_for_checkpoints(slow):
    """Its facts are on the tape in the order in which they were decided, and what is begun with is whole."""
    slow.syncer.handle(Interrupted(), slow.now)
    slow.syncer.look(slow.now)
    assert slow.syncer.finished is None, "a version is not durable yet"
    slow.syncer.log.pool.looks = 0
    while not slow.syncer.finished:
        slow.syncer.look(slow.now)
    assert slow.syncer.finished == "interrupted" and slow.syncer.log.is_durable
    facts = facts_of(slow)
    kinds = [type(fact) for fact in facts if isinstance(fact, Committed | Paused | Checkpointed)]
    assert kinds[-3:] == [Committed, Paused, Checkpointed]
    state = slow.syncer.machine.state
    assert all(at.checkpoints[-1].version == at.version for at in state.fragments)
    values = slow.syncer.values
    slow.restart()
    assert slow.syncer.machine.state.merges == state.merges >= 1
    for old, new in zip(values, slow.syncer.values, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(old, new, strict=True))
    slow.run(20)
    assert audited(facts_of(slow)) == []


def test_what_was_not_written_when_the_process_dies_is_merged_again(slow):
    """Nobody has heard of it: learners hold what was in it, and send it again."""
    assert slow.versions[1] == 1
    slow.restart()
    assert slow.versions[1] == 0
    slow.run(20)
    assert min(slow.versions) >= 1 and audited(facts_of(slow)) == []
    assert slow.syncer.machine.state.ledger.totals().discarded == {}


# ------------------------------------------------------------------------------------------ threads


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
