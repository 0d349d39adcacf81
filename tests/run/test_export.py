"""An exported model is on the disk before it has its name, and two exports do not share a file on the way there."""

import hashlib
import os
from pathlib import Path

import pytest

from node.pair import Pair, config_of
from skerry.algo.contents import Contents, encode_contents
from skerry.core.facts import RunCreated
from skerry.core.state import state_of
from skerry.errors import ModelError
from skerry.run.export import write_model
from skerry.run.outputs import ADAPTER, adapter
from skerry.store import Store


@pytest.fixture
def root(tmp_path):
    with Pair(tmp_path / "run", config_of()) as pair:
        pair.join("a")
        pair.run(8)
    return pair.root


@pytest.fixture
def synced(monkeypatch):
    """What was synced, as it was called then, with the names in its folder at that time."""
    seen, fsync = [], os.fsync

    def noting(fd):
        name = Path(os.readlink(f"/proc/self/fd/{fd}"))
        seen.append((name, sorted(path.name for path in (name if name.is_dir() else name.parent).iterdir())))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    return seen


def test_it_is_synced_before_it_is_named_and_its_name_behind_that(root, tmp_path, synced):
    folder = tmp_path / "models"
    folder.mkdir()
    with Store.open(root, readonly=True) as store:
        digest = write_model(store, state_of(store.records), folder / "model")
    (file, before), (last, after) = synced
    assert before == [file.name] and file.name.startswith("model.") and file.name != "model", "not its name yet"
    assert (last, after) == (folder, ["model"])
    assert hashlib.sha256((folder / "model").read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"x": ' + "[" * 100_000], ids=lambda text: text[:20])
def test_an_adapter_that_cannot_be_read_is_refused(tmp_path, text):
    """It was written by whoever made the genesis."""
    contents = encode_contents(Contents(files={ADAPTER: text}))
    created = RunCreated("run", 1, b"", b"", b"", (), (), (), (), contents)
    with pytest.raises(ModelError, match="names no adapter: export without"):
        adapter(tmp_path, created)
