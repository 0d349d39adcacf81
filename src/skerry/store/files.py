"""The file system the store is handed: a dozen small calls on names inside one directory.

Rules: nothing is durable until `sync` (contents) or `sync_dir` (names) has returned; `rename` replaces
atomically; every call may raise `OSError` and none is ever retried here. `DiskFiles` is the real one; tests
and the simulator hand in their own. It does not know what the files mean.

What is long goes to the disk from the memory where it lies (O_DIRECT) if it begins on a page, there and in the file:
the system's copy of it, which nobody reads, would take eight times the CPU. Else it is written as anything is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from skerry.disk import contents as contents
from skerry.disk import opened as opened
from skerry.disk import sync_folder
from skerry.errors import StoreInUse
from skerry.memory import PAGE_BYTES

from .lock import LOCK, take

if TYPE_CHECKING:
    from typing_extensions import Buffer

LONG_BYTES = 1 << 20  # what is shorter may go through the page cache, and stay in it
SECTOR_BYTES = 512  # what a disk is written in


class FileSystem(Protocol):
    """Names are relative, with `/`; `""` is the root directory itself."""

    def read(self, name: str) -> bytes: ...
    def read_at(self, name: str, offset: int, size: int) -> bytes: ...  # fewer bytes where the file ends
    def write(self, name: str, parts: Sequence[Buffer]) -> None: ...  # a new file, in place of one of this name
    def append(self, name: str, data: Buffer) -> None: ...
    def sync(self, name: str) -> None: ...
    def rename(self, source: str, target: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def names(self, directory: str) -> list[str]: ...  # sorted
    def make_dir(self, directory: str) -> None: ...  # fine if it is there
    def sync_dir(self, directory: str) -> None: ...
    def lock(self) -> None: ...  # exclusive until close; StoreInUse if another holds it
    def close(self) -> None: ...


class DiskFiles:
    """A directory on disk, held by descriptor: renaming it while we run does no harm.

    The descriptor that wrote a file stays open until the file is synced and renamed. Linux reports a failed
    write-back to the descriptors that were open then; one opened later may hear nothing of it. Threads may write files
    of different names side by side.
    """

    def __init__(self, root: Path, *, create: bool = True) -> None:
        self.root = root
        if create:
            _make_root(root)
        self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open_fds: dict[str, int] = {}
        self._appended: dict[str, str] = {}  # directory -> the one file in it that is kept open to be appended to
        self._lock_fd: int | None = None

    def __repr__(self) -> str:
        return f"DiskFiles({str(self.root)!r})"

    def read(self, name: str) -> bytes:
        # Only up to the size seen at the start: a reader beside a live writer then sees whole bytes or none.
        with self._reading(name) as fd:
            return _read_all(fd, 0, os.fstat(fd).st_size)

    def read_at(self, name: str, offset: int, size: int) -> bytes:
        with self._reading(name) as fd:
            return _read_all(fd, offset, size)

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        # Never the old file cut to nothing: after a rename that a failing disk kept by half, its contents may stand
        # under another name as well.
        self._forget(name)
        with _naming(name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._root_fd)
            fd = self._open_fds[name] = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
            for part in parts:
                _write_all(fd, flat(part))

    def append(self, name: str, data: Buffer) -> None:
        directory = name.rpartition("/")[0]
        if (last := self._appended.get(directory, name)) != name:
            self._forget(last)
        self._appended[directory] = name
        with _naming(name):
            _write_all(self._kept(name), flat(data))

    def sync(self, name: str) -> None:
        with _naming(name):
            fd = self._kept(name)
            os.fsync(fd)
            found = os.fstat(fd)
            if found.st_nlink == 0:  # we would be writing where nobody will read
                raise OSError(errno.ESTALE, "deleted or replaced while in use")
            _leave_cache(fd, found.st_size)

    def rename(self, source: str, target: str) -> None:
        self._forget(source)
        self._forget(target)
        with _naming(target):
            os.rename(source, target, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)

    def remove(self, name: str) -> None:
        self._forget(name)
        with _naming(name):
            os.unlink(name, dir_fd=self._root_fd)

    def names(self, directory: str) -> list[str]:
        with self._directory(directory) as fd:
            return sorted(os.listdir(fd))

    def make_dir(self, directory: str) -> None:
        with _naming(directory):
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700, dir_fd=self._root_fd)
            if not stat.S_ISDIR(os.stat(directory, dir_fd=self._root_fd).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    def sync_dir(self, directory: str) -> None:
        with self._directory(directory) as fd:
            os.fsync(fd)

    def lock(self) -> None:
        with _naming(LOCK):
            fd = self._open(LOCK, os.O_RDWR | os.O_CREAT)
            if holder := take(fd):
                os.close(fd)
                raise StoreInUse(f"{self.root} is in use by process {holder}: stop it, or choose another directory")
            self._lock_fd = fd

    def close(self) -> None:
        for name in list(self._open_fds):
            with suppress(OSError):  # what mattered was synced; a failing disk must not keep the lock
                self._forget(name)
        if self._lock_fd is not None:
            with suppress(OSError):
                os.ftruncate(self._lock_fd, 0)
            os.close(self._lock_fd)
            self._lock_fd = None
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1

    def _open(self, name: str, flags: int) -> int:
        # Without waiting: who opens a pipe that lies at the name would wait for its other end.
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, 0o600, dir_fd=self._root_fd)

    @contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        with _naming(name):
            fd = self._open(name, os.O_RDONLY)
            try:
                yield fd
            finally:
                os.close(fd)

    def _kept(self, name: str) -> int:
        """The descriptor that wrote this file, or one that is kept from now on."""
        if name not in self._open_fds:
            self._open_fds[name] = self._open(name, os.O_WRONLY | os.O_APPEND)
        return self._open_fds[name]

    def _forget(self, name: str) -> None:
        fd = self._open_fds.pop(name, None)
        if fd is not None:
            with _naming(name):
                os.close(fd)

    @contextmanager
    def _directory(self, directory: str) -> Iterator[int]:
        with _naming(directory or "."):
            fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root_fd)
            try:
                yield fd
            finally:
                os.close(fd)


def flat(part: Buffer) -> memoryview:
    """The buffer as plain bytes, without a copy."""
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty array cannot be cast


def _read_all(fd: int, offset: int, size: int) -> bytes:
    """Fewer bytes where the file ends."""
    data = os.pread(fd, size, offset)
    while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data


def _write_all(fd: int, data: memoryview) -> None:
    if len(data) >= LONG_BYTES:
        data = data[_write_directly(fd, data) :]
    while data:
        data = data[os.write(fd, data) :]


def _write_directly(fd: int, data: memoryview) -> int:
    """Past the page cache, as much as fills sectors; how many bytes went so.

    None do where the file system has no such way, or where file or memory do not begin where a disk's does: it says so
    before it has done anything.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
        return os.write(fd, data[: len(data) - len(data) % SECTOR_BYTES])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _leave_cache(fd: int, size: int) -> None:
    """Give back the memory of what was synced: a long file is read again after a crash only.

    The last page stays where it is not full, or the next append would have to read it first.
    """
    if size >= LONG_BYTES and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, size - size % PAGE_BYTES, os.POSIX_FADV_DONTNEED)


def _make_root(root: Path) -> None:
    if not root.exists():
        _make_root(root.parent)
        with suppress(FileExistsError):
            os.mkdir(root, 0o700)
    with suppress(PermissionError):  # a parent we may not read was not made by us
        sync_folder(root.parent)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Calls on a descriptor fail without saying on which file."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = name, None
        raise


# ---------------------------------------------------------------------------------------------- beside the store

# Every file that is made outside of a store is opened here: none through a link, none that others can write to. What is
# exported is for others to read and goes by the umask; the rest is for this user.


def fresh(path: Path, mode: int = 0o666) -> BufferedRandom:
    """A file that was not there: what lies at the name is removed first, and a link that comes there not followed."""
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, mode), "w+b")


def appended(path: Path) -> BufferedRandom:
    """A file of this user's to be written at its end, made where there is none; `OSError` if a link lies there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "r+b")


def temporary(path: Path) -> Path:
    """A name beside `path` that nobody can foresee, for what is to be moved there when it is whole."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def is_temporary(name: str, of: str = "") -> bool:
    """Whether this is such a name, of anything or of what has this name."""
    stem = re.escape(of) if of else ".+"
    return re.fullmatch(rf"{stem}\.[0-9a-f]{{16}}\.tmp", name, re.DOTALL) is not None


def put_in_place(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Small things that people and programs look at: whoever reads finds all of the last or all of this."""
    anew = path.with_name(f"{path.name}.tmp")  # always the same: one that a kill leaves is taken by the next
    with _naming(str(path)):
        try:
            with fresh(anew, mode) as file:
                file.write(data)
            anew.replace(path)
        except OSError:
            with suppress(OSError):
                anew.unlink()
            raise


# All that a small file which anybody may have written may do to who decodes it: what is not there, is no text, is
# nested without end, or has numbers that no float holds.
UNREADABLE = (OSError, ValueError, OverflowError, RecursionError)
