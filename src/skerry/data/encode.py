"""Text to tokens: bytes as they are, or a tokenizer of the package `tokenizers`, by its file or its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from skerry.data.sources import Piece
from skerry.errors import DataError

BYTES = "bytes"
BYTE_VALUES = 256
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")  # what tokenizers call the end of a document
TOGETHER_BYTES = 4 << 20  # encoded at once, by as many threads as there are cores
TOGETHER_PIECES = 1024


@dataclass(frozen=True)
class Encoder:
    """A tokenizer: its name, how many tokens it has, which ends a document, and what it makes of pieces of text."""

    name: str
    vocabulary: int
    separator: int | None
    encode: Callable[[Sequence[Piece]], Iterable[np.ndarray | list[int]]]


def encoder_of(name: str) -> Encoder:
    if name == BYTES:  # text has no NUL
        return Encoder(BYTES, BYTE_VALUES, 0, lambda pieces: [np.frombuffer(piece.text, np.uint8) for piece in pieces])
    if find_spec("tokenizers") is None:
        raise DataError(f"--tokenizer {name}: needs tokenizers: pip install 'skerry[data]'")
    tokenizer = _tokenizer(name)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    ends = next((vocabulary[end] for end in ENDS if end in vocabulary), None)
    return Encoder(_named(name), max(vocabulary.values(), default=0) + 1, ends, lambda some: _encode(tokenizer, some))


def _named(name: str) -> str:
    """A file by its contents too: very many are called tokenizer.json."""
    file = Path(name)
    return f"{file.name}@{xxhash.xxh3_64_hexdigest(file.read_bytes())[:8]}" if file.is_file() else name


def together(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lots of a few megabytes."""
    lot: list[Piece] = []
    size = 0
    for piece in pieces:
        lot.append(piece)
        size += len(piece.text)
        if size >= TOGETHER_BYTES or len(lot) == TOGETHER_PIECES:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot


def _tokenizer(name: str) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(name) if Path(name).exists() else Tokenizer.from_pretrained(name)
    except Exception as error:  # theirs are plain Exceptions
        raise DataError(
            f"--tokenizer {name}: cannot be had ({error}); "
            "give bytes, a tokenizer.json, or a name on the Hugging Face hub"
        ) from None


def _encode(tokenizer: Any, pieces: Sequence[Piece]) -> Iterator[list[int]]:
    texts = [_text(piece) for piece in pieces]
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        yield encoding.ids


def _text(piece: Piece) -> str:
    try:
        return piece.text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{piece.origin} is not UTF-8 ({error.reason}); convert it, or pack bytes") from None
