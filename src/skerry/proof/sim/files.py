"""A file system in memory that forgets what was not synced, and fails or crashes at a chosen operation.

What a program sees (the cache) and what is on the disk are kept apart. `sync` brings a file's contents to the
disk and `sync_dir` a directory's names; at a power cut each pending change is kept, lost, torn or garbled on
its own. A failed sync drops some changes from the pending list while the cache goes on showing them, as Linux
does. A process sees it through a `Session`, which holds the lock as a process does: until it ends.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skerry.errors import StoreInUse

if TYPE_CHECKING:
    from typing_extensions import Buffer

SECTOR_BYTES = 16


class Crash(BaseException):
    """The process is gone. Not an `Exception`: nothing in the product may catch it and go on."""


@dataclass
class Inode:
    cache: bytes = b""
    disk: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # (offset, data); None: cut there


class CrashFiles:
    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.cache: dict[str, Inode] = {}
        self.disk: dict[str, Inode] = {}
        self.pending: list[tuple[str, Inode | None]] = []  # names: (name, inode); None: removed
        self.operations = 0
        self.log: list[str] = []
        self.crash_at = 0  # the process dies before doing this operation
        self.fail_at: tuple[int, int] = (0, 0)  # (operation, errno)
        self.strike: Callable[[str, str], int] = lambda kind, name: 0  # weather: an errno, or it raises Crash
        self.skip: Callable[[str], bool] = lambda call: False  # syncs that silently do nothing: planted bugs
        self.holder: object = None  # of the lock

    def plan(self, *, crash_at: int = 0, fail_at: tuple[int, int] = (0, 0)) -> None:
        self.operations, self.log = 0, []
        self.crash_at, self.fail_at = crash_at, fail_at

    def read(self, name: str) -> bytes:
        return self._inode(name).cache

    def read_at(self, name: str, offset: int, size: int) -> bytes:
        return self._inode(name).cache[offset : offset + size]

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        data = b"".join(bytes(part) for part in parts)
        error = self._operation("write", name)
        self._set_name(name, Inode())
        self._add(self.cache[name], data, error)

    def append(self, name: str, data: Buffer) -> None:
        error = self._operation("append", name)
        self._add(self._inode(name), bytes(data), error)

    def sync(self, name: str) -> None:
        error = self._operation("sync", name)
        inode = self._inode(name)
        if self.skip(f"sync {name}"):
            return
        for change in inode.pending:
            if not error or self.random.random() < 0.5:
                inode.disk = _apply(inode.disk, change)
        inode.pending = []
        _raise(error)

    def sync_dir(self, directory: str) -> None:
        error = self._operation("sync_dir", directory)
        if self.skip(f"sync_dir {directory}"):
            return
        inside = [change for change in self.pending if _parent(change[0]) == directory]
        self.pending = [change for change in self.pending if _parent(change[0]) != directory]
        for name, inode in inside:
            if not error or self.random.random() < 0.5:
                _set(self.disk, name, inode)
        _raise(error)

    def rename(self, source: str, target: str) -> None:
        _raise(self._operation("rename", target))
        inode = self._inode(source)
        self._set_name(target, inode)
        self._set_name(source, None)

    def remove(self, name: str) -> None:
        _raise(self._operation("remove", name))
        self._inode(name)
        self._set_name(name, None)

    def names(self, directory: str) -> list[str]:
        return sorted(name.rpartition("/")[2] for name in self.cache if _parent(name) == directory)

    def make_dir(self, directory: str) -> None: ...
    def lock(self) -> None: ...
    def close(self) -> None: ...

    def power_cut(self) -> None:
        """Only the disk remains, and of what was pending any part."""
        for inode in {id(i): i for i in [*self.cache.values(), *self.disk.values()]}.values():
            for change in inode.pending:
                inode.disk = self._perhaps(inode.disk, change)
            inode.cache, inode.pending = inode.disk, []
        for name, named in self.pending:
            if self.random.random() < 0.6:
                _set(self.disk, name, named)
        self.cache, self.pending = dict(self.disk), []
        for inode in self.cache.values():
            inode.cache = inode.disk

    def _perhaps(self, disk: bytes, change: tuple[int, bytes | None]) -> bytes:
        offset, data = change
        fate = self.random.random()
        if fate < 0.3:
            return disk
        if data and fate > 0.7:
            data = data[: self.random.randrange(len(data) + 1)]
        if data and fate > 0.8:
            data = self._garble(data)
        return _apply(disk, (offset, data))

    def _garble(self, data: bytes) -> bytes:
        """Some sectors hold junk or nothing, the others what was written."""
        sectors = [data[at : at + SECTOR_BYTES] for at in range(0, len(data), SECTOR_BYTES)]
        zeros = self.random.random() < 0.5
        for at, sector in enumerate(sectors):
            if self.random.random() < 0.3:
                sectors[at] = bytes(len(sector)) if zeros else self.random.randbytes(len(sector))
        return b"".join(sectors)

    def _operation(self, kind: str, name: str) -> int:
        self.operations += 1
        self.log.append(f"{kind} {name}")
        if self.operations == self.crash_at:
            raise Crash
        return self.fail_at[1] if self.operations == self.fail_at[0] else self.strike(kind, name)

    def _inode(self, name: str) -> Inode:
        if name not in self.cache:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self.cache[name]

    def _set_name(self, name: str, inode: Inode | None) -> None:
        _set(self.cache, name, inode)
        self.pending.append((name, inode))

    def _add(self, inode: Inode, data: bytes, error: int) -> None:
        if error:
            data = data[: self.random.randrange(len(data) + 1)]
        inode.pending.append((len(inode.cache), data))
        inode.cache += data
        _raise(error)


class Session:
    """One process's view of the disk; it loses the lock when it closes or dies, and nobody else's."""

    def __init__(self, disk: CrashFiles) -> None:
        self.disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self.disk, name)

    def lock(self) -> None:
        if self.disk.holder not in (None, self):
            raise StoreInUse("in use by another process: stop it, or choose another directory")
        self.disk.holder = self

    def close(self) -> None:
        if self.disk.holder is self:
            self.disk.holder = None


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _raise(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error), "somewhere")


def _set(names: dict[str, Inode], name: str, inode: Inode | None) -> None:
    if inode is None:
        names.pop(name, None)
    else:
        names[name] = inode


def _apply(disk: bytes, change: tuple[int, bytes | None]) -> bytes:
    offset, data = change
    if data is None:
        return disk[:offset]
    return disk[:offset].ljust(offset, b"\0") + data + disk[offset + len(data) :]
