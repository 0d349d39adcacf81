"""skerry data: text becomes a pack, and what cannot be packed is refused in one line and leaves nothing."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from cli.called import called
from skerry.data import Pack
from skerry.data.sources import PIECE_BYTES, whole


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder, in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: called(capsys, "data", *words)


def text_of(path):
    pack = Pack(path)
    return bytes(pack.read(0, pack.tokens).astype(np.uint8))


def test_files_folders_and_json_lines_are_packed_in_order(call, tmp_path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "b.md").write_text("second")
    (tmp_path / "folder" / "a.jsonl").write_text('{"text": "one"}\n\n{"id": 7, "text": "zwölf"}\n')
    (tmp_path / "folder" / "deep" / "c.bin").write_bytes(b"a\0b")
    (tmp_path / "folder" / "empty.txt").touch()
    (tmp_path / "named.txt").write_text("first\n")
    code, out, err = call("pack", "named.txt", "folder", "--out", "pack")
    assert code == 0 and "25 tokens of 4 documents" in out and "not text, left out: folder/deep/c.bin" in err
    assert text_of(tmp_path / "pack") == "first\n\0one\0zwölf\0second\0".encode()
    assert Pack(tmp_path / "pack").index.separator == 0


def test_a_pack_of_bytes_without_separators_is_the_text_of_the_files(call, tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("cd")
    code, out, err = call("pack", "a.txt", "b.txt", "--out", "pack", "--separator", "none", "--json")
    record = json.loads(out)
    assert (code, err, record["tokens"], record["documents"], record["skipped"]) == (0, "", 4, 2, [])
    assert text_of(tmp_path / "pack") == b"abcd"


def test_the_same_sources_give_the_same_pack(call, tmp_path):
    (tmp_path / "a.txt").write_text("text " * 1000)
    first, second = (json.loads(call("pack", "a.txt", "--out", out, "--json")[1]) for out in ("one", "two"))
    assert first["digest"] == second["digest"]


def test_standard_input_is_a_source(tmp_path):
    words = [sys.executable, "-m", "skerry", "data", "pack", "-", "--out", str(tmp_path / "pack")]
    done = subprocess.run(words, input=b"piped text", capture_output=True)
    assert done.returncode == 0, done.stderr
    assert text_of(tmp_path / "pack") == b"piped text\0"


def test_a_long_text_is_read_in_pieces_that_end_with_lines_or_characters():
    lines = ("zwölf Zeilen\n" * 300_000).encode()
    unbroken = ("ö" * PIECE_BYTES).encode()
    for text in (lines, b"x" + unbroken, unbroken, b"", b"x"):
        pieces = [piece for piece, _ in whole(io.BytesIO(text))]
        assert b"".join(pieces) == text and max(map(len, pieces)) <= 2 * PIECE_BYTES
        assert [piece.decode() for piece in pieces]
    assert all(piece.endswith(b"\n") for piece, _ in whole(io.BytesIO(lines)) if piece)


def test_show_says_what_a_pack_holds_and_check_finds_what_has_changed(call, tmp_path):
    (tmp_path / "a.txt").write_text("text " * 1000)
    call("pack", "a.txt", "--out", "pack", "--shard-tokens", "2k")
    code, out, _ = call("show", "pack", "--check")
    assert code == 0 and "5 kB in 3 shards (uint8)" in out and "every shard is as it was packed" in out
    shard = tmp_path / "pack" / "shards" / "00001.bin"
    shard.write_bytes(shard.read_bytes()[::-1])
    assert call("show", "pack")[0] == 0
    code, out, err = call("show", "pack", "--check")
    assert (code, out) == (2, "") and "00001.bin is not what was packed" in err


def test_what_a_strangers_pack_says_does_not_reach_the_terminal_as_it_is(call, tmp_path):
    (tmp_path / "a.txt").write_text("text " * 1000)
    call("pack", "a.txt", "--out", "pack")
    index = tmp_path / "pack" / "index.json"
    index.write_text(json.dumps(json.loads(index.read_bytes()) | {"tokenizer": "\x1b[31mred\nx"}))
    code, out, _ = call("show", "pack")
    assert code == 0 and r"tokenizer \x1b[31mred\nx, vocabulary" in out


REFUSED = {
    "nowhere": "nowhere does not exist",
    "empty.txt": "there is nothing to pack",
    "image.bin": "image.bin is not text",
    "bad.jsonl": 'bad.jsonl, line 2: must be {"text": "…"}',
    "keyless.jsonl": "keyless.jsonl, line 1: must be",
    "latin.jsonl": "latin.jsonl, line 1: must be",
    "deep.jsonl": "deep.jsonl, line 1: must be",
    "packed": "packed is a pack already",
    "good.txt --out taken": "--out taken: exists",
    "good.txt --out no/where": "no is not a folder",
    "good.txt --separator 256": "--separator 256: bytes has tokens from 0 to 255",
    "good.txt --separator end": "--separator end: give a token's number, or none",
    "good.txt --shard-tokens 0": "--shard-tokens",
    "good.txt --sync.quorum 2": "nothing is configured here",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_packed_is_refused_in_one_line_and_leaves_nothing(call, tmp_path, words):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.bin").write_bytes(b"\0" * 100)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": ')
    (tmp_path / "keyless.jsonl").write_text('{"content": "x"}')
    (tmp_path / "latin.jsonl").write_bytes('{"text": "zwölf"}'.encode("latin-1"))
    (tmp_path / "deep.jsonl").write_text('{"text": "good", "x": ' + "[" * 100_000)
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "taken").mkdir()
    call("pack", "good.txt", "--out", "packed")
    before = sorted(os.listdir(tmp_path))
    out = [] if "--out" in words else ["--out", "pack"]
    code, said, err = call("pack", *words.split(), *out)
    assert (code, said, err.count("\n")) == (2, "", 1), err
    assert REFUSED[words] in err
    assert sorted(os.listdir(tmp_path)) == before


def test_a_tokenizer_that_is_not_installed_is_named_with_its_command(call, tmp_path, monkeypatch):
    (tmp_path / "good.txt").write_text("good")
    for module, words in {"tokenizers": ["good.txt", "--tokenizer", "gpt2"], "datasets": ["hf:some/texts"]}.items():
        for where in ("sources", "encode"):
            monkeypatch.setattr(f"skerry.data.{where}.find_spec", lambda name: None)
        code, _, err = call("pack", *words, "--out", "pack")
        assert code == 2 and f"needs {module}: pip install 'skerry[data]'" in err


def test_a_tokenizer_of_a_file(call, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    text = "the cat sat on the mat, the hat\n" * 50
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "zwölf Katzen"}))
    (tmp_path / "latin.txt").write_bytes("zwölf".encode("latin-1"))
    code, _, err = call("pack", "a.jsonl", "--tokenizer", "tokenizer.json", "--out", "pack", "--json")
    assert code == 0, err
    pack = Pack(tmp_path / "pack")
    tokens = pack.read(0, pack.tokens).tolist()
    assert pack.index.dtype == "uint16" and pack.vocabulary == tokenizer.get_vocab_size()
    assert pack.index.tokenizer.startswith("tokenizer.json@")
    end = tokenizer.token_to_id("<|endoftext|>")
    assert tokens.count(end) == 2 and tokens[-1] == end and pack.tokens < len(text)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text + "zwölf Katzen"
    code, _, err = call("pack", "latin.txt", "--tokenizer", "tokenizer.json", "--out", "other")
    assert code == 2 and "latin.txt is not UTF-8" in err and not (tmp_path / "other").exists()
    code, _, err = call("pack", "a.jsonl", "--tokenizer", "a.jsonl", "--out", "other")
    assert code == 2 and "--tokenizer a.jsonl: cannot be had" in err


DATASETS = """
def load_dataset(name, config=None, split=None, streaming=False):
    assert streaming
    if name == "none":
        raise FileNotFoundError("no such dataset")
    if name == "images":
        return iter([{"image": 1, "label": 2}])
    return iter([{"text": f"{name} {config} {split}"}, {"text": "more"}])
"""


def test_a_dataset_is_streamed(call, tmp_path, monkeypatch):
    """In place of Hugging Face's package stands one with its one function that is used."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "datasets.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(tmp_path / "stub")
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    try:
        assert call("pack", "hf:some/texts:en@test", "--out", "pack")[0] == 0
        assert text_of(tmp_path / "pack") == b"some/texts en test\0more\0"
        code, _, err = call("pack", "hf:images", "--out", "other")
        assert code == 2 and "has no column 'text' of texts; its columns are image, label" in err
        code, _, err = call("pack", "hf:none", "--out", "other")
        assert code == 2 and "hf:none: cannot be had (no such dataset)" in err
    finally:
        sys.modules.pop("datasets", None)
