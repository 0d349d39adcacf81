"""Writing a pack: tokens go to its shards as they come, and the index last, at once.

Who leaves a `Writer` by an exception finds nothing of what it had written; who is killed leaves a pack that is refused
as unfinished.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash

from skerry.data.pack import DTYPES, FORMAT, INDEX, SHARDS, UNFINISHED, VERSION, Dtype, Index, Shard
from skerry.disk import sync_folder
from skerry.errors import DataError, DiskFull, LocalError

SHARD_TOKENS = 1 << 28
VOCABULARY_MAX = DTYPES["uint32"]


class Writer:
    """A pack that is being written to a folder that must not exist: `with Writer(…) as pack: pack.add(tokens)`.

    It is a pack when the block is left in order. Each document is ended by `separator`, if there is one.
    """

    def __init__(
        self,
        out: str | Path,
        vocabulary: int,
        tokenizer: str,
        separator: int | None = None,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        self.out, self.vocabulary, self.tokenizer, self.separator = Path(out), vocabulary, tokenizer, separator
        self.dtype = dtype_of(vocabulary)
        self.tokens = self.documents = 0
        self.index: Index | None = None  # once it is a pack
        self._document_began = 0
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        if shard_tokens < 1:
            raise DataError(f"a shard of {shard_tokens} tokens: at least one must fit")
        if separator is not None and not 0 <= separator < vocabulary:
            raise DataError(f"separator {separator}: a token is from 0 to {vocabulary - 1}, the vocabulary's last")
        _make(self.out)

    def add(self, tokens: np.ndarray | Sequence[int]) -> None:
        """The next tokens of a document."""
        array = np.asarray(tokens)
        if not array.size:
            return
        self._check(array)
        left = array.astype(np.dtype(self.dtype).newbyteorder("<"))
        while left.size:
            left = left[self._append(left) :]

    def end_document(self) -> None:
        """What comes next is another; one without a token is none."""
        if self.tokens == self._document_began:
            return
        self.documents += 1
        if self.separator is not None:
            self.add([self.separator])
        self._document_began = self.tokens

    def finish(self) -> None:
        """Make it a pack: all of it is on the disk before the index is."""
        if not self.tokens:
            raise DataError(f"{self.out}: there is nothing to pack: the sources hold no text")
        self._end_shard()
        index = Index(
            FORMAT, VERSION, self.dtype, self.vocabulary, self.tokenizer, self.separator, self.documents, self.tokens,
            tuple(self._shards),
        )  # fmt: skip
        sync_folder(self.out / SHARDS)
        (self.out / UNFINISHED).unlink()
        with (self.out / UNFINISHED).open("xb") as file:  # never through a link
            file.write(msgspec.json.encode(index))
            _sync(file)
        (self.out / UNFINISHED).rename(self.out / INDEX)
        sync_folder(self.out)
        sync_folder(self.out.parent)
        self.index = index

    def abandon(self) -> None:
        """Remove what was written."""
        if self._file is not None:
            self._file.close()
        shutil.rmtree(self.out, ignore_errors=True)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None and self.index is None:
            with self:  # what goes wrong now is told as before
                self.finish()
        if error is None:
            return
        self.abandon()
        if isinstance(error, OSError):
            raise _told(error, self.out) from error

    def _check(self, array: np.ndarray) -> None:
        if array.dtype.kind not in "ui" or array.ndim != 1:
            raise DataError(f"tokens: give whole numbers in one row, not {array.dtype} {list(array.shape)}")
        for token in (int(array.min()), int(array.max())):
            if not 0 <= token < self.vocabulary:
                raise DataError(f"token {token}: {self.tokenizer} has a vocabulary of {self.vocabulary}")

    def _append(self, tokens: np.ndarray) -> int:
        """To the open shard, as many as it has room for; how many."""
        if self._file is None:
            self._file = (self.out / SHARDS / f"{len(self._shards):05d}.bin").open("xb")
            self._digest, self._count = xxhash.xxh3_128(), 0
        some = np.ascontiguousarray(tokens[: self._shard_tokens - self._count])
        self._file.write(some.data)
        self._digest.update(some.data)
        self._count += len(some)
        self.tokens += len(some)
        if self._count == self._shard_tokens:
            self._end_shard()
        return len(some)

    def _end_shard(self) -> None:
        if self._file is None:
            return
        _sync(self._file)
        self._file.close()
        self._file = None
        self._shards.append(Shard(f"{len(self._shards):05d}.bin", self._count, self._digest.hexdigest()))


def dtype_of(vocabulary: int) -> Dtype:
    """The narrowest that holds every token."""
    for dtype, values in DTYPES.items():
        if 0 < vocabulary <= values:
            return dtype
    raise DataError(f"a vocabulary of {vocabulary}: must be from 1 to {VOCABULARY_MAX}")


def _make(out: Path) -> None:
    try:
        out.mkdir()
        (out / SHARDS).mkdir()
        (out / UNFINISHED).touch()
    except FileExistsError:
        rest = "it holds a pack that was not finished: remove it" if (out / UNFINISHED).exists() else "remove it"
        raise DataError(f"{out} exists; {rest}, or name another folder") from None
    except OSError as error:
        raise DataError(f"{out} cannot be made ({error.strerror}); name another folder") from None


def _told(error: OSError, out: Path) -> LocalError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(f"{out}: there is no room for the pack ({error.strerror}): free some, or name another folder")
    return DataError(f"{out} cannot be written ({error.strerror}); name another folder")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
