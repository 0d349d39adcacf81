"""Kept versions of the whole model, and a rollback to one, on real nodes and a real store."""

import msgspec
import numpy as np
import pytest

from node.pair import Pair, config_of
from skerry.core.audit import Audit
from skerry.core.events import Interrupted
from skerry.core.facts import Checkpointed, Committed, Kept, Paused, RolledBack, SteppedBack
from skerry.core.ledger import MERGED
from skerry.core.messages import FULL, Contribution, Welcome
from skerry.core.state import RunState, decode_fact, state_of
from skerry.errors import FileDamaged, Refusal
from skerry.node import versions
from skerry.run.rollback import roll_back
from skerry.run.status import status_of
from skerry.store import Store


def pair_of(tmp_path, keep_every, steps=200, learners=1, checkpoint_every=16, **tables):
    store = {"keep_every": keep_every, "checkpoint_every": checkpoint_every} | tables.pop("store", {})
    return Pair(tmp_path / "run", config_of(learners=learners, steps=steps, store=store, **tables))


def facts_of(pair):
    return [decode_fact(record.body) for record in pair.store.history()]


def kept_in(pair):
    return [fact for fact in facts_of(pair) if isinstance(fact, Kept)]


def audited(pair):
    audit = Audit()
    for fact in facts_of(pair):
        audit.take(fact)
    assert audit.violations == []
    return audit.state


def master(store, pair, version):
    """Of a kept version, by fragment."""
    values = [versions.whole(store, f, version.checkpoints[f.index]) for f in pair.fragments]
    return [each.theta.astype(np.float64) + each.error for each in values]


def rolled_back(pair, number):
    """The syncer ends in order, the run is taken back, and another syncer serves it; learners are not told yet."""
    pair.syncer.handle(Interrupted(), pair.now)
    pair.syncer.look(pair.now)
    for loop in pair.loops.values():
        loop.is_linked = False
    pair.wires.clear()
    pair.store.close()
    with Store.open(pair.root, clock=lambda: pair.now) as store:
        roll_back(store, state_of(store.records), number)
    pair._open()


# ---------------------------------------------------------------------------------------------- what is kept


def test_a_version_is_kept_at_each_share_of_the_budget(tmp_path):
    with pair_of(tmp_path, 0.25) as pair:
        pair.join("a")
        pair.close()
        kept = kept_in(pair)
        assert [one.number for one in kept] == [1, 2, 3]
        assert [int(one.progress / 0.25) for one in kept] == [1, 2, 3]
        assert audited(pair).kept == pair.syncer.machine.state.kept


def test_a_version_is_kept_every_so_many_of_the_slowest_fragment(tmp_path):
    with pair_of(tmp_path, 5, steps=100) as pair:
        pair.join("a")
        pair.close()
        assert [min(one.versions) // 5 for one in kept_in(pair)] == [1, 2, 3, 4]


def test_none_is_kept_where_none_is_asked_for(tmp_path):
    with pair_of(tmp_path, 0) as pair:
        pair.join("a")
        pair.close()
        assert kept_in(pair) == [] and pair.syncer.machine.state.kept == []


@pytest.mark.parametrize("checkpoint_every", [1, 16])
def test_what_is_kept_is_not_collected_and_is_the_model_as_it_was(tmp_path, checkpoint_every):
    with pair_of(tmp_path, 0.2, checkpoint_every=checkpoint_every) as pair:
        pair.syncer.commits_per_collect = 1
        pair.join("a")
        seen = {}
        while pair.syncer.machine.state.phase != "closing":
            pair.tick()
            pair.syncer.tidy()
            seen |= {(p, version): pair.master(p) for p, version in enumerate(pair.versions)}
        pair.close()
        state = pair.syncer.machine.state
        pair.store.collect(state.files, state.journal)
        assert len(state.kept) == 4
        for version in state.kept:
            for p, found in enumerate(master(pair.store, pair, version)):
                np.testing.assert_array_equal(found, seen[p, version.versions[p]])


def test_a_process_that_ends_while_a_version_is_being_kept_leaves_it_to_the_next(tmp_path, monkeypatch):
    with pair_of(tmp_path, 0.25) as pair:
        pair.join("a")
        write = type(pair.syncer)._checkpoint
        wrote = []

        def write_two(self, p, *args):
            if len(wrote) == 2 and pair.syncer.machine.progress >= 0.25:
                raise KeyboardInterrupt
            wrote.extend([p] if pair.syncer.machine.progress >= 0.25 else [])
            return write(self, p, *args)

        monkeypatch.setattr(type(pair.syncer), "_checkpoint", write_two)
        with pytest.raises(KeyboardInterrupt):
            pair.close()
        monkeypatch.undo()
        assert kept_in(pair) == []
        pair.restart()
        pair.until(lambda: pair.syncer.machine.state.kept)
        (kept,) = kept_in(pair)
        assert kept.number == 1 and audited(pair)
        pair.close()
        assert [one.number for one in kept_in(pair)] == [1, 2, 3]


def test_checkpoints_for_a_kept_version_follow_each_other_at_once(tmp_path):
    with pair_of(tmp_path, 0.5, checkpoint_every=1000) as pair:
        pair.join("a")
        pair.until(lambda: kept_in(pair))
        (kept,) = kept_in(pair)
        written = {(f.fragment, f.version) for f in facts_of(pair) if isinstance(f, Checkpointed)}
        assert set(enumerate(kept.versions)) <= written
        assert max(kept.versions) - min(kept.versions) <= 1


# ---------------------------------------------------------------------------------------------- going back


def test_after_a_rollback_the_run_is_what_it_was_and_goes_on_to_its_end(tmp_path):
    with pair_of(tmp_path, 0.25, learners=2, store={"record": "full"}) as pair:
        loops = [pair.join("a"), pair.join("b", 2)]
        pair.until(lambda: len(kept_in(pair)) == 2)
        pair.run(12)
        before = pair.syncer.machine.state
        version, progress, left = before.kept[0], before.progress, pair.versions
        rolled_back(pair, 1)
        state = pair.syncer.machine.state
        assert pair.versions == [v + 1 for v in left]
        assert [at.since for at in state.fragments] == pair.versions
        assert state.progress == pytest.approx(progress, abs=0.02), "work that was done is done"
        for p, values in enumerate(master(pair.store, pair, version)):
            np.testing.assert_array_equal(values, pair.master(p))
        for name in pair.loops:
            pair.link(name)
        pair.until(lambda: all(min(p.base_version for p in loop.machine.positions) >= max(left) for loop in loops))
        pair.close()
        final = audited(pair)
        assert final.phase == "closed" and final.ledger.totals().pending == 0
        assert [loop.machine.discards for loop in loops] == [["rolled back"]] * 2
        assert [loop.parameters.optimizer_resets for loop in loops] == [1, 1]
        assert [fact.number for fact in facts_of(pair) if isinstance(fact, RolledBack)] == [1]


def test_nothing_that_was_learned_before_a_rollback_is_in_the_model_after_it(tmp_path):
    with pair_of(tmp_path, 0.25) as pair:
        loop = pair.join("a")
        pair.until(lambda: len(kept_in(pair)) == 2)
        pair.run(7)
        rolled_back(pair, 1)
        start = [pair.master(p) for p in range(3)]
        loop.step()  # it trains on, alone, on what was rolled back
        told_at = loop.machine.step_count
        pair.link("a")
        pair.close()
        for p in range(3):
            mine = [row for d in pair.decisions for row in d.rows
                    if d.epoch > 2 and d.fragment == p and row.fate == MERGED]  # fmt: skip
            assert mine and mine[0].from_step >= told_at
            work = loop.worked_after[mine[-1].to_step][p] - loop.worked_after[mine[0].from_step][p]
            # merged deltas are rounded to bf16; a single step is four times as much
            np.testing.assert_allclose(pair.master(p), start[p] + work, atol=4e-3)


@pytest.mark.parametrize("budget", [{"steps": 0, "run": {"tokens": 2_000}}, {"steps": 250}])
def test_work_done_alone_during_a_rollback_spends_no_budget(tmp_path, budget):
    """It is given up, so what was left of the budget is left, however long the learner trained meanwhile."""
    with pair_of(tmp_path, 0.25, **budget) as pair:
        loop = pair.join("a")
        pair.until(lambda: len(kept_in(pair)) == 2)
        rolled_back(pair, 1)
        progress, merges = pair.syncer.machine.progress, pair.syncer.machine.state.merges
        while loop.machine.tokens < 3_000:
            loop.step()
        pair.link("a")
        pair.until(lambda: loop.machine.discards and pair.syncer.machine.state.merges > merges)
        assert progress <= pair.syncer.machine.progress < progress + 0.1
        pair.close()
        final = audited(pair)
        assert final.ledger.merged / len(final.fragments) == pytest.approx(2_000, rel=0.1)
        assert final.ledger.discarded["fast-forward"] > 0 and final.ledger.totals().pending == 0


def test_a_learner_gives_its_drift_up_once_when_it_has_every_fragment(tmp_path):
    with pair_of(tmp_path, 0.25) as pair:
        loop = pair.join("a")
        pair.until(lambda: kept_in(pair))
        pair.run(3)
        rolled_back(pair, 1)
        lost = []

        def without_the_last(learner, message, payload):
            is_last = type(message).__name__ == "Publication" and message.fragment == 2
            lost.extend([message] if is_last else [])
            return None if is_last else (message, payload)

        pair.tap = without_the_last
        pair.link("a")
        pair.run(6)
        assert lost and loop.machine.discards == [] and not loop.machine.positions[0].is_rolled_back
        assert not pair.syncer.held, "it contributes nothing meanwhile"
        pair.tap = lambda learner, message, payload: (message, payload)
        pair.until(lambda: loop.machine.discards)
        pair.close()
        assert loop.machine.discards == ["rolled back"] and audited(pair).phase == "closed"


def test_a_learner_that_knows_nothing_of_rollbacks_is_refused_and_fast_forwards(tmp_path):
    with pair_of(tmp_path, 0.25) as pair:
        loop = pair.join("a")
        pair.until(lambda: kept_in(pair))
        pair.tap = lambda learner, message, payload: None if isinstance(message, Contribution) else (message, payload)
        pair.run(6)
        rolled_back(pair, 1)

        def older(learner, message, payload):
            return (msgspec.structs.replace(message, since=()) if isinstance(message, Welcome) else message), payload

        pair.tap = older
        assert loop.node.outstanding, "it holds what was never settled, and sends it again"
        pair.link("a")
        pair.close()
        assert audited(pair).phase == "closed"
        assert pair.syncer.machine.refused["rolled back"] >= 1 and "refused" in loop.machine.discards
        assert loop.parameters.optimizer_resets == loop.machine.discards.count("refused")


def test_a_learner_that_joins_afresh_has_nothing_to_give_up(tmp_path):
    with pair_of(tmp_path, 0.25) as pair:
        pair.join("a")
        pair.until(lambda: kept_in(pair))
        rolled_back(pair, 0)
        del pair.loops["a"]
        loop = pair.join("b")
        pair.run(5)
        assert loop.machine.discards == [] and loop.parameters.optimizer_resets == 0
        assert all(position.base_version > FULL for position in loop.machine.positions)


def test_a_run_can_go_back_twice_and_to_its_start(tmp_path):
    with pair_of(tmp_path, 0.2) as pair:
        pair.join("a")
        pair.until(lambda: len(kept_in(pair)) == 2)
        for number in (2, 2, 0):
            rolled_back(pair, number)
        for p in range(3):
            np.testing.assert_array_equal(pair.master(p), pair.genesis[p])
        pair.link("a")
        pair.close()
        final = audited(pair)
        assert [version.number for version in final.kept][:2] == [1, 2] and final.phase == "closed"


def test_a_version_kept_after_a_rollback_has_the_next_number(tmp_path):
    with pair_of(tmp_path, 0.2) as pair:
        pair.join("a")
        pair.until(lambda: len(kept_in(pair)) == 2)
        rolled_back(pair, 1)
        pair.link("a")
        pair.close()
        assert [one.number for one in kept_in(pair)] == [1, 2, 3, 4]


def test_a_run_that_was_rolled_back_is_paused(tmp_path):
    with pair_of(tmp_path, 0.25) as pair:
        pair.join("a")
        pair.until(lambda: kept_in(pair))
        pair.store.close()  # as if it had died
        with Store.open(pair.root) as store:
            assert not any(isinstance(decode_fact(record), Paused) for record in store.records)
            roll_back(store, state_of(store.records), 1)
        assert status_of(pair.root)["serving"] == "paused"


# ---------------------------------------------------------------------------------------------- refused


def records_of(root):
    with Store.open(root, readonly=True) as store:
        return [record.body for record in store.history()]


@pytest.fixture
def ended(tmp_path):
    """A run that was ended in order, with one kept version."""
    with pair_of(tmp_path, 0.25) as pair:
        pair.join("a")
        pair.until(lambda: kept_in(pair))
        pair.run(5)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
    return pair


def test_a_damaged_file_of_a_kept_version_leaves_the_run_as_it_is(ended):
    state = ended.syncer.machine.state
    file = state.kept[0].checkpoints[1].file
    path = ended.root / "files" / file
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    before = records_of(ended.root)
    with (
        Store.open(ended.root) as store,
        pytest.raises(FileDamaged, match=r"^kept version 1, fragment 1: .*restore it"),
    ):
        roll_back(store, state_of(store.records), 1)
    assert records_of(ended.root) == before
    with Store.open(ended.root) as store:
        assert isinstance(roll_back(store, state_of(store.records), 0)[-1], RolledBack), "the start is another version"


def test_a_run_whose_newest_files_are_gone_can_still_go_back(ended):
    state = ended.syncer.machine.state
    kept = {c.file for version in state.kept for c in version.checkpoints} | set(state.created.files)
    for file in {c.file for at in state.fragments for c in at.checkpoints} - kept:
        (ended.root / "files" / file).unlink()
    with Store.open(ended.root) as store:
        facts = roll_back(store, state_of(store.records), 1)
    assert [type(fact) for fact in facts[1:-1]] == [SteppedBack] * 3
    ended._open()
    with ended:
        assert audited(ended)


def test_a_version_that_is_not_kept_is_refused_by_those_that_are(ended):
    with Store.open(ended.root) as store, pytest.raises(Refusal, match="version 7 is not kept: kept are 1, and 0"):
        roll_back(store, state_of(store.records), 7)


def test_a_closed_run_is_not_rolled_back(tmp_path):
    with pair_of(tmp_path, 0.25) as pair:
        pair.join("a")
        pair.close()
    with Store.open(pair.root) as store, pytest.raises(Refusal, match=r"budget is spent.*skerry export .* --version 1"):
        roll_back(store, state_of(store.records), 1)


def test_a_fold_has_what_is_kept(tmp_path):
    with pair_of(tmp_path, 0.25) as pair:
        pair.join("a")
        pair.until(lambda: len(kept_in(pair)) == 2)
        state = pair.syncer.machine.state
        again = decode_fact(msgspec.msgpack.encode(state))
        assert isinstance(again, RunState) and (again.kept, again.last_kept) == (state.kept, state.kept[-1])
        assert {c.file for version in again.kept for c in version.checkpoints} <= again.files
        assert [fact for fact in facts_of(pair) if isinstance(fact, Committed)]
