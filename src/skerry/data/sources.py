"""What is packed, as pieces of text: files, JSON lines, folders of both, standard input, datasets of Hugging Face.

A piece is a document or a part of a long one, cut at the end of a line where there is one, so no more than a few
megabytes or one line of JSON are in memory. A file is one document; so is each line of a .jsonl file, its key "text".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from skerry.data.files import SNIFF_BYTES, corpus_files, is_text, refuse
from skerry.data.pack import is_pack
from skerry.errors import DataError

STDIN = "-"
HUGGING_FACE = "hf:"
PIECE_BYTES = 1 << 20
KEY = "text"


class Piece(NamedTuple):
    text: bytes
    ends: bool  # a document
    origin: str
    done_bytes: int  # of the files among the sources


class Line(msgspec.Struct):
    text: str


class Sources:
    """Everything that is to be packed, looked up before anything is written."""

    def __init__(self, names: Sequence[str]) -> None:
        self.skipped: list[str] = []  # files of a folder that are not text
        self._found = [(name, [] if _is_stream(name) else corpus_files(name)) for name in names]
        for name in names:
            _check(name)
        self.total_bytes = sum(file.stat().st_size for _, files in self._found for file in files)

    def pieces(self) -> Iterator[Piece]:
        done = 0
        for name, files in self._found:
            if _is_stream(name):
                for text, ends in _stream(name):
                    yield Piece(text, ends, name, done)
            for file in files:
                is_named = str(file) == str(Path(name))
                for text, ends, at in self._file(file, is_named):
                    yield Piece(text, ends, str(file), done + at)
                done += file.stat().st_size

    def _file(self, file: Path, is_named: bool) -> Iterator[tuple[bytes, bool, int]]:
        """Its pieces, and how much of it was read for each."""
        try:
            with file.open("rb") as opened:
                if not is_text(opened.read(SNIFF_BYTES)):
                    if is_named:
                        raise DataError(f"{file} is not text; name text files, .jsonl files or folders of them")
                    self.skipped.append(str(file))
                    return
                opened.seek(0)
                for text, ends in _lines(opened, file) if file.suffix == ".jsonl" else whole(opened):
                    yield text, ends, opened.tell()
        except OSError as error:
            refuse(error)


def whole(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """One document in pieces that end with a line, or else with a character."""
    rest = b""
    while block := file.read(PIECE_BYTES):
        text = rest + block
        cut = text.rfind(b"\n") + 1 or _last_character(text)
        yield text[:cut], False
        rest = text[cut:]
    yield rest, True


def _last_character(text: bytes) -> int:
    """Where the last character of UTF-8 begins: it may go on in what is not read yet."""
    at = len(text) - 1
    while at > 0 and text[at] & 0xC0 == 0x80 and at > len(text) - 4:
        at -= 1
    return at or len(text)


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, bool]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield msgspec.json.decode(line, type=Line).text.encode("utf-8", "replace"), True
            except (ValueError, RecursionError) as error:
                raise DataError(f'{path}, line {number}: must be {{"{KEY}": "…"}} ({error})') from None


def _is_stream(name: str) -> bool:
    return name == STDIN or name.startswith(HUGGING_FACE)


def _check(name: str) -> None:
    if is_pack(name):
        raise DataError(f"{name} is a pack already; name the text that it was made of")
    if name.startswith(HUGGING_FACE) and find_spec("datasets") is None:
        raise DataError(f"{name}: needs datasets: pip install 'skerry[data]'")


def _stream(name: str) -> Iterator[tuple[bytes, bool]]:
    if name == STDIN:
        return whole(sys.stdin.buffer)
    return ((text.encode("utf-8", "replace"), True) for text in _rows(name))


def _rows(name: str) -> Iterable[str]:
    """The texts of hf:NAME[:CONFIG][@SPLIT], as they come."""
    import datasets

    which, _, split = name.removeprefix(HUGGING_FACE).partition("@")
    dataset, _, config = which.partition(":")
    try:
        rows = datasets.load_dataset(dataset, config or None, split=split or "train", streaming=True)
        for row in rows:
            yield _text_of(row, name)
    except DataError:
        raise
    except Exception as error:  # theirs are of many kinds, and come at any row
        raise DataError(f"{name}: cannot be had ({error})") from error


def _text_of(row: dict[str, Any], name: str) -> str:
    text = row.get(KEY)
    if not isinstance(text, str):
        raise DataError(f"{name}: has no column {KEY!r} of texts; its columns are {', '.join(row)}")
    return text
