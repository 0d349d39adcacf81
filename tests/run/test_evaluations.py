"""Reading a model beside its run, and keeping what was found until it can be put on the tape."""

import math

import numpy as np
import pytest

from node.pair import Pair, config_of
from skerry.core.events import Interrupted
from skerry.core.facts import Evaluated
from skerry.core.state import state_of
from skerry.errors import FileDamaged, Refusal, StoreError, TapeDamaged
from skerry.run.evaluations import EVALUATIONS, curve, fact_of, keep, newest, put_on_tape, read, waiting
from skerry.run.export import read_model
from skerry.run.facts import facts_of
from skerry.run.last_words import STATUS, SUMMARY, last_words, whole_state
from skerry.run.provenance import PROVENANCE, commands_of
from skerry.run.replay import replay
from skerry.run.status import status_of
from skerry.run.tally import tally
from skerry.store import Store


@pytest.fixture
def root(tmp_path):
    """A closed run that has kept a version."""
    with Pair(tmp_path / "run", config_of(steps=60, store={"keep_every": 0.25, "record": "full"})) as pair:
        pair.join("a")
        pair.until(lambda: pair.syncer.machine.state.kept)
        pair.close()
    return tmp_path / "run"


def on_tape(root):
    with Store.open(root, readonly=True) as store:
        return [fact for _, fact in facts_of(store) if isinstance(fact, Evaluated)]


def is_same(arrays, others):
    return arrays.keys() == others.keys() and all(np.array_equal(arrays[name], others[name]) for name in arrays)


# ---------------------------------------------------------------------------------------------- the model


def test_the_newest_model_is_the_exported_one(root):
    with Store.open(root, readonly=True) as store:
        state = state_of(store.records)
        model, exported = read(root), read_model(store, state)
    assert is_same(model.arrays, exported)
    assert (model.versions, model.progress) == (tuple(at.version for at in state.fragments), state.progress)
    assert model.tokens == state.ledger.merged


def test_a_kept_version_the_start_and_what_was_before_the_end(root):
    state = whole_state(root)
    start, kept, before, newest = read(root, 0), read(root, 1), read(root, before_close=True), read(root)
    assert start.versions == (0,) * len(state.fragments) and (start.progress, start.tokens) == (0.0, 0)
    assert kept.versions == state.kept[0].versions and kept.tokens is None
    assert before.versions == state.before_close
    assert not any(is_same(one.arrays, newest.arrays) for one in (start, kept))


def test_what_is_not_there_is_refused(root, tmp_path):
    with pytest.raises(Refusal, match="version 9 is not kept"):
        read(root, 9)
    with pytest.raises(StoreError, match="holds no run: check the path"):
        read(tmp_path / "nowhere")


def test_files_that_were_collected_meanwhile_are_looked_for_again(tmp_path, monkeypatch):
    """The first look finds the tape as it was before the syncer wrote its checkpoints and collected the older ones."""
    with Pair(tmp_path / "run", config_of(steps=400, store={"checkpoint_every": 2})) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 4)
        looks, opened = [], Store.open.__func__

        def opened_late(cls, *words, **options):
            store = opened(cls, *words, **options)
            looks.append(store)
            if len(looks) == 1:
                before = min(pair.versions)
                for _ in range(200):
                    pair.tick()
                    pair.syncer.tidy()
                assert min(pair.versions) > before + 8
            return store

        monkeypatch.setattr(Store, "open", classmethod(opened_late))
        model = read(tmp_path / "run")
        assert len(looks) > 1 and model.versions == tuple(pair.versions)


def test_what_is_damaged_for_good_is_said(root):
    for file in (root / "files").iterdir():
        file.unlink()
    with pytest.raises(FileDamaged, match="is missing"):
        read(root)


# ---------------------------------------------------------------------------------------------- what was found


def test_what_was_found_waits_in_a_file_and_goes_on_the_tape_once(root):
    model = read(root)
    first, second = fact_of(model, {"loss": 2.5}), fact_of(model, {"loss": math.nan, "hits": 3})
    for one in (first, second):
        keep(root, one)
    assert waiting(root) == [first, second] and second.figures == {"loss": None, "hits": 3.0}
    put_on_tape(root)
    put_on_tape(root)
    assert on_tape(root) == [first, second] and not (root / EVALUATIONS).exists() and waiting(root) == []


def test_a_crash_behind_the_commit_doubles_nothing(root):
    keep(root, fact_of(read(root), {"loss": 2.5}))
    lines = (root / EVALUATIONS).read_bytes()
    put_on_tape(root)
    (root / EVALUATIONS).write_bytes(lines)
    put_on_tape(root)
    assert len(on_tape(root)) == 1 and not (root / EVALUATIONS).exists()


def test_nothing_is_put_on_a_tape_that_was_cut_off(root):
    keep(root, fact_of(read(root), {"loss": 2.5}))
    (root / STATUS).write_text('{"merges": 10000}')
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(TapeDamaged, match=r"truncated: the tape ends with [0-9]+ merges, status.json says 10000"):
        put_on_tape(root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


LINE = b'{"type":"Evaluated","versions":[%s],"progress":%s,"tokens":%s,"figures":{"%s":%s},"at":%s}\n'
LONG = b"1" + b"0" * 400


@pytest.mark.parametrize(
    "spoiled",
    [
        b"[]\n", b"\xff\n", b"[" * 10**5, b'{"type":' + b"[" * 10**5,
        LINE % (b"1", b"0.1", LONG, b"loss", b"1", b"1"), LINE % (LONG, b"0.1", b"1", b"loss", b"1", b"1"),
        LINE % (b"1", LONG, b"1", b"loss", b"1", b"1"), LINE % (b"1", b"0.1", b"1", b"loss", LONG, b"1"),
        LINE % (b"1", b"0.1", b"1", b"loss", b"1", b"1e300"), LINE % (b"1", b"0.1", b"-1", b"loss", b"1", b"1"),
        LINE % (b"1", b"0.1", b"1", b"\xff\xfe", b"1", b"1"),
    ],
    ids=range(11),
)  # fmt: skip
def test_what_is_no_evaluation_is_refused_and_ends_nobody_who_looks(root, spoiled):
    """A syncer puts the newest into each status, and a command that reads the run shows what it can."""
    (root / EVALUATIONS).write_bytes(spoiled)
    with pytest.raises(StoreError, match=r"evaluations.jsonl: cannot be read"):
        waiting(root)
    with Store.open(root, readonly=True) as store:
        assert newest(root) is None and curve(root, store.records) == []
    assert status_of(root)["serving"] == "closed"


def test_spoiled_files_beside_the_tape_end_nobody_who_looks(root):
    for spoiled in (b"\xff", b'{"at":1.0,"command":"\xff","versions":{}}\n', b"[" * 10**5, LONG):
        for name in (PROVENANCE, STATUS, SUMMARY):
            (root / name).write_bytes(spoiled)
        assert commands_of(root) == [] and last_words(root) == [] and status_of(root)["serving"] == "closed"


def test_readers_of_the_tape_know_it(root):
    """Replay, status and tally; the run stays closed."""
    keep(root, fact_of(read(root), {"loss": 2.5}))
    put_on_tape(root)
    with Store.open(root, readonly=True) as store:
        report = replay(store, threads=1)
        assert [one.figures for one in tally(store).evaluated] == [{"loss": 2.5}]
    assert report.violations == [] and report.first_difference is None and report.recomputed
    assert status_of(root)["serving"] == "closed"


def test_a_paused_run_stays_paused(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=400)) as pair:
        pair.join("a")
        pair.run(40)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
    keep(tmp_path / "run", fact_of(read(tmp_path / "run"), {"loss": 2.5}))
    put_on_tape(tmp_path / "run")
    assert status_of(tmp_path / "run")["serving"] == "paused"
