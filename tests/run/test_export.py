"""An exported model is on the disk before it has its name, and two exports do not share a file on the way there."""

import hashlib
import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from cli.called import called
from node.pair import Pair, config_of
from skerry.algo.contents import Contents, encode_contents
from skerry.core.facts import Buffered, LifeStarted, RunCreated
from skerry.core.state import state_of
from skerry.errors import ModelError
from skerry.run.evaluations import read
from skerry.run.export import write_model
from skerry.run.genesis import METADATA, create_run, read_genesis
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


def begun(root, arrays, buffers=(), given=None):
    """A run of this model, of which a learner has given buffers, if any."""
    said = {"embeddings": [], "trained": ["w"], "buffers": list(buffers), "aliases": {}, "files": {}}
    save_file(arrays, root.with_name("g.safetensors"), {METADATA: json.dumps(said)})
    with Store.open(root) as store:
        create_run(store, config_of(steps=60), *read_genesis(root.with_name("g.safetensors")))
        if given is not None:
            file = store.put([save(given)])
            facts = [LifeStarted("a", 1, "p", 0, 0.0), Buffered("a", 1, 0, 0, file, 0.0)]
            store.commit([msgspec.msgpack.encode(fact) for fact in facts], [file])
    return root


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64])
def test_a_buffer_without_elements_is_one_like_any_other(tmp_path, capsys, dtype):
    """A cache that is filled later may be persistent; no learner's message may make a run impossible to export."""
    arrays = {"w": np.ones((20, 30), np.float32), "cache": np.empty((0, 3), dtype)}
    root = begun(tmp_path / "run", arrays, ["cache"], {"cache": arrays["cache"]})
    out = tmp_path / "model.safetensors"
    assert called(capsys, "export", root, "--out", out)[::2] == (0, "")
    exported = load_file(out)["cache"]
    assert (exported.shape, exported.dtype) == ((0, 3), dtype)
    assert read(root).arrays["cache"].shape == (0, 3)
    assert called(capsys, "fork", root, tmp_path / "fork")[::2] == (0, "")


def test_numbers_that_a_dtype_cannot_hold_are_told_of_by_the_first_tensor(tmp_path, caplog, capsys):
    """What is infinite already, as a mask may be, is not told of."""
    arrays = {name: np.float32([number] * 5) for name, number in (("w", 3.4e38), ("b", 7e4), ("mask", -np.inf))}
    with np.errstate(over="ignore"):
        halves = {name: array.astype(np.float16) for name, array in arrays.items()}
    root, alike, out = begun(tmp_path / "run", arrays), tmp_path / "like.safetensors", tmp_path / "model.safetensors"
    told = []
    for wanted in (arrays, halves | {"w": arrays["w"]}, halves):
        caplog.clear()
        save_file(wanted, alike)
        assert called(capsys, "export", root, "--out", out, "--like", alike)[0] == 0
        told.append(caplog.messages)
    of, kept = f"{out}: numbers of", "too large for float16 and infinite there: --like of a file in float32 keeps them"
    assert told == [[], [f"{of} b are {kept}"], [f"{of} b and of 1 more are {kept}"]]
