"""The audit: silent over what machines in bad weather write, one line naming the invariant for each planted wrong."""

import math

import msgspec
import pytest

from skerry import config as configs
from skerry.core.audit import Audit
from skerry.core.facts import (
    RULES,
    Buffered,
    Checkpointed,
    Committed,
    Decision,
    Discarded,
    Entry,
    EpochStarted,
    Evaluated,
    Injected,
    Kept,
    LifeStarted,
    Lineage,
    Part,
    Paused,
    PhaseChanged,
    Pruned,
    Restored,
    Result,
    RolledBack,
    Row,
    RunCreated,
    Sample,
    Sampled,
    Seen,
    SteppedBack,
    Stretch,
    Witnessed,
)
from skerry.core.ledger import MERGED
from skerry.core.state import decode_fact, fold
from skerry.proof.sim.world import World
from skerry.run.history import History

CONFIG = configs.Config(
    run=configs.Run(learners=3, steps=8),
    sync=configs.Sync(num_fragments=2, sync_every=8, quorum=0.5, warm_share=0.2, warm_every=4, warm_steps=20),
)
PLAIN = {"rule": "mean", "outer": "sgd", "lr": 1.0, "momentum": 0.0}
STEADY = {"rule": "rda", "outer": "nesterov", "lr": 0.4, "momentum": 0.85}


def row(learner, start, stop, fate=MERGED, seq=1, fragment=0, life=1, per_step=10):
    return Row(learner, life, fragment, start, start * per_step, stop, stop * per_step, fate, seq * (fate == MERGED))


def seen(learner, step, life=1):
    return Seen(learner, life, step, 10 * step, 0, 0, 0.0)


def commit(version, rows, kind="steady", fragment=0, codecs=None, bases=None, entry=None, **changes):
    """A merge as its stage, or the closing, says; `codecs` and `bases` are those of the merged rows."""
    merged = [r for r in rows if r.fate == MERGED]
    came = zip(merged, codecs or ("int4",) * len(merged), bases or (version - 1,) * len(merged), strict=True)
    told = {
        "epoch": 1, "fragment": fragment, "version": version, "parent": b"%d.%d" % (fragment, version - 1),
        **(STEADY if kind == "steady" else PLAIN), "delay": 1, "restart": 0, "gain": 1.0,
        "codec": "fp32" if kind == "closing" else "int4", "delta": "fp32" if kind == "closing" else "bf16",
        "sync_every": 4 if kind == "warm" else 8, "quorum": 1 if kind == "closing" else 2,
        "stage": None if kind == "closing" else kind, "ready": 3,
        "reason": "the last work" if kind == "closing" else "all in",
        "rows": tuple(rows), "parts": tuple(Part(codec, base, r.tokens**2 / r.steps) for r, codec, base in came),
        "seen": (), "progress": {"warm": 0.1, "steady": 0.4, "cool": 0.95, "closing": 1.0}[kind],
        "open_s": 0.1, "elapsed_s": 10.0 * version,
    }  # fmt: skip
    name = b"%d.%d" % (fragment, version)
    result = Result(name, b"state " + name, entry or Entry(1, 100 * version + 10_000 * fragment, 100, b""))
    return Committed(Decision(**(told | changes)), result)


def replace(fact, **changes):
    """The fact with fields changed; of a commit, those of its decision."""
    if isinstance(fact, Committed):
        return Committed(msgspec.structs.replace(fact.decision, **changes), fact.result)
    return msgspec.structs.replace(fact, **changes)


def parts(*changes):
    """Those of the merge with a gap, each with its fields changed."""
    return tuple(
        msgspec.structs.replace(part, **change)
        for part, change in zip(clean()[GAP_COMMIT].decision.parts, changes, strict=False)
    )


def clean():
    """A small run with everything in it: two epochs, a second life, a gap, a repair, the end."""
    files, digests = ("0.0", "1.0"), (b"0.0", b"1.0")
    return [
        RunCreated(
            "run", RULES, configs.encode(CONFIG), b"", msgspec.json.encode([[]] * len(files)), files, *(digests,) * 3
        ),
        EpochStarted(1),
        LifeStarted("a", 1, "pa", 0, 0.0),
        LifeStarted("b", 1, "pb", 1, 0.0),
        LifeStarted("c", 1, "pc", 2, 0.0),
        PhaseChanged("training", (), (), 0.0),
        Witnessed("a", 1, "stepping", 0.0),
        commit(1, [row("a", 0, 4), row("b", 0, 4)], "warm", seen=(seen("a", 4), seen("b", 4), seen("c", 2))),
        Discarded((row("c", 0, 2, "died"), row("c", 0, 2, "died", fragment=1)), (seen("c", 2),), 12.0),
        LifeStarted("c", 2, "pc2", 2, 12.0),
        commit(2, [row("a", 4, 6, "fast-forward"), row("a", 6, 10, seq=2), row("c", 0, 6, life=2)]),
        Sampled((Sample("c", 2, 6, 60, (0.1,), 0, 0.0, 0, 0.0),), 20.0),
        EpochStarted(2),
        Checkpointed(0, 1, "0.1", b""),
        Restored(0, 2, "other", b"0.2", b"another", b"", "a"),
        Paused((seen("b", 11),), 25.0),
        EpochStarted(3),
        PhaseChanged("closing", (2, 0), (), 30.0),
        commit(3, [row("b", 4, 11, seq=2)], "closing", epoch=3, ready=1, codecs=("fp32",)),
        commit(1, [row("a", 0, 10, fragment=1), row("b", 0, 11, fragment=1)], "closing", 1, epoch=3, elapsed_s=31.0),
        Discarded((row("c", 0, 6, "absent at close", fragment=1, life=2),), (), 31.0),
        PhaseChanged("closed", (), (seen("a", 10), seen("b", 11), seen("c", 6, 2)), 31.0),
        Injected("kill", "syncer", "", 0.0, 1.0),
        Evaluated((2, 0), 0.4, 190, {"loss": 2.5}, 0.0),
        EpochStarted(4),
        Paused((seen("a", 10),), 31.0),
    ]


WARM_COMMIT, DIED, GAP_COMMIT, CHECKPOINT, RESTORE, PAUSED = 7, 8, 10, 13, 14, 15
CLOSING, LAST_B, LAST, ABSENT, CLOSED = 17, 18, 19, 20, 21
EVALUATION = 23


def audited(facts):
    audit = Audit()
    for fact in facts:
        audit.take(fact)
    return audit


def planted(at, **changes):
    """The clean run with one fact changed; the one line the audit has to say."""
    facts = clean()
    facts[at] = replace(facts[at], **changes)
    return only_line(audited(facts))


def instead(at, *facts):
    tape = clean()
    tape[at : at + 1] = facts
    return only_line(audited(tape))


def only_line(audit):
    assert audit.violations, "nothing was found"
    assert not any("\n" in line for line in audit.violations)
    return audit.violations[0]


# ------------------------------------------------------------------------------------------ what is right


def test_a_clean_tape_has_no_violation_and_its_checks_are_counted():
    audit = audited(clean())
    assert audit.violations == [] and audit.checks > 100
    assert audit.state is not None and msgspec.msgpack.encode(audit.state) == msgspec.msgpack.encode(fold(clean()))


def test_a_fold_may_stand_anywhere_and_an_audit_may_begin_with_one():
    for cut in range(1, len(clean())):
        facts = clean()
        assert audited([*facts[:cut], fold(clean()[:cut]), *facts[cut:]]).violations == [], cut
        assert audited([fold(clean()[:cut]), *facts[cut:]]).violations == [], cut


def test_a_fold_may_hold_what_was_heard_and_not_written_yet():
    state = fold(clean()[:GAP_COMMIT])
    state.ledger.see(seen("b", 9))
    state.ledger.account("c", 2)
    state.progress = 0.3
    assert audited([*clean()[:GAP_COMMIT], state, *clean()[GAP_COMMIT:]]).violations == []


@pytest.mark.parametrize("seed", range(20))
def test_machines_in_bad_weather_write_nothing_that_is_wrong(seed):
    """Two audits: one of the facts, one of the facts with a fold in their middle; and a history can be told of them."""
    world = World(seed)
    world.run()
    facts = [decode_fact(record) for record in world.oracle.tape]
    told = History()
    for at, fact in enumerate(facts):
        told.take(float(at), fact)
    assert told.record()["merges"] == told.state.merges > 0
    middle = len(facts) // 2
    for tape in (facts, [*facts[:middle], fold(facts[:middle]), *facts[middle:]]):
        audit = audited(tape)
        assert audit.violations == []
        assert audit.state is not None and audit.state.phase == "closed" and audit.checks > 5 * len(facts)


def test_only_the_first_bad_fact_is_judged():
    facts = clean()
    facts[WARM_COMMIT] = replace(facts[WARM_COMMIT], version=5)
    facts[GAP_COMMIT] = replace(facts[GAP_COMMIT], lr=9.0)
    audit = audited(facts)
    assert len(audit.violations) == 1 and "version 5 after 0" in audit.violations[0]


# ------------------------------------------------------------------------------------------ I1, I2: every work once


def test_i1_a_contribution_merged_twice():
    again = clean()[WARM_COMMIT]
    line = instead(GAP_COMMIT, replace(again, version=2, parent=b"0.1"))
    assert line.startswith("I1: Committed fragment 0 version 2: merged again:")


def test_i1_an_old_seq_over_new_steps():
    rows = (row("a", 4, 8, seq=1), row("b", 4, 8, seq=2))
    assert instead(GAP_COMMIT, commit(2, rows)).startswith("I1: ")


def test_i1_ranges_that_overlap():
    line = instead(GAP_COMMIT, commit(2, [row("a", 3, 8, seq=2), row("b", 4, 8, seq=2)]))
    assert line.startswith("I1: ") and "settled up to step 4" in line


def test_i2_a_hole_between_rows():
    line = instead(GAP_COMMIT, commit(2, [row("a", 5, 8, seq=2), row("b", 4, 8, seq=2)]))
    assert line.startswith("I2: ") and "does not begin at step 4, token 40" in line


def test_i2_tokens_that_do_not_follow_on():
    bent = replace(row("a", 4, 8, seq=2), from_tokens=41)
    assert instead(GAP_COMMIT, commit(2, [bent, row("b", 4, 8, seq=2)])).startswith("I2: ")


def test_i2_rows_that_go_back_or_settle_nothing():
    for stop in (4, 3):
        line = instead(GAP_COMMIT, Discarded((row("b", 4, stop, "died"),), (), 20.0))
        assert line.startswith("I2: ") and f"settles {stop - 4} steps" in line


def test_i2_work_that_is_pending_at_the_end():
    facts = clean()
    del facts[ABSENT]
    assert "I2: PhaseChanged closed: c/2 settled on 1 up to" in only_line(audited(facts))
    assert planted(CLOSED, seen=(seen("a", 12),)).startswith("I2: ")
    silent = [*clean()[:CLOSED], LifeStarted("d", 1, "pd", 3, 31.0), clean()[CLOSED]]
    silent[-1] = replace(silent[-1], seen=(seen("d", 1),))
    assert "nothing of ['d/1'] is settled" in only_line(audited(silent))


@pytest.mark.parametrize(
    "late",
    [
        Discarded((row("a", 10, 11, "died"),), (), 31.0),
        LifeStarted("a", 2, "p", 0, 31.0),
        Witnessed("a", 1, "lost", 31.0),
        Buffered("a", 1, 10, 100, "file", 31.0),
        Sampled((), 31.0),
        Paused((seen("a", 11),), 31.0),
    ],
)
def test_i2_nothing_is_written_after_the_end(late):
    assert only_line(audited([*clean(), late])).startswith("I2: ")


def test_i2_nothing_is_merged_after_the_end():
    late = commit(4, [row("a", 10, 12, seq=3)], "closing", epoch=4, elapsed_s=40.0)
    assert "phase: Committed fragment 0 version 4: a closing merge" in only_line(audited([*clean(), late]))


def test_i2_a_discard_of_nothing_or_on_no_fragment():
    assert instead(DIED, Discarded((), (), 12.0)).startswith("I2: ")
    assert "no such fragment" in planted(DIED, rows=(row("c", 0, 2, "died", fragment=2),))


def test_i21_work_is_booked_as_expelled_only_of_who_was_turned_out():
    booked = replace(clean()[DIED], rows=tuple(replace(row, fate="expelled") for row in clean()[DIED].rows))
    assert "I21: Discarded: it was never turned out" in instead(DIED, booked)
    facts = clean()
    facts[DIED : DIED + 1] = [Witnessed(booked.rows[0].learner, 1, "expelled", 12.0), booked]
    assert not audited(facts[: DIED + 2]).violations


def test_i3_a_commit_books_nothing_as_expelled():
    rows = [row("a", 4, 5, "expelled"), row("a", 5, 8, seq=2), row("b", 4, 8, seq=2)]
    assert "settles what it does not merge" in instead(GAP_COMMIT, commit(2, rows))


# ------------------------------------------------------------------------------------------ I3: one line of versions


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 3},
        {"version": 1},  # used before
        {"parent": b"0.0"},
        {"fragment": 2},
        {"fragment": -1},
        {"parts": lambda: parts({}, {"weight": 601.0})},
        {"parts": lambda: parts({}, {"weight": math.nan})},
        {"parts": lambda: parts({}, {"weight": math.inf})},
        {"parts": lambda: parts({})},
        {"parts": lambda: parts({}, {"codec": "fp32"})},  # only the last work comes whole
        {"codec": "fp32"},
        {"rule": "mean"},
        {"outer": "sgd"},
        {"lr": 0.7},
        {"momentum": 0.5},
        {"delay": 4},  # the rule is not delayed
        {"restart": 2},
        {"sync_every": 3},
        {"sync_every": 4},  # that of the warm stage
        {"gain": 0.5},  # nobody has missed a version
        {"gain": math.nan},
    ],
    ids=", ".join,
)
def test_i3_what_a_merge_may_be(changes):
    changes = {name: value() if callable(value) else value for name, value in changes.items()}
    assert planted(GAP_COMMIT, **changes).startswith("I3: Committed fragment ")


def test_i3_the_stage_is_one_in_which_the_round_may_have_been_opened():
    """Warm at the fragment's last merge, steady at 0.4 and cool at 0.95, or from ten merges on."""
    warm, cool = PLAIN | {"stage": "warm", "sync_every": 4}, PLAIN | {"stage": "cool"}
    for changes, progress, merges, is_right in [
        ({}, 0.4, 1, True), (warm, 0.4, 1, True), (cool, 0.4, 1, False), (cool, 0.95, 1, True),
        ({}, 0.95, 1, True), ({}, 0.1, 9, False), ({}, 0.1, 10, True), (warm, 0.1, 10, True),
    ]:  # fmt: skip
        audit = audited(clean()[:GAP_COMMIT])
        assert audit.state is not None
        audit.state.merges = merges  # as if the others had been of the other fragment
        audit.take(replace(clean()[GAP_COMMIT], **changes, progress=progress))
        assert (audit.violations == []) == is_right, (changes, progress, merges, audit.violations)


def test_i3_the_warm_stage_is_counted_in_versions():
    """20 steps at H = 4 are five versions of each of two fragments; a round that is open then may still be warm."""

    def tape(last, kind):
        merges = [(p, v) for v in range(1, 7) for p in (0, 1)][:last]
        rows = {(p, v): [row(name, 4 * v - 4, 4 * v, seq=2 * v + p, fragment=p) for name in "ab"] for p, v in merges}
        kinds = {at: "warm" for at in merges} | {merges[-1]: kind}
        at = {"progress": 0.1, "elapsed_s": 20.0}
        return clean()[:WARM_COMMIT] + [
            commit(v, rows[p, v], kinds[p, v], p, entry=Entry(v, 100 * p, 100, b""), **at) for p, v in merges
        ]

    for last, kind, is_right in [(10, "warm", True), (10, "steady", False), (11, "steady", True), (11, "warm", True)]:
        assert (audited(tape(last, kind)).violations == []) == is_right, (last, kind)


def test_i3_the_h_asked_for_is_no_shorter_than_the_configured():
    assert audited([replace(f, asked_every=9) if f == clean()[GAP_COMMIT] else f for f in clean()]).violations == []
    assert "was asked for" in planted(GAP_COMMIT, asked_every=7)


def test_i3_a_restart_closes_the_rounds_that_were_open():
    """Warm was over before this process began: no round of it can be that old, on a fragment never merged either."""
    rows = [row("a", 0, 10, fragment=1), row("b", 0, 11, fragment=1)]
    for epoch, tape in ((1, clean()[: GAP_COMMIT + 1]), (3, clean()[:CLOSING])):
        now = {"fragment": 1, "epoch": epoch, "elapsed_s": 25.0, "progress": 0.4}
        assert (audited([*tape, commit(1, rows, "warm", **now)]).violations == []) == (epoch == 1)
        assert audited([*tape, commit(1, rows, **now)]).violations == []


def test_i3_learners_in_order_of_their_ids():
    rows = (row("b", 4, 8, seq=2), row("a", 4, 8, seq=2))
    assert instead(GAP_COMMIT, commit(2, rows)).startswith("I3: ")


def test_i3_a_merge_settles_only_what_it_merges():
    for stray in (row("b", 4, 5, "died"), row("a", 0, 3, "fast-forward", fragment=1)):
        rows = [row("a", 4, 8, seq=2), stray, row("c", 0, 6, life=2)]
        assert instead(GAP_COMMIT, commit(2, rows)).startswith("I3: ")


def test_i3_merged_outside_a_commit():
    assert planted(DIED, rows=(row("a", 4, 5, seq=2),)).startswith("I3: ")


def test_i3_the_closing_begins_with_the_newest_versions():
    assert planted(CLOSING, versions=(1, 0)).startswith("I3: PhaseChanged closing: begins with")


@pytest.mark.parametrize("changes", [{"version": 1}, {"digest": b"0.1"}, {"fragment": 7}], ids=str)
def test_i3_a_restored_file_is_of_the_same_version(changes):
    assert planted(RESTORE, **changes).startswith("I3: Restored fragment ")


def kept_and_left():
    """The clean run up to its closing, with a kept version; and the facts of a rollback to it."""
    tape = [*clean()[:CLOSING], Kept(1, (2, 0), ("other", "1.0"), 0.4, 30.0)]
    backs = [
        SteppedBack(4, 0, 3, b"0.2", to=2, file="other", digest=b"0.2", state=b"another", theta=b""),
        SteppedBack(4, 1, 1, b"1.0", to=0, file="1.0", digest=b"1.0", state=b"1.0", theta=b""),
    ]
    return tape, [EpochStarted(4), *backs, RolledBack(4, 1)]


def test_i18_a_kept_version_is_made_of_checkpoints():
    (*tape, kept), _ = kept_and_left()
    assert audited([*tape, kept]).violations == []
    for wrong, says in (
        ({"number": 2}, "number 2 where 1 is next"),
        ({"versions": (1, 0)}, "fragment 0: version 1 in other is no checkpoint"),
        ({"files": ("other", "1.1")}, "fragment 1: version 0 in 1.1 is no checkpoint"),
        ({"files": ("other",)}, "number"),
        ({"progress": 1.5}, "progress"),
        ({"elapsed_s": 0.0}, "0.0 s of training"),
    ):
        assert says in only_line(audited([*tape, replace(kept, **wrong)]))


def test_i18_a_rollback_takes_every_fragment_to_a_kept_version():
    tape, back = kept_and_left()
    audit = audited([*tape, *back])
    assert audit.violations == [] and [at.since for at in audit.state.fragments] == [3, 1]
    assert "fragment 1: version 0 is not" in only_line(audited([*tape, *back[:2], back[-1]]))
    assert "version 7 is not kept" in only_line(audited([*tape, *back[:-1], RolledBack(4, 7)]))
    assert "epoch 3, current is 4" in only_line(audited([*tape, *back[:-1], RolledBack(3, 1)]))


def test_i12_work_on_what_was_rolled_back_is_not_merged():
    tape, back = kept_and_left()
    rows = [row("a", 10, 18, seq=3), row("c", 6, 14, seq=2, life=2)]
    merge = commit(4, rows, bases=(3, 3), epoch=4, parent=b"0.2", elapsed_s=31.0)
    assert audited([*tape, *back, merge]).violations == []
    late = commit(4, rows, bases=(3, 2), epoch=4, parent=b"0.2", elapsed_s=31.0)
    assert "c is relative to version 2" in only_line(audited([*tape, *back, late]))


def test_i18_what_is_pruned_was_there():
    tape, _ = kept_and_left()
    assert audited([*tape, Pruned(3, (1,))]).state.kept == []
    assert "removes (2,), kept are [1]" in only_line(audited([*tape, Pruned(3, (2,))]))
    assert "begins with segment 2, began with 3" in only_line(audited([*tape, Pruned(3, ()), Pruned(2, ())]))


def test_i3_going_back_after_damage_takes_the_values_before_it():
    back = SteppedBack(3, 0, 3, b"0.2", to=1, file="0.1", digest=b"0.1", state=b"state 0.1", theta=b"")
    tape = clean()[:CLOSING]
    assert audited([*tape, back]).violations == []
    assert "digest" in only_line(audited([*tape, replace(back, digest=b"0.2")]))
    assert "digest" in only_line(audited([*tape, replace(back, state=b"state 0.2")]))
    assert "goes back to 3" in only_line(audited([*tape, replace(back, to=3)]))
    assert "epoch" in only_line(audited([*tape, replace(back, epoch=2)]))
    assert "parent" in only_line(audited([*tape, replace(back, parent=b"0.1")]))
    assert "version 4 after 2" in only_line(audited([*tape, replace(back, version=4)]))


# ------------------------------------------------------------------------------------------ I5: folds


def test_i5_a_fold_that_is_not_what_was_folded():
    def version(state):
        state.fragments[0].version += 1

    def digest(state):
        state.fragments[1].digest = b"?"

    def epoch(state):
        state.epoch = 7

    def merged(state):
        state.ledger.merged += 1

    def discarded(state):
        state.ledger.discarded_steps += 1

    def settled(state):
        account = state.ledger.accounts["a/1"]
        account.settled[0].step += 1

    def went_back(state):
        state.ledger.accounts["a/1"].step -= 1

    def progress(state):
        state.progress = 0.0

    def lives(state):
        state.lives["a"].process = "another"

    def stranger(state):
        state.ledger.account("z", 1)

    def fragments(state):
        state.ledger.accounts["a/1"].settled.pop()

    changes = (version, digest, epoch, merged, discarded, settled, went_back, progress, lives, stranger, fragments)
    for change in changes:
        state = fold(clean()[:RESTORE])
        change(state)
        line = only_line(audited([*clean()[:RESTORE], state]))
        assert line.startswith(("I5: RunState", "I2: RunState", "I13: RunState")), change


def test_i5_a_fold_in_which_a_life_has_produced_less_than_was_seen_of_it():
    state = fold(clean()[:CLOSING])
    state.ledger.accounts["b/1"].step, state.ledger.accounts["b/1"].tokens = 10, 100
    state.ledger.steps, state.ledger.produced = state.ledger.steps - 1, state.ledger.produced - 20
    assert "I5: RunState: b/1 went back" in only_line(audited([*clean()[:CLOSING], state]))


def test_i5_a_fold_nobody_can_begin_with():
    state = fold(clean()[:RESTORE])
    state.ledger.produced += 1
    assert only_line(audited([state])).startswith("I2: RunState")
    state = fold(clean()[:RESTORE])
    state.phase = "asleep"
    assert only_line(audited([state])).startswith("I5: RunState: phase asleep")


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"fragment": 2}, "I3: Checkpointed fragment 2 version 1: there is no such fragment"),
        ({"version": 0}, "I5: Checkpointed fragment 0 version 0: version 0, the last checkpoint is 0, the newest 2"),
        ({"version": 3}, "I5: Checkpointed fragment 0 version 3: version 3, the last checkpoint is 0, the newest 2"),
    ],
    ids=str,
)
def test_i5_a_checkpoint_is_of_a_version_there_is_and_later_than_the_last(changes, says):
    assert planted(CHECKPOINT, **changes) == says


def test_i5_a_version_has_one_checkpoint():
    once = clean()[CHECKPOINT]
    assert instead(CHECKPOINT, once, once).startswith("I5: Checkpointed fragment 0 version 1: version 1, the last")


@pytest.mark.parametrize("entry", [Entry(1, 199, 100, b""), Entry(0, 500, 100, b""), Entry(1, 200, -1, b"")], ids=str)
def test_i5_an_entry_of_the_journal_lies_behind_all_before_it(entry):
    """The one before lies in the first file, up to byte 200."""
    fact = clean()[GAP_COMMIT]
    line = instead(GAP_COMMIT, Committed(fact.decision, msgspec.structs.replace(fact.result, entry=entry)))
    assert line.startswith("I5: Committed fragment 0 version 2: its entry") and "byte 200 of file 1" in line


def test_i5_an_entry_may_leave_bytes_out_or_begin_another_file():
    """What no record names is nobody's: a tail that a crash has torn."""
    for entry in (Entry(1, 250, 0, b""), Entry(3, 0, 100, b"")):
        facts = clean()
        fact = facts[GAP_COMMIT]
        facts[GAP_COMMIT] = Committed(fact.decision, msgspec.structs.replace(fact.result, entry=entry))
        assert audited(facts[: GAP_COMMIT + 1]).violations == []


# ------------------------------------------------------------------------------------------ I11, I12, I13, I15


def test_i11_fewer_than_the_quorum():
    line = instead(GAP_COMMIT, commit(2, [row("a", 4, 8, seq=2)]))
    assert line == "I11: Committed fragment 0 version 2: 1 merged, quorum 2"


@pytest.mark.parametrize("changes", [{"quorum": 1}, {"quorum": 3}, {"ready": 5}, {"quorum": 0}], ids=str)
def test_i11_the_quorum_is_the_configured_one(changes):
    assert planted(GAP_COMMIT, **changes).startswith("I11: ")


def test_i11_nobody_merged_at_the_end():
    assert planted(LAST_B, rows=(), parts=()).startswith("I11: ")


@pytest.mark.parametrize("base", [-1, 2, 9])
def test_i12_a_base_there_was(base):
    assert planted(GAP_COMMIT, parts=parts({"base_version": base}, {})) == (
        f"I12: Committed fragment 0 version 2: a is relative to version {base}"
    )


def test_i13_epochs_rise_by_one_and_only_the_current_commits():
    assert planted(1, epoch=2).startswith("I13: EpochStarted 2")
    assert planted(12, epoch=1).startswith("I13: EpochStarted 1: epoch 1 after 1")
    assert planted(LAST, epoch=2).startswith("I13: Committed fragment 1 version 1: epoch 2, current is 3")
    facts = clean()
    del facts[1]
    facts[6] = replace(facts[6], epoch=0)
    assert only_line(audited(facts)).startswith("I13: ")


def test_i13_lives_rise_by_one_and_keep_their_index():
    assert planted(9, life=3).startswith("I13: LifeStarted c: life 3 where 2 is next")
    assert planted(9, life=1).startswith("I13: ")
    assert planted(9, index=1).startswith("I13: ")
    assert planted(4, index=5).startswith("I13: ")


def test_i13_a_life_that_never_began():
    assert instead(GAP_COMMIT, commit(2, [row("a", 4, 8, seq=2), row("c", 0, 4, life=3)])).startswith("I13: ")
    assert instead(GAP_COMMIT, commit(2, [row("a", 4, 8, seq=2), row("d", 0, 4)])).startswith("I13: ")
    assert planted(DIED, seen=(seen("z", 1),)).startswith("I13: ")
    assert planted(6, learner="z").startswith("I13: ")
    assert planted(11, samples=(Sample("c", 3, 1, 1, (), 0, 0.0, 0, 0.0),)).startswith("I13: ")


def test_i15_a_tape_begins_with_a_run_and_only_once():
    assert only_line(audited(clean()[1:])).startswith("I15: EpochStarted 1: the tape does not begin with a run")
    assert only_line(audited([*clean(), clean()[0]])) == "I15: RunCreated: a run is created once"
    assert planted(0, config=b"{").startswith("I15: ")
    assert planted(0, digests=()).startswith("I15: ")


def test_i15_a_fork_names_a_commit_of_its_parent_and_versions_that_it_had():
    fork = msgspec.structs.replace(clean()[0], lineage=Lineage("a", 32 * b"h", (0, 0), 0))
    assert audited([fork, *clean()[1:]]).violations == []
    assert "I15: RunCreated: its parent's commit is 3 bytes" in planted(0, lineage=Lineage("a", b"abc", (1, 2)))
    assert "its parent's versions are ()" in planted(0, lineage=Lineage("a", 32 * b"h", ()))
    assert "its parent's versions are (1, -1)" in planted(0, lineage=Lineage("a", 32 * b"h", (1, -1)))
    assert "version 0 of its parent, at versions (0, 3)" in planted(0, lineage=Lineage("a", 32 * b"h", (0, 3), 0))


# ------------------------------------------------------------------------------------------ never back


def test_phases_go_forward_one_by_one():
    assert planted(5, phase="closing").startswith("phase: ")
    assert planted(CLOSING, phase="training").startswith("phase: ")
    assert planted(CLOSING, phase="asleep").startswith("phase: ")


def test_a_merge_is_of_the_stage_and_phase_the_run_is_in():
    assert "a closing merge" in instead(GAP_COMMIT, commit(2, [row("a", 4, 8, seq=2)], "closing", elapsed_s=20.0))
    early = replace(clean()[WARM_COMMIT], stage="steady", **STEADY)
    assert instead(WARM_COMMIT, early).startswith("phase: ")
    late = commit(3, [row("b", 4, 11, seq=2), row("c", 6, 8, seq=2, life=2)], "warm", epoch=3, progress=0.5)
    assert instead(CLOSING, late).startswith("phase: ")
    cool = replace(clean()[GAP_COMMIT], stage="cool", **PLAIN)
    assert instead(GAP_COMMIT, cool).startswith("phase: ")
    facts = clean()
    del facts[5]
    assert "run created" in only_line(audited(facts))


def test_time_and_progress_never_go_back():
    for at, changes in [
        (GAP_COMMIT, {"progress": 0.05}),
        (GAP_COMMIT, {"progress": 1.5}),
        (GAP_COMMIT, {"progress": math.nan}),
        (GAP_COMMIT, {"elapsed_s": 9.0}),
        (GAP_COMMIT, {"elapsed_s": math.nan}),
        (DIED, {"elapsed_s": 9.0}),
        (9, {"elapsed_s": 11.0}),
        (11, {"elapsed_s": 11.0}),
        (PAUSED, {"elapsed_s": math.inf}),
        (CLOSING, {"elapsed_s": 24.0}),
    ]:
        assert planted(at, **changes).startswith("clock: "), (at, changes)


# ------------------------------------------------------------------------------------------ measured beside the run


def test_the_closing_begins_when_the_budget_is_spent_by_what_is_not_discarded():
    facts = clean()
    larger = replace(CONFIG, run=replace(CONFIG.run, steps=9))  # 27 steps where 26 were taken and not discarded
    facts[0] = replace(facts[0], config=configs.encode(larger))
    assert only_line(audited(facts)).startswith("budget: PhaseChanged closing: 0.96")


@pytest.mark.parametrize("alone", [Stretch(0, 0, 3, 30), Stretch(0, 0, 9, 10**6), Stretch(0, 0, 10**6, 30)])
def test_only_what_was_done_and_is_longer_than_the_bound_spends_no_budget(alone):
    facts = clean()
    facts[0] = replace(facts[0], config=configs.encode(replace(CONFIG, learner=configs.Learner(alone_steps_max=3))))
    facts[CLOSED] = replace(facts[CLOSED], seen=(replace(facts[CLOSED].seen[0], alone=alone), *facts[CLOSED].seen[1:]))
    assert only_line(audited(facts)).startswith("budget: PhaseChanged closed: it was not alone like that")


@pytest.mark.parametrize(
    "changes", [{"versions": (4, 0)}, {"versions": (2,)}, {"versions": (-1, 0)}, {"progress": 1.5}, {"tokens": 10**6}]
)
def test_what_was_evaluated_must_have_been_there(changes):
    assert "evaluated" in planted(EVALUATION, **changes)


@pytest.mark.parametrize("wrong", [("c", 3, 1, 10), ("d", 1, 1, 10), ("c", 2, 5, 60), ("c", 1, 9, 90)], ids=str)
def test_i13_buffers_are_of_a_life_that_was_and_never_older_than_those_before(wrong):
    before, behind = clean()[: GAP_COMMIT + 1], clean()[GAP_COMMIT + 1 :]
    given = Buffered("c", 2, 6, 60, "file", 20.0)
    assert not audited([*before, given, *behind]).violations
    assert only_line(audited([*before, given, Buffered(*wrong, "file", 20.0), *behind])).startswith("I13: ")
