"""What the built-in trainer learns from: text as bytes, or a pack.

Of text a token is a byte. The same files give the same corpus, and batch k of learner n is a function of (corpus, seed,
n, k) alone, so a learner's place in its data is one integer. No torch here.

The text is cut into chunks, and every 20th is held out. Learners draw windows from all the others: were the text dealt
out among them for good, the slow and the dead would take their part of it with them. (Of a pack, which may be too large
to be seen twice, each epoch is dealt out anew: `data/order.py`.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from skerry.config import Config
from skerry.config import Pack as PackTable
from skerry.data.files import SNIFF_BYTES, STDLIB, corpus_files, is_text, refuse
from skerry.data.pack import Pack, is_pack
from skerry.data.windows import (
    CHUNK_TOKENS,
    HELD_OUT_EVERY,
    Batch,
    chunk_tokens,
    held_out_batches,
    need_window,
    windows,
)
from skerry.errors import DataError
from skerry.train.shapes import BYTE_VALUES, pack_table, shape_of

TEXT_BYTES_MAX = 64 << 20
CHUNK_BYTES = CHUNK_TOKENS

__all__ = ["CHUNK_BYTES", "Batch", "Corpus", "Stream", "held_out_batches", "open_data"]


def open_data(config: Config) -> Corpus | Pack:
    """What lies at the run's data.path on this machine; refused if it is not what the run's model is for."""
    path = config.data.path
    data = Pack(path) if is_pack(path) else Corpus.open(path, config.data.bytes_max)
    ours = pack_table(data.index, data.digest) if isinstance(data, Pack) else PackTable(vocabulary=BYTE_VALUES)
    if config.pack.digest and ours != config.pack:
        raise DataError(f"{path} is not the pack that the run trains on: {_differences(ours, config.pack)}")
    shape = shape_of(config.model)
    if ours.vocabulary > shape.vocabulary:
        raise DataError(
            f"{path} has a vocabulary of {ours.vocabulary}, and the run's model one of {shape.vocabulary}: "
            "name the data that it was begun with"
        )
    data.batches(0, 0, config.data.batch, shape.context, learners=config.run.learners)  # refused if there is too little
    return data


def _differences(ours: PackTable, runs: PackTable) -> str:
    if not ours.digest:
        return f"it is text; give a pack of {runs.tokens} tokens ({runs.tokenizer})"
    pairs = [(key, getattr(ours, key), getattr(runs, key)) for key in PackTable.__struct_fields__]
    return ", ".join(f"{key} {our} (the run has {its})" for key, our, its in pairs if our != its)


@dataclass(frozen=True, eq=False, repr=False)
class Corpus:
    """Training and held-out text, uint8 [bytes] each, and a digest of the whole."""

    name: str
    train: np.ndarray
    held_out: np.ndarray
    digest: str
    kind = "bytes of text"

    @classmethod
    def open(cls, path: str | Path, max_bytes: int = TEXT_BYTES_MAX) -> Corpus:
        """Read a file, a folder or "stdlib" (a folder of that name is "./stdlib"), up to `max_bytes`."""
        if is_pack(path):
            raise DataError(f"{path} is a pack, and this works on text; name a text file, a folder, or {STDLIB!r}")
        text = np.frombuffer(read_text(corpus_files(path), max_bytes), np.uint8)
        if not len(text):
            raise DataError(f"{path} holds no text; name a text file, a folder of them, or {STDLIB!r}")
        train, held_out = split(text)
        return cls(str(path), train, held_out, xxhash.xxh3_128_hexdigest(text.data))

    def batches(self, learner: int, seed: int, batch: int, context: int, start: int = 0, *, learners: int) -> Stream:
        """As `Pack.batches`; how many learners there are changes nothing here."""
        stream = Stream(self, learner, seed, batch, context)
        stream.seek(start)
        return stream

    def __repr__(self) -> str:
        sizes = f"train {len(self.train)}, held out {len(self.held_out)}"
        return f"Corpus({self.name}, {sizes}, {self.digest[:8]})"


class Stream:
    """Endless batches of one learner: `position` counts those drawn, `seek` goes to any of them."""

    def __init__(self, corpus: Corpus, learner: int, seed: int, batch: int, context: int) -> None:
        need_window(corpus, corpus.train, context)
        self.text = corpus.train
        self.learner = learner
        self.seed = seed
        self.batch = batch
        self.context = context
        self.position = 0

    def seek(self, position: int) -> None:
        assert position >= 0, position
        self.position = position

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        return windows(self.text, self.starts(), self.context)

    def starts(self) -> np.ndarray:
        """Where the next batch's windows start in the text; moves on by one batch."""
        # Raw draws, because numpy keeps those the same from release to release.
        draws = np.random.Philox(np.random.SeedSequence([self.seed, self.learner, self.position]))
        self.position += 1
        return (draws.random_raw(self.batch) % np.uint64(len(self.text) - self.context)).astype(np.int64)

    def __repr__(self) -> str:
        return f"Stream(learner {self.learner}, seed {self.seed}, position {self.position})"


def split(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out text."""
    chunks = cut(text, chunk_tokens(len(text)))
    train = [chunk for number, chunk in enumerate(chunks, 1) if number % HELD_OUT_EVERY]
    return join(train), join(chunks[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])


def cut(text: np.ndarray, chunk_bytes: int) -> list[np.ndarray]:
    size = max(1, chunk_bytes)
    return [text[at : at + size] for at in range(0, len(text), size)]


def join(chunks: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.uint8), *chunks])


def read_text(files: list[Path], max_bytes: int) -> bytes:
    """The bytes of those files that look like text, in order, cut at `max_bytes`."""
    text = bytearray()
    for path in files:
        if len(text) >= max_bytes:
            break
        try:
            with path.open("rb") as file:
                opening = file.read(SNIFF_BYTES)
                if is_text(opening):
                    text += opening + file.read(min(max_bytes, os.fstat(file.fileno()).st_size))
        except OSError as error:
            refuse(error)
    return bytes(text[:max_bytes])
