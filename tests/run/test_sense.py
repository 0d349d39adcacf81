"""A tape with a whole chain whose facts cannot be true: damage by its place to every reader, and no traceback."""

import json
import shutil

import msgspec
import pytest

from cli.called import called
from node.pair import Pair, config_of
from skerry.core.facts import (
    COUNT_MAX,
    Buffered,
    Checkpointed,
    Discarded,
    EpochStarted,
    Injected,
    Kept,
    LifeStarted,
    Paused,
    PhaseChanged,
    Restored,
    Row,
    RunCreated,
    Sample,
    Sampled,
    Seen,
    SteppedBack,
    Stretch,
    Witnessed,
)
from skerry.core.state import RunState, decode_fact
from skerry.errors import TapeDamaged
from skerry.page.feed import Feed
from skerry.run.facts import history_of
from skerry.run.history import history_in
from skerry.run.status import status_of
from skerry.run.tally import tally
from skerry.store import Store

FIGURES = (1, 1, 1, (0.1,), 0, 0.0, 0, 0.0, 0, 0.0, 0, 0.0, 1.0, 1.0)
IN_THE_STATE = {
    "a seventh life": LifeStarted("b", 7, "p", 1, 0.0),
    "a stranger is forgotten": LifeStarted("b", 1, "p", 1, 0.0, forgotten=("nobody",)),
    "who has worked is forgotten": LifeStarted("b", 1, "p", 1, 0.0, forgotten=("a",)),
    "a ninth epoch": EpochStarted(9),
    "a fragment that is not there was given up": Discarded((Row("a", 1, 99, 0, 0, 5, 5, "died"),), (), 1.0),
    "a fragment that is not there is restored": Restored(
        fragment=99, version=1, file="a" * 32, digest=b"", state=b"", theta=b"", source="x"
    ),
    "a fragment that is not there is in a file": Checkpointed(99, 0, "a" * 32, b""),
    "a version that is in another file": Checkpointed(0, 0, "a" * 32, b""),
    "other files are kept": Kept(1, (0, 0, 0), ("a" * 32,) * 3, 0.5, 1.0),
    "a stranger is turned out": Witnessed("nobody", 1, "expelled", 1.0),
}
IN_THE_HISTORY = {
    "a stranger is lost": Witnessed("nobody", 1, "lost", 1.0),
    "a stranger steps": Witnessed("nobody", 1, "stepping", 1.0),
    "a stranger is measured": Sampled((Sample("nobody", *FIGURES),), 1.0),
    "a stranger's work is given up": Discarded((Row("nobody", 1, 0, 0, 0, 5, 5, "died"),), (), 1.0),
}


NESTED = b"[" * 300_000
UNREADABLE = {
    "a configuration of lists": {"config": b"[[[]]]"},
    "a configuration nested without end": {"config": NESTED},
    "a table of another kind": {"fragments": b"{}"},
    "a table nested without end": {"fragments": NESTED},
    "a layout nested without end": {"layout": NESTED},
    "files whose names are too long": {"files": ("x" * 1000,) * 3},
    "files elsewhere": {"files": ("../../../etc/passwd",) * 3},
    "what else there is, nested without end": {"contents": b"\x81\xa1x" + b"\x91" * 300_000},
}
PASSWORDS = "../../../etc/passwd"
OTHER = {"digest": b"", "state": b"", "theta": b""}
IMPOSSIBLE = {
    "a fault before all time": Injected("kill", "a", "", -1e300, 1.0),
    "a fault until no time": Injected("kill", "a", "", 1.0, float("nan")),
    "a checkpoint elsewhere": Checkpointed(0, 1, PASSWORDS, b""),
    "files elsewhere are kept": Kept(1, (0, 0, 0), (PASSWORDS,) * 3, 0.5, 1.0),
    "a version from elsewhere is restored": Restored(fragment=0, version=0, file=PASSWORDS, source="x", **OTHER),
    "buffers elsewhere": Buffered("a", 1, 1, 1, PASSWORDS, 1.0),
    "a step back to elsewhere": SteppedBack(1, 0, 1, b"", 0, PASSWORDS, b"", b"", b""),
    "steps that nobody can have done": Paused((Seen("a", 1, 1 << 62, 0, 0, 0, 0.0),), 1.0),
    "steps alone that nobody can": Paused((Seen("a", 1, 9, 9, 0, 0, 0.0, Stretch(0, 0, (1 << 63) - 1, 0)),), 1.0),
    "bytes below nothing": LifeStarted("a", 2, "p", 0, 1.0, seen=(Seen("a", 1, 9, 9, -1, 0, 0.0),)),
    "work that nobody can have done": Discarded((Row("a", 1, 0, 0, 0, 5, 1 << 60, "died"),), (), 1.0),
}


@pytest.fixture
def begun(tmp_path):
    """A run whose creation is another than its syncer's; where that is."""

    def begin(**other):
        with Pair(tmp_path / "runs" / "begun", config_of()) as pair:
            pair.join("a")
        first, *rest = facts_in(pair.root)
        rewrite(pair.root, [msgspec.structs.replace(first, **other), *rest])
        return pair.root, f"{pair.root}/tape/000001.seg record 0"

    return begin


@pytest.fixture
def forged(tmp_path):
    """A run to whose tape a fact is put as if its syncer had said so; where that is."""

    def forge(fact):
        with Pair(tmp_path / "runs" / "forged", config_of()) as pair:
            pair.join("a")
            pair.run(20)
        with Store.open(pair.root) as store:
            store.commit([msgspec.msgpack.encode(fact)])
            number = len(store.records)  # as many as there were when it was opened
        return pair.root, f"{pair.root}/tape/000001.seg record {number}"

    return forge


def facts_in(root):
    with Store.open(root, readonly=True) as store:
        return [decode_fact(record.body) for record in history_of(store)]


def rewrite(root, facts):
    """The tape anew, its chain whole."""
    shutil.rmtree(root / "tape")
    with Store.open(root) as store:
        for fact in facts:
            store.commit([msgspec.msgpack.encode(fact)])


def trouble(root):
    return Feed(root).look().get("trouble", "")


@pytest.mark.parametrize("fact", IN_THE_STATE.values(), ids=IN_THE_STATE.keys())
def test_a_fact_that_cannot_come_next_is_damage_by_its_place(forged, fact, capsys):
    root, place = forged(fact)
    with pytest.raises(TapeDamaged) as error:
        status_of(root)
    assert str(error.value).startswith(f"{place}: ") and "skerry replay" in str(error.value)
    assert trouble(root).startswith(place)
    for command in ("status", "export"):
        code, out, err = called(capsys, command, root)
        assert (code, out) == (2, "") and err.count("\n") == 1 and place in err, err
    code, out, err = called(capsys, "replay", root, "--json")
    assert (code, err) == (1, "") and place in str(json.loads(out)["violated"]), out


@pytest.mark.parametrize("fact", IN_THE_HISTORY.values(), ids=IN_THE_HISTORY.keys())
def test_a_fact_of_a_stranger_is_damage_to_who_tells_the_history(forged, fact):
    """To the state nothing follows from it, so that a status is made."""
    root, place = forged(fact)
    assert status_of(root)["learners"].keys() == {"a"}
    assert trouble(root).startswith(place)
    with Store.open(root, readonly=True) as store, pytest.raises(TapeDamaged, match=place):
        history_in(store)


def test_a_folder_is_listed_with_a_run_in_it_whose_tape_makes_no_sense(forged, capsys):
    root, place = forged(EpochStarted(9))
    with Pair(root.parent / "whole", config_of()) as pair:
        pair.join("a")
    code, out, err = called(capsys, "runs", root.parent, "--json")
    rows = {row["run_dir"]: row for row in json.loads(out)["runs"]}
    assert (code, err) == (0, "") and rows.keys() == {str(root), str(pair.root)}
    assert rows[str(root)]["damaged"].startswith(place) and not rows[str(pair.root)]["damaged"]


def refused_by_all(root, place, out_file, capsys):
    """Every reader ends in one line with the place."""
    for words in (
        ("status",), ("export",), ("replay",), ("report", "--out", out_file), ("syncer", "--port", 0, "--run"),
        ("evaluate",), ("prune", "--keep-days", 1), ("rollback",), ("fork",), ("backup",),
    ):  # fmt: skip
        more = (out_file,) if words in [("fork",), ("backup",)] else ()
        code, out, err = called(capsys, *words, root, *more)
        assert (code, out) == (2, "") and err.count("\n") == 1 and place in err, (words, err)
    assert trouble(root).startswith(place)
    code, out, err = called(capsys, "runs", root.parent, "--json")
    assert (code, err) == (0, "") and json.loads(out)["runs"][0]["damaged"].startswith(place)


@pytest.mark.parametrize("other", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_creation_that_cannot_be_read_is_damage_by_its_place_to_every_reader(begun, tmp_path, other, capsys):
    root, place = begun(**other)
    refused_by_all(root, place, tmp_path / "out", capsys)


@pytest.mark.parametrize("fact", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_what_can_be_true_of_no_run_is_damage_by_its_place_to_every_reader(forged, tmp_path, fact, capsys):
    root, place = forged(fact)
    refused_by_all(root, place, tmp_path / "out", capsys)


def test_sums_that_no_tape_can_hold_end_a_prune_before_it_has_written(forged, capsys):
    root, _ = forged(Discarded((), tuple(Seen(f"b{n}", 1, 1, COUNT_MAX, 0, 0, 0.0) for n in range(700)), 1.0))
    before = facts_in(root)
    code, out, err = called(capsys, "prune", root, "--keep-days", 0)
    assert (code, out) == (2, "") and err.count("\n") == 1 and f"{root}/tape: cannot be true" in err, err
    assert facts_in(root) == before


@pytest.mark.parametrize("lacks", [RunCreated, EpochStarted], ids=lambda fact: fact.__name__)
def test_a_tape_without_its_beginning_has_no_twin(tmp_path, lacks, capsys):
    with Pair(tmp_path / "run", config_of(steps=40)) as pair:
        pair.join("a")
        pair.close()
    rewrite(pair.root, [fact for fact in facts_in(pair.root) if not isinstance(fact, lacks)])
    code, out, err = called(capsys, "simulate", "run", pair.root)
    assert (code, out) == (2, "") and err.count("\n") == 1 and f"{pair.root}/tape: cannot be true" in err, err


def test_a_tape_without_its_creation_adds_up_to_nothing(forged):
    root, _ = forged(EpochStarted(2))
    rewrite(root, facts_in(root)[1:])
    with Store.open(root, readonly=True) as store, pytest.raises(TapeDamaged, match=f"{root}/tape: cannot be true"):
        tally(store)


def test_a_syncer_does_not_begin_on_it(forged, capsys):
    root, place = forged(EpochStarted(9))
    code, _, err = called(capsys, "syncer", "--run", root, "--port", "0")
    assert code == 2 and err.count("\n") == 1 and place in err, err


def test_a_fold_that_speaks_of_a_stranger_is_damage_too(forged):
    root, _ = forged(PhaseChanged("training", (), (Seen("a", 1, 30, 240, 0, 0, 0.0),), 1.0))
    with Store.open(root) as store:
        fold = history_in(store).state
        assert isinstance(fold, RunState)
        fold.dropped, fold.first_segment = {"nobody": "x"}, 2
        store.rotate(msgspec.msgpack.encode(fold))
    (root / "tape" / "000001.seg").unlink()
    assert trouble(root).startswith(f"{root}/tape/000002.seg record 0")
