"""A tape with a whole chain whose facts cannot be true: damage by its place to every reader, and no traceback."""

import json
import shutil

import msgspec
import pytest

from cli.called import called
from node.pair import Pair, config_of
from skerry.core.facts import (
    Checkpointed,
    Discarded,
    EpochStarted,
    Injected,
    Kept,
    LifeStarted,
    PhaseChanged,
    Restored,
    Row,
    Sample,
    Sampled,
    Seen,
    Witnessed,
)
from skerry.core.state import RunState, decode_fact
from skerry.errors import TapeDamaged
from skerry.page.feed import Feed
from skerry.run.facts import history_of
from skerry.run.history import history_in
from skerry.run.status import status_of
from skerry.store import Store

FIGURES = (1, 1, 1, (0.1,), 0, 0.0, 0, 0.0, 0, 0.0, 0, 0.0, 1.0, 1.0)
IN_THE_STATE = {
    "a seventh life": LifeStarted("b", 7, "p", 1, 0.0),
    "a stranger is forgotten": LifeStarted("b", 1, "p", 1, 0.0, forgotten=("nobody",)),
    "who has worked is forgotten": LifeStarted("b", 1, "p", 1, 0.0, forgotten=("a",)),
    "a ninth epoch": EpochStarted(9),
    "a fragment that is not there was given up": Discarded((Row("a", 1, 99, 0, 0, 5, 5, "died"),), (), 1.0),
    "a fragment that is not there is restored": Restored(
        fragment=99, version=1, file="../../../../etc/passwd", digest=b"", state=b"", theta=b"", source="x"
    ),
    "a fragment that is not there is in a file": Checkpointed(99, 0, "a" * 32, b""),
    "a version that is in another file": Checkpointed(0, 0, "../../../etc/passwd", b""),
    "files elsewhere are kept": Kept(1, (0, 0, 0), ("../../etc/passwd",) * 3, 0.5, 1.0),
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
    "what else there is, nested without end": {"contents": b"\x81\xa1x" + b"\x91" * 300_000},
}
AT_NO_TIME = {
    "before all time": Injected("kill", "a", "", -1e300, 1.0),
    "until no time": Injected("kill", "a", "", 1.0, float("nan")),
}


@pytest.fixture
def begun(tmp_path):
    """A run whose creation is another than its syncer's; where that is."""

    def begin(**other):
        with Pair(tmp_path / "runs" / "begun", config_of()) as pair:
            pair.join("a")
        with Store.open(pair.root, readonly=True) as store:
            bodies = [record.body for record in history_of(store)]
        created = msgspec.structs.replace(decode_fact(bodies[0]), **other)
        shutil.rmtree(pair.root / "tape")
        with Store.open(pair.root) as store:
            for body in [msgspec.msgpack.encode(created), *bodies[1:]]:
                store.commit([body])
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
        ("evaluate",), ("prune", "--keep-days", 1), ("fork",), ("backup",),
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


@pytest.mark.parametrize("fact", AT_NO_TIME.values(), ids=AT_NO_TIME.keys())
def test_a_fault_at_no_time_is_damage_by_its_place_to_every_reader(forged, tmp_path, fact, capsys):
    root, place = forged(fact)
    refused_by_all(root, place, tmp_path / "out", capsys)


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
