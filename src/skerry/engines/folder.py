"""What a launch leaves on the machine that gave it: a folder with `launch.json`, by which other verbs find it again.

On this machine, and wherever the syncer sees the same file system, it is the run directory too. Secrets in it are
readable by their owner alone. What `launch.json` says is done: processes are ended, clusters dialled, commands run. So
it is believed only where nobody but this user can have written it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from skerry.engines.spec import COUNT_MAX, Launch
from skerry.errors import DiskFull, Refusal, StoreBusy, StoreError
from skerry.store.files import appended, contents, put_in_place
from skerry.store.lock import NO_ROOM

LAUNCHED = "launch.json"
CHANGING = "launch.lock"  # held by who changes it
CHANGING_S = 60.0  # for another who does to be done; a cluster may take its time
CHANGING_POLL_S = 0.05
OF_DISKS = {  # what a disk, or who has it, has against a file; what else goes wrong there is ours
    errno.EROFS: "mount it writable",
    errno.EACCES: "check its owner and permissions",
    errno.EPERM: "check its owner and permissions",
    errno.EIO: "check the disk",
}


class Record(msgspec.Struct, kw_only=True):
    """A launch, as it is to be found again; an engine keeps what it needs in `handle`."""

    engine: str
    name: str
    folder: str  # where this lies, absolute
    file: str  # the TOML file that was launched, absolute; empty: skerry train
    text: str  # and what it said
    overrides: list[tuple[str, str | int | float | bool]] = []
    counts: dict[str, Annotated[int, Meta(ge=0, le=COUNT_MAX)]] = {}  # learners of each island, as last asked for
    learners: int = 0  # that the run expects (run.learners), and that scale goes up to; 0: not known
    launched_at: float = 0.0
    handle: dict[str, str] = {}


def record_of(launch: Launch, engine: str, folder: Path, **handle: str) -> Record:
    """Of a launch that begins, or goes on with as many learners as were last asked for; `write` keeps it."""
    counts = {island.name: island.count for island in launch.islands}
    check_ours(folder)
    if (folder / LAUNCHED).exists():
        before = read(folder)
        asked = counts | {name: count for name, count in before.counts.items() if name in counts}
        counts = asked if has_room(asked, launch.config.run.learners) else counts
        handle = before.handle | handle
    return Record(
        engine=engine,
        name=launch.name,
        folder=str(folder.absolute()),
        file=str(launch.file) if launch.text else "",
        text=launch.text,
        overrides=list(launch.overrides),
        counts=counts,
        learners=launch.config.run.learners,
        launched_at=time.time(),
        handle=handle,
    )


def write(record: Record) -> None:
    folder = Path(record.folder)
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        put_in_place(folder / LAUNCHED, msgspec.json.encode(record), 0o600)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What cannot be written for a launch is said in a line, by its own name: it may lie on another disk."""
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        if error.errno in NO_ROOM:
            raise DiskFull(
                f"{where}: the disk is full ({error.strerror}): free space, and the same command goes on"
            ) from None
        if not is_of_disk(error):
            raise
        raise StoreError(f"{where}: {error.strerror}; {OF_DISKS[error.errno or 0]}") from None


def is_of_disk(error: OSError | None) -> bool:
    """Whether nothing can be written until somebody has seen to the disk; what names no file may be a terminal."""
    if error is None or (error.errno == errno.EIO and not error.filename):
        return False
    return error.errno in NO_ROOM or error.errno in OF_DISKS


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[Record]:
    """The record for who is to `write` it changed: two at once would each write without what the other did."""
    read(folder)  # what holds no launch is refused before anything is made in it
    with writing(folder), appended(folder / CHANGING) as file:
        _lock(file.fileno(), folder)
        yield read(folder)


def _lock(fd: int, folder: Path) -> None:
    ends_at = time.monotonic() + CHANGING_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > ends_at:
                raise StoreBusy(
                    f"{folder}: another command has been changing it for {CHANGING_S:g} s: say it again later"
                ) from None
            time.sleep(CHANGING_POLL_S)


def read(folder: Path) -> Record:
    check_ours(folder)
    check_ours(folder / LAUNCHED)
    try:
        record = msgspec.json.decode(contents(folder / LAUNCHED), type=Record)
    except FileNotFoundError:
        raise Refusal(f"{folder}: nothing was launched into it: give the folder that skerry launch named") from None
    except OSError as error:
        raise Refusal(f"{folder / LAUNCHED}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"{folder / LAUNCHED}: is damaged ({error}): end what it started by hand, and launch again"
        ) from None
    record.folder = str(folder.absolute())  # it may have been moved
    return record


def has_room(counts: Mapping[str, int], learners: int) -> bool:
    """Whether a run for so many learners can have these of its islands."""
    return not learners or sum(counts.values()) <= learners


def made(folder: Path) -> Path:
    """A folder of ours, that of a launch or inside of it; refused where a link or anything else has its name."""
    if folder.is_symlink():
        raise Refusal(f"{folder}: is a link, which is not followed: remove it")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise Refusal(f"{folder}: a folder belongs there: move away what is in its place") from None
    except OSError as error:
        raise Refusal(f"{folder}: cannot be made here ({error.strerror}): name another") from None
    check_ours(folder)
    return folder


def check_ours(path: Path) -> None:
    """Refused where somebody else can have written what is there; fine where nothing is."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: cannot be read ({getattr(error, 'strerror', '') or error})") from None
    if found.st_uid != os.geteuid():
        raise Refusal(f"{path}: belongs to user {found.st_uid}: act as that user")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise Refusal(f"{path}: others may change it: see who did, then chmod go-w {shlex.quote(str(path))}")
