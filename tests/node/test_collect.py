"""What a syncer removes from its run directory, and when: on real files, over starts, stops and crashes."""

import shutil

import msgspec
import pytest

from node.pair import Pair, config_of
from skerry.core.audit import Audit
from skerry.core.events import Interrupted
from skerry.core.state import decode_fact, state_of
from skerry.node import versions
from skerry.store import Store


@pytest.fixture
def pair(tmp_path):
    with Pair(tmp_path / "run", config_of(store={"checkpoint_every": 4, "keep_every": 0})) as pair:
        pair.join("a")
        yield pair


def merge(pair, count):
    """Go on for so many merges."""
    wanted = pair.syncer.machine.state.merges + count
    pair.until(lambda: pair.syncer.machine.state.merges >= wanted)


def stop(pair):
    """In order, with its last checkpoints."""
    pair.syncer.handle(Interrupted(), pair.now)
    pair.syncer.look(pair.now)
    assert pair.syncer.finished == "interrupted"


def journal_in(pair):
    return {int(path.stem) for path in (pair.root / "journal").iterdir()}


def files_in(pair):
    return {path.name for path in (pair.root / "files").iterdir()}


def check_tape(pair):
    audit = Audit()
    for record in pair.store.history():
        audit.take(decode_fact(record.body))
    assert audit.violations == []


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_however_many_processes_there_were_no_more_lies_there_than_the_run_needs(pair, is_killed):
    """Each has far fewer commits than are collected behind now and then."""
    for _ in range(24):
        merge(pair, 3)
        if not is_killed:
            stop(pair)
            state = pair.syncer.machine.state
            assert journal_in(pair) == state.journal | {state.journal_file} and files_in(pair) == state.files
        pair.restart()
    state = pair.syncer.machine.state
    merge(pair, 1)
    assert state.epoch == 25 and state.journal_file == 25
    assert journal_in(pair) >= state.journal and len(journal_in(pair)) < 12
    assert files_in(pair) >= state.files and len(files_in(pair) - state.files) < 4, "what that merge freed"
    check_tape(pair)


def test_a_number_is_not_given_out_again_though_no_file_of_the_journal_is_left(pair):
    """As after a stop at which every fragment has two new checkpoints, or a repair of a journal that was lost."""
    merge(pair, 3)
    stop(pair)
    shutil.rmtree(pair.root / "journal")
    pair.restart()
    merge(pair, 1)
    assert journal_in(pair) == {2}
    pair.store.rotate(msgspec.msgpack.encode(pair.syncer.machine.state))
    stop(pair)
    shutil.rmtree(pair.root / "journal")
    pair.restart()
    merge(pair, 1)
    assert journal_in(pair) == {3}, "a fold says it too"
    check_tape(pair)


def test_a_process_that_has_not_merged_removes_nothing(pair):
    """With an older copy of the tape, what that does not name is what the newer one needs."""
    merge(pair, 30)
    older, newer = pair.root.parent / "older", pair.root.parent / "newer"
    shutil.copytree(pair.root / "tape", older)
    pair.restart()
    merge(pair, 9)
    pair.store.close()
    (pair.root / "tape").rename(newer)
    older.rename(pair.root / "tape")
    before = journal_in(pair), files_in(pair)
    pair._open()
    pair.syncer.commits_per_collect = 1
    pair.syncer.tidy()
    stop(pair)
    assert journal_in(pair) == before[0] and files_in(pair) >= before[1]
    pair.store.close()
    shutil.rmtree(pair.root / "tape")
    newer.rename(pair.root / "tape")
    with Store.open(pair.root, readonly=True) as store:
        versions.newest(store, state_of(store.records), pair.fragments)
