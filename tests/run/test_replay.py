"""Replay on the tapes of real syncer nodes: identical to the bit, and every damage named at its first bad record."""

import hashlib
import json
import shutil
from collections import Counter

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load

from node.pair import Pair, config_of
from skerry import config as configs
from skerry.algo.fragments import scatter
from skerry.core.audit import Audit
from skerry.core.facts import Committed, Decision, EpochStarted, PhaseChanged, Restored
from skerry.core.ledger import MERGED
from skerry.core.state import decode_fact, state_of
from skerry.errors import FileDamaged, ReplayError, StoreError, TapeDamaged, TapeUnknown
from skerry.node import versions
from skerry.node.algebra import FLOAT32, Values
from skerry.run import repair
from skerry.run.export import read_model, write_model
from skerry.run.facts import fragments_of
from skerry.run.replay import replay
from skerry.store import Store
from skerry.store.store import RECORD

INT4 = {"codec_up": "int4", "codec_down": "int4"}
NESTEROV = {"rule": "nesterov", "lr": 0.3, "momentum": 0.9}
LEARNERS = (("a", 1), ("b", 2), ("c", 3))


def config(record="full", segment_bytes=3000, **run):
    """RDA and Nesterov after a warm phase, int4 both ways, and segments smaller than `validate` would let through."""
    tables = {
        "run": {"steps": 110, **run},
        "sync": {"quorum": 2, "policy": "auto", "warm_share": 0.3, "warm_every": 2, "cool_share": 0.2},
        "merge": {"rule": "rda"},
        "outer": NESTEROV,
        "wire": INT4,
        "store": {"record": record},
    }
    checked = config_of(learners=3, **tables)
    store = msgspec.structs.replace(checked.store, segment_bytes=segment_bytes)
    return msgspec.structs.replace(checked, store=store)


def train(root, settings, until_closed=True):
    """A run with three speeds and a syncer restart in the middle; `tidy` after every tick, as the shell does."""
    with Pair(root, settings) as pair:
        for name, every in LEARNERS:
            pair.join(name, every)
        for half in range(2):
            for _ in range(85):
                pair.tick()
                pair.syncer.tidy()
            if not half:
                pair.restart()
        if until_closed:
            pair.close()
    return root


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return train(tmp_path_factory.mktemp("full") / "run", config())


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    return train(tmp_path_factory.mktemp("decisions") / "run", config("decisions"))


@pytest.fixture
def copy(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "run")


def replayed(root, **options):
    with Store.open(root, readonly=True) as store:
        return replay(store, **options)


def records_of(root):
    with Store.open(root, readonly=True) as store:
        return list(store.history())


def facts_of(root):
    return [decode_fact(record.body) for record in records_of(root)]


def commits_of(root):
    return [fact for fact in facts_of(root) if isinstance(fact, Committed)]


def rewrite(root, change):
    """The tape with some facts changed and every hash made to fit: what only the contents can give away."""
    records = records_of(root)
    shutil.rmtree(root / "tape")
    with Store.open(root) as store:
        for record in records:
            body = msgspec.msgpack.encode(change(decode_fact(record.body)))
            if record.is_fold:
                store.rotate(body)
            else:
                store.commit([body])


def changed(commit, **changes):
    """The commit with fields of its decision or its result changed."""
    ours = {name: value for name, value in changes.items() if name in Decision.__struct_fields__}
    decision = msgspec.structs.replace(commit.decision, **ours)
    result = {name: value for name, value in changes.items() if name not in ours}
    return Committed(decision, msgspec.structs.replace(commit.result, **result))


def append(root, *facts):
    with Store.open(root) as store:
        store.commit([msgspec.msgpack.encode(fact) for fact in facts])


def named(record):
    return f"tape/{record.segment:06d}.seg record {record.number} at byte {record.offset}: "


# ------------------------------------------------------------------------------------------ identical


def test_a_whole_run_replays_to_the_bit(recorded, tmp_path):
    """Warm and steady merges, a restart, rotated segments, quantised both ways, float32 at the end."""
    commits, records = commits_of(recorded), records_of(recorded)
    decisions = [commit.decision for commit in commits]
    assert {"warm", "steady", "cool", None} == {d.stage for d in decisions}
    assert {d.rule for d in decisions} == {"mean", "rda"} and {d.codec for d in decisions} == {"int4", "fp32"}
    assert len({r.segment for r in records}) > 2 and any(r.is_fold for r in records)
    assert sum(isinstance(fact, EpochStarted) for fact in facts_of(recorded)) == 2

    report = replayed(recorded)

    assert report.identical and report.violations == [] and report.first_difference is None
    assert report.recomputed == report.merges == len(commits) > 30
    assert report.record == "full" and report.checks > 10 * len(records)
    with Store.open(recorded, readonly=True) as store:
        exported = write_model(store, state_of(store.records), tmp_path / "model.safetensors")
    assert report.model_sha256 == exported == hashlib.sha256(b"".join(report.model())).hexdigest()


@pytest.mark.parametrize("rule", ["nesterov", "delayed"])
def test_the_outer_steps_calendar_is_on_the_tape(rule, tmp_path):
    """Consensus over two bits both ways, momentum that is delayed or forgotten: recomputed from what the tape says."""
    outer = configs.Outer(**NESTEROV | {"rule": rule, "delay": 3, "restart": 5})
    wire = configs.Wire(codec_up="int2", codec_down="int2")
    settings = msgspec.structs.replace(config(), outer=outer, wire=wire, merge=configs.Merge(rule="consensus"))
    root = train(tmp_path / "run", settings)
    decisions = [commit.decision for commit in commits_of(root)]
    said = {d.stage: (d.rule, d.outer, d.codec, d.delay, d.restart) for d in decisions}
    delay = 3 if rule == "delayed" else 1
    assert said == {
        "warm": ("mean", "sgd", "int2", 1, 0),
        "steady": ("consensus", rule, "int2", delay, 5),
        "cool": ("mean", "sgd", "int2", 1, 0),
        None: ("mean", "sgd", "fp32", 1, 0),
    }
    assert replayed(root).identical
    rewrite(root, lambda fact: changed(fact, restart=0) if isinstance(fact, Committed) else fact)
    assert "merged by" in replayed(root).violations[0]


def test_any_number_of_threads_gives_the_same_bits(recorded):
    reports = [replayed(recorded, threads=threads) for threads in (1, 2, 8)]
    assert all(report.identical for report in reports)
    assert len({report.model_sha256 for report in reports}) == 1


def test_beside_a_live_syncer_and_before_the_end(tmp_path):
    with Pair(tmp_path, config()) as pair:
        for name, every in LEARNERS:
            pair.join(name, every)
        merges = 0
        for _ in range(3):
            pair.run(12)
            pair.syncer.tidy()
            report = replayed(tmp_path)
            assert report.identical and report.recomputed == len(pair.commits) > merges
            merges = report.merges


def test_without_contributions_the_choices_are_verified_and_nothing_is_recomputed(decided):
    report = replayed(decided)
    assert report.agrees and report.identical is None and report.record == "decisions"
    assert report.merges == len(commits_of(decided)) > 30 and report.recomputed == 0
    assert report.model_sha256 is None and report.checks > 1000


def test_progress_is_shown_up_to_the_last_merge(recorded):
    shown = []
    report = replayed(recorded, show=lambda done, total: shown.append((done, total)))
    assert shown[-1] == (report.merges, report.merges) and len(shown) == report.merges


# ------------------------------------------------------------------------------------------ without one learner


def by_hand(root, gone):
    """The masters of a run merged again without one learner, written down independently of replay."""
    with Store.open(root, readonly=True) as store:
        state = state_of(store.records)
        fragments = fragments_of(state.created)
        values = [FLOAT32.load(store.get(f), p) for f, p in zip(state.created.files, fragments, strict=True)]
        for fact in commits_of(root):
            decision, data, held = fact.decision, store.get(fact.result.payloads, RECORD), []
            p, fragment = decision.fragment, fragments[decision.fragment]
            rows = [row for row in decision.rows if row.fate == MERGED]
            for row, (codec, _, weight) in zip(rows, map(msgspec.structs.astuple, decision.parts), strict=True):
                length = FLOAT32.payload_bytes(codec, fragment)
                payload, data = data[:length], data[length:]
                if row.learner != gone:
                    held.append(FLOAT32.hold(codec, payload, weight, FLOAT32.inspect(codec, payload, fragment)))
            if held:
                delta = FLOAT32.merge(decision, fragment, held)
                values[p] = FLOAT32.advance(decision, fragment, values[p], delta).values
        whole = read_model(store, state)
        arrays = {name: np.full_like(array, np.nan) for name, array in whole.items()}
        for fragment, (theta, _, error) in zip(fragments, values, strict=True):
            scatter(fragment, theta + error, arrays)
        return arrays, whole


@pytest.mark.parametrize("gone", ["a", "c"])
def test_excluding_a_learner_is_merging_again_without_it(recorded, gone):
    expected, whole = by_hand(recorded, gone)
    report = replayed(recorded, exclude=gone)
    mine = [row for c in commits_of(recorded) for row in c.decision.rows if (row.learner, row.fate) == (gone, MERGED)]

    assert report.identical and report.excluded is not None
    found = load(b"".join(report.model()))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    gone_now = report.excluded
    assert gone_now.contributions == len(mine) == gone_now.merges_changed + gone_now.merges_skipped
    assert gone_now.tokens == pytest.approx(sum(row.tokens for row in mine) / 3)
    moved = np.sqrt(sum(float(((whole[n] - a).astype(np.float64) ** 2).sum()) for n, a in expected.items()))
    norm = np.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in whole.values()))
    assert gone_now.relative_change == pytest.approx(moved / norm, rel=1e-5) and moved > 0
    assert gone_now.model_sha256 == hashlib.sha256(b"".join(report.model())).hexdigest() != report.model_sha256
    assert "trained on versions that held the work of" in gone_now.note


def test_merges_in_which_nobody_is_left_are_skipped(tmp_path):
    settings = config_of(store={"record": "full"})
    with Pair(tmp_path, settings) as pair:
        pair.join("a")
        pair.run(30)
        genesis = pair.arrays
    report = replayed(tmp_path, exclude="a")
    assert report.excluded.merges_skipped == report.merges > 0 and report.excluded.merges_changed == 0
    for name, array in load(b"".join(report.model())).items():
        np.testing.assert_array_equal(array, genesis[name])


def test_excluding_a_learner_that_never_contributed_changes_nothing(tmp_path):
    with Pair(tmp_path, config()) as pair:
        for name, every in LEARNERS:
            pair.join(name, every)
        pair.join("idle", every=10**9)
        pair.run(20)
    report = replayed(tmp_path, exclude="idle")
    assert report.identical and report.merges > 0
    assert (report.excluded.contributions, report.excluded.tokens, report.excluded.relative_change) == (0, 0, 0)
    assert report.excluded.model_sha256 == report.model_sha256


def test_an_unknown_learner_is_refused_before_any_work_naming_the_known(recorded):
    shown = []
    with pytest.raises(ReplayError, match="--exclude z: this run has no such learner, but a, b, c"):
        replayed(recorded, exclude="z", show=lambda *at: shown.append(at))
    assert not shown


def test_without_contributions_nobody_can_be_excluded(decided):
    with pytest.raises(ReplayError, match=r"kept no contributions to merge again: begin one with --store\.record full"):
        replayed(decided, exclude="a")


# ------------------------------------------------------------------------------------------ repaired runs


def fragment_of(state, p):
    return fragments_of(state.created)[p]


def newest(root, p):
    """A fragment's newest version, from what lies on disk."""
    with Store.open(root, readonly=True) as store:
        state = state_of(store.records)
        return state.fragments[p], versions.load(store, fragment_of(state, p), state.fragments[p])


def restored(root, at, values):
    return Restored(1, at.version, put(root, values), at.digest, FLOAT32.state_digest(values), b"", "a")


def put(root, values):
    with Store.open(root) as store:
        file = store.put(FLOAT32.parts(values))
        store.commit([msgspec.msgpack.encode(EpochStarted(state_of(store.records).epoch + 1))])
    return file


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    return train(tmp_path_factory.mktemp("unfinished") / "run", config(steps=1000), until_closed=False)


@pytest.fixture
def paused(unfinished, tmp_path):
    """A run that is not over."""
    return shutil.copytree(unfinished, tmp_path / "run")


@pytest.mark.parametrize("keeps_velocity", [True, False])
def test_a_restored_fragment_replays_and_so_does_what_follows(paused, keeps_velocity):
    at, values = newest(paused, 1)
    zero = np.zeros_like(values.theta)
    append(paused, restored(paused, at, values if keeps_velocity else Values(values.theta, zero, zero)))
    report = replayed(paused)
    assert report.identical, report.first_difference
    with Store.open(paused, readonly=True) as store:
        expected = read_model(store, state_of(store.records))
    for name, array in load(b"".join(report.model())).items():
        np.testing.assert_array_equal(array, expected[name])


def test_a_fragment_restored_to_something_else_is_a_difference(paused):
    at, values = newest(paused, 1)
    append(paused, restored(paused, at, Values(values.theta, values.velocity + 1, values.error)))
    report = replayed(paused)
    assert not report.identical and "fragment 1" in report.first_difference
    assert named(records_of(paused)[-1]) in report.first_difference


def test_a_version_gone_back_to_replays(paused):
    with Store.open(paused) as store:
        state = state_of(store.records)
        fragment, to = fragment_of(state, 2), state.fragments[2].version - 3
        values = versions.load(store, fragment, state.fragments[2], version=to)
        fact = repair.back_to(store, state, fragment, to, values)
        store.commit([msgspec.msgpack.encode(fact)])
    report = replayed(paused, exclude="b")
    assert report.identical, (report.violations, report.first_difference)
    assert report.recomputed == report.merges


# ------------------------------------------------------------------------------------------ damage


def test_a_flipped_byte_anywhere_in_the_tape_is_named(recorded, copy):
    """In the last group it looks like a torn tail to the chain; the status file knows better."""
    merges = len(commits_of(recorded))
    (copy / "status.json").write_text(json.dumps({"merges": merges, "phase": "closed"}))
    segments = sorted((copy / "tape").iterdir())
    tried = Counter()
    for segment in segments:
        whole = segment.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 12)):
            segment.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            try:
                report = replayed(copy)
            except (TapeDamaged, TapeUnknown) as error:
                assert "/tape/0000" in str(error), at
                tried[segment.name] += 1
            else:  # behind the end of the run there are only checkpoints, which nobody needs
                assert segment == segments[-1] and "are left out" in report.left_out and report.identical
        segment.write_bytes(whole)
    assert len(tried) > 2 and min(tried.values()) > 9
    assert replayed(copy).identical


def test_a_flipped_byte_names_the_first_bad_record(recorded, copy):
    """The first of the group that was committed together: none of them can be trusted."""
    records = [r for r in records_of(recorded) if r.segment == 1]
    ends = [0] + [r.offset + 4 + len(r.body) for r in records]
    starts = [r.number for r, end in zip(records, ends, strict=False) if r.offset != end]
    segment = copy / "tape" / "000001.seg"
    whole = segment.read_bytes()
    for record in records[1:-3:5]:
        at = record.offset + 8
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        first = max(number for number in starts if number <= record.number)
        with pytest.raises(TapeDamaged, match=rf"tape/000001.seg is damaged from record {first} at byte \d+ "):
            replayed(copy)


def test_a_segment_cut_in_the_middle_or_missing_is_named(copy):
    segment = copy / "tape" / "000002.seg"
    whole = segment.read_bytes()
    segment.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TapeDamaged, match=r"tape/000002.seg is damaged from record \d+ at byte \d+"):
        replayed(copy)
    segment.unlink()
    with pytest.raises(TapeDamaged, match=r"tape/000002.seg is missing"):
        replayed(copy)


@pytest.mark.parametrize("said", ["summary.json", "status.json"])
def test_a_tape_cut_at_its_end_is_told_by_what_was_last_said_of_the_run(copy, said):
    merges = len(commits_of(copy))
    (copy / said).write_text(json.dumps({"merges": merges, "phase": "closed"}))
    assert replayed(copy).identical
    last = sorted((copy / "tape").iterdir())[-1]
    last.unlink()
    end, left = sorted((copy / "tape").iterdir())[-1], len(commits_of(copy))
    with pytest.raises(TapeDamaged) as caught:
        replayed(copy)
    place = f"{end} at byte {end.stat().st_size}: "
    assert f"{place}truncated: the tape ends with {left} merges, {said} says {merges}" in str(caught.value)


def test_a_lost_end_of_the_run_is_told_too(copy):
    """The last group holds no merge, so only the phase gives it away."""
    (copy / "status.json").write_text(json.dumps({"merges": len(commits_of(copy)), "phase": "closed"}))
    records = records_of(copy)
    shutil.rmtree(copy / "tape")
    closed = max(n for n, r in enumerate(records) if isinstance(decode_fact(r.body), PhaseChanged))
    with Store.open(copy) as store:
        for record in records[:closed]:
            (store.rotate if record.is_fold else lambda body: store.commit([body]))(record.body)
    with pytest.raises(TapeDamaged, match=r"truncated: .* and the end of the run: restore it from a copy"):
        replayed(copy)


def test_unreadable_words_about_a_run_are_no_evidence(copy):
    (copy / "summary.json").write_text("{")
    (copy / "status.json").write_text('{"merges": "many"}')
    assert replayed(copy).identical


def test_a_tape_of_a_later_format_is_named(copy):
    segment = copy / "tape" / "000001.seg"
    whole = bytearray(segment.read_bytes())
    whole[8] = 9
    segment.write_bytes(whole)
    with pytest.raises(TapeUnknown, match=r"tape/000001\.seg has format 9"):
        replayed(copy)


def test_a_record_of_a_later_version_is_named(copy):
    with Store.open(copy) as store:
        store.commit([msgspec.msgpack.encode({"type": "FromTheFuture", "of": 1.0})])
    last = records_of(copy)[-1]
    with pytest.raises(TapeUnknown) as caught:
        replayed(copy)
    assert named(last) in str(caught.value) and "is no fact of this version" in str(caught.value)


def test_a_missing_or_garbled_contribution_is_named_with_its_record(recorded, copy):
    commits = [(r, f) for r, f in zip(records_of(copy), facts_of(copy), strict=True) if isinstance(f, Committed)]
    for record, fact in commits[3::9]:
        path = copy / "record" / fact.result.payloads
        whole = path.read_bytes()
        path.write_bytes(whole[:7] + bytes([whole[7] ^ 1]) + whole[8:])
        with pytest.raises(FileDamaged) as caught:
            replayed(copy)
        assert named(record) in str(caught.value) and f"record/{path.name} differs" in str(caught.value)
        path.unlink()
        with pytest.raises(FileDamaged) as caught:
            replayed(copy)
        assert named(record) in str(caught.value) and f"record/{path.name} is missing" in str(caught.value)
        path.write_bytes(whole)
    assert replayed(copy).identical


def test_a_missing_first_version_is_named(copy):
    with Store.open(copy, readonly=True) as store:
        first = state_of(store.records).created.files[0]
    (copy / "files" / first).unlink()
    with pytest.raises(FileDamaged, match=rf"000001.seg record 0 at byte \d+: .*files/{first} is missing"):
        replayed(copy)


def test_an_empty_directory_holds_no_run(tmp_path):
    Store.open(tmp_path).close()
    with pytest.raises(ReplayError, match="holds no run"):
        replayed(tmp_path)
    with pytest.raises(StoreError, match="holds no run"):
        replayed(tmp_path / "elsewhere")


# --------------------------------------------------------------------------- changed, with every hash made to fit


def tampered(root, number, **changes):
    """Change the n-th commit of the tape and whatever hashes over it; the record that now holds it."""
    seen = Counter()

    def change(fact):
        if isinstance(fact, Committed):
            seen["commits"] += 1
            if seen["commits"] == number:
                return changed(fact, **{k: v(fact.decision) for k, v in changes.items()})
        return fact

    rewrite(root, change)
    commits = [r for r in records_of(root) if isinstance(decode_fact(r.body), Committed)]
    return commits[number - 1]


def test_a_rewritten_tape_replays(copy):
    rewrite(copy, lambda fact: fact)
    assert replayed(copy).identical


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parts": lambda d: d.parts[:-1]}, "I3: Committed fragment"),
        ({"lr": lambda d: d.lr / 2}, "I3: Committed fragment"),
        ({"rows": lambda d: d.rows[:-1]}, "I3: Committed fragment"),
    ],
)
def test_changed_decisions_are_violations_named_at_their_record(copy, changes, words):
    record = tampered(copy, 20, **changes)
    report = replayed(copy)
    assert not report.identical and report.merges > 20
    assert named(record) + words in report.violations[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": lambda d: bytes(16)}, "velocity or residual differ"),
        ({"payloads": lambda d: ""}, "names no file with its contributions"),
    ],
)
def test_changed_values_are_a_difference_named_at_their_record(copy, changes, words):
    record = tampered(copy, 20, **changes)
    report = replayed(copy)
    if report.violations:  # a fold that comes later holds the right file
        assert "I5" in report.violations[0]
    assert not report.identical and report.recomputed == 19
    assert named(record) in report.first_difference and words in report.first_difference


def shape(commit):
    return commit.decision.fragment, [part.codec for part in commit.decision.parts]


def test_contributions_of_another_merge_are_a_difference(copy):
    """The file is whole and its name right; only merging it tells."""
    commits = commits_of(copy)
    other = next(c for c in commits[20:] if shape(c) == shape(commits[19]))
    record = tampered(copy, 20, payloads=lambda d: other.result.payloads)
    report = replayed(copy)
    assert not report.identical and report.recomputed == 19
    assert named(record) in report.first_difference and "recomputed" in report.first_difference


def test_contributions_of_another_length_are_a_difference(copy):
    longer = next(c for c in commits_of(copy) if {part.codec for part in c.decision.parts} == {"fp32"})
    record = tampered(copy, 20, payloads=lambda d: longer.result.payloads)
    report = replayed(copy)
    assert named(record) in report.first_difference and "its contributions are" in report.first_difference


def test_the_audit_agrees_with_these_tapes(recorded, decided):
    for root in (recorded, decided):
        audit = Audit()
        for fact in facts_of(root):
            audit.take(fact)
        assert audit.violations == [] and audit.state is not None and audit.state.phase == "closed"
