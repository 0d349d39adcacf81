"""A genesis file: read whole or for its layout alone, refused in one line where it is none, and a run begun once."""

import json
import os

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from e2e.processes import skerry
from skerry.algo.fragments import Tensor, layout_of
from skerry.config import Config, decode
from skerry.core.state import state_of
from skerry.errors import ModelError, TapeDamaged
from skerry.run.export import read_model
from skerry.run.facts import fragments_of
from skerry.run.genesis import METADATA, begin, create_run, is_from, open_genesis, read_genesis
from skerry.store import Store


def zeros(fragment):
    return np.zeros(fragment.size, np.float32)


@pytest.mark.parametrize("metadata", [None, {METADATA: json.dumps({"embeddings": ["table"]})}])
def test_the_layout_by_the_header_alone_is_that_of_the_whole_file(tmp_path, metadata):
    arrays = {"table": np.zeros((7, 3), np.float32), "emb.w": np.zeros((5,), np.float32), "s": np.zeros((), np.float32)}
    save_file(arrays, tmp_path / "g", metadata)
    layout, values = read_genesis(tmp_path / "g")
    assert open_genesis(tmp_path / "g")[0] == layout
    assert {name: array.shape for name, array in values.items()} == {
        name: array.shape for name, array in arrays.items()
    }


@pytest.mark.parametrize("read", [read_genesis, open_genesis])
def test_a_file_that_is_none_is_refused(tmp_path, read):
    (tmp_path / "g").write_bytes(b"nothing")
    for path in (tmp_path / "g", tmp_path / "absent"):
        with pytest.raises(ModelError, match=path.name):
            read(path)


@pytest.mark.parametrize("read", [read_genesis, open_genesis])
def test_a_directory_is_refused_as_one(tmp_path, read):
    with pytest.raises(ModelError, match="is a directory; name the safetensors file"):
        read(tmp_path)


def test_values_that_no_run_can_start_from_are_refused_by_name(tmp_path):
    save_file({"w": np.array([1.0, np.nan], np.float32)}, tmp_path / "g")
    with pytest.raises(ModelError, match="parameter w holds values that are not finite"):
        read_genesis(tmp_path / "g")
    save_file({"w": np.zeros(2, np.float64)}, tmp_path / "g")
    with pytest.raises(ModelError, match="parameter w is F64; a genesis holds float32"):
        read_genesis(tmp_path / "g")


def test_a_tensor_of_very_many_dimensions_is_refused_by_its_header_alone(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1] * 300_000, "data_offsets": [0, 4]}}).encode()
    (tmp_path / "g").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelError, match=r"g: w: has 300000 dimensions, and at most 64 can be$"):
        open_genesis(tmp_path / "g")


def test_so_is_one_that_is_not_trained(tmp_path):
    """A run could be served and exported with it, but not evaluated."""
    said = json.dumps({"embeddings": [], "trained": ["w"], "buffers": ["deep"], "aliases": {}, "files": {}})
    about = {
        "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "deep": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [4, 8]},
        "__metadata__": {METADATA: said},
    }
    header = json.dumps(about).encode()
    (tmp_path / "g").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match=r"g: deep: has 65 dimensions, and at most 64 can be$"):
        open_genesis(tmp_path / "g")


def test_a_further_name_is_of_the_same_values_or_refused(tmp_path):
    """A file may have a copy under it, as an export has, and the run keeps one of the two."""
    path, w = tmp_path / "g", np.arange(600, dtype=np.float32)
    said = {"embeddings": [], "trained": ["w"], "buffers": [], "aliases": {"tied": "w"}, "files": {}}
    for tied in (w, w[::-1].copy()):
        save_file({"w": w, "tied": tied}, path, {METADATA: json.dumps(said)})
        if tied is w:
            assert read_genesis(path)[1].contents.aliases == {"tied": "w"}
    with pytest.raises(ModelError, match="has 'tied' as another name of 'w', and their values differ: leave it out"):
        read_genesis(path)


def test_a_run_that_leaves_the_number_of_fragments_open_keeps_that_and_has_a_table_of_them(tmp_path):
    with Store.open(tmp_path) as store:
        created = begin(store, Config(), layout_of([Tensor("w", (3000,))]), zeros)
    assert decode(created.config).sync.num_fragments == 0
    assert len(fragments_of(created)) == len(created.files) == 6


def test_a_run_knows_the_file_it_began_with(tmp_path):
    save_file({"w": np.arange(300, dtype=np.float32)}, tmp_path / "g")
    layout, values = read_genesis(tmp_path / "g")
    with Store.open(tmp_path / "run") as store:
        created = create_run(store, Config(), layout, values)
    assert is_from(tmp_path / "g", layout, created)
    for other in (np.zeros(300, np.float32), np.full(300, np.nan, np.float32)):
        save_file({"w": other}, tmp_path / "other")
        assert not is_from(tmp_path / "other", layout, created)


def rewritten(path):
    """With other values, as somebody who saves a model again does it."""
    save_file({"w": np.full(600, 2.0, np.float32)}, path.with_suffix(".new"))
    path.write_bytes(path.with_suffix(".new").read_bytes())
    os.utime(path, ns=(0, 0))  # whatever the clock of this file system can tell apart


def cut_short(path):
    os.truncate(path, path.stat().st_size - 40)


def spoiled(path):
    """With a value that is not finite, and the time it had: nothing but the value shows it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(np.nan).tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rewritten, "was changed while it was read: begin again when nobody writes to it"),
        (cut_short, "was changed while it was read: begin again when nobody writes to it"),
        (spoiled, "parameter w holds values that are not finite"),
    ],
)
def test_a_file_that_is_changed_while_a_run_is_begun_begins_none(tmp_path, change, said):
    """It was whole and finite when it was looked at; what is stored comes from a second reading."""
    path = tmp_path / "g"
    save_file({"w": np.ones(600, np.float32)}, path)
    layout, values = read_genesis(path)
    change(path)
    with Store.open(tmp_path / "run") as store, pytest.raises(ModelError, match=f"{path}: {said}$"):
        create_run(store, Config(), layout, values)
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert store.records == []


@pytest.mark.parametrize("left", ["files", "journal"])
def test_what_a_creation_that_was_broken_off_has_left_is_removed_before_the_next(tmp_path, left):
    """Unless there was more than a creation: what has lost its tape is left for a person to look at."""
    for name, value in (("one", 1.0), ("other", 2.0)):
        save_file({"a": np.full(600, value, np.float32), "b": np.full(600, -value, np.float32)}, tmp_path / name)

    def broken_off(done, total):
        raise KeyboardInterrupt

    with Store.open(tmp_path / "run") as store, pytest.raises(KeyboardInterrupt):
        create_run(store, Config(), *read_genesis(tmp_path / "one"), broken_off)
    (stale,) = (tmp_path / "run" / "files").iterdir()
    if left == "journal":
        (tmp_path / "run" / "journal" / "000001.log").touch()
    told = []
    with Store.open(tmp_path / "run") as store:
        created = create_run(store, Config(), *read_genesis(tmp_path / "other"), lambda *count: told.append(count))
    found = {path.name for path in (tmp_path / "run" / "files").iterdir()}
    assert found == {*created.files, *([stale.name] if left == "journal" else [])}
    assert told == [(n, len(created.files)) for n in range(1, len(created.files) + 1)]


def test_a_file_that_is_replaced_while_a_run_is_begun_does_no_harm(tmp_path):
    path = tmp_path / "g"
    save_file({"w": np.ones(600, np.float32)}, path)
    layout, values = read_genesis(path)
    path.unlink()
    with Store.open(tmp_path / "run") as store:
        create_run(store, Config(), layout, values)
    with Store.open(tmp_path / "run", readonly=True) as store:
        state = state_of(store.records)
        np.testing.assert_array_equal(read_model(store, state)["w"], np.ones(600, np.float32))


def test_a_tape_that_tells_of_two_runs_is_refused(tmp_path):
    layout = layout_of([Tensor("w", (3,))])
    with Store.open(tmp_path) as store:
        begin(store, Config(), layout, zeros)
        begin(store, Config(), layout, zeros)
    with Store.open(tmp_path, readonly=True) as store, pytest.raises(TapeDamaged, match="one run from its creation on"):
        state_of(store.records)


def test_a_record_of_a_later_version_is_refused_in_one_line(tmp_path):
    with Store.open(tmp_path) as store:
        begin(store, Config(), layout_of([Tensor("w", (3,))]), zeros)
        store.commit([msgspec.msgpack.encode({"type": "Newfangled"})])
    for command in (["export", tmp_path], ["replay", tmp_path], ["syncer", "--run", tmp_path, "--port", "0"]):
        done = skerry(*command)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "is no fact of this version" in done.stderr


def test_a_directory_that_lost_its_tape_is_not_taken_for_a_fresh_one(tmp_path):
    (tmp_path / "status.json").write_text('{"merges": 129, "phase": "training"}')
    done = skerry("syncer", "--run", tmp_path, "--port", "0", "--run.tokens", "1e6")
    assert done.returncode == 2 and "tape is missing, and status.json says" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    "said",
    [
        {"aliases": {"b": "b"}},
        {"aliases": {"b": "c", "c": "b"}},
        {"aliases": {"zz": "b", "b": "a"}},
        {"aliases": {"__metadata__": "a"}},
        {"aliases": {"a": "b"}},
        {"aliases": {"c": "a"}},
        {"files": {"model.safetensors": "x"}},
        {"files": {"../config.json": "x"}},
        {"files": {"pwn.py": "x"}},
    ],
    ids=lambda said: json.dumps(said),
)
def test_a_description_from_which_no_export_could_be_made_is_refused(tmp_path, said):
    """When the file is read, and not when everything is trained."""
    path = tmp_path / "genesis.safetensors"
    arrays = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((2, 3), np.float32), "c": np.zeros(4, np.float32)}
    about = {"embeddings": [], "trained": ["a"], "buffers": [], "aliases": {}, "files": {}} | said
    save_file(arrays, path, {METADATA: json.dumps(about)})
    with pytest.raises(ModelError, match="its metadata 'skerry'"):
        read_genesis(path)


def test_a_description_that_nests_without_end_is_refused(tmp_path):
    path = tmp_path / "genesis.safetensors"
    save_file({"a": np.zeros(4, np.float32)}, path, {METADATA: '{"x":' + "[" * 100_000})
    with pytest.raises(ModelError, match="its metadata 'skerry' names no embeddings"):
        read_genesis(path)
