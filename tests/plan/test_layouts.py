"""A model's tensors, found without torch: the same that a learner would describe."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from skerry.errors import ModelError
from skerry.plan import layouts
from skerry.run.genesis import METADATA, read_genesis
from skerry.train.shapes import SHAPES, parameter_count


@pytest.mark.parametrize("name", SHAPES)
def test_the_built_in_model_is_the_one_that_is_trained(name):
    gpt = pytest.importorskip("skerry.train.gpt")
    from skerry.adapters.torch import layout_of_model

    shape = SHAPES[name]
    layout = layouts.built_in(shape)
    assert layout == layout_of_model(gpt.build(shape.layers, shape.width, shape.heads, shape.context, seed=0))
    assert layout.param_count == parameter_count(shape)


@pytest.mark.parametrize("metadata", [None, {METADATA: json.dumps({"embeddings": ["table"]})}])
def test_a_file_has_the_layout_that_the_syncer_would_read(tmp_path, metadata):
    arrays = {"table": np.zeros((7, 3), np.float32), "emb.w": np.zeros((5,), np.float32), "s": np.zeros((), np.float32)}
    save_file(arrays, tmp_path / "g", metadata)
    assert layouts.of_file(tmp_path / "g") == read_genesis(tmp_path / "g")[0]


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "g").write_bytes(b"nothing")
    for path in (tmp_path / "g", tmp_path / "absent"):
        with pytest.raises(ModelError, match=path.name):
            layouts.of_file(path)


def test_a_size_alone_is_even():
    layout = layouts.even(1000, 7)
    assert len(layout.tensors) == 7 and {t.size for t in layout.tensors} == {142, 143}
    assert layout.param_count == 1000
    assert layouts.even(5e9, 24).param_count == 5 * 10**9


def test_a_directory_is_refused_as_one(tmp_path):
    with pytest.raises(ModelError, match="is a directory; name the safetensors file"):
        layouts.of_file(tmp_path)
