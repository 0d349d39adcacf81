"""Reading a run that is being served: what a reader is about to read may be collected before it does."""

import pytest

from node.pair import Pair, config_of
from skerry.core.state import state_of
from skerry.errors import FileDamaged, FileMissing
from skerry.run.export import write_model
from skerry.run.facts import READINGS_MAX, read_run


@pytest.fixture
def pair(tmp_path):
    with Pair(tmp_path / "run", config_of(store={"checkpoint_every": 2, "keep_every": 0})) as pair:
        pair.store.journal.file_bytes = 1  # each entry has a file
        pair.syncer.commits_per_collect = 1
        pair.join("a")
        pair.until(lambda: min(pair.versions) > 6)
        yield pair


def serve(pair):
    """Go on until nothing is left of what the versions of now can be had from."""
    files, entries = pair.syncer.machine.state.files, pair.syncer.machine.state.journal
    files -= set(pair.syncer.machine.state.created.files)
    while files & pair.syncer.machine.state.files or entries & pair.syncer.machine.state.journal:
        pair.tick()
        pair.syncer.tidy()


class Exporting:
    """An export of a run that is served on between the fold of its tape and the first file, so many times."""

    def __init__(self, pair, times, out):
        self.pair, self.times, self.out, self.calls = pair, times, out, 0

    def __call__(self, store):
        state = state_of(store.records)
        self.calls += 1
        if self.calls <= self.times:
            serve(self.pair)
        return state.merges, write_model(store, state, self.out)


def test_what_was_collected_meanwhile_is_read_again_from_the_tape_as_it_is_now(pair, tmp_path):
    exporting = Exporting(pair, 2, tmp_path / "model")
    merges, digest = read_run(pair.root, exporting)
    assert exporting.calls == 3 and merges == pair.syncer.machine.state.merges
    again = read_run(pair.root, Exporting(pair, 0, tmp_path / "again"))
    assert again == (merges, digest) and sorted(path.name for path in tmp_path.iterdir()) == ["again", "model", "run"]


def test_a_run_that_is_always_faster_is_given_up_and_what_is_missing_is_named(pair, tmp_path):
    exporting = Exporting(pair, READINGS_MAX, tmp_path / "model")
    with pytest.raises(FileMissing, match=f"^{pair.root}/files/.* is missing"):
        read_run(pair.root, exporting)
    assert exporting.calls == READINGS_MAX and not (tmp_path / "model").exists()


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "rotten"])
def test_what_is_lost_or_rotten_is_said_at_once(pair, tmp_path, is_missing):
    for checkpoint in pair.syncer.machine.state.fragments[1].checkpoints:
        file = pair.root / "files" / checkpoint.file
        file.unlink() if is_missing else file.write_bytes(b"rotten")
    exporting = Exporting(pair, 0, tmp_path / "model")
    with pytest.raises(FileDamaged, match="is missing" if is_missing else "differs from what was written"):
        read_run(pair.root, exporting)
    assert exporting.calls == 1
