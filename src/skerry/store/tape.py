"""The tape: an append-only, hash-chained list of records in numbered segments.

A *group* is what one commit appends: one write, one fsync, one hash over all its records, so after a crash a
group is there whole or not at all. Every segment but the first begins with a group of one record, the *fold*:
the state of everything before it, so opening reads only the last segment. Earlier segments stay, for replay, until
they are pruned: then the tape begins with a later one, which says everything before it in its fold. Which one that is
stands in a record, so that a segment that is lost is not taken for pruned: who reads says where the tape begins.

    segment   magic 8 | version u16 | 0 u16 | number u32 | previous hash 32 | group ...
    group     magic 4 | segment u32 | offset u64 | at f64 | records u32 | payload bytes u32 | previous hash 32
              | payload: (length u32 | body) ... | sha256 of all of the group before it 32

`at` is when it was committed, in seconds of the wall clock: a stamp, by which nothing is ordered.

Torn tail or damage? A group is written only after everything before it was fsynced. So behind a bad group:
- no intact group follows: it is the tail, torn by a crash and never acknowledged (or the very last group has
  rotted, which nothing in the file can tell apart). It is cut off, and kept beside the tape for a person to look at.
- an intact group follows: the bad bytes had been fsynced, a crash cannot have spoiled them. `TapeDamaged`.
A group holds its own place and its predecessor's hash, so it can be recognised behind any damage, also where bytes
were put in or taken out, so that it lies elsewhere: it must belong behind the good ones then, by what it says.

Opening for writing always copies the good part of the last segment to a fresh file and renames it into place:
this cuts the tail, and makes durable what is only in the page cache. After a failed fsync Linux shows bytes
there, marked clean, that never reached the disk; syncing such a file again succeeds and proves nothing. The tail
is durable in a file of its own, `000003.1.cut`, before it is cut; no segment is ever read from such a file.

The tape does not know what a record says.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from skerry.errors import TapeDamaged, TapeUnknown

from .files import FileSystem

FORMAT_VERSION = 3
WRITTEN_BY = {1: "0.1", 2: "0.2", FORMAT_VERSION: "0.3"}  # format -> the version of Skerry that writes and reads it
GROUP_BYTES_MAX = 64 << 20  # payload of one commit
SEGMENT_BYTES_MAX = 2 << 30  # twice the most that `store.segment_bytes` may be, for commits before it is looked at
AT_MIN, AT_MAX = -1e9, 1e11  # seconds of the wall clock, which may be wrong: the years 1938 and 5138
LOOK_BYTES = 1 << 20  # that whoever follows a tape reads at once
CUTS_MAX = 16  # kept beside a tape: a full disk and an eager service manager may make one a second

_SEGMENT_MAGIC = b"SKRYTAPE"
_SEGMENT = struct.Struct("<8sHHI32s")
_GROUP_MAGIC = b"\xf5GRP"
_GROUP = struct.Struct("<4sIQdII32s")
_LENGTH = struct.Struct("<I")
_HASH_BYTES = 32
_NO_HASH = bytes(_HASH_BYTES)  # what the first segment continues


class Record(NamedTuple):
    segment: int
    number: int  # within the segment, from 0
    offset: int  # of its length field, within the segment
    at: float  # when it was committed
    is_fold: bool
    body: bytes


class Cut(NamedTuple):
    """What lies behind the last whole group: in which file, from which byte on, and where it is kept once cut off."""

    name: str
    offset: int
    data: bytes
    kept: str = ""


class Tape:
    """The open end of the tape. One writer; after a call that raised it must not be used again."""

    def __init__(self, files: FileSystem, last: _Segment, cut: Cut | None) -> None:
        self._files = files
        self.number = last.number  # of the last segment
        self.size = len(last.good)  # bytes in it: when to rotate
        self.head = last.head  # hash of the last group
        self.committed_at = last.records[-1].at if last.records else 0.0  # before it was opened; 0: never
        self.cut = cut  # found behind it when it was opened; a reader leaves it where it is

    def __repr__(self) -> str:
        return f"Tape({_name(self.number)}, {self.size} bytes, head {self.head.hex()[:12]})"

    @classmethod
    def open(cls, files: FileSystem, *, readonly: bool = False) -> tuple[Tape, list[bytes]]:
        """The tape and the records of its last segment: the fold, if any, and everything since."""
        last, cut = _last_segment(files)
        if not readonly:
            if cut.data:
                cut = _keep(files, cut)
            if cut.name != _name(last.number):
                files.remove(cut.name)
                files.sync_dir("tape")
            _place(files, _name(last.number), last.good)
            for leftover in [name for name in files.names("tape") if name.endswith(".tmp")]:
                files.remove(f"tape/{leftover}")
        return cls(files, last, cut if cut.data else None), [record.body for record in last.records]

    def append(self, bodies: Sequence[bytes], at: float) -> None:
        """One group: durable on return; after a crash before that, all of it is there or nothing."""
        group = _group(self.number, self.size, at, self.head, bodies)
        self._files.append(_name(self.number), group)
        self._files.sync(_name(self.number))
        self.size, self.head = self.size + len(group), group[-_HASH_BYTES:]

    def rotate(self, fold: bytes, at: float) -> None:
        """Go on in a new segment that begins with the folded state; it appears whole or not at all."""
        header = _header(self.number + 1, self.head)
        group = _group(self.number + 1, len(header), at, self.head, [fold])
        _place(self._files, _name(self.number + 1), header + group)
        self.number, self.size, self.head = self.number + 1, len(header + group), group[-_HASH_BYTES:]

    def prune(self, first: int) -> int:
        """Remove what lies before this segment; that the tape begins there is on it already. How many files."""
        assert first <= self.number, (first, self.number)
        stale = [name for name in self._files.names("tape") if _is_before(name, first)]
        for name in stale:
            self._files.remove(f"tape/{name}")
        return len(stale)


def read_all(files: FileSystem, first: int = 1) -> Iterator[Record]:
    """Every record from this segment on, the whole chain verified; needs no lock and stops before a torn tail."""
    head = _NO_HASH if first == 1 else None  # what a pruned tape continues is known to nobody
    numbers = [number for number in _numbers(files) if number >= first]
    if first > 1 and not numbers:
        raise TapeDamaged(f"{_name(first)} is missing: restore it from a copy")
    for expected, number in enumerate(numbers, start=first):
        if number != expected:
            raise TapeDamaged(f"{_name(expected)} is missing: restore it from a copy")
        segment = _parse(_whole(files, number), number)
        if (segment.tail or not segment.good) and number != numbers[-1]:
            raise _damage(segment, "there is a later segment")
        if segment.good and head is not None and segment.previous != head:
            raise TapeDamaged(f"{_name(number)} does not continue the segment before it: restore both")
        yield from segment.records
        head = segment.head


class Follower:
    """Reads behind a writer, of whom it knows nothing: each look gives what was committed since the last one.

    Whole groups only, their chain verified: what is being written, or was torn by a crash, is not there yet. A segment
    that a writer copies and renames when it opens the tape has the same bytes up to where they were read.
    """

    def __init__(self, files: FileSystem, first: int = 1) -> None:
        self._files = files
        self._number, self._offset, self._count = first, 0, 0  # of the record that comes next
        self._head = _NO_HASH if first == 1 else b""  # what a pruned tape continues is known to nobody

    def __repr__(self) -> str:
        return f"Follower({_name(self._number)}, byte {self._offset})"

    def read(self) -> Iterator[Record]:
        """Every record since the last look; `FileNotFoundError` if its segment was pruned before it was read."""
        while True:
            has_next = self._has_next()
            yield from self._rest()  # asked in this order: where there is a next one, nothing is added to this one
            if not has_next:
                return
            self._number, self._offset, self._count = self._number + 1, 0, 0

    def _has_next(self) -> bool:
        try:
            return bool(self._files.read_at(_name(self._number + 1), 0, 1))
        except FileNotFoundError:
            return False

    def _rest(self) -> Iterator[Record]:
        """What is left of this segment, from the hash before it on: by that a file that was replaced is known."""
        size = LOOK_BYTES
        while self._offset or self._begin():
            start = self._offset - _HASH_BYTES
            data = self._files.read_at(_name(self._number), start, size)
            if data[:_HASH_BYTES] != self._head:
                raise TapeDamaged(f"{_name(self._number)} was replaced while it was read: read it from its beginning")
            position = _HASH_BYTES
            while group := _group_at(data, self._number, position, start):
                if group.previous != self._head:
                    raise TapeDamaged(
                        f"{_name(self._number)} is damaged at byte {self._offset}: restore it from a copy"
                    )
                for offset, body in group.bodies:
                    is_fold = self._number > 1 and self._count == 0
                    yield Record(self._number, self._count, start + offset, group.at, is_fold, body)
                    self._count += 1
                self._head, self._offset, position = group.hash, start + group.end, group.end
            if len(data) < size or (position == _HASH_BYTES and size > 2 * GROUP_BYTES_MAX):
                return  # what follows is not all there, or longer than a group can be
            size = LOOK_BYTES if position > _HASH_BYTES else 2 * size  # one group may be longer than a look

    def _begin(self) -> bool:
        """Whether the segment's header is there; it must continue what was read."""
        try:
            header = self._files.read_at(_name(self._number), 0, _SEGMENT.size)
        except FileNotFoundError:
            if _numbers(self._files):
                raise
            return False  # nobody has written anything yet
        previous = _read_header(header, self._number)
        if previous is None:
            return False
        if self._head and previous != self._head:
            raise TapeDamaged(f"{_name(self._number)} does not continue the segment before it: restore both")
        self._head, self._offset = previous, _SEGMENT.size
        return True


@dataclass
class _Segment:
    number: int
    previous: bytes = _NO_HASH
    head: bytes = _NO_HASH
    good: bytes = b""  # header and intact groups; empty when not even the header is right
    tail: bytes = b""  # what follows them
    records: list[Record] = field(default_factory=list)

    @property
    def cut(self) -> Cut:
        return Cut(_name(self.number), len(self.good), self.tail)


def _last_segment(files: FileSystem) -> tuple[_Segment, Cut]:
    """The segment to go on from, and what is behind its good part or is a later one that holds no commit."""
    numbers = _numbers(files)
    if not numbers:
        first = _first_segment()
        return first, first.cut
    last = _parse(_whole(files, numbers[-1]), numbers[-1])
    if last.records or (last.good and last.number == 1):
        return last, last.cut
    if last.number == 1:
        return _first_segment(), last.cut
    # A later segment without its fold: nothing was committed in it; all before it was durable when it began.
    if last.number - 1 not in numbers:
        raise TapeDamaged(f"{_name(last.number - 1)} is missing: restore it from a copy")
    before = _parse(_whole(files, last.number - 1), last.number - 1)
    if before.tail or not before.good:
        raise _damage(before, "there is a later segment")
    return before, Cut(_name(last.number), 0, last.good + last.tail)


def _first_segment() -> _Segment:
    return _Segment(1, good=_header(1, _NO_HASH))


def _keep(files: FileSystem, cut: Cut) -> Cut:
    """Put the bytes beside the tape, unless `CUTS_MAX` lie there: none is overwritten, the oldest may matter most.

    Where a crash came between keeping and cutting, the same bytes are there already. They are written again under the
    same name: what is merely seen in the directory may exist in the cache alone.
    """
    there = [f"tape/{name}" for name in files.names("tape") if name.endswith(".cut")]
    same = next((name for name in there if files.read(name) == cut.data), "")
    if not same and len(there) >= CUTS_MAX:
        return cut
    stem = cut.name.removesuffix(".seg")
    fresh = next(name for n in range(1, CUTS_MAX + 1) if (name := f"{stem}.{n}.cut") not in there)
    _place(files, same or fresh, cut.data)
    return cut._replace(kept=same or fresh)


def _place(files: FileSystem, name: str, data: bytes) -> None:
    """A file that is durable and whole, or not there."""
    temporary = f"{name}.tmp"
    files.write(temporary, [data])
    files.sync(temporary)
    files.rename(temporary, name)
    files.sync_dir("tape")


def _whole(files: FileSystem, number: int) -> bytes:
    """All of a segment; what is longer than any that is written is refused before it fills the memory."""
    if files.read_at(_name(number), SEGMENT_BYTES_MAX, 1):
        raise TapeDamaged(f"{_name(number)} is longer than {SEGMENT_BYTES_MAX} bytes: restore it from a copy")
    return files.read(_name(number))


def _parse(data: bytes, number: int) -> _Segment:
    """The good part of a segment; `TapeDamaged` if what follows it is more than a torn tail."""
    segment = _Segment(number)
    previous = _read_header(data, number)
    end = 0
    if previous is not None:
        segment.previous = segment.head = previous
        end = _SEGMENT.size
        while (group := _group_at(data, number, end)) and group.previous == segment.head:
            segment.records += [
                Record(number, count, offset, group.at, number > 1 and count == 0, body)
                for count, (offset, body) in enumerate(group.bodies, start=len(segment.records))
            ]
            segment.head, end = group.hash, group.end
    segment.good, segment.tail = data[:end], data[end:]
    if (later := _intact_group_after(data, segment, end)) is not None:
        raise _damage(segment, f"an intact one follows at byte {later}")
    return segment


class _Group(NamedTuple):
    offset: int  # as it says itself
    at: float
    previous: bytes
    bodies: list[tuple[int, bytes]]  # (offset, body)
    hash: bytes
    end: int


def _group_at(data: bytes, number: int, start: int, base: int = 0) -> _Group | None:
    """The group at `start`, if it is whole and in its place; `data` is the file from byte `base` on."""
    group = _whole_group_at(data, number, start, base)
    return group if group is not None and group.offset == base + start else None


def _whole_group_at(data: bytes, number: int, start: int, base: int = 0) -> _Group | None:
    """The group at `start`, wherever it belongs, if all of it is there and its hash is right.

    `TapeDamaged` if it is stamped with what is no time, which nobody who shows it could.
    """
    if start + _GROUP.size > len(data):
        return None
    magic, segment, offset, at, count, payload_bytes, previous = _GROUP.unpack_from(data, start)
    end = start + _GROUP.size + payload_bytes
    if (magic, segment) != (_GROUP_MAGIC, number) or payload_bytes > GROUP_BYTES_MAX:
        return None
    if end + _HASH_BYTES > len(data):
        return None
    hash = sha256(memoryview(data)[start:end]).digest()
    if hash != data[end : end + _HASH_BYTES]:
        return None
    if not AT_MIN <= at <= AT_MAX:  # the hash is right, so no crash did this
        where = f"{_name(number)} is damaged at byte {base + start}"
        raise TapeDamaged(f"{where}: its time stamp, {at:g}, is no time between 1970 and 5138: restore it from a copy")
    bodies = _bodies(data, start + _GROUP.size, end)
    return _Group(offset, at, previous, bodies, hash, end + _HASH_BYTES) if 0 < len(bodies) == count else None


def _bodies(data: bytes, start: int, end: int) -> list[tuple[int, bytes]]:
    """The records between `start` and `end`; none if their lengths do not add up."""
    bodies = []
    while start + _LENGTH.size <= end:
        body_start = start + _LENGTH.size
        body_end = body_start + _LENGTH.unpack_from(data, start)[0]
        if body_end > end:
            break
        bodies.append((start, data[body_start:body_end]))
        start = body_end
    return bodies if start == end else []


def _intact_group_after(data: bytes, segment: _Segment, end: int) -> int | None:
    """Where a group lies that was written behind the good ones, in its place or not."""
    start = end
    while (start := data.find(_GROUP_MAGIC, start)) >= 0:
        if group := _whole_group_at(data, segment.number, start):
            follows = group.offset == end and group.previous == segment.head
            if group.offset > end or group.offset == start or follows:
                return start
        start += 1
    return None


def _group(number: int, offset: int, at: float, previous: bytes, bodies: Sequence[bytes]) -> bytes:
    payload_bytes = sum(_LENGTH.size + len(body) for body in bodies)
    assert bodies, "a group holds at least one record"
    assert AT_MIN <= at <= AT_MAX, f"a commit at {at}"
    assert payload_bytes <= GROUP_BYTES_MAX, f"a commit of {payload_bytes} bytes, at most {GROUP_BYTES_MAX}"
    parts = [_GROUP.pack(_GROUP_MAGIC, number, offset, at, len(bodies), payload_bytes, previous)]
    for body in bodies:
        parts += [_LENGTH.pack(len(body)), body]
    group = b"".join(parts)
    return group + sha256(group).digest()


def _header(number: int, previous: bytes) -> bytes:
    return _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, 0, number, previous)


def _read_header(data: bytes, number: int) -> bytes | None:
    """The hash this segment continues from, or None if the header is torn."""
    first = data[: len(_SEGMENT_MAGIC)]
    if any(first) and not _SEGMENT_MAGIC.startswith(first):  # a crash may leave a beginning, or zeros
        raise TapeDamaged(f"{_name(number)} is no segment of a tape, its first bytes are not: restore it from a copy")
    if len(data) < _SEGMENT.size or not data.startswith(_SEGMENT_MAGIC):
        return None
    _, version, _, _, previous = _SEGMENT.unpack_from(data)
    if 0 < version != FORMAT_VERSION:  # zeros are a torn header
        raise TapeUnknown(f"{_name(number)} {_who_reads(version)}")
    is_right = data[: _SEGMENT.size] == _header(number, previous) and (number > 1 or previous == _NO_HASH)
    return previous if is_right else None


def _who_reads(version: int) -> str:
    """What to do with a tape of another format."""
    ours = f"Skerry {WRITTEN_BY[FORMAT_VERSION]} reads format {FORMAT_VERSION}"
    if version not in WRITTEN_BY:
        return f"has format {version}; {ours}: use a later version"
    theirs = f"Skerry {WRITTEN_BY[version]}"
    return f"was written by {theirs} (format {version}); {ours}: export or finish this run with {theirs}"


def _name(number: int) -> str:
    return f"tape/{number:06d}.seg"


def _is_before(name: str, first: int) -> bool:
    """Whether a file is an earlier segment, or what was cut off from one."""
    match = re.fullmatch(r"([0-9]{6,})(\.[0-9]+\.cut|\.seg)", name)
    return match is not None and int(match[1]) < first


def _numbers(files: FileSystem) -> list[int]:
    matches = (re.fullmatch(r"([0-9]{6,})\.seg", name) for name in files.names("tape"))
    return sorted(int(match[1]) for match in matches if match)


def _damage(segment: _Segment, proof: str) -> TapeDamaged:
    return TapeDamaged(
        f"{_name(segment.number)} is damaged from record {len(segment.records)} at byte {len(segment.good)}"
        f" ({proof}): restore it from a copy"
    )
