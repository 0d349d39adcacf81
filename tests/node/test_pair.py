"""A syncer and its learners, node to node, with real arrays and real files: what a user relies on, to the bit."""

import hashlib
from collections import Counter

import msgspec
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from node.pair import Pair, behind_and_due, config_of, due
from skerry.algo.fragments import Tensor, gather
from skerry.core.ledger import MERGED
from skerry.core.messages import FULL, Contribution, Hello, Publication, Pull, Welcome
from skerry.core.state import state_of
from skerry.node.algebra import FLOAT32, Values
from skerry.run.export import read_model, write_model
from skerry.run.genesis import read_genesis
from skerry.store import Store

CODECS = ("fp32", "bf16", "int8", "int4")
STEPS_OF = {"fp32": np.inf, "bf16": 256, "int8": 127, "int4": 7}  # a block's largest value is this many codec steps
ROUNDING = 1e-5  # float32 sums of values up to about 20


def rule(**tables):
    return {"merge": {"rule": "rda"}, "outer": {"rule": "nesterov", "lr": 0.3, "momentum": 0.9}} | tables


def lose_every(pair, n):
    """Every n-th message is lost on the way, hello and welcome excepted; the sender believes that it went."""
    count = Counter()

    def tap(learner, message, payload):
        count["seen"] += 1
        is_lost = count["seen"] % n == 0 and not isinstance(message, Hello | Welcome)
        count["lost"] += is_lost
        return None if is_lost else (message, payload)

    pair.tap = tap
    return count


def catch_up(pair):
    """Let every learner pass boundaries without a step, so that what is prepared stands in its parameters.

    Two of them: what the node gets ready after the first is put there by the second.
    """
    for _ in range(2):
        for loop in pair.loops.values():
            loop.boundary()
            loop.node.catch_up()


def weights_of(decision):
    return {part.weight for part in decision.parts}


def check_every_base(pair):
    """A learner at version v holds the bits that were committed as v."""
    digests = {(c.decision.fragment, c.decision.version): c.result.digest for c in pair.commits}
    digests |= {(p, 0): FLOAT32.digest(theta) for p, theta in enumerate(pair.genesis)}
    for loop in pair.loops.values():
        for p, position in enumerate(loop.machine.positions):
            assert FLOAT32.digest(loop.node.bases[p]) == digests[p, position.base_version], (loop.name, p)


def check_work(pair):
    """Each learner's work is in the global model or in its hands; the global model holds what is booked, once."""
    catch_up(pair)
    for p in range(len(pair.fragments)):
        for name, loop in pair.loops.items():
            found = pair.merged_work(name, p) + loop.drift(p)
            np.testing.assert_allclose(found, loop.worked[p], rtol=0, atol=ROUNDING, err_msg=f"{name}, fragment {p}")
        booked = pair.genesis[p] + pair.booked_work(p) + pair.rounding(p)
        np.testing.assert_allclose(pair.master(p), booked, rtol=0, atol=ROUNDING)
    merged = Counter((r.learner, r.life, r.fragment, r.seq) for d in pair.decisions for r in d.rows if r.fate == MERGED)
    assert set(merged.values()) == {1}, "a contribution is merged once"
    pair.syncer.machine.state.ledger.check()


def check_rows(pair):
    """Each merged row carries the work of exactly its own steps; true without quantisation."""
    for row in (row for d in pair.decisions for row in d.rows if row.fate == MERGED):
        after = pair.loops[row.learner].worked_after
        work = after[row.to_step][row.fragment] - after[row.from_step][row.fragment]
        np.testing.assert_allclose(pair.decoded(row), work, rtol=0, atol=ROUNDING, err_msg=str(row))


def last_step_size(pair, loop, p):
    """The codec's step in the last thing this learner contributed to a fragment: what it may have kept back."""
    rows = [row for d in pair.decisions for row in d.rows if (row.learner, row.fragment) == (loop.name, p)]
    c, _ = pair.contributions[rows[-1].learner, rows[-1].life, rows[-1].seq]
    return np.abs(pair.decoded(rows[-1])).max() / STEPS_OF[c.codec]


# ------------------------------------------------------------------------------------------ no work lost or doubled


@pytest.mark.parametrize("residual", ["theta", "buffer"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_bit_of_work_is_in_the_global_model_or_in_the_learners_hands(tmp_path, codec, residual):
    """Three speeds, a quorum of two, every seventh message lost, one learner with a sluggish node thread."""
    tables = {"wire": {"codec_up": codec, "codec_down": codec}, "learner": {"residual": residual}}
    config = config_of(learners=3, sync={"quorum": 2}, **tables)
    with Pair(tmp_path, config) as pair:
        for name, every in [("a", 1), ("b", 2), ("c", 3)]:
            pair.join(name, every)
        pair.loops["b"].is_late = True
        lost = lose_every(pair, 7)
        for _ in range(4):
            pair.run(30)
            check_work(pair)
            check_every_base(pair)
            if codec == "fp32":
                check_rows(pair)
        assert lost["lost"] > 50 and min(pair.versions) >= 6
        assert not any(loop.machine.discards for loop in pair.loops.values())
        assert {row.learner for d in pair.decisions for row in d.rows} == {"a", "b", "c"}
        assert any(len(weights_of(d)) > 1 for d in pair.decisions), "weights that differ"


@pytest.mark.parametrize("residual", ["theta", "buffer"])
@pytest.mark.parametrize("codec", CODECS)
def test_with_one_learner_the_global_model_and_its_drift_are_all_its_work(tmp_path, codec, residual):
    config = config_of(wire={"codec_up": codec, "codec_down": codec}, learner={"residual": residual})
    with Pair(tmp_path, config) as pair:
        loop = pair.join("a")
        for _ in range(80):
            pair.tick()
            catch_up(pair)
            for p in range(len(pair.fragments)):
                done = pair.genesis[p] + loop.worked[p] + pair.rounding(p)
                error = np.abs(pair.master(p) + loop.drift(p) - done).max()
                assert error <= (0.0 if codec == "fp32" else ROUNDING), (pair.ticks, p)
        assert min(pair.versions) > 10


@pytest.mark.parametrize("codec", CODECS)
def test_after_the_closing_merge_learners_of_equal_speed_have_the_mean_of_their_work(tmp_path, codec):
    """Exactly what they did; where a learner had no step left to close with, less than a step of its codec is kept."""
    config = config_of(learners=3, steps=70, wire={"codec_up": codec, "codec_down": codec})
    with Pair(tmp_path, config) as pair:
        loops = [pair.join(name) for name in "abc"]
        pair.close()
        check_work(pair)
        assert {len(d.parts) for d in pair.decisions} == {3} and {len(weights_of(d)) for d in pair.decisions} == {1}
        assert {d.fragment for d in pair.decisions if d.is_closing}, "some work was left for the end"
        for p in range(len(pair.fragments)):
            mean = pair.genesis[p] + sum(loop.worked[p] for loop in loops) / 3 + pair.rounding(p)
            kept_back = max(last_step_size(pair, loop, p) for loop in loops)
            np.testing.assert_allclose(pair.master(p), mean, rtol=0, atol=ROUNDING + kept_back)
            for loop in loops:
                np.testing.assert_allclose(loop.parameters.values[p], pair.master(p), atol=ROUNDING + kept_back)
        totals = pair.syncer.machine.state.ledger.totals()
        assert totals.pending == 0 and totals.discarded == {} and totals.merged == totals.produced


@pytest.mark.parametrize("residual", ["theta", "buffer"])
def test_quantisation_error_does_not_add_up_over_two_hundred_rounds(tmp_path, residual):
    """int4 both ways ends as close to the work as fp32 does, up to one step of the codec."""
    sync = {"num_fragments": 1, "sync_every": 2, "fragment_sync_delay": 1}
    for codec in ("fp32", "int4"):
        wire = {"codec_up": codec, "codec_down": codec}
        config = config_of(learners=2, steps=701, sync=sync, wire=wire, learner={"residual": residual})
        with Pair(tmp_path / codec, config) as pair:
            loops = [pair.join(name) for name in "ab"]
            kept_down = []
            while pair.syncer.machine.state.phase != "closing":
                pair.tick()
                kept_down.append(np.abs(pair.syncer.values[0].error).max())
            pair.close()
            assert pair.versions[0] >= 200
            largest = max(np.abs(pair.decoded(row)).max() for d in pair.decisions for row in d.rows)
            # e ≤ half a step of (e + Δ), so it stays below Δ / (2·7 − 1) however long it goes on
            assert max(kept_down) <= (largest / 13 if codec == "int4" else ROUNDING)
            mean = pair.genesis[0] + sum(loop.worked[0] for loop in loops) / 2 + pair.rounding(0)
            kept_up = max(last_step_size(pair, loop, 0) for loop in loops)
            assert np.abs(pair.master(0) - mean).max() <= 5 * ROUNDING + kept_up, codec
            assert np.abs(mean).max() > 10, "far from where it began"


def test_one_learner_alone_trains_as_if_nothing_were_there(tmp_path):
    """Mean of one, outer step 1, fp32: adopting takes out what came back, which differs by the merge's rounding."""
    with Pair(tmp_path, config_of(steps=100)) as pair:
        loop = pair.join("a")
        draw = np.random.default_rng(3)
        target = [draw.normal(size=g.size).astype(np.float32) * (g != 0) for g in pair.genesis]

        def descent(values, p):
            return np.float32(0.05) * (target[p] - values)

        loop.increment = lambda fragment: descent(loop.parameters.values[fragment.index], fragment.index)
        pair.close()
        assert min(pair.versions) > 10 and loop.machine.step_count >= 100
        for p, plain in enumerate(g.copy() for g in pair.genesis):
            for _ in range(loop.machine.step_count):
                plain += descent(plain, p)
            np.testing.assert_allclose(loop.parameters.values[p], plain, rtol=0, atol=2e-3)
            np.testing.assert_allclose(pair.master(p), loop.parameters.values[p], rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------ the outer step


def plain_rda(fragment, vectors, weights):
    """Radial-directional averaging as one would write it down, in float64; embeddings are averaged."""
    shares = np.array(weights) / np.sum(weights)
    merged = np.zeros(fragment.size)
    for slot in fragment.slots:
        at = slice(slot.offset, slot.offset + slot.size)
        parts = [v[at].astype(np.float64) for v in vectors]
        if slot.kind == "embedding":
            merged[at] = sum(s * v for s, v in zip(shares, parts, strict=True))
            continue
        direction = sum(s * v / np.linalg.norm(v) for s, v in zip(shares, parts, strict=True))
        radius = sum(s * np.linalg.norm(v) for s, v in zip(shares, parts, strict=True))
        merged[at] = radius * direction / np.linalg.norm(direction)
    return merged


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_each_commit_is_rda_and_nesterov_of_the_contributions_that_arrived(tmp_path, codec):
    config = config_of(learners=3, sync={"quorum": 2}, wire={"codec_up": codec, "codec_down": codec}, **rule())
    with Pair(tmp_path, config) as pair:
        for name, every in [("a", 1), ("b", 1), ("c", 3)]:
            pair.join(name, every)
        pair.until(lambda: min(pair.versions) >= 6)
        before = [Values(g, np.zeros_like(g), np.zeros_like(g)) for g in pair.genesis]
        versions = pair.values_of()
        for commit in pair.commits:
            d = commit.decision
            p, old, weights = d.fragment, before[d.fragment], [part.weight for part in d.parts]
            assert (d.rule, d.outer, d.lr, d.momentum) == ("rda", "nesterov", 0.3, 0.9)
            for row, weight in zip(d.rows, weights, strict=True):
                assert weight == row.tokens * row.tokens / row.steps
            arrived = [pair.decoded(row) for row in d.rows]
            delta = pair.applied(commit)
            exact = d.gain * plain_rda(pair.fragments[p], arrived, weights)
            np.testing.assert_allclose(delta, exact, rtol=2**-8, atol=1e-7)
            velocity = 0.9 * old.velocity.astype(np.float64) + delta
            x = old.theta.astype(np.float64) + old.error + 0.3 * (delta + 0.9 * velocity)
            new = before[p] = versions[p, d.version]
            np.testing.assert_allclose(new.velocity, velocity, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(new.theta.astype(np.float64) + new.error, x, rtol=0, atol=2e-6)
            assert FLOAT32.digest(new.theta) == commit.result.digest
            assert FLOAT32.state_digest(new) == commit.result.state


# ------------------------------------------------------------------------------------------ what learners hold


@pytest.mark.parametrize("codec", CODECS)
def test_every_learner_at_a_version_holds_its_bits(tmp_path, codec):
    with Pair(tmp_path, config_of(learners=3, sync={"quorum": 1}, wire={"codec_down": codec}, **rule())) as pair:
        pair.join("a")
        pair.join("b", every=3)
        for _ in range(60):
            pair.tick()
            check_every_base(pair)
        late = pair.join("late")
        assert late.node.welcome.progress > 0
        pair.run(10)
        check_every_base(pair)
        used = {(m.base_version == FULL, m.codec) for _, m in pair.publications if m.version > 0}
        assert used == {(True, "fp32")} if codec == "fp32" else used >= {(False, codec)}


@pytest.mark.parametrize(("missed", "is_kept"), [(3, True), (6, False)])
def test_a_learner_that_was_away_gets_the_deltas_it_lacks_or_the_whole_fragment(tmp_path, missed, is_kept):
    config = config_of(learners=2, sync={"quorum": 1}, wire={"codec_down": "int4"}, store={"deltas_kept": 4})
    with Pair(tmp_path, config) as pair:
        here, away = pair.join("here"), pair.join("away")
        pair.run(20)
        pair.unlink("away")
        held = [p.base_version for p in away.machine.positions]
        pair.until(lambda: min(n - h for n, h in zip(pair.versions, held, strict=True)) >= missed)
        pair.publications.clear()
        wanted = pair.versions
        pair.link("away")
        first = {p: [m for who, m in pair.publications if who == "away" and m.fragment == p] for p in range(3)}
        for p, messages in first.items():
            steps = [(m.base_version, m.version) for m in messages]
            lacking = [(v - 1, v) for v in range(held[p] + 1, wanted[p] + 1)]
            is_small = len(lacking) <= 4
            assert is_small or not is_kept or len(lacking) > missed
            assert steps == (lacking if is_small else [(FULL, wanted[p])])
            assert FLOAT32.digest(away.node.bases[p]) == FLOAT32.digest(here.node.bases[p])
        assert any((m[0].base_version != FULL) == is_kept for m in first.values())
        pair.run(30)
        check_work(pair)
        check_every_base(pair)
        assert away.machine.discards == []


def test_of_deltas_that_all_have_few_are_kept_and_of_those_that_somebody_lacks_all(tmp_path, monkeypatch):
    monkeypatch.setattr("skerry.node.syncer.SPARE_BYTES", 0)
    config = config_of(learners=3, sync={"quorum": 1}, wire={"codec_down": "int4"}, store={"deltas_kept": 4})
    with Pair(tmp_path, config) as pair:
        quick, slow = pair.join("quick"), pair.join("slow", every=5)
        pair.run(20)
        pair.publications.clear()
        pair.run(60)
        assert all(m.base_version != FULL for _, m in pair.publications)  # nobody had to be sent a whole one
        assert {who for who, _ in pair.publications} == {"quick", "slow"}
        pair.unlink("slow")
        pair.run(20)
        left = [v for p, kept in enumerate(pair.syncer.deltas) for v in kept if v < pair.versions[p]]
        assert left == []  # but for the newest, perhaps, which the last reports do not tell of yet
        pair.link("slow")
        assert {m.base_version for who, m in pair.publications if who == "slow"} >= {FULL}
        pair.run(20)
        check_every_base(pair)
        check_work(pair)
        assert quick.machine.discards == slow.machine.discards == []


# ------------------------------------------------------------------------------------------ restart


def test_a_restarted_syncer_has_every_bit_and_its_learners_go_on(tmp_path):
    config = config_of(learners=2, wire={"codec_up": "int4", "codec_down": "int4"}, **rule())
    with Pair(tmp_path, config) as pair:
        a, b = pair.join("a"), pair.join("b")
        for n in range(3):
            pair.run(23)
            versions, values = pair.versions, pair.syncer.values
            pair.restart()
            assert pair.versions == versions and pair.syncer.machine.state.epoch == n + 2
            for was, now in zip(values, pair.syncer.values, strict=True):
                assert all(x.tobytes() == y.tobytes() for x, y in zip(was, now, strict=True))
                assert np.abs(now.velocity).max() > 0 and np.abs(now.error).max() > 0
        pair.until(lambda: min(n - v for n, v in zip(pair.versions, versions, strict=True)) > 2)
        check_every_base(pair)
        assert a.machine.discards == b.machine.discards == [] and a.machine.life == b.machine.life == 1
        assert pair.dismissed == []


@pytest.mark.parametrize("residual", ["theta", "buffer"])
def test_a_held_contribution_lost_in_a_crash_is_asked_for_again_and_merged_once(tmp_path, residual):
    config = config_of(learners=2, wire={"codec_up": "int4"}, learner={"residual": residual})
    with Pair(tmp_path, config) as pair:
        a, b = pair.join("a"), pair.join("b", every=3)
        pair.until(lambda: any("a" in held and "b" not in held for held in pair.syncer.machine.held))
        p = next(p for p, held in enumerate(pair.syncer.machine.held) if "a" in held)
        out = a.node.outstanding[p]
        bytes_sent = out.payload.tobytes()
        again = []

        def tap(learner, message, payload):
            if isinstance(message, Contribution) and (learner, message.seq) == ("a", out.contribution.seq):
                again.append(bytes(payload))
            return message, payload

        pair.tap = tap
        pair.restart()
        pair.until(lambda: pair.settled_seq(a, p) >= out.contribution.seq)
        pair.run(20)
        assert again == [bytes_sent], "the same bytes, once"
        check_work(pair)
        assert a.machine.discards == b.machine.discards == []


def test_an_upload_that_was_cut_off_is_sent_again_on_the_next_connection(tmp_path):
    with Pair(tmp_path, config_of(wire={"codec_up": "int4"})) as pair:
        loop = pair.join("a")
        pair.run(20)
        pair.until(lambda: any(due(loop.machine, p) for p in range(len(loop.machine.positions))))
        loop.step()  # contributes; the connection goes before any of it has left
        assert loop.node.outstanding
        pair.unlink("a")
        pair.run(5)
        pair.link("a")
        pair.run(30)
        check_work(pair)
        assert loop.machine.discards == [] and max(loop.machine.step_count - r for r in marks_of(loop)) < 15


def marks_of(loop):
    return [position.mark_step for position in loop.machine.positions]


def test_a_contribution_that_was_merged_before_the_crash_is_not_merged_again(tmp_path):
    """Its publication never came; the learner learns from the new syncer that it is settled."""
    with Pair(tmp_path, config_of(learners=2, wire={"codec_up": "int4", "codec_down": "int4"})) as pair:
        a, b = pair.join("a"), pair.join("b")
        pair.run(20)
        pair.tap = lambda who, message, payload: None if isinstance(message, Publication) else (message, payload)
        pair.until(lambda: any(out.contribution.seq <= pair.settled_seq(a, p) for p, out in a.node.outstanding.items()))
        pair.tap = lambda who, message, payload: (message, payload)
        pair.restart()
        pair.run(40)
        check_work(pair)
        check_every_base(pair)
        assert a.machine.discards == b.machine.discards == []
        assert pair.syncer.machine.refused == {}


def test_rotation_and_collection_keep_what_restart_and_export_need(tmp_path):
    """A budget of time, so that the end can be made to come while a contribution is held that is not the last."""
    tables = {"wire": {"codec_up": "int4", "codec_down": "int4"}, "store": {"segment_bytes": 1 << 16}}
    config = config_of(learners=2, run={"steps": 0, "minutes": 60}, **tables, **rule())
    with Pair(tmp_path / "run", config) as pair:
        pair.join("a")
        pair.join("b", every=3)
        counts = []
        for restarts in range(2):
            while pair.store.tape.number < 2 + restarts:
                assert pair.ticks < 2000
                pair.tick()
                pair.syncer.tidy()
                counts.append(len(list((tmp_path / "run" / "files").iterdir())))
            values = pair.syncer.values
            pair.restart()
            for was, now in zip(values, pair.syncer.values, strict=True):
                assert all(x.tobytes() == y.tobytes() for x, y in zip(was, now, strict=True))
        assert len(pair.commits) > 1.5 * max(counts), "old versions were collected"

        pair.tap = lambda learner, message, payload: (
            None if isinstance(message, Contribution) and learner == "b" else (message, payload)
        )
        pair.until(lambda: any(held.keys() == {"a"} for held in pair.syncer.machine.held))
        pair.tap = lambda learner, message, payload: (message, payload)
        pinned = pair.versions
        masters = [np.float32(pair.master(p)) for p in range(len(pinned))]
        while pair.syncer.machine.progress < 1:  # in steps that are no sleep
            pair.now += 50
            pair.syncer.look(pair.now)
        pair.close()
        closing = Counter(d.fragment for d in pair.decisions if d.is_closing)
        assert max(closing.values()) > 1, "what the closing began with is more than one version back"
        assert list(pair.syncer.machine.state.before_close) == pinned
        state = pair.syncer.machine.state
        pair.store.collect(state.files, state.journal)  # as tidy does after some more commits
        check_every_base(pair)
        final = [np.float32(pair.master(p)) for p in range(len(pinned))]
    with Store.open(tmp_path / "run", readonly=True) as store:
        state = state_of(store.records)
        assert state.phase == "closed" and state.ledger.totals().pending == 0
        export = tmp_path / "model.safetensors"
        sha = write_model(store, state, export)
        assert sha == hashlib.sha256(export.read_bytes()).hexdigest()
        exported, before = load_file(export), read_model(store, state, before_close=True)
        assert len({record.segment for record in store.history()}) > 2
    assert {name: array.shape for name, array in exported.items()} == {t.name: t.shape for t in pair.layout.tensors}
    for p, fragment in enumerate(pair.fragments):
        np.testing.assert_array_equal(gather(fragment, exported), final[p])
        np.testing.assert_array_equal(gather(fragment, before), masters[p])
    assert any((before[name] != exported[name]).any() for name in exported), "the last merge changed something"
    layout, arrays = read_genesis(export)
    assert layout == pair.layout and set(arrays) == set(exported), "an export is a genesis for the next run"


# ------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_damaged_publication_is_noticed_and_the_whole_fragment_asked_for(tmp_path, codec, version):
    with Pair(tmp_path, config_of(learners=2, wire={"codec_up": "int4", "codec_down": codec})) as pair:
        damaged, healed = [], []

        def tap(learner, message, payload):
            if isinstance(message, Publication) and (learner, message.fragment) == ("a", 1):
                if message.version == version and not damaged:
                    damaged.append(message)
                    payload[5] ^= 0x40
                elif damaged and not healed and message.base_version == FULL:
                    healed.append(message)
            return message, payload

        pair.tap = tap
        a = pair.join("a")
        pair.join("b")
        for _ in range(80):
            pair.tick()
            check_every_base(pair)
        assert damaged and healed and a.machine.discards == []
        assert not a.machine.positions[1].want_full and a.machine.positions[1].base_version == pair.versions[1]
        check_every_base(pair)
        check_work(pair)


def test_a_learner_whose_values_are_spoiled_starts_afresh_and_the_syncer_never_sees_them(tmp_path):
    with Pair(tmp_path, config_of(learners=2, sync={"quorum": 1}, wire={"codec_up": "int4"}, **rule())) as pair:
        a, b = pair.join("a"), pair.join("b")
        pair.run(30)
        a.parameters.values[1][3] = np.nan
        pair.until(lambda: a.machine.discards)
        pair.run(2)
        assert a.machine.discards == ["not finite"]
        assert a.parameters.optimizer_resets == 1
        assert b.machine.discards == [] and b.parameters.optimizer_resets == 0
        assert all(np.isfinite(values).all() for values in a.parameters.values.values())
        before = pair.versions
        pair.until(lambda: min(n - v for n, v in zip(pair.versions, before, strict=True)) > 2)
        for d in pair.decisions:
            for row in d.rows:
                assert row.fate != MERGED or np.isfinite(pair.decoded(row)).all()
        assert pair.syncer.machine.refused == {}
        state = pair.syncer.machine.state
        assert state.ledger.totals().discarded.keys() == {"fast-forward"}
        assert any(row.learner == "a" and row.from_step > 32 for d in pair.decisions for row in d.rows), "it goes on"
        assert all(np.isfinite(v).all() for values in pair.syncer.values for v in values)
        check_every_base(pair)
        state.ledger.check()


@pytest.mark.parametrize(
    ("value", "is_signed", "reason"),
    [(np.nan, True, "not finite"), (np.inf, True, "not finite"), (3e6, True, "too large"), (0.5, False, "damaged")],
)
def test_a_harmful_contribution_is_refused_and_its_learner_fast_forwards(tmp_path, value, is_signed, reason):
    with Pair(tmp_path, config_of(learners=2, sync={"quorum": 1})) as pair:
        a, b = pair.join("a"), pair.join("b")
        pair.run(20)
        before = [master.copy() for master in map(pair.master, range(3))]
        injected = []

        def tap(learner, message, payload):
            if isinstance(message, Contribution) and learner == "a" and not injected:
                payload[8:12] = np.float32(value).tobytes()
                digest = xxhash.xxh3_128_digest(payload) if is_signed else message.digest
                message = msgspec.structs.replace(message, digest=digest)
                injected.append(message)
            return message, payload

        pair.tap = tap
        pair.until(lambda: a.machine.discards)
        assert a.machine.discards == ["refused"]
        assert pair.syncer.machine.refused == {reason: 1}
        pair.run(30)
        assert a.parameters.optimizer_resets == 0 and b.machine.discards == []
        settled = [row for d in pair.decisions for row in d.rows]
        bad = injected[0]
        assert not any((r.learner, r.fragment, r.seq) == ("a", bad.fragment, bad.seq) for r in settled)
        assert any((r.learner, r.fate) == ("a", "fast-forward") for r in settled), "what it gave up is booked"
        assert any(r.learner == "a" and r.seq > bad.seq for r in settled), "and it contributes again"
        moved = max(np.abs(pair.master(p) - before[p]).max() for p in range(3))
        assert 0 < moved < 5
        check_every_base(pair)
        pair.syncer.machine.state.ledger.check()


def test_a_learner_far_behind_gives_its_drift_up_everywhere(tmp_path):
    config = config_of(learners=2, sync={"quorum": 1, "stale_versions_max": 4})
    with Pair(tmp_path, config) as pair:
        pair.join("here")
        away = pair.join("away")
        pair.run(20)
        pair.unlink("away")
        held = [p.base_version for p in away.machine.positions]
        pair.until(lambda: min(n - h for n, h in zip(pair.versions, held, strict=True)) > 4)
        pair.link("away")
        pair.run(1)
        assert away.machine.discards and away.machine.discards[0] == "stale"
        assert away.parameters.optimizer_resets == 0
        catch_up(pair)
        for p in range(3):
            mark = away.machine.positions[p].mark_step
            steps = away.machine.step_count - mark
            assert steps <= 1 and np.abs(away.drift(p)).max() <= 0.2 * (steps + 1)
        pair.run(30)
        check_every_base(pair)
        pair.syncer.machine.state.ledger.check()


# ------------------------------------------------------------------------------------------ determinism


def run_of(root, threads=1, tensors=None):
    """A run with losses, three speeds, a restart and a close; every file of it, by name and content."""
    tables = {"run": {"name": "same"}, "wire": {"codec_up": "int8", "codec_down": "int4"}}
    config = config_of(learners=3, steps=60, sync={"quorum": 2}, **tables, **rule(merge={"threads": threads}))
    with Pair(root, config, *([tensors] if tensors else [])) as pair:
        for name, every in [("a", 1), ("b", 2), ("c", 3)]:
            pair.join(name, every)
        untapped, _ = pair.tap, lose_every(pair, 11)
        pair.run(40)
        pair.tap = untapped
        pair.restart()
        pair.close()
        digests = [(c.decision.fragment, c.decision.version, c.result) for c in pair.commits]
    files = {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
    return digests, files


def test_the_same_schedule_gives_the_same_files(tmp_path):
    digests, files = run_of(tmp_path / "one")
    assert (digests, files) == run_of(tmp_path / "two")
    assert len(digests) > 20 and len([name for name in files if name.startswith("files/")]) > 6
    assert [name for name in files if name.startswith("journal/")] == ["journal/000002.log"], "of the second process"


def test_the_number_of_merge_threads_changes_no_bit(tmp_path):
    tensors = (Tensor("emb.weight", (130, 120), "embedding"), Tensor("bias", (7,)), Tensor("w", (111, 181)))
    one, _ = run_of(tmp_path / "one", 1, tensors)
    three, _ = run_of(tmp_path / "three", 3, tensors)
    assert one == three and len(one) > 10


# ------------------------------------------------------------------------------------------ two threads


def test_a_drift_is_taken_from_the_base_that_stood_when_the_snapshot_was_taken(tmp_path):
    """The training thread passes a boundary while the node thread is busy adopting a newer version."""
    with Pair(tmp_path, config_of(learners=2, sync={"quorum": 1, "grace": 0.0})) as pair:
        late, kept_back = behind_and_due(pair)
        base, base_values = late.machine.positions[0].base_version, late.node.bases[0]
        late.is_late = True
        late.step()
        drift = late.parameters.values[0] - base_values
        late.node.told(*kept_back[-1])
        assert late.machine.positions[0].base_version == kept_back[-1][0].version > base
        late.node.catch_up()
        assert late.machine.positions[0].outstanding.base_version == base
        np.testing.assert_array_equal(np.frombuffer(late.node.outstanding[0].payload, np.float32), drift)
        pair.tap = lambda learner, message, payload: (message, payload)
        pair.run(40)
        check_work(pair)
        check_every_base(pair)


def test_a_pull_is_answered_at_the_next_boundary_and_the_training_thread_never_waits(tmp_path):
    """A boundary does what lies ready and returns: with no syncer at all it does nothing but count."""
    with Pair(tmp_path, config_of()) as pair:
        loop = pair.join("a")
        pair.unlink("a")
        pair.run(50)
        assert loop.machine.step_count >= 50 and not loop.training.stand()
        loop.node.tell_news()
        loop.training.stand()
        assert loop.training.alone_steps == 50 and not loop.training.is_linked
        pulled = []
        pair.tap = lambda who, message, payload: pulled.append(type(message)) or (message, payload)
        pair.link("a")
        loop.node.tell_news()
        loop.training.stand()
        assert loop.training.alone_steps == 0 and loop.training.is_linked
        pair.run(10)
        assert Pull in pulled
        check_work(pair)
