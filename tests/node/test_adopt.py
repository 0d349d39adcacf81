"""What taking a new version in does to a learner's parameters, for each `learner.adopt`, on real arrays.

The formulas are held against the published files and the bytes that were sent, not against what the node keeps.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from node.pair import Pair, behind_and_due, config_of
from node.test_pair import ROUNDING, check_every_base, check_rows, lose_every
from skerry.algo import codecs
from skerry.core.ledger import MERGED
from skerry.core.messages import Contribution


@dataclass
class Adopted:
    """One version taken in at a boundary, and what θ held besides its base then."""

    fragment: int
    version: int
    step: int
    before: np.ndarray  # θ and its base
    base: np.ndarray
    after: np.ndarray
    settled: np.ndarray  # of the contribution that this version settles; zero if it settles none
    outstanding: np.ndarray  # of the one that it leaves open


class Watch:
    """Sees every boundary of a loop from outside; `adopted` has what it did."""

    def __init__(self, pair, loop):
        self.pair, self.loop, self.adopted = pair, loop, []
        self.taken = {}  # fragment -> drift at its last snapshot
        self.last = {}  # fragment -> seq of the last contribution, and what of the drift it stands for
        self._boundary, self._read, self._send = loop.boundary, loop.parameters.read, loop.send
        loop.boundary, loop.parameters.read, loop.send = self.boundary, self.read, self.send

    def read(self, fragment):
        p = fragment.index
        self.taken[p] = self.loop.parameters.values[p] - self.base_of(p)
        return self._read(fragment)

    def base_of(self, p):
        """What θ stands on, whether or not the node knows of it."""
        orders = self.loop.node.orders
        sent = orders.under_way.get(p)
        is_made = sent is not None and self.loop.training.applied[p] == sent.change
        return sent.to.base if is_made else orders.stands[p].base

    def send(self, message, payload=None, tag=None):
        """All of the drift, or what the bytes say of it."""
        if isinstance(message, Contribution):
            said = codecs.decode(message.codec, np.frombuffer(payload, np.uint8))
            is_all = self.loop.node.config.learner.residual == "buffer"
            self.last[message.fragment] = (message.seq, self.taken[message.fragment] if is_all else said)
        self._send(message, payload, tag)

    def boundary(self, *args):
        loop, applied = self.loop, self.loop.training.applied
        before = {p: (a.version, self.base_of(p), loop.parameters.values[p].copy()) for p, a in applied.items()}
        last = dict(self.last)
        self._boundary(*args)
        told = {(m.fragment, m.version): m.settled_seq for who, m in self.pair.publications if who == loop.name}
        for p, (version, base, values) in before.items():
            now = applied[p].version
            if now != version:
                nothing = np.zeros_like(base)
                seq, part = last.get(p, (0, nothing))
                settled = part if told[p, version] < seq <= told[p, now] else nothing
                still_open = part if seq > told[p, now] else nothing
                after = loop.parameters.values[p].copy()
                self.adopted.append(Adopted(p, now, loop.machine.step_count, values, base, after, settled, still_open))


def published(pair):
    """Θ of every version."""
    return {which: values.theta for which, values in pair.values_of().items()}


def two(root, adopt, codec="int4", residual="buffer", alpha=0.5, **run):
    """Two learners, either of which is a quorum, so that versions come without one's contribution."""
    learner = {"adopt": adopt, "adopt_alpha": alpha, "residual": residual}
    tables = {"wire": {"codec_up": codec, "codec_down": codec}, "learner": learner}
    return Pair(root, config_of(learners=2, sync={"quorum": 1, "grace": 0.0}, **tables, **run))


def watched(pair):
    """Two of three contributions of one learner are lost, so that they wait while versions come."""
    watches = [Watch(pair, pair.join("a")), Watch(pair, pair.join("b", every=2))]
    count = Counter()

    def tap(learner, message, payload):
        count[learner] += isinstance(message, Contribution)
        is_lost = isinstance(message, Contribution) and learner == "b" and count["b"] % 3
        return None if is_lost else (message, payload)

    pair.tap = tap
    pair.run(150)
    return [adopted for watch in watches for adopted in watch.adopted]


def check_both_happen(adopted):
    assert sum(bool(x.settled.any()) for x in adopted) > 5, "versions that settle"
    assert sum(bool(x.outstanding.any()) for x in adopted) > 5, "and versions that leave something open"


# ------------------------------------------------------------------------------------------ what it does to θ


@pytest.mark.parametrize("residual", ["theta", "buffer"])
def test_rebase_keeps_all_that_is_not_settled(tmp_path, residual):
    with two(tmp_path, "rebase", residual=residual) as pair:
        adopted, new = watched(pair), published(pair)
        check_both_happen(adopted)
        for x in adopted:
            expected = x.before + (new[x.fragment, x.version] - x.base) - x.settled
            np.testing.assert_allclose(x.after, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("residual", ["theta", "buffer"])
def test_overwrite_leaves_the_bits_of_the_version_and_no_residual(tmp_path, residual):
    with two(tmp_path, "overwrite", residual=residual) as pair:
        adopted, new = watched(pair), published(pair)
        check_both_happen(adopted)
        for x in adopted:
            np.testing.assert_array_equal(x.after, new[x.fragment, x.version])
        assert any(np.abs(x.before - x.base - x.settled).max() > 0.01 for x in adopted), "something was given up"
        assert all(r is None for loop in pair.loops.values() for r in loop.node.residuals)


@pytest.mark.parametrize("residual", ["theta", "buffer"])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_blend_scales_what_is_neither_settled_nor_outstanding(tmp_path, alpha, residual):
    with two(tmp_path, "blend", residual=residual, alpha=alpha) as pair:
        adopted, new = watched(pair), published(pair)
        check_both_happen(adopted)
        for x in adopted:
            rest = x.before - x.base - x.settled - x.outstanding
            expected = new[x.fragment, x.version] + x.outstanding + alpha * rest
            np.testing.assert_allclose(x.after, expected, rtol=0, atol=ROUNDING)
        assert pair.syncer.machine.state.ledger.totals().discarded == {}, "its tokens stay pending"


def test_a_blend_with_alpha_one_is_a_rebase_to_the_bit(tmp_path):
    runs = []
    for adopt in ("rebase", "blend"):
        with two(tmp_path / adopt, adopt, alpha=1.0) as pair:
            watched(pair)
            runs.append(
                ([c.result.digest for c in pair.commits], {n: loop.parameters for n, loop in pair.loops.items()})
            )
    (digests, left), (others, right) = runs
    assert digests == others and len(digests) > 20
    for name in "ab":
        for p, values in left[name].values.items():
            np.testing.assert_array_equal(values, right[name].values[p])


# ------------------------------------------------------------------------------------------ the books


def test_what_an_overwrite_gives_up_is_booked_and_the_rest_is_merged_once(tmp_path):
    """Rows carry the work of exactly their own steps; a gap ends at a boundary where a version was taken in."""
    with two(tmp_path, "overwrite", codec="fp32") as pair:
        loops = [pair.join("a"), pair.join("b", every=3)]
        loops[1].is_late = True
        watches = {loop.name: Watch(pair, loop) for loop in loops}
        lose_every(pair, 7)
        pair.run(150)
        check_rows(pair)
        check_every_base(pair)
        rows = [row for decision in pair.decisions for row in decision.rows]
        assert set(Counter((r.learner, r.fragment, r.seq) for r in rows if r.fate == MERGED).values()) == {1}
        gaps = [row for row in rows if row.fate != MERGED]
        assert {row.fate for row in gaps} == {"fast-forward"} and {row.learner for row in gaps} == {"a", "b"}
        assert not any(loop.machine.discards for loop in loops), "no learner was sent forward for it"
        overwritten = {(x.fragment, x.step) for x in watches["a"].adopted}
        assert {(row.fragment, row.to_step) for row in gaps if row.learner == "a"} <= overwritten
        state = pair.syncer.machine.state
        state.ledger.check()
        totals = state.ledger.totals()
        assert totals.balance == 0 and totals.discarded == {"fast-forward": sum(row.tokens for row in gaps)}
        for p in range(len(pair.fragments)):
            booked = pair.genesis[p] + pair.booked_work(p) + pair.rounding(p)
            np.testing.assert_allclose(pair.master(p), booked, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("adopt", ["overwrite", "blend"])
def test_a_run_closes_with_nothing_pending(tmp_path, adopt):
    with two(tmp_path, adopt, steps=60) as pair:
        loops = [pair.join("a"), pair.join("b", every=3)]
        pair.close()
        totals = pair.syncer.machine.state.ledger.totals()
        assert totals.pending == totals.balance == 0 and totals.merged > 0
        assert bool(totals.discarded) == (adopt == "overwrite")
        check_every_base(pair)
        if adopt == "overwrite":
            for loop in loops:
                for p, values in loop.parameters.values.items():
                    np.testing.assert_array_equal(values, pair.syncer.values[p].theta)


# ------------------------------------------------------------------------------------------ two threads


def test_a_blend_waits_for_a_snapshot_that_is_on_its_way_and_leaves_it_whole(tmp_path):
    """The training thread passes boundaries while the node thread has not yet seen what the snapshot holds."""
    with two(tmp_path, "blend", codec="fp32", alpha=0.25) as pair:
        late, kept_back = behind_and_due(pair)
        base, version = late.node.bases[0], late.machine.positions[0].base_version
        late.is_late = True
        late.step()
        snapshot = late.parameters.values[0] - base
        late.node.told(*kept_back[0])
        late.step()
        assert late.training.applied[0].version == version, "not yet"
        before = late.parameters.values[0].copy()
        late.node.catch_up()
        late.boundary()
        assert late.training.applied[0].version == version + 1
        new, rest = late.node.bases[0], before - base - snapshot
        assert np.abs(rest).max() > 0.01
        np.testing.assert_allclose(late.parameters.values[0], new + snapshot + 0.25 * rest, rtol=0, atol=ROUNDING)
        late.node.catch_up()
        assert late.machine.positions[0].outstanding.base_version == version
