"""The journal: what is needed to do merges again, appended to numbered files.

    journal/000007.log      the entries of one process, one after the other; a long one begins on a page of the file

An entry has no header: the tape says where it lies, how long it is and its checksum (`Place`), and what the tape does
not name is nobody's. So a tail that a crash tore needs no care, and a process never appends to a file of another: it
begins a new one. No number is given out twice, also where the file that had it was removed: the tape still speaks of
it. Entries are appended in the order in which their places were given out, and are durable before the record that names
them is written.

The journal does not know what an entry says. Its checksum is xxh3: it is there for damage, not for liars.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from skerry.memory import PAGE_BYTES

from .files import LONG_BYTES, FileSystem, flat

if TYPE_CHECKING:
    from typing_extensions import Buffer

JOURNAL = "journal"
# A file is left behind when it is so long, by the size of the model: what nobody needs is removed by the file.
FILE_BYTES_MIN, FILE_BYTES_MAX = 1 << 20, 256 << 20


class Place(NamedTuple):
    """Where an entry lies, and what it must be."""

    file: int  # its number
    offset: int
    size: int
    checksum: bytes


class Journal:
    """The open end. Places are given out by one thread, entries appended by one, which may be another."""

    def __init__(self, files: FileSystem) -> None:
        self._files = files
        self.file_bytes = FILE_BYTES_MAX
        self.known = 0  # the newest file that a record speaks of
        self._number, self._size = 0, 0  # where the next entry is placed; 0: in a file that is yet to be chosen
        self._begun, self._end = 0, 0  # the file that is written to, and up to where it was

    def place(self, size: int, checksum: bytes) -> Place:
        """Where an entry will lie; those placed are to be appended in the same order."""
        if not self._number:  # not before: who reads a tape alone needs no journal
            self._number = max([self.known, *_numbers(self._files)]) + 1
        if self._size >= self.file_bytes:
            self._number, self._size = self._number + 1, 0
        if size >= LONG_BYTES:
            self._size += -self._size % PAGE_BYTES
        self._size += size
        return Place(self._number, self._size - size, size, checksum)

    def append(self, entries: Sequence[tuple[Place, Buffer]]) -> None:
        """Durable on return."""
        for number in sorted({place.file for place, _ in entries}):
            name = _name(number)
            if is_new := number > self._begun:
                self._files.write(name, [])
                self._begun, self._end = number, 0
            for place, data in entries:
                if place.file == number:
                    self._append(place, data)
            self._files.sync(name)
            if is_new:
                self._files.sync_dir(JOURNAL)

    def _append(self, place: Place, data: Buffer) -> None:
        gap = place.offset - self._end
        assert 0 <= gap < PAGE_BYTES and place.size == flat(data).nbytes, (place, self._end)
        if gap:
            self._files.append(_name(place.file), bytes(gap))
        self._files.append(_name(place.file), data)
        self._end = place.offset + place.size

    def collect(self, keep: Collection[int]) -> int:
        """Remove the files of earlier entries, and of earlier processes, that are not in `keep`."""
        left = [number for number in _numbers(self._files) if number < self._begun or not self._begun]
        stale = [number for number in left if number not in keep]
        for number in stale:
            with suppress(IsADirectoryError):  # nothing of ours
                self._files.remove(_name(number))
        return len(stale)


def file_bytes(entries_bytes: int) -> int:
    """How long a file should be where so much is written between two checkpoints."""
    return min(FILE_BYTES_MAX, max(FILE_BYTES_MIN, entries_bytes))


def read(files: FileSystem, at: Place) -> bytes | None:
    """What lies there; None if it is not what was written."""
    data = files.read_at(_name(at.file), at.offset, at.size)
    is_it = len(data) == at.size and xxhash.xxh3_128_digest(data) == at.checksum
    return data if is_it else None


def where(at: Place) -> str:
    return f"{_name(at.file)} at byte {at.offset}"


def _name(number: int) -> str:
    return f"{JOURNAL}/{number:06d}.log"


def _numbers(files: FileSystem) -> list[int]:
    matches = (re.fullmatch(r"([0-9]{6,})\.log", name) for name in files.names(JOURNAL))
    return sorted(int(match[1]) for match in matches if match)
