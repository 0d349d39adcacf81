"""The corpus is the same for the same files, the held-out text stays unseen, and a stream resumes exactly."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import DataError
from skerry.train.data import CHUNK_BYTES, Corpus, Stream, held_out_batches, split


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "book.txt"
    path.write_bytes(rng.integers(32, 127, 50 * CHUNK_BYTES, dtype=np.uint8).tobytes())
    return Corpus.open(path)


def occurs_in(text, window):
    return window.tobytes() in text.tobytes()


def test_every_twentieth_chunk_is_held_out(corpus, tmp_path):
    text = np.frombuffer((tmp_path / "book.txt").read_bytes(), np.uint8)
    chunks = text.reshape(50, CHUNK_BYTES)
    assert np.array_equal(corpus.held_out, chunks[[19, 39]].ravel())
    assert np.array_equal(corpus.train, np.delete(chunks, [19, 39], axis=0).ravel())


def test_held_out_text_is_in_no_training_window(corpus):
    stream = Stream(corpus, learner=0, seed=1, batch=16, context=64)
    for _ in range(20):
        inputs, _ = next(stream)
        assert all(occurs_in(corpus.train, row) and not occurs_in(corpus.held_out, row) for row in inputs)
    for inputs, _ in held_out_batches(corpus, batch=16, context=64, count=4):
        assert all(occurs_in(corpus.held_out, row) and not occurs_in(corpus.train, row) for row in inputs)


def test_targets_are_the_inputs_one_byte_later(corpus):
    inputs, targets = next(Stream(corpus, learner=0, seed=1, batch=4, context=32))
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == targets.dtype == np.uint8
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_every_learner_draws_from_all_of_the_training_text(corpus):
    for learner in (0, 7):
        stream = Stream(corpus, learner, seed=1, batch=512, context=64)
        chunks = {int(start) // CHUNK_BYTES for start in stream.starts()}
        assert len(chunks) == 48  # 512 draws miss none of 48


@given(position=st.integers(0, 1000), seed=st.integers(0, 2**40), learner=st.integers(0, 3))
def test_a_stream_resumes_anywhere(position, seed, learner):
    text = np.random.default_rng(0).integers(32, 127, 100_000, dtype=np.uint8)
    corpus = Corpus("random", *split(text), digest="")
    walked = Stream(corpus, learner, seed, batch=2, context=16)
    walked.seek(max(0, position - 3))
    while walked.position < position:
        next(walked)
    sought = Stream(corpus, learner, seed, batch=2, context=16)
    sought.seek(position)
    for _ in range(2):
        assert np.array_equal(next(walked), next(sought))
    assert walked.position == sought.position == position + 2


def test_seed_learner_and_position_each_change_the_batch(corpus):
    def batch(learner=0, seed=0, position=0):
        stream = Stream(corpus, learner, seed, batch=8, context=32)
        stream.seek(position)
        return next(stream)[0].tobytes()

    assert len({batch(), batch(learner=1), batch(seed=1), batch(position=1)}) == 4
    assert batch() == batch()


def test_held_out_batches_are_fixed_and_distinct(corpus):
    first = held_out_batches(corpus, batch=4, context=64, count=8)
    again = held_out_batches(corpus, batch=4, context=64, count=8)
    assert np.array_equal(first, again)
    assert len({row.tobytes() for inputs, _ in first for row in inputs}) == 32


def test_a_folder_is_its_text_files_in_path_order(tmp_path):
    for name, content in {
        "b.txt": b"second",
        "a/z.md": b"first",
        "c.bin": b"abc\0def",
        ".git/config": b"hidden",
        ".secret": b"hidden",
        "pkg/site-packages/x.py": b"installed",
        "__pycache__/x.txt": b"cached",
    }.items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "corpus" / "loop").symlink_to(tmp_path / "corpus", target_is_directory=True)
    (tmp_path / "joined.txt").write_bytes(b"firstsecond")
    assert Corpus.open(tmp_path / "corpus").digest == Corpus.open(tmp_path / "joined.txt").digest


def test_max_bytes_cuts_across_files(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "1").write_bytes(b"abcdef")
    (tmp_path / "corpus" / "2").write_bytes(b"ghijkl")
    (tmp_path / "cut").write_bytes(b"abcdefghi")
    assert Corpus.open(tmp_path / "corpus", max_bytes=9).digest == Corpus.open(tmp_path / "cut").digest


def test_the_standard_library_is_a_corpus():
    corpus = Corpus.open("stdlib", max_bytes=1 << 20)
    assert len(corpus.train) + len(corpus.held_out) == 1 << 20
    assert b"import" in corpus.train.tobytes()
    assert corpus.digest == Corpus.open("stdlib", max_bytes=1 << 20).digest


def test_missing_empty_and_special_files_are_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.bin").write_bytes(b"\0" * 100)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, fault in {
        "nowhere": "does not exist",
        "empty.txt": "holds no text",
        "image.bin": "holds no text",
        "folder": "holds no text",
        "pipe": "neither a file nor a folder",
    }.items():
        with pytest.raises(DataError, match=f"{name} .*{fault}.*; name a text file") as caught:
            Corpus.open(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_bytes(b"text")
    path.chmod(0)
    with pytest.raises(DataError, match=r"secret.txt cannot be read \(Permission denied\)"):
        Corpus.open(path)


@pytest.mark.parametrize("context", [1, 64, 128, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_too_small_a_corpus_says_how_much_is_enough(tmp_path, context):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x")
    with pytest.raises(DataError, match=r"short.txt holds 1 bytes .* at least \d+ are needed") as caught:
        held_out_batches(Corpus.open(path), 1, context, 1)
    needed = int(str(caught.value).split("at least ")[1].split()[0])

    if context < CHUNK_BYTES:  # beyond, a part of a chunk may do
        path.write_bytes(b"x" * (needed - 1))
        with pytest.raises(DataError):
            held_out_batches(Corpus.open(path), 1, context, 1)
    path.write_bytes(b"x" * needed)
    held_out_batches(Corpus.open(path), 1, context, 1)
    next(Stream(Corpus.open(path), 0, 0, 1, context))


def test_data_and_shapes_need_no_torch():
    code = "import sys, skerry.train.data, skerry.train.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
