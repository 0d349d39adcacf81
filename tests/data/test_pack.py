"""A pack reads as one stretch of tokens, splits as text does, resumes anywhere, and what is wrong with it is named."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import skerry
from skerry.data import Pack, Writer
from skerry.data.pack import is_pack
from skerry.data.windows import CHUNK_TOKENS, held_out_batches
from skerry.errors import DataError, DiskFull
from skerry.train.data import Corpus, split


def written(path, tokens, vocabulary=None, shard_tokens=1000, **more):
    with Writer(path, vocabulary or int(max(tokens)) + 1, "mine", shard_tokens=shard_tokens, **more) as pack:
        pack.add(tokens)
        pack.end_document()
    return Pack(path)


def random_tokens(count, vocabulary=1000, seed=0):
    return np.random.default_rng(seed).integers(0, vocabulary, count)


@pytest.fixture
def pack(tmp_path):
    return written(tmp_path / "pack", random_tokens(40_000), vocabulary=1000)


def test_a_pack_is_plain_files(tmp_path):
    """What docs/DATA.md says of the format, with numpy and json alone."""
    tokens = random_tokens(2500, 70_000)
    written(tmp_path / "pack", tokens, vocabulary=70_000)
    index = json.loads((tmp_path / "pack" / "index.json").read_bytes())
    assert [shard["tokens"] for shard in index["shards"]] == [1000, 1000, 500]
    files = [(tmp_path / "pack" / "shards" / shard["name"]).read_bytes() for shard in index["shards"]]
    assert np.array_equal(np.frombuffer(b"".join(files), "<u4"), tokens)
    assert [xxhash.xxh3_128_hexdigest(file) for file in files] == [shard["xxh3"] for shard in index["shards"]]
    del index["shards"]
    assert index == {
        "format": "skerry-pack", "version": 1, "dtype": "uint32", "vocabulary": 70_000, "tokenizer": "mine",
        "separator": None, "documents": 1, "tokens": 2500,
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "pack").iterdir()) == ["index.json", "shards"]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_tokens_are_as_wide_as_the_vocabulary_needs(tmp_path, vocabulary, dtype):
    pack = written(tmp_path / "pack", [0, vocabulary - 1], vocabulary)
    assert pack.index.dtype == dtype
    assert pack.read(0, 2).tolist() == [0, vocabulary - 1]


@pytest.mark.parametrize("count", [1, 19, 20, 39, 400, 20 * CHUNK_TOKENS - 1, 41 * CHUNK_TOKENS + 5])
def test_a_pack_is_divided_as_text_is(tmp_path, count):
    tokens = random_tokens(count, 256)
    pack = written(tmp_path / "pack", tokens, 256, shard_tokens=max(1, count // 3))
    train, held_out = split(tokens.astype(np.uint8))
    for part, expected in ((pack.train, train), (pack.held_out, held_out)):
        assert np.array_equal(part[:], expected)


@given(begin=st.integers(0, 20_100), end=st.integers(0, 20_100))
def test_any_slice_of_a_part_is_that_of_the_whole(tmp_path_factory, begin, end):
    folder = tmp_path_factory.getbasetemp() / "sliced"
    pack = Pack(folder) if folder.exists() else written(folder, random_tokens(20_011), shard_tokens=777)
    for part in (pack.train, pack.held_out):
        assert np.array_equal(part[begin:end], part[:][begin:end])


def test_targets_are_the_inputs_one_token_later(pack):
    inputs, targets = next(pack.batches(0, seed=1, batch=4, context=32, learners=1))
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_an_epoch_of_all_learners_is_the_training_part_and_nothing_else(tmp_path):
    """Tokens that are all different tell which windows were drawn."""
    pack = written(tmp_path / "pack", np.arange(40_001), shard_tokens=777)
    seen = []
    for learner in range(3):
        batches = pack.batches(learner, seed=5, batch=2, context=16, learners=3)
        for _ in range(batches.windows // 3 // 2):
            seen += next(batches)[0].ravel().tolist()
    train = pack.train[:].tolist()
    assert len(set(seen)) == len(seen) and set(seen) <= set(train)
    assert len(train) - len(seen) < 3 * 2 * 16 + 16  # what does not fill a batch of each, and a window
    held_out = {int(token) for inputs, _ in held_out_batches(pack, 4, 16, 8) for token in inputs.ravel()}
    assert not held_out & set(train)


@given(position=st.integers(0, 5000), seed=st.integers(0, 2**40), learner=st.integers(0, 6))
def test_batches_resume_anywhere(tmp_path_factory, position, seed, learner):
    folder = tmp_path_factory.getbasetemp() / "resumed"
    pack = Pack(folder) if folder.exists() else written(folder, random_tokens(20_000))
    walked = pack.batches(learner, seed, 3, 16, start=max(0, position - 3), learners=4)
    while walked.position < position:
        next(walked)
    sought = pack.batches(learner, seed, 3, 16, start=position, learners=4)
    for _ in range(2):
        assert np.array_equal(next(walked), next(sought))
    assert walked.position == sought.position == position + 2


def test_more_shards_than_may_be_mapped_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("skerry.data.pack.MAPS_MAX", 2)
    tokens = random_tokens(1000)
    pack = written(tmp_path / "pack", tokens, shard_tokens=100)
    for begin in (0, 350, 0):
        assert np.array_equal(pack.read(begin, 1000), tokens[begin:])


def test_documents_end_with_the_separator_and_empty_ones_are_none(tmp_path):
    with Writer(tmp_path / "pack", 10, "mine", separator=9) as writer:
        for document in ([1, 2], [], [3]):
            writer.add(document)
            writer.end_document()
    pack = Pack(tmp_path / "pack")
    assert pack.read(0, 5).tolist() == [1, 2, 9, 3, 9] and pack.index.documents == 2


# ---------------------------------------------------------------------------------------------- what is refused


def test_too_small_a_pack_and_too_many_learners(tmp_path):
    small = written(tmp_path / "small", [1, 2, 3])
    with pytest.raises(DataError, match=r"small holds 3 tokens, too few for a context of 64: at least \d+ are needed"):
        small.batches(0, 0, 1, 64, learners=1)
    pack = written(tmp_path / "pack", random_tokens(400))
    assert pack.batches(0, 0, 1, 16, learners=23).windows == 23
    with pytest.raises(DataError, match="has 23 windows of 16 tokens, too few to deal out among 24 learners"):
        pack.batches(0, 0, 1, 16, learners=24)


@pytest.mark.parametrize("wrong", [{"learner": -1}, {"batch": 0}, {"context": 0}, {"start": -1}, {"learners": 0}])
def test_batches_that_cannot_be_are_refused(pack, wrong):
    with pytest.raises(DataError, match="no batches of "):
        pack.batches(**{"learner": 0, "seed": 0, "batch": 1, "context": 16, "learners": 1} | wrong)


def test_a_shard_that_is_gone_cut_off_or_changed_is_named(pack):
    shard = pack.path / "shards" / "00003.bin"
    whole = shard.read_bytes()
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DataError, match=r"00003.bin is not what was packed"):
        Pack(pack.path).check()
    shard.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"00003.bin has 1998 bytes, and had 2000 when it was packed"):
        Pack(pack.path)
    shard.unlink()
    with pytest.raises(DataError, match=r"00003.bin cannot be read \(No such file"):
        Pack(pack.path)
    shard.write_bytes(whole)
    Pack(pack.path).check()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"version": 2}, "is of version 2, and this Skerry reads version 1"),
        ({"format": "other"}, "is not the index of a pack"),
        ({"dtype": "int7"}, "is not the index of a pack"),
        ({"vocabulary": 70_000}, "a vocabulary of 70000, which uint16 does not hold"),
        ({"tokens": 5}, "says 5 tokens"),
        ({"shards": [{"name": "../../secret", "tokens": 40_000, "xxh3": ""}]}, "names a shard that cannot be one"),
        ({"separator": -7}, "documents end with token -7, and its vocabulary is 1000"),
        ({"separator": 1000}, "documents end with token 1000, and its vocabulary is 1000"),
        ({"documents": -5}, "says -5 documents, and none is without a token"),
        ({"documents": 10**25}, "says 10000000000000000000000000 documents, and none"),
        ({"shards": [{"name": "00000.bin", "tokens": 20_000, "xxh3": ""}] * 2}, "names a shard twice"),
        ({"format": "\x1b[31m\n"}, r"format '.x1b\[31m.n'"),
        ({"dtype": "\x1b[31m\n"}, r"Invalid enum value '.x1b\[31m.n'"),
    ],
)
def test_an_index_that_cannot_be_is_refused(pack, change, fault):
    file = pack.path / "index.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
    with pytest.raises(DataError, match=fault):
        Pack(pack.path)


def test_a_pack_that_was_not_finished_is_refused_by_name(tmp_path):
    """A process that is killed while it packs leaves one."""
    code = (
        "import os, sys; from skerry.data import Writer; w = Writer(sys.argv[1], 10, 'mine', shard_tokens=4);"
        "w.add([1] * 10); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "half")]).returncode == 9
    assert is_pack(tmp_path / "half")
    for opens in (Pack, lambda path: Writer(path, 10, "mine")):
        with pytest.raises(DataError, match=r"half .*not finished"):
            opens(tmp_path / "half")


def test_a_damaged_index_is_no_text(pack):
    for rest in (b'{"form', b'{"format":"\xff"}', b'{"format":' + b"[" * 100_000, b'{"x":' + b"[" * 100_000):
        (pack.path / "index.json").write_bytes(rest)
        assert is_pack(pack.path)
        with pytest.raises(DataError, match=r"index.json is not the index of a pack"):
            Pack(pack.path)


def test_an_index_that_is_no_plain_file_is_neither_waited_for_nor_read_without_end(tmp_path):
    index = tmp_path / "index.json"
    for make in (lambda: os.mkfifo(index), lambda: index.symlink_to("/dev/zero")):
        make()
        assert not is_pack(tmp_path)
        with pytest.raises(DataError, match=r"is no pack: index.json cannot be read \(is no plain file\)"):
            Pack(tmp_path)
        index.unlink()
    index.touch()
    os.truncate(index, 65 << 20)
    with pytest.raises(DataError, match=r"index.json cannot be read \(is longer than 67108864 bytes\)"):
        Pack(tmp_path)


def test_the_index_alone_is_known_as_a_packs_and_a_folder_of_text_is_not(pack, tmp_path):
    (tmp_path / "syncer").mkdir()
    (tmp_path / "syncer" / "index.json").write_bytes((pack.path / "index.json").read_bytes())
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "index.json").write_text('{"pages": 3}')
    assert is_pack(tmp_path / "syncer") and not is_pack(tmp_path / "text") and not is_pack("stdlib")
    with pytest.raises(DataError, match="is a pack, and this works on text"):
        Corpus.open(pack.path)


@pytest.mark.parametrize(
    ("tokens", "fault"),
    [
        ([1, 10], "token 10: mine has a vocabulary of 10"),
        ([-1], "token -1"),
        ([0.5], "whole numbers"),
        ([[1]], "one row"),
    ],
)
def test_a_token_that_cannot_be_is_refused_and_nothing_is_left(tmp_path, tokens, fault):
    with pytest.raises(DataError, match=fault), Writer(tmp_path / "pack", 10, "mine") as writer:
        writer.add([1, 2, 3])
        writer.add(tokens)
    assert not (tmp_path / "pack").exists()


def test_nothing_to_pack_a_wrong_separator_and_a_vocabulary_beyond_any_dtype(tmp_path):
    with pytest.raises(DataError, match="nothing to pack"), Writer(tmp_path / "pack", 10, "mine"):
        pass
    with pytest.raises(DataError, match="separator 10"):
        Writer(tmp_path / "pack", 10, "mine", separator=10)
    with pytest.raises(DataError, match="a vocabulary of 4294967297"):
        Writer(tmp_path / "pack", 2**32 + 1, "mine")
    assert not (tmp_path / "pack").exists()


def test_a_full_disk_leaves_nothing(tmp_path):
    code = (
        "import resource, sys; from skerry.data import Writer\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    with Writer(sys.argv[1], 10, 'mine') as writer:\n"
        "        writer.add([1] * 200_000)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "pack")], capture_output=True, text=True)
    assert done.stdout.startswith("DiskFull") and "there is no room for the pack" in done.stdout, done
    assert DiskFull.code == 75 and not (tmp_path / "pack").exists()


def test_skerry_data_needs_no_torch_and_is_imported_when_it_is_used():
    assert skerry.data.Pack is Pack
    code = (
        "import sys, skerry; assert 'numpy' not in sys.modules, 'numpy'; skerry.data.Pack;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
