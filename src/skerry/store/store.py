"""The durable store: a tape of records, a journal of entries, and files named by the digest of their contents.

    put      write temporary, fsync, rename to the digest
    mend     the same for a file that a record names already and that is damaged
    place    where an entry will lie
    commit   fsync directory, append entries, fsync journal, append records, fsync tape

Rules: what `commit` returned from survives any crash, whole; a record is on the tape only after the files and entries
it was committed with are durable; the first error while writing stops the store for good, because after a failed fsync
nobody knows what is on the disk, and asking again proves nothing. One thread commits, rotates and collects. `place`
may be called from another, `put` and the reading ones from any. So a commit names its files: another may have been put
meanwhile, whose record is yet to come. The store does not know what records say, so it is also told which files to
keep. It stamps each commit with the time of the clock it was handed.

A checkpoint is the syncer's own, and xxh3 names it, which finds damage. What learners contributed is named by its
sha256, so that the tape's chain proves what they said.
"""

from __future__ import annotations

import errno
import itertools
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import xxhash

from skerry.errors import DiskFull, FileDamaged, FileMissing, StoreError, TapeDamaged, TapeUnknown

from . import journal
from .files import DiskFiles, FileSystem, flat
from .journal import JOURNAL, Journal, Place
from .lock import NO_ROOM
from .tape import CUTS_MAX, Follower, Record, Tape, read_all

if TYPE_CHECKING:
    from typing_extensions import Buffer

FILES = "files"  # collected when nobody needs them any more
RECORD = "record"  # kept until they are pruned
_DIGEST = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")  # what names a file in either
_LEFTOVER = re.compile(r"([0-9a-f]{32}|[0-9a-f]{64})\.[0-9]+\.tmp")  # of a put that did not end
_HASHES: dict[str, Callable[[], Any]] = {FILES: xxhash.xxh3_128, RECORD: sha256}  # that name what is there
# Why a file that is whole may not be read: this process lacks something, and a later one may have it.
_OF_THE_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM}

log = logging.getLogger("skerry.store")


class Store:
    def __init__(self, root: Path, files: FileSystem, *, readonly: bool, clock: Callable[[], float]) -> None:
        self.root = root
        self._files = files
        self._clock = clock
        self._readonly = readonly
        self._stopped = ""  # why, once it has,
        self._stopped_as = StoreError  # and what it says so by, to whoever comes later
        self._lock = threading.Lock()  # of the two below; held for a moment, never while a file is written
        self._written: set[str] = set()  # by this process, whole and under their names
        self._uncommitted: Counter[str] = Counter()  # how often each was put, or is being, and no commit has named it
        self._put_numbers = itertools.count()
        self.tape, self.records = Tape.open(files, readonly=readonly)
        self.journal = Journal(files)
        if self.left_out and not readonly:
            log.warning("%s", self.left_out)

    def __repr__(self) -> str:
        state = self._stopped or ("reading" if self._readonly else f"{len(self._uncommitted)} uncommitted")
        return f"Store({str(self.root)!r}, {self.tape}, {state})"

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        readonly: bool = False,
        files: FileSystem | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Recover what is there; `records` is the last fold, if any, and everything since.

        A writer makes the directories and holds the lock until `close`. A reader changes nothing and may open
        beside a live writer. A file system handed in belongs to the store from here on.
        """
        root = root.absolute()
        try:
            files = files or DiskFiles(root, create=not readonly)
            try:
                if not readonly:
                    _prepare(files)
                return cls(root, files, readonly=readonly, clock=clock)
            except BaseException:
                files.close()
                raise
        except FileNotFoundError as error:
            if readonly:
                raise StoreError(f"{root} holds no run: check the path") from error
            raise _failure(root, "open", error) from error
        except OSError as error:
            raise _failure(root, "open", error) from error
        except (TapeDamaged, TapeUnknown) as error:
            raise type(error)(f"{root}/{error}") from error

    @property
    def left_out(self) -> str:
        """One line about bytes behind the last whole commit, which are not read; empty if there were none."""
        cut = self.tape.cut
        if cut is None:
            return ""
        where = f"{self.root}/{cut.name}: {len(cut.data)} bytes after the last whole commit, from byte {cut.offset} on,"
        if self._readonly:
            return f"{where} are left out: a commit torn by a crash, damaged, or under way"
        kept = f"kept in {self.root}/{cut.kept}" if cut.kept else f"not kept, {CUTS_MAX} such files lie there already"
        return f"{where} were cut off: a commit torn by a crash, or damaged; {kept}"

    def put(self, parts: Sequence[Buffer], folder: str = FILES) -> str:
        """Keep a file whose contents are `parts` joined; it lasts once a commit has named it. From any thread."""
        self._check_open()
        digest = _digest(parts, folder)
        name = f"{folder}/{digest}"
        with self._writing("put"):
            with self._lock:
                self._uncommitted[name] += 1
                # A file merely seen in the directory may exist in the cache alone (a failed sync before a
                # restart), so only what this process wrote is taken as written.
                is_written = name in self._written
            if not is_written:
                self._write(name, parts)
        return digest

    def _write(self, name: str, parts: Sequence[Buffer]) -> None:
        temporary = f"{name}.{next(self._put_numbers)}.tmp"  # two threads may put the same contents
        self._files.write(temporary, parts)
        self._files.sync(temporary)
        try:
            self._files.rename(temporary, name)
        except IsADirectoryError:  # nothing of ours, but it lies where a damaged file is to be written anew
            self._files.rename(name, f"{temporary.removesuffix('.tmp')}.aside")
            self._files.rename(temporary, name)
        with self._lock:
            self._written.add(name)

    def mend(self, digest: str, parts: Sequence[Buffer]) -> bool:
        """Write a file anew under its name, durable on return; False if `parts` are not what it held. From any thread.

        A record names it, so nothing has to be committed.
        """
        if _digest(parts, FILES) != digest:
            return False
        with self._writing("mend"):
            self._write(f"{FILES}/{digest}", parts)
            self._files.sync_dir(FILES)
        return True

    def place(self, size: int, checksum: bytes) -> Place:
        """Where an entry of the journal will lie; a commit is to follow that brings it, in the same order."""
        return self.journal.place(size, checksum)

    def commit(
        self, records: Sequence[bytes], files: Iterable[str] = (), entries: Sequence[tuple[Place, Buffer]] = ()
    ) -> None:
        """Append the records, all or none; on return they are durable, and so are entries and `files`, put before."""
        names = [self._put_as(digest) for digest in files]
        with self._writing("commit"):
            self._sync_names(names)
            self.journal.append(entries)
            self.tape.append(records, self._clock())
            with self._lock:
                self._uncommitted -= Counter(names)  # keeps what is left above zero

    def get(self, digest: str, folder: str = FILES) -> bytes:
        """The contents of a file, checked against its name."""
        self._check_open()
        if not is_digest(digest):
            raise FileDamaged(f"{self.root}: {digest[:80]!r} is no file digest")
        where = f"{self.root}/{folder}/{digest}"
        with self._reading("get", where):
            data = self._files.read(f"{folder}/{digest}")
        if _digest([data], folder) != digest:
            raise FileDamaged(f"{where} differs from what was written: restore it from a copy")
        return data

    def entry(self, at: Place) -> bytes:
        """What the journal has there, checked."""
        self._check_open()
        where = f"{self.root}/{journal.where(at)}"
        with self._reading("entry", f"{where}: the file"):
            data = journal.read(self._files, at)
        if data is None:
            raise FileDamaged(f"{where}: {at.size} bytes are not what was written: restore the file from a copy")
        return data

    def rotate(self, fold: bytes) -> None:
        """Begin a new segment with `fold`, the state of everything committed."""
        with self._writing("rotate"):
            self.tape.rotate(fold, self._clock())

    def collect(self, keep: Collection[str], keep_journal: Collection[int] | None = ()) -> int:
        """Remove files not in `keep`, and files of the journal, or none of it; not what awaits a commit."""
        with self._writing("collect"):
            removed = sum(self._remove(digest) for digest in self._there() if digest not in keep)
            return removed + (self.journal.collect(keep_journal) if keep_journal is not None else 0)

    @property
    def files(self) -> set[str]:
        """Every one that lies there, whether a commit names it or not."""
        self._check_open()
        with self._reading("list", f"{self.root}/{FILES}"):
            return set(self._there())

    def _there(self) -> list[str]:
        return [name for name in self._files.names(FILES) if _DIGEST.fullmatch(name)]

    def _remove(self, digest: str) -> bool:
        """Whether it was; under the lock, for a put of the same contents relies on what is written already."""
        name = f"{FILES}/{digest}"
        with self._lock:
            if name in self._uncommitted:
                return False
            self._written.discard(name)
            with suppress(IsADirectoryError):  # nothing of ours
                self._files.remove(name)
        return True

    def prune(self, first: int, keep: Collection[str]) -> int:
        """Remove recorded contributions not in `keep`, then the tape before segment `first`; how many files.

        A record says already that they are not there any more, so it does not matter how far this comes.
        """
        with self._writing("prune"):
            stale = _recorded_besides(self._files, keep)
            for name in stale:
                self._files.remove(name)
            return len(stale) + self.tape.prune(first)

    def history(self, first: int = 1) -> Iterator[Record]:
        """Every record committed from segment `first` on, folds among them, with the whole chain verified."""
        self._check_open()
        with self._reading_tape():
            yield from read_all(self._files, first)

    def follow(self, first: int = 1) -> Iterator[Record | None]:
        """The same, and then what others commit from now on; None whenever all that there is was read.

        `FileMissing` if a segment was pruned before it was read.
        """
        self._check_open()
        follower = Follower(self._files, first)
        while True:
            with self._reading_tape():
                try:
                    yield from follower.read()
                except FileNotFoundError as error:
                    raise FileMissing(f"{self.root}/{error.filename} is not there any more: was it pruned?") from None
            yield None

    def close(self) -> None:
        self._stopped = self._stopped or f"{self.root}: the store is closed"
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put_as(self, digest: str) -> str:
        """The name of a file that was put and that no commit has named."""
        names = [f"{folder}/{digest}" for folder in (FILES, RECORD)]
        with self._lock:
            return next(name for name in names if name in self._uncommitted)

    def _sync_names(self, names: Collection[str]) -> None:
        for folder in (FILES, RECORD):
            if any(name.startswith(folder) for name in names):
                self._files.sync_dir(folder)

    @property
    def is_readonly(self) -> bool:
        return self._readonly

    def _check_open(self) -> None:
        if self._stopped:
            raise self._stopped_as(self._stopped)

    @contextmanager
    def _reading(self, doing: str, what: str) -> Iterator[None]:
        """A file that cannot be read is damaged, as one with other bytes is: there may be another way to its values."""
        try:
            yield
        except FileNotFoundError:
            raise FileMissing(f"{what} is missing: restore it from a copy") from None
        except OSError as error:
            if error.errno in _OF_THE_MACHINE:
                raise _failure(self.root, doing, error) from error
            raise FileDamaged(f"{what} {_unreadable(error)}") from error

    @contextmanager
    def _reading_tape(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _OF_THE_MACHINE:
                raise _failure(self.root, "history", error) from error
            raise TapeDamaged(f"{self.root}/{error.filename} {_unreadable(error)}") from error
        except (TapeDamaged, TapeUnknown) as error:
            raise type(error)(f"{self.root}/{error}") from error

    @contextmanager
    def _writing(self, doing: str) -> Iterator[None]:
        """Whatever breaks off in here, an interrupt too, leaves the tape's end unknown: stop for good."""
        self._check_open()
        if self._readonly:
            raise StoreError(f"{self.root} is open for reading only: {doing} refused")
        try:
            yield
        except OSError as error:
            failure = _failure(self.root, doing, error)
            self._stopped = f"{self.root}: stopped after a failed write or fsync, restart: {failure}"
            self._stopped_as = type(failure)
            raise failure from error
        except BaseException as error:
            self._stopped = f"{self.root}: stopped, {doing} was broken off by {type(error).__name__}: restart"
            raise


def is_digest(name: str) -> bool:
    """Whether a file may have this name: anything else that a record says leads elsewhere."""
    return _DIGEST.fullmatch(name) is not None


def check_unused(root: Path) -> None:
    """`StoreInUse` if another process writes in this directory."""
    try:
        with closing(DiskFiles(root, create=False)) as files:
            files.lock()
    except OSError as error:
        raise _failure(root, "open", error) from error


def make_room(root: Path, files: Iterable[str], keep: Collection[str]) -> None:
    """Remove these files, and recorded contributions not in `keep`, though no record says so yet.

    For a disk so full that no store opens. Until a record says it, who looks for them finds them missing.
    """
    try:
        with closing(DiskFiles(root, create=False)) as disk:
            disk.lock()
            recorded = _recorded_besides(disk, keep)
            for name in sorted(f"{FILES}/{digest}" for digest in files) + recorded:
                with suppress(FileNotFoundError):  # removed before, and broken off
                    disk.remove(name)
    except OSError as error:
        raise _failure(root, "remove", error) from error


def _recorded_besides(files: FileSystem, keep: Collection[str]) -> list[str]:
    return [f"{RECORD}/{name}" for name in files.names(RECORD) if _DIGEST.fullmatch(name) and name not in keep]


def _prepare(files: FileSystem) -> None:
    files.lock()
    files.make_dir("tape")
    files.make_dir(FILES)
    files.make_dir(RECORD)
    files.make_dir(JOURNAL)
    files.sync_dir("")
    for folder in (FILES, RECORD):
        for name in filter(_LEFTOVER.fullmatch, files.names(folder)):
            files.remove(f"{folder}/{name}")


def _digest(parts: Sequence[Buffer], folder: str) -> str:
    hash = _HASHES[folder]()
    for part in parts:
        hash.update(flat(part))
    return str(hash.hexdigest())


def _unreadable(error: OSError) -> str:
    return f"cannot be read ({error.strerror or error}): restore it from a copy"


def _failure(root: Path, doing: str, error: OSError) -> StoreError:
    """What went wrong, in a line; the caller raises it."""
    where = root / str(error.filename or "")
    if error.errno in NO_ROOM:
        return DiskFull(f"the disk is full ({where}); committed state is intact: free space and restart")
    if error.errno == errno.EFBIG:
        remedy = "committed state is intact: raise the limit (ulimit -f) and restart"
        return StoreError(f"{where} may not grow any more; {remedy}")
    is_inside = bool(error.filename) and not Path(str(error.filename)).is_absolute()
    folder = "a folder belongs there: move away what is in its place" if is_inside else "choose a directory"
    file = "a file belongs there: move away what is in its place"
    remedy = {
        errno.EACCES: "check its owner and permissions",
        errno.EROFS: "mount it writable",
        errno.ENOTDIR: folder,
        errno.EEXIST: folder,
        errno.EISDIR: file,
        errno.ELOOP: file,
    }.get(error.errno or 0, "check the disk, then restart")
    return StoreError(f"{doing} failed at {where}: {error.strerror or error}; {remedy}")
