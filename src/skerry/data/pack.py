"""A pack: tokens in shards that are mapped into memory, and an index that says what they are.

    index.json            written last, at once: where it is missing the pack was never finished
    shards/00000.bin …    nothing but tokens, little-endian

A pack's tokens are those of its shards, one behind the other. Its digest is that of the index, which holds a digest of
every shard. Sizes are checked when a pack is opened; contents only by `check`, which reads all of it. A file must not
be changed while it is mapped.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import xxhash

from skerry.data.order import window_numbers
from skerry.data.windows import HELD_OUT_EVERY, Batch, chunk_tokens, need_window, windows
from skerry.disk import contents, opened
from skerry.errors import DataError, one_line

INDEX = "index.json"
UNFINISHED = "index.json.part"  # of a pack that is being written, or was broken off
SHARDS = "shards"
FORMAT = "skerry-pack"
VERSION = 1
Dtype = Literal["uint8", "uint16", "uint32"]
DTYPES: dict[Dtype, int] = {
    "uint8": 1 << 8,
    "uint16": 1 << 16,
    "uint32": 1 << 32,
}  # and how many tokens each can tell apart
MAPS_MAX = 512  # shards that are mapped at once: each has a file open
AHEAD = 64  # batches whose windows are found at once: a single one costs as much
READ_BYTES = 4 << 20
SHARD_NAME = re.compile(r"\d{5,}\.bin")


class Shard(msgspec.Struct, frozen=True):
    name: str
    tokens: int
    xxh3: str  # XXH3, 128 bits, of the file


class Index(msgspec.Struct, frozen=True):
    """What index.json holds. `format` comes first, so that a pack is known by its first bytes."""

    format: str
    version: int
    dtype: Dtype
    vocabulary: int  # every token is below it
    tokenizer: str
    separator: int | None  # the token that ends each document
    documents: int
    tokens: int
    shards: tuple[Shard, ...]


class Pack:
    """The tokens of a pack, read where they lie: the training part, the held-out part, and a learner's batches."""

    kind = "tokens"

    def __init__(self, path: str | Path) -> None:
        self.path, self.name = Path(path), str(path)
        self.index, self.digest = read_index(self.path)
        for shard in self.index.shards:
            self._check_size(shard)
        self._ends = list(accumulate(shard.tokens for shard in self.index.shards))
        self._maps: dict[int, np.ndarray] = {}
        chunk = chunk_tokens(self.tokens)
        length = _held_out_tokens(self.tokens, chunk)
        in_row = HELD_OUT_EVERY - 1  # chunks that are trained on, then one that is not
        self.train = Part(self, self.tokens - length, chunk, lambda number: chunk * (number + number // in_row))
        self.held_out = Part(self, length, chunk, lambda number: chunk * (HELD_OUT_EVERY * number + in_row))

    @property
    def tokens(self) -> int:
        return self.index.tokens

    @property
    def vocabulary(self) -> int:
        return self.index.vocabulary

    def batches(self, learner: int, seed: int, batch: int, context: int, start: int = 0, *, learners: int) -> Batches:
        """Endless batches of one learner, from its batch number `start` on: int64 [batch, context] inputs and targets.

        `learners` is how many the run has (`run.learners`): an epoch is dealt out among them.
        """
        if min(batch, context, learners) < 1 or min(learner, start) < 0:
            given = f"learner {learner}, batch {batch}, context {context}, start {start}, learners {learners}"
            raise DataError(
                f"{self.name}: no batches of {given}: batch, context and learners are from 1, the rest from 0"
            )
        batches = Batches(self, learner, learners, seed, batch, context)
        batches.seek(start)
        return batches

    def read(self, begin: int, end: int) -> np.ndarray:
        """The tokens from `begin` on and before `end`, as int64, which is what torch looks up and compares."""
        tokens = np.empty(end - begin, np.int64)
        done = 0
        while done < len(tokens):
            number = bisect_right(self._ends, begin + done)
            shard = self._shard(number)
            first = begin + done - (self._ends[number] - len(shard))
            some = shard[first : first + len(tokens) - done]
            tokens[done : done + len(some)] = some
            done += len(some)
        return tokens

    def check(self, told: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read every shard and refuse what is not as it was written; `told` hears how many shards are done."""
        shards = self.index.shards
        for done, shard in enumerate(shards, 1):
            if _digest_of(self.path / SHARDS / shard.name) != shard.xxh3:
                raise DataError(f"{self.path / SHARDS / shard.name} is not what was packed; copy it again or pack anew")
            told(done, len(shards))

    def _shard(self, number: int) -> np.ndarray:
        if number not in self._maps:
            if len(self._maps) >= MAPS_MAX:
                del self._maps[next(iter(self._maps))]
            file = self.path / SHARDS / self.index.shards[number].name
            mapped = np.memmap(file, np.dtype(self.index.dtype).newbyteorder("<"), "r")
            self._maps[number] = np.asarray(mapped)  # a plain array of the same memory is quicker to cut
        return self._maps[number]

    def _check_size(self, shard: Shard) -> None:
        file, size = self.path / SHARDS / shard.name, shard.tokens * np.dtype(self.index.dtype).itemsize
        try:
            found = file.stat().st_size
        except OSError as error:
            raise DataError(f"{file} cannot be read ({error.strerror}); copy it again or pack anew") from None
        if found != size:
            raise DataError(f"{file} has {found} bytes, and had {size} when it was packed; copy it again or pack anew")

    def __repr__(self) -> str:
        return f"Pack({self.name}, {self.tokens} tokens of {self.vocabulary}, {self.digest[:8]})"


class Part:
    """Some chunks of a pack as one stretch of tokens; `place` says where in the pack the chunk of a number begins."""

    def __init__(self, pack: Pack, length: int, chunk: int, place: Callable[[int], int]) -> None:
        self._pack, self._length, self._chunk, self._place = pack, length, chunk, place

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, wanted: slice, /) -> np.ndarray:
        begin, end, _ = wanted.indices(self._length)
        stretches = [np.empty(0, np.int64)]
        while begin < end:
            number, within = divmod(begin, self._chunk)
            first, count = self._place(number) + within, min(end - begin, self._chunk - within)
            stretches.append(self._pack.read(first, first + count))
            begin += count
        return np.concatenate(stretches)


class Batches:
    """One learner's way through a pack: `position` counts the batches drawn, `seek` goes to any of them."""

    def __init__(self, pack: Pack, learner: int, learners: int, seed: int, batch: int, context: int) -> None:
        need_window(pack, pack.train, context)
        self.pack, self.learner, self.learners = pack, learner, learners
        self.seed, self.batch, self.context = seed, batch, context
        self.windows = (len(pack.train) - 1) // context
        self.position, self._lot = 0, -1
        if learners > self.windows:
            raise DataError(
                f"{pack.name} has {self.windows} windows of {context} tokens, too few to deal out among {learners} "
                "learners; pack more text, shorten the context or lower run.learners"
            )

    def seek(self, position: int) -> None:
        assert position >= 0, position
        self.position = position

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        return windows(self.pack.train, self.context * self.numbers(), self.context)

    def numbers(self) -> np.ndarray:
        """Which windows the next batch is made of; moves on by one batch."""
        lot, number = divmod(self.position, AHEAD)
        self.position += 1
        if lot != self._lot:
            self._lot, count = lot, AHEAD * self.batch
            numbers = window_numbers(self.windows, self.learner, self.learners, self.seed, lot * count, count)
            self._numbers = numbers.reshape(AHEAD, self.batch)
        some: np.ndarray = self._numbers[number]
        return some

    def __repr__(self) -> str:
        return f"Batches({self.pack.name}, learner {self.learner}, seed {self.seed}, position {self.position})"


def is_pack(path: str | Path) -> bool:
    """Whether a path is that of a pack, be it damaged, unfinished, or its index alone."""
    folder = Path(path)
    try:
        if (folder / UNFINISHED).is_file() or (folder / SHARDS / "00000.bin").is_file():
            return True
        with opened(folder / INDEX, through_link=True) as file:
            return file.read(64).startswith(b'{"format":"%s"' % FORMAT.encode())
    except OSError:
        return False


def read_index(path: Path) -> tuple[Index, str]:
    """The index of a pack and its digest; the shards are not looked at."""
    try:
        data = contents(path / INDEX, through_link=True)
        index = msgspec.json.decode(data, type=Index)
    except OSError as error:
        if (path / UNFINISHED).exists():
            raise DataError(f"{path} is a pack that was not finished; remove it and pack anew") from None
        raise DataError(f"{path} is no pack: {INDEX} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        why = one_line(str(error))
        raise DataError(f"{path / INDEX} is not the index of a pack ({why}); copy it again or pack anew") from None
    for fault in _faults(index):
        raise DataError(f"{path / INDEX} {fault}; copy it again or pack anew")
    return index, xxhash.xxh3_128_hexdigest(data)


def _faults(index: Index) -> Iterable[str]:
    if index.format != FORMAT:
        yield f"is not the index of a pack (format {one_line(repr(index.format))})"
    elif index.version != VERSION:
        yield f"is of version {index.version}, and this Skerry reads version {VERSION}"
    elif not 0 < index.vocabulary <= DTYPES[index.dtype]:
        yield f"has a vocabulary of {index.vocabulary}, which {index.dtype} does not hold"
    elif index.separator is not None and not 0 <= index.separator < index.vocabulary:
        yield f"says that documents end with token {index.separator}, and its vocabulary is {index.vocabulary}"
    elif not all(SHARD_NAME.fullmatch(shard.name) and shard.tokens > 0 for shard in index.shards):
        yield "names a shard that cannot be one"
    elif len({shard.name for shard in index.shards}) < len(index.shards):
        yield "names a shard twice"
    elif not index.tokens or index.tokens != sum(shard.tokens for shard in index.shards):
        yield f"says {index.tokens} tokens, and its shards are of another number"
    elif not 0 <= index.documents <= index.tokens:
        yield f"says {index.documents} documents, and none is without a token"


def _held_out_tokens(total: int, chunk: int) -> int:
    whole, rest = divmod(total, chunk)
    return chunk * (whole // HELD_OUT_EVERY) + (rest if (whole + 1) % HELD_OUT_EVERY == 0 else 0)


def _digest_of(file: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb") as opened:
            while block := opened.read(READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); copy it again or pack anew") from None
    return digest.hexdigest()
