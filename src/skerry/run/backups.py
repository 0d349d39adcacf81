"""What a folder of backups is: one run's files by digest, and for each backup a small file that says which it has.

    DIR/backups.json     of which run they are
    DIR/backup-7.json    one backup (`Backup`): each file of the run by its name there, with its digest and size
    DIR/pool/DIGEST      the files themselves: 32 letters are an xxh3, as the run names its checkpoints, 64 a sha256

Rules that hold here: a backup has its name only when all of it lies in the pool, is durable and was looked at
(`check`). What is in the pool and in no backup is nobody's, and the next backup removes it. A name that a backup may
have is in `NAMES`, so a folder that somebody else wrote puts no file anywhere else. Everything is its owner's alone,
and no link is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeVar

import msgspec
import xxhash

from skerry.core.audit import Audit
from skerry.core.facts import Committed
from skerry.core.state import RunState
from skerry.disk import sync_folder
from skerry.errors import DiskFull, FileMissing, Refusal, StoreError, TapeDamaged
from skerry.run.facts import history_of
from skerry.run.genesis import FIXED
from skerry.run.room import free_disk
from skerry.run.sense import fact_of
from skerry.store.files import UNREADABLE, fresh, opened, temporary
from skerry.store.journal import JOURNAL, Place
from skerry.store.lock import NO_ROOM
from skerry.store.store import FILES, RECORD, Store
from skerry.text import size

if TYPE_CHECKING:
    from typing_extensions import Buffer

FORMAT = 1  # of a folder of backups
MARK, POOL, LOCK = "backups.json", "pool", "lock"
SHA256 = 64 * "0"  # a digest of this kind
PIECE_BYTES = 1 << 24  # that are in memory at once
MARGIN_BYTES = 16 << 20  # for names, folders and the small files, on top of what is copied
JSON_BYTES_MAX = 256 << 20
LINES_MAX = 10  # about what was left out
NAMES = re.compile(
    r"tape/[0-9]{6,}\.seg|journal/[0-9]{6,}\.log|files/[0-9a-f]{32}|record/[0-9a-f]{64}"
    r"|fixed\.safetensors|local\.json|evaluations\.jsonl|keys/(ca\.pem|syncer\.pem|issued\.json)"
)
_DIGEST = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
IN_POOL = re.compile(rf"(?:{_DIGEST.pattern})(\.[0-9a-f]{{16}}\.tmp)?")  # a name of ours there
_BACKUP = re.compile(r"backup-([0-9]{1,9})\.json")

Kind = TypeVar("Kind")
Show = Callable[[int, int], None]  # (bytes done, of how many)


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One file of a backup."""

    digest: str  # its name in the pool
    size: int


class Backup(msgspec.Struct, frozen=True):
    """A whole run as it was at one commit."""

    number: int
    made_at: float
    skerry: str  # the version that made it
    run: str
    head: str  # of the tape: the hash of its last commit, in hex
    epoch: int
    phase: str
    progress: float
    merges: int
    parts: dict[str, Part]  # by name in the run's directory
    left_out: tuple[str, ...] = ()  # learners' buffers and recorded contributions that are lost or damaged there

    @property
    def bytes(self) -> int:
        return sum(part.size for part in self.parts.values())

    @property
    def has_keys(self) -> bool:
        return any(name.startswith("keys/") for name in self.parts)


def lost_lines(root: str, left_out: Sequence[str]) -> list[str]:
    """What is not in a backup of this run, and what that costs; of many files no more than a few."""
    lines = [f"{root}/{name}: was damaged or missing, and is left out; {_cost(name)}" for name in left_out[:LINES_MAX]]
    more = len(left_out) - LINES_MAX
    return [*lines, f"{root}: {more} more are left out; --json names all"] if more > 0 else lines


def _cost(name: str) -> str:
    is_recorded = name.startswith(f"{RECORD}/")
    return "the run can do without" + (", a replay that comes to it stops" if is_recorded else "")


class Mark(msgspec.Struct, frozen=True):
    """Of which run a folder has the backups."""

    format: int
    run: str
    created: str  # sha256 of the record that began it


def identity(state: RunState) -> str:
    """By which a run is known for as long as it lasts, however its tape is pruned."""
    return hashlib.sha256(msgspec.msgpack.encode(state.created)).hexdigest()


# ---------------------------------------------------------------------------------------------- what is there


def mark_of(folder: Path) -> Mark:
    """Refused unless this is a folder of backups that this version reads, and its owner's alone to write."""
    if not folder.is_dir():
        raise Refusal(f"{folder}: is no folder of backups: check the path")
    check_ours(folder)
    _check_pool(folder / POOL)
    mark = _decoded(folder / MARK, Mark)
    if mark.format != FORMAT:
        raise Refusal(f"{folder}: its format is {mark.format}, {FORMAT} is read here: use a later version of Skerry")
    return mark


def check_ours(folder: Path) -> None:
    """Others could put another run in its place."""
    found = os.stat(folder)
    if found.st_uid != os.geteuid():
        raise Refusal(f"{folder}: belongs to another user (id {found.st_uid}): name a folder of your own")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise Refusal(f"{folder}: others may write to it: chmod 700 {folder}")


def _check_pool(pool: Path) -> None:
    """Files of ours lie in it and nowhere else: through a link a backup would remove and a restore read what is not."""
    if not os.path.lexists(pool):
        return  # of a backup that was broken off before it had one
    if not stat.S_ISDIR(pool.lstat().st_mode):
        raise Refusal(f"{pool}: is a link, or no folder: put the folder itself there, or name another")
    check_ours(pool)
    for entry in os.scandir(pool):
        if not entry.is_file(follow_symlinks=False):
            raise Refusal(f"{pool}: has {entry.name!r:.80}, which is a link or no plain file: remove it")


def listed(folder: Path) -> tuple[list[Backup], list[str]]:
    """Every backup, the oldest first; and a line about each that cannot be read."""
    found, damaged = [], []
    for name in sorted(os.listdir(folder)):
        if match := _BACKUP.fullmatch(name):
            try:
                found.append(_backup(folder / name, int(match[1])))
            except StoreError as error:
                damaged.append(str(error))
    return sorted(found, key=lambda each: each.number), damaged


def next_number(folder: Path) -> int:
    """Beyond that of every backup there, one that cannot be read too."""
    return max((int(match[1]) for match in map(_BACKUP.fullmatch, os.listdir(folder)) if match), default=0) + 1


def file_of(folder: Path, number: int) -> Path:
    return folder / f"backup-{number}.json"


def _backup(path: Path, number: int) -> Backup:
    backup = _decoded(path, Backup)
    for name, part in backup.parts.items():
        if not NAMES.fullmatch(name) or not _DIGEST.fullmatch(part.digest) or part.size < 0:
            raise StoreError(f"{path}: names {name!r:.80}, which no backup has: take another backup")
    if strange := [name for name in backup.left_out if not NAMES.fullmatch(name)]:
        raise StoreError(f"{path}: leaves out {strange[0]!r:.80}, which no backup has: take another backup")
    if backup.number != number:
        raise StoreError(f"{path}: is of backup {backup.number}: take another backup")
    return backup


def _decoded(path: Path, kind: type[Kind]) -> Kind:
    try:
        with opened(path) as file:
            return msgspec.json.decode(file.read(JSON_BYTES_MAX), type=kind)
    except FileNotFoundError:
        raise StoreError(f"{path}: is missing: check the path") from None
    except UNREADABLE as error:
        raise StoreError(f"{path}: cannot be read ({error}): take another backup") from None


@contextlib.contextmanager
def holding(folder: Path, *, is_shared: bool) -> Iterator[None]:
    """One backup at a time; several may be read at once, and none while one is made."""
    path = folder / LOCK
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_RDONLY if is_shared else os.O_RDWR | os.O_CREAT)
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if is_shared:  # a copy of the folder, or a disk that is mounted read-only: nobody makes a backup there
            yield
            return
        raise failure(path, error) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refusal(f"{path}: is no plain file: remove it, and begin again")
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Refusal(f"{folder}: another backup or restore is under way there: wait until it has ended") from None
    try:
        yield
    finally:
        os.close(fd)


# ---------------------------------------------------------------------------------------------- bytes


def hash_like(digest: str) -> Any:
    """Of the kind that this digest is."""
    return xxhash.xxh3_128() if len(digest) == 32 else hashlib.sha256()


def pieces(file: BinaryIO, count: int) -> Iterator[bytes]:
    """So many bytes from its beginning on, or all there are if that is less."""
    file.seek(0)
    while count and (data := file.read(min(PIECE_BYTES, count))):
        count -= len(data)
        yield data


def digest_of(file: BinaryIO, count: int, like: str = SHA256) -> str:
    hash = hash_like(like)
    for data in pieces(file, count):
        hash.update(data)
    return str(hash.hexdigest())


def copied(file: BinaryIO, part: Part, path: Path, show: Callable[[int], None]) -> bool:
    """A durable copy at `path`, which has its name once it is whole; False if the bytes are not what they must be."""
    anew, hash, count = temporary(path), hash_like(part.digest), 0
    try:
        with fresh(anew, 0o600) as out:
            for data in pieces(file, part.size):
                out.write(data)
                hash.update(data)
                count += len(data)
                show(len(data))
            out.flush()
            os.fsync(out.fileno())
            if hasattr(os, "posix_fadvise"):  # so that who looks at it next reads the disk
                os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        is_right = (count, hash.hexdigest()) == (part.size, part.digest)
        if is_right:
            anew.replace(path)
        return is_right
    finally:
        with contextlib.suppress(OSError):
            anew.unlink(missing_ok=True)


def put(path: Path, record: object) -> None:
    """A small file of ours, durable, in place of what is there."""
    anew = temporary(path)
    try:
        with fresh(anew, 0o600) as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        anew.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            anew.unlink(missing_ok=True)
        raise


def check_room(where: Path, needed: int, what: str) -> None:
    """Said before a byte is written."""
    free = free_disk(where)
    if needed and needed + MARGIN_BYTES > free:
        raise DiskFull(
            f"{where}: {what} takes {size(needed + MARGIN_BYTES)}, {size(free)} are free: free space, "
            "or name a folder on a larger disk"
        )


def failure(path: Path, error: OSError) -> StoreError:
    if error.errno in NO_ROOM:
        return DiskFull(f"{path}: the disk is full; nothing that was there is lost: free space and begin again")
    return StoreError(f"{path}: {error.strerror or error}: check the disk, its permissions, and what lies there")


# ---------------------------------------------------------------------------------------------- whether it is whole


class Places:
    """The files of a run wherever they lie, by their names in it: what a store reads (`store.files.FileSystem`)."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places

    def read(self, name: str) -> bytes:
        with self._opened(name) as file:
            return file.read()

    def read_at(self, name: str, offset: int, size: int) -> bytes:
        with self._opened(name) as file:
            file.seek(offset)
            return file.read(size)

    def names(self, directory: str) -> list[str]:
        start = f"{directory}/"
        return sorted(name.removeprefix(start) for name in self._places if name.startswith(start))

    def close(self) -> None: ...

    def _opened(self, name: str) -> BinaryIO:
        if name not in self._places:
            raise FileNotFoundError(0, "is not there", name)
        return opened(self._places[name])

    # It is read and nothing else.
    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        self._refuse()

    def append(self, name: str, data: Buffer) -> None:
        self._refuse()

    def sync(self, name: str) -> None:
        self._refuse()

    def rename(self, source: str, target: str) -> None:
        self._refuse()

    def remove(self, name: str) -> None:
        self._refuse()

    def make_dir(self, directory: str) -> None:
        self._refuse()

    def sync_dir(self, directory: str) -> None:
        self._refuse()

    def lock(self) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("a backup is read, not written")


def check(root: Path, backup: Backup, places: Mapping[str, Path]) -> None:
    """Refuse what is not the whole run that it says, by the tape's chain, the audit and the journal's checksums.

    `root` is what messages call it. Whether each file is what it must be is for `damage` to say, before.
    """
    with Store.open(root, readonly=True, files=Places(places)) as store:
        state, payloads = _audited(store, backup)
        recorded = {record_name(file) for file in payloads}
        wanted = {f"{FILES}/{file}" for file in state.files} | recorded | ({FIXED} if state.created.fixed else set())
        dispensable = recorded | {f"{FILES}/{given.file}" for given in state.buffers.values()}
        wanted -= dispensable & set(backup.left_out)
        if missing := sorted(wanted - places.keys()):
            raise FileMissing(f"{root}: {missing[0]} is missing: take another backup")
        for at in state.fragments:
            for redo in at.redo:
                store.entry(Place(*redo.entry))


def damage(backup: Backup, places: Mapping[str, Path], show: Show = lambda done, total: None) -> dict[str, str]:
    """By name, what is wrong with files that are not what they must be; each is read from beginning to end."""
    found, done = {}, 0
    for name, part in backup.parts.items():
        try:
            with opened(places[name]) as file:
                is_right = os.fstat(file.fileno()).st_size == part.size
                if not is_right or digest_of(file, part.size, part.digest) != part.digest:
                    found[name] = f"{places[name]}: is not what was written"
        except OSError as error:
            found[name] = f"{places[name]}: cannot be read ({error.strerror})"
        show(done := done + part.size, backup.bytes)
    return found


def _audited(store: Store, backup: Backup) -> tuple[RunState, set[str]]:
    """What its tape comes to, and the files with contributions that it names."""
    audit, payloads = Audit(), set[str]()
    for record in history_of(store):
        fact = fact_of(store.root, record)
        audit.take(fact)
        payloads |= {fact.result.payloads} if isinstance(fact, Committed) else set()
        if audit.violations:
            raise TapeDamaged(f"{store.root}: its tape breaks an invariant: {audit.violations[0]}: see skerry replay")
    state = audit.state
    if state is None or (store.tape.head.hex(), state.merges) != (backup.head, backup.merges) or store.left_out:
        raise TapeDamaged(f"{store.root}: its tape does not end where the backup says: take another backup")
    return state, payloads - {""}


def tape_names(first: int, last: int) -> list[str]:
    return [f"tape/{number:06d}.seg" for number in range(first, last + 1)]


def journal_sizes(state: RunState) -> dict[str, int]:
    """How much of each file of the journal is needed to have the newest versions again."""
    sizes: dict[str, int] = {}
    for at in state.fragments:
        for redo in at.redo:
            name = f"{JOURNAL}/{redo.entry.file:06d}.log"
            sizes[name] = max(sizes.get(name, 0), redo.entry.offset + redo.entry.size)
    return sizes


def record_name(file: str) -> str:
    return f"{RECORD}/{file}"
