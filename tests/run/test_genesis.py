"""A genesis file: read whole or for its layout alone, refused in one line where it is none, and a run begun once."""

import json

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from e2e.processes import skerry
from skerry.algo.fragments import Tensor, layout_of
from skerry.config import Config
from skerry.core.state import state_of
from skerry.errors import ModelError, TapeDamaged
from skerry.run.genesis import METADATA, create_run, read_genesis, read_layout
from skerry.store import Store


@pytest.mark.parametrize("metadata", [None, {METADATA: json.dumps({"embeddings": ["table"]})}])
def test_the_layout_alone_is_that_of_the_whole_file(tmp_path, metadata):
    arrays = {"table": np.zeros((7, 3), np.float32), "emb.w": np.zeros((5,), np.float32), "s": np.zeros((), np.float32)}
    save_file(arrays, tmp_path / "g", metadata)
    layout, values = read_genesis(tmp_path / "g")
    assert read_layout(tmp_path / "g") == layout
    assert {name: array.shape for name, array in values.items()} == {
        name: array.shape for name, array in arrays.items()
    }


@pytest.mark.parametrize("read", [read_genesis, read_layout])
def test_a_file_that_is_none_is_refused(tmp_path, read):
    (tmp_path / "g").write_bytes(b"nothing")
    for path in (tmp_path / "g", tmp_path / "absent"):
        with pytest.raises(ModelError, match=path.name):
            read(path)


@pytest.mark.parametrize("read", [read_genesis, read_layout])
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


def test_a_tape_that_tells_of_two_runs_is_refused(tmp_path):
    layout, arrays = layout_of([Tensor("w", (3,))]), {"w": np.zeros(3, np.float32)}
    with Store.open(tmp_path) as store:
        create_run(store, Config(), layout, arrays)
        create_run(store, Config(), layout, arrays)
    with Store.open(tmp_path, readonly=True) as store, pytest.raises(TapeDamaged, match="one run from its creation on"):
        state_of(store.records)


def test_a_record_of_a_later_version_is_refused_in_one_line(tmp_path):
    with Store.open(tmp_path) as store:
        create_run(store, Config(), layout_of([Tensor("w", (3,))]), {"w": np.zeros(3, np.float32)})
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
