"""safetensors files, a piece at a time: the library of safetensors wants the whole model at once.

What is read is never mapped: a file that somebody cuts short would end this process. What is written is there whole or
not at all, and has the bytes that the library would write (tested).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedRandom
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from skerry.algo.fragments import F32
from skerry.disk import sync_folder
from skerry.errors import ModelError
from skerry.run.leftovers import making, remove_left
from skerry.store.files import fresh, temporary

# As the library orders them in a file, which keeps what follows aligned.
ORDER = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E8M0", "F8_E4M3", "F8_E5M2",
    "I8", "U8", "F6_E3M2", "F6_E2M3", "F4", "BOOL",
)  # fmt: skip
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of an element, of what can be trained
WORDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_NUMPY = {
    "U64": np.uint64, "I64": np.int64, "F64": np.float64, "C64": np.complex64, "F32": np.float32, "U32": np.uint32,
    "I32": np.int32, "F16": np.float16, "U16": np.uint16, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip
INFINITE_FROM = {"F16": 65520.0, "BF16": 2.0**128 - 2.0**119}  # half-way between the largest number and the next
PIECE_BYTES = 1 << 24  # that are in memory at once


class Entry(NamedTuple):
    """A tensor of a file; where its bytes begin, behind the head, and how many there are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    start: int = 0


def entry_of(name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    """Of a tensor that is, or was, trained."""
    return Entry(name, dtype, shape, WIDTHS[dtype] * math.prod(shape))


class TensorFile:
    """A safetensors file, whose tensors stay there until they are asked for.

    It was not written to since it was opened, or `ModelError` is raised. Whoever opens it knows that it is one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        self._first = self._stamp()
        self._begin = 8 + int.from_bytes(self._read(0, 8), "little")
        told = json.loads(self._read(8, self._begin - 8))
        self.metadata: dict[str, str] = told.pop("__metadata__", None) or {}
        self.entries = {name: _entry(name, about) for name, about in told.items()}

    def read(self, name: str, start: int, size: int) -> bytes:
        """So many bytes of a tensor, from this one on."""
        return self._read(self._begin + self.entries[name].start + start, size)

    def pieces(self, name: str) -> Iterator[bytes]:
        size = self.entries[name].size
        for start in range(0, size, PIECE_BYTES):
            yield self.read(name, start, min(PIECE_BYTES, size - start))

    def array(self, name: str, instead: bytes | None = None) -> npt.NDArray[Any]:
        """The whole tensor, or these bytes as one; bfloat16 as float32, what else numpy has not as plain bytes."""
        entry = self.entries[name]
        data = self.read(name, 0, entry.size) if instead is None else instead
        if entry.dtype == "BF16":
            return widened(data, "BF16").reshape(entry.shape)
        if entry.dtype not in _NUMPY:
            return np.frombuffer(data, np.uint8).copy()
        return np.frombuffer(data, _NUMPY[entry.dtype]).reshape(entry.shape).copy()

    def close(self) -> None:
        self._file.close()

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        data = self._file.read(size)
        if len(data) < size or self._stamp() != self._first:
            raise ModelError(f"{self.path}: was changed while it was read: begin again when nobody writes to it")
        return data

    def _stamp(self) -> tuple[int, int]:
        about = os.fstat(self._file.fileno())
        return about.st_size, about.st_mtime_ns


def _entry(name: str, about: dict[str, Any]) -> Entry:
    start, stop = about["data_offsets"]
    return Entry(name, about["dtype"], tuple(about["shape"]), stop - start, start)


def head_of(
    entries: Iterable[Entry], metadata: Mapping[str, str], as_given: bool = False
) -> tuple[bytes, dict[str, Entry]]:
    """What a file of these begins with, and each with its place behind that; in the library's order, or as given."""
    told: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    placed, end = {}, 0
    for entry in entries if as_given else sorted(entries, key=_order):
        _check_name(entry.name)
        placed[entry.name], start, end = entry._replace(start=end), end, end + entry.size
        told[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, placed


def _check_name(name: str) -> None:
    """The format keeps one name for itself, and its header is UTF-8, which has no lone surrogates."""
    if name == "__metadata__" or any("\ud800" <= char <= "\udfff" for char in name):
        raise ValueError(f"tensor {name!r} can have no such name in a safetensors file: give it another")


def _order(entry: Entry) -> tuple[int, str]:
    return (ORDER.index(entry.dtype) if entry.dtype in ORDER else len(ORDER)), entry.name


@contextlib.contextmanager
def written(path: Path) -> Iterator[BufferedRandom]:
    """A file to be filled: it has its name once it is whole and durable, and is gone if that breaks off.

    The name that it has until then is its own: another process may be writing the same.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # which this would take the place of
        raise OSError(errno.EINVAL, "is a device or a pipe, and no file", str(path))
    remove_left(path)
    anew = temporary(path)
    try:
        with fresh(anew) as file, making(anew):
            yield file
            file.flush()
            os.fsync(file.fileno())
        anew.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            anew.unlink()
        raise


# ---------------------------------------------------------------------------------------------- numbers


def widened(data: bytes | memoryview, dtype: str) -> F32:
    """These bytes as float32, exactly."""
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, _NUMPY[dtype]).astype(np.float32, copy=False)


def narrowed(values: F32, dtype: str) -> memoryview:
    """The bytes of these values in their own dtype, rounded to the nearest, ties to even, as torch does."""
    if dtype == "F32":
        return values.data.cast("B")
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).data.cast("B")
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).data.cast("B")


def overflows(values: F32, dtype: str) -> bool:
    """Among them are numbers that become infinite in this dtype."""
    if dtype not in INFINITE_FROM:
        return False
    sizes = np.abs(values)
    return bool(((sizes >= INFINITE_FROM[dtype]) & (sizes < np.inf)).any())
