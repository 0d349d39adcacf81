"""safetensors by the piece: the library's own bytes, and numbers rounded as torch rounds them."""

import os
import re
import stat

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import skerry
from skerry.run.tensors import Entry, TensorFile, head_of, narrowed, overflows, widened, written

ODD = {
    "b": torch.tensor([True, False, True]),
    "count": torch.tensor(3),
    "w.half": torch.arange(7, dtype=torch.float16),
    "w.brain": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "a.full": torch.arange(4, dtype=torch.float32),
    "z.full": torch.ones(2, 1),
    "byte": torch.zeros(5, dtype=torch.uint8),
    "none": torch.zeros(0, 3),
}


@pytest.mark.parametrize("metadata", [{}, {"skerry": "ä"}])
def test_a_file_by_the_piece_has_the_bytes_that_the_library_writes(tmp_path, metadata):
    save_file(ODD, tmp_path / "theirs", metadata or None)
    theirs = TensorFile(tmp_path / "theirs")
    assert theirs.metadata == metadata
    entries = [Entry(e.name, e.dtype, e.shape, e.size) for e in reversed(theirs.entries.values())]
    head, placed = head_of(entries, metadata)
    with written(tmp_path / "ours") as file:
        file.write(head)
        for name in placed:
            file.writelines(theirs.pieces(name))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    for name, values in ODD.items():
        np.testing.assert_array_equal(theirs.array(name), values.float() if values.is_floating_point() else values)


@pytest.mark.parametrize(("dtype", "kind"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)])
def test_numbers_are_rounded_as_torch_does_it(dtype, kind):
    draw = np.random.default_rng(0)
    values = np.concatenate(
        [
            draw.normal(size=5000).astype(np.float32),
            draw.integers(0, 1 << 30, 5000, np.uint32).view(np.float32),  # of every size, half-way cases among them
            np.array([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 3e38, -70000.0, 1e-8], np.float32),
            (np.arange(1000, dtype=np.uint32) * 0x8000 + 0x3F800000).view(np.float32),
        ]
    )
    ours = np.frombuffer(narrowed(values, dtype), np.uint8)
    theirs = torch.from_numpy(values).to(kind)
    np.testing.assert_array_equal(ours, theirs.view(torch.uint8).numpy())
    np.testing.assert_array_equal(widened(ours.tobytes(), dtype), theirs.float().numpy())


def test_a_device_or_a_pipe_is_not_replaced_by_a_file_and_nothing_is_left_beside_it(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(OSError, match="is a device or a pipe"), written(path):
            raise AssertionError
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and link.is_symlink() and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_numbers_that_become_infinite_are_known_to_the_last_place(dtype):
    most = np.finfo(np.float32).max
    around = [
        np.nextafter(np.float32(end), np.float32(way)) for end in (65520.0, 2.0**128 - 2.0**119) for way in (0, most)
    ]
    values = [65504.0, 65520.0, *around, 2.0**128 - 2.0**119, most, np.inf, np.nan, 0.0]
    for value in [*values, *(-value for value in values)]:
        array = np.float32([1.0, value])
        becomes = widened(narrowed(array, dtype), dtype)
        assert overflows(array, dtype) == (np.isfinite(array[1]) and np.isinf(becomes[1])), value


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_a_name_that_no_safetensors_file_can_have_is_refused_where_the_file_is_written(tmp_path, name):
    model = torch.nn.Linear(2, 2)
    model.register_buffer(name, torch.zeros(1))
    writes = {
        "buffer": lambda path: skerry.save_genesis(model, path),
        "parameter": lambda path: skerry.save_genesis(torch.nn.ParameterDict({name: torch.zeros(2)}), path),
        "array": lambda path: skerry.save_arrays({name: np.zeros(2, np.float32)}, path),
    }
    for what, write in writes.items():
        with pytest.raises(ValueError, match=f"^tensor {re.escape(repr(name))} can have no such name") as refused:
            write(tmp_path / what)
        assert not isinstance(refused.value, UnicodeError)
    assert not list(tmp_path.iterdir())
