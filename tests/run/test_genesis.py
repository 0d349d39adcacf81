"""A genesis file: read whole or for its layout alone, refused in one line where it is none, and a run begun once."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from skerry.errors import ModelError
from skerry.run.genesis import METADATA, read_genesis, read_layout


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
    with pytest.raises(ModelError, match="parameter w is float64; a genesis holds float32"):
        read_genesis(tmp_path / "g")
