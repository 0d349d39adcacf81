"""Text as bytes: a corpus, its held-out part, and a stream of batches that resumes anywhere.

A token is a byte. The same files give the same corpus, and batch k of learner n is a function of (corpus, seed, n, k)
alone, so a learner's place in its data is one integer. No torch here.

The text is cut into chunks, and every 20th is held out. Learners draw windows from all the others: were the text dealt
out among them, the slow and the dead would take their part of it with them.
"""

from __future__ import annotations

import math
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import xxhash

from skerry.errors import DataError

STDLIB = "stdlib"  # the corpus on every machine with Python: the source of its standard library
TEXT_BYTES_MAX = 64 << 20
CHUNK_BYTES = 8 << 10
HELD_OUT_EVERY = 20  # chunks
SNIFF_BYTES = 4 << 10  # a NUL among these first bytes of a file: not text
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})  # half of the standard library; much of it is data

Batch = tuple[np.ndarray, np.ndarray]  # inputs, and targets one byte later: uint8 [batch, context] each


@dataclass(frozen=True, eq=False, repr=False)
class Corpus:
    """Training and held-out text, uint8 [bytes] each, and a digest of the whole."""

    name: str
    train: np.ndarray
    held_out: np.ndarray
    digest: str

    @classmethod
    def open(cls, path: str | Path, max_bytes: int = TEXT_BYTES_MAX) -> Corpus:
        """Read a file, a folder or "stdlib" (a folder of that name is "./stdlib"), up to `max_bytes`."""
        text = np.frombuffer(read_text(corpus_files(path), max_bytes), np.uint8)
        if not len(text):
            raise DataError(f"{path} holds no text; name a text file, a folder of them, or {STDLIB!r}")
        train, held_out = split(text)
        return cls(str(path), train, held_out, xxhash.xxh3_128_hexdigest(text.data))

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


def held_out_batches(corpus: Corpus, batch: int, context: int, count: int) -> list[Batch]:
    """Fixed batches, spread evenly over the held-out text: the same for every learner and every run."""
    need_window(corpus, corpus.held_out, context)
    starts = np.linspace(0, len(corpus.held_out) - context - 1, batch * count).astype(np.int64)
    return [windows(corpus.held_out, some, context) for some in starts.reshape(count, batch)]


def split(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out text; a short text is cut finer, so that it has a held-out chunk too."""
    chunks = cut(text, min(CHUNK_BYTES, len(text) // HELD_OUT_EVERY))
    train = [chunk for number, chunk in enumerate(chunks, 1) if number % HELD_OUT_EVERY]
    return join(train), join(chunks[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])


def cut(text: np.ndarray, chunk_bytes: int) -> list[np.ndarray]:
    size = max(1, chunk_bytes)
    return [text[at : at + size] for at in range(0, len(text), size)]


def join(chunks: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.uint8), *chunks])


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    rows = text[starts[:, None] + np.arange(context + 1)]  # [batch, context + 1]
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def need_window(corpus: Corpus, part: np.ndarray, context: int) -> None:
    """A window is a context and one byte more; the held-out part, a twentieth, must have one as well."""
    if len(part) > context:
        return
    window = context + 1
    chunk = min(CHUNK_BYTES, window)
    needed = HELD_OUT_EVERY * chunk * math.ceil(window / chunk)
    total = len(corpus.train) + len(corpus.held_out)
    raise DataError(
        f"{corpus.name} holds {total} bytes of text, too few for a context of {context}: "
        f"at least {needed} are needed; add text or shorten the context"
    )


def corpus_files(path: str | Path) -> list[Path]:
    if path == STDLIB:
        return walk(Path(sysconfig.get_path("stdlib")), SKIPPED_FOLDERS | TEST_FOLDERS, suffix=".py")
    root = Path(path)
    try:
        if root.is_dir():
            return walk(root, SKIPPED_FOLDERS)
        if root.is_file():
            return [root]
        fault = "is neither a file nor a folder" if root.exists() else "does not exist"
    except OSError as error:
        refuse(error)
    raise DataError(f"{path} {fault}; name a text file, a folder of them, or {STDLIB!r}")


def walk(root: Path, skipped: frozenset[str], suffix: str = "") -> list[Path]:
    """Regular files in the order of their relative paths; nothing hidden, no links to folders."""
    found = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in skipped]
        found += [Path(folder, name) for name in files if name[0] != "." and name.endswith(suffix)]
    found.sort(key=lambda file: file.relative_to(root).as_posix())
    return [file for file in found if file.is_file()]


def read_text(files: list[Path], max_bytes: int) -> bytes:
    """The bytes of those files that look like text, in order, cut at `max_bytes`."""
    text = bytearray()
    for path in files:
        if len(text) >= max_bytes:
            break
        try:
            with path.open("rb") as file:
                opening = file.read(SNIFF_BYTES)
                if b"\0" not in opening:
                    text += opening + file.read(max_bytes)
        except OSError as error:
            refuse(error)
    return bytes(text[:max_bytes])


def refuse(error: OSError) -> NoReturn:
    what = f"{error.filename} cannot be read ({error.strerror})"
    raise DataError(f"{what}; make it readable or name another") from error
