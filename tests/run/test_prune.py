"""Pruning a run: what goes, what stays, what can still be done, and that a crash anywhere in it does no harm."""

import errno
import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest

from cli.called import called
from node.pair import Pair, config_of
from skerry.core.facts import Committed, Pruned
from skerry.core.state import RunState, state_of
from skerry.errors import FileDamaged, ReplayError, StoreError, TapeDamaged
from skerry.node import versions
from skerry.proof.sim.files import Crash, CrashFiles, Inode, Session
from skerry.run import repair
from skerry.run.export import write_model
from skerry.run.facts import entries_of, first_segment, fragments_of, history_of, read_run
from skerry.run.prune import DAY_S, _bytes, carry_out, choose, freed, make_way
from skerry.run.replay import replay
from skerry.run.rollback import roll_back
from skerry.run.status import status_of
from skerry.run.tally import tally
from skerry.store import Store
from skerry.store.files import DiskFiles

IN_MEMORY = Path("/run")
STEPS = 240


def config(record="full", keep_every=0.2):
    checked = config_of(
        learners=2, steps=STEPS, store={"record": record, "keep_every": keep_every, "checkpoint_every": 4},
        wire={"codec_up": "int8", "codec_down": "int8"}, outer={"rule": "nesterov", "lr": 0.3, "momentum": 0.9},
    )  # fmt: skip
    return msgspec.structs.replace(checked, store=msgspec.structs.replace(checked.store, segment_bytes=4000))


def train(root, settings, until=None):
    """To its end, or until so many versions are kept; a day passes in every second of its life."""
    with Pair(root, settings) as pair:
        pair.store._clock = lambda: pair.now * DAY_S
        pair.join("a")
        pair.join("b", 2)
        while len(pair.syncer.machine.state.kept) < (until or 3):
            pair.tick()
            pair.syncer.tidy()
        if until is None:
            pair.close()
        pair.ended_at = pair.now * DAY_S
    return pair


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("closed") / "run", config())


@pytest.fixture
def root(closed, tmp_path):
    return shutil.copytree(closed.root, tmp_path / "run")


def pruned(root, now=0.0, days=None, before=None, kept=None):
    with Store.open(root) as store:
        state = state_of(store.records)
        version = None if before is None else state.kept_version(before)
        choice = choose(store, state, now, days, version, kept)
        told = freed(root, state, choice)
        bytes_before = size_of(root)
        carry_out(store, state, choice)
    assert bytes_before - size_of(root) == pytest.approx(sum(told.values()), abs=20_000), "but for a fold"
    return choice


def size_of(root):
    return sum(path.stat().st_size for folder in ("tape", "files", "record") for path in (root / folder).iterdir())


def state_in(root):
    with Store.open(root, readonly=True) as store:
        return state_of(store.records)


def exported(root, out):
    with Store.open(root, readonly=True) as store:
        return write_model(store, state_of(store.records), out)


def replayed(root, **options):
    with Store.open(root, readonly=True) as store:
        return replay(store, **options)


def rolled_back(pair, number):
    """To the kept version of this number, and served again."""
    with Store.open(pair.root) as store:
        roll_back(store, state_of(store.records), number)
    pair.restart()


def check_replays(root):
    report = replayed(root)
    assert report.identical and report.recomputed > 0 and report.model_sha256 == exported(root, root / "m")


def segments_in(root):
    return sorted(int(path.name[:6]) for path in (root / "tape").glob("*.seg"))


# ---------------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def full_disk(monkeypatch):
    """Nothing can be written until a file was removed; reading and removing go on."""
    is_full = True

    def write(files, *about):
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device", about[0])
        return whole[0](files, *about)

    def remove(files, name):
        nonlocal is_full
        is_full = False
        whole[1](files, name)

    whole = DiskFiles.write, DiskFiles.remove
    monkeypatch.setattr(DiskFiles, "write", write)
    monkeypatch.setattr(DiskFiles, "remove", remove)


@pytest.mark.parametrize("words", [["--before", 2], ["--kept", 1]], ids=lambda words: words[0])
def test_a_full_disk_is_pruned_all_the_same(root, tmp_path, capsys, full_disk, words):
    model = exported(root, tmp_path / "model")
    code, _, said = called(capsys, "prune", root, *words)
    assert (code, said) == (0, "")
    state = state_in(root)
    assert len(state.kept) < 4 and exported(root, tmp_path / "again") == model
    assert {path.name for path in (root / "files").iterdir()} == state.files
    check_replays(root)


def test_what_makes_way_is_what_was_to_go_and_another_prune_ends_it(root, tmp_path):
    """Broken off between the files and the record that says so: the run is whole, and says the same when pruned."""
    state = state_in(root)
    with Store.open(root, readonly=True) as store:
        choice = choose(store, state, 0.0, before=state.kept_version(2))
    make_way(root, state, choice)
    assert {path.name for path in (root / "record").iterdir()} == choice.payloads
    with pytest.raises(StoreError, match="missing"):
        replayed(root)
    pruned(root, before=2)
    check_replays(root)


def test_what_somebody_removes_meanwhile_frees_nothing(root):
    there = next(iter((root / "record").iterdir()))
    assert _bytes(iter([root / "record" / "gone", there])) == there.stat().st_size


# ---------------------------------------------------------------------------------------------- what goes


def test_before_a_kept_version_goes_what_replay_from_it_does_not_need(root, tmp_path):
    before, model = replayed(root), exported(root, tmp_path / "model")
    assert before.identical and before.skipped == 0
    choice = pruned(root, before=2)
    state = state_in(root)
    assert segments_in(root)[0] == choice.first == state.first_segment > 1
    assert [version.number for version in state.kept] == [2, 3, 4]
    after = replayed(root)
    assert after.identical and 0 < after.merges < before.merges and after.merges + choice.merges == before.merges
    assert 0 < after.recomputed == after.merges - after.skipped
    assert f"begins with segment {choice.first}, after {choice.merges} merges" in after.begins
    assert after.model_sha256 == before.model_sha256 == model == exported(root, tmp_path / "again")


def test_what_is_older_than_some_days_goes(root, closed):
    choice = pruned(root, now=closed.ended_at, days=8)
    assert choice.first > 1 and segments_in(root)[0] == choice.first
    with Store.open(root, readonly=True) as store:
        assert (
            max(record.at for record in history_of(store) if record.segment == choice.first)
            >= closed.ended_at - 8 * DAY_S
        )
    assert replayed(root).identical


def test_nothing_goes_that_is_young(root, closed):
    files = sorted(path.name for folder in ("tape", "files", "record") for path in (root / folder).iterdir())
    before = [record.body for record in Store.open(root, readonly=True).history()]
    choice = pruned(root, now=closed.ended_at, days=1000)
    assert (choice.first, choice.kept, choice.merges) == (1, (), 0)
    assert [record.body for record in Store.open(root, readonly=True).history()] == before
    left = sorted(path.name for folder in ("tape", "record") for path in (root / folder).iterdir())
    assert set(left) <= set(files)


def test_everything_may_go_and_the_run_is_still_there(root, closed, tmp_path):
    model = exported(root, tmp_path / "model")
    choice = pruned(root, now=closed.ended_at + DAY_S, days=0)
    assert segments_in(root) == [choice.first] and not list((root / "record").iterdir())
    assert state_in(root).kept == [] and choice.merges == state_in(root).merges
    assert exported(root, tmp_path / "again") == model
    report = replayed(root)
    assert report.identical is None and report.merges == report.recomputed == 0
    assert "and none has followed" in report.begins
    assert status_of(root)["serving"] == "closed"


def test_only_kept_versions_may_go(root):
    numbers = [version.number for version in state_in(root).kept]
    gone = {c.file for version in state_in(root).kept[:-1] for c in version.checkpoints}
    choice = pruned(root, kept=1)
    state = state_in(root)
    assert choice.first == 1 and choice.kept == tuple(numbers[:-1])
    assert [version.number for version in state.kept] == numbers[-1:] and state.last_kept.number == numbers[-1]
    assert not any((root / "files" / file).exists() for file in gone - state.files)
    report = replayed(root)
    assert report.identical and report.skipped == 0 and report.begins == ""


def test_without_contributions_the_choices_are_audited_from_where_the_tape_begins(tmp_path):
    pair = train(tmp_path / "run", config("decisions"))
    choice = pruned(pair.root, before=2)
    report = replayed(pair.root)
    assert choice.first > 1 and report.identical is None and report.recomputed == 0 and report.begins


def test_pruning_twice_is_pruning_once(root):
    first = pruned(root, before=2)
    tape = [record.body for record in Store.open(root, readonly=True).history(first.first)]
    assert pruned(root, before=2) == first._replace(kept=())
    assert [record.body for record in Store.open(root, readonly=True).history(first.first)] == tape


# ---------------------------------------------------------------------------------------------- going on


@pytest.fixture
def under_way(tmp_path):
    return train(tmp_path / "under way" / "run", config(), until=2)


def test_a_pruned_run_goes_on_to_its_end(under_way):
    pair = under_way
    pruned(pair.root, before=2)
    assert status_of(pair.root)["serving"] == "paused"
    pair.restart()
    with pair:
        pair.close()
        merges = pair.syncer.machine.state.merges
        assert tally(pair.store).merges_before + len(tally(pair.store).merges) == merges
    report = replayed(pair.root)
    assert report.identical and report.recomputed > 0 and report.model_sha256
    assert [version.number for version in state_in(pair.root).kept] == [2, 3, 4]


def test_a_pruned_run_keeps_the_next_version_when_it_is_due_and_not_before(under_way):
    pair = under_way
    pruned(pair.root, kept=0)
    pair.restart()
    with pair:
        pair.run(3)
        assert pair.syncer.machine.state.kept == []
        pair.close()
        assert [version.number for version in pair.syncer.machine.state.kept] == [3, 4]


def test_a_pruned_run_can_be_rolled_back_and_replayed(under_way):
    pair = under_way
    pruned(pair.root, before=2)
    rolled_back(pair, 2)
    with pair:
        pair.close()
    check_replays(pair.root)


def test_a_run_rolled_back_to_what_is_not_on_the_tape_any_more_replays(under_way):
    pair = under_way
    rolled_back(pair, 1)
    with pair:
        pair.run(20)
        pair.syncer.store.rotate(msgspec.msgpack.encode(pair.syncer.machine.state))
    pruned(pair.root, now=pair.now * DAY_S * 2, days=0, kept=2)
    rolled_back(pair, 1)
    with pair:
        pair.close()
    check_replays(pair.root)


def test_exact_repair_says_that_the_tape_lacks_its_merges(under_way, caplog):
    root = under_way.root
    under_way.restart()
    with under_way:
        at = under_way.syncer.machine.state.fragments[0]
        under_way.until(lambda: at.version > at.checkpoints[-1].version)
    pruned(root, now=under_way.ended_at + DAY_S, days=0)
    state = state_in(root)
    fragment, at = fragments_of(state.created)[0], state.fragments[0]
    for journal in (root / "journal").iterdir():
        journal.write_bytes(bytes(journal.stat().st_size))
    with Store.open(root) as store:
        (damage, *_) = repair.damaged(store, state)
        assert damage.fragment == fragment and repair.remake(store, state, damage) is None
        assert "the tape does not tell of its merge any more" in caplog.text
        back = repair.step_back(store, state, damage)
        assert back.to == at.checkpoints[-1].version


# ---------------------------------------------------------------------------------------------- refused, damaged


def test_a_tape_that_is_pruned_while_it_is_replayed_is_read_again_from_where_it_begins_then(root):
    readings = 0

    def read(store):
        nonlocal readings
        readings += 1
        if readings == 1:
            pruned(root, before=2)
        return replay(store)

    report = read_run(root, read)
    assert readings == 2 and report.identical and report.begins


def test_without_one_learner_needs_the_whole_tape(root):
    pruned(root, before=2)
    with pytest.raises(ReplayError, match="pruned, and --exclude needs all of it"):
        replayed(root, exclude="a")


def test_a_segment_that_was_not_pruned_is_missed(root):
    choice = pruned(root, before=2)
    (root / f"tape/{choice.first:06d}.seg").unlink()
    with pytest.raises(TapeDamaged, match=f"{choice.first:06d}.seg is missing"):
        read_run(root, replay)


def test_a_kept_file_that_has_rotted_is_named_by_replay(root):
    pruned(root, before=2)
    file = state_in(root).kept[0].checkpoints[0].file
    (root / "files" / file).write_bytes(b"rotten")
    with pytest.raises(FileDamaged, match=file):
        replayed(root)


# ---------------------------------------------------------------------------------------------- crashes


def loaded(root):
    """A run directory in memory, as it lies on the disk."""
    files = CrashFiles()
    for folder in ("tape", "files", "record", "journal"):
        for path in sorted((root / folder).iterdir()):
            data = path.read_bytes()
            inode = Inode(data, data)
            files.cache[f"{folder}/{path.name}"] = files.disk[f"{folder}/{path.name}"] = inode
    return files


def prune_in(files, **wanted):
    session = Session(files)
    try:
        store = Store.open(IN_MEMORY, files=session, clock=lambda: 0.0)
        state = state_of(store.records)
        before = state.kept_version(wanted["before"])
        carry_out(store, state, choose(store, state, 0.0, before=before))
    finally:
        session.close()


@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
def test_a_crash_at_every_file_operation_leaves_a_run_that_is_whole(under_way, power):
    """It can be read from where it says it begins, all it says it keeps is there, and pruning again ends it."""
    whole = loaded(under_way.root)
    prune_in(whole, before=2)
    operations = whole.operations
    final = sorted(name for name in whole.cache if not name.startswith("tape/"))
    for at in range(1, operations + 1):
        files = loaded(under_way.root)
        files.plan(crash_at=at)
        with pytest.raises(Crash):
            prune_in(files, before=2)
        if power:
            files.power_cut()
        files.plan()
        check_whole(files)
        prune_in(files, before=2)
        assert sorted(name for name in files.cache if not name.startswith("tape/")) == final, at
        first = check_whole(files)
        assert not [name for name in files.cache if name.startswith("tape/") and int(name[5:11]) < first]


def check_whole(files):
    session = Session(files)
    try:
        with Store.open(IN_MEMORY, files=session, clock=lambda: 0.0) as store:
            state = state_of(store.records)
            told = [fact for _, fact in entries_of(store)]
            assert isinstance(told[0], RunState) == (state.first_segment > 1)
            assert state.first_segment == 1 or any(isinstance(fact, Pruned | RunState) for fact in told)
            fragments = fragments_of(state.created)
            versions.newest(store, state, fragments)
            for version in [state.start, *state.kept]:
                for fragment in fragments:
                    versions.whole(store, fragment, version.checkpoints[fragment.index])
            for fact in told:
                if isinstance(fact, Committed):
                    assert hashlib.sha256(store.get(fact.result.payloads, "record")).hexdigest() == fact.result.payloads
            return first_segment(store)
    finally:
        session.close()
