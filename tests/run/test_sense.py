"""A tape with a whole chain whose facts cannot be true: damage by its place to every reader, and no traceback."""

import json

import msgspec
import pytest

from cli.called import called
from node.pair import Pair, config_of
from skerry.core.facts import (
    Checkpointed,
    Discarded,
    EpochStarted,
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
from skerry.core.state import RunState
from skerry.errors import TapeDamaged
from skerry.page.feed import Feed
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
