"""What every room needs of the disk: names that outlive the power, and small files of others, read as a whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

SMALL_BYTES_MAX = 64 << 20  # of what is read as a whole
PIECE_BYTES = 1 << 20  # that are read at once of a file that grows


def sync_folder(folder: Path) -> None:
    """Make the names in it durable: those that files were given, or lost, up to now."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def opened(path: Path, *, through_link: bool = False) -> BinaryIO:
    """A plain file to be read; `OSError` at once if anything else lies there: a pipe would be waited for."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if through_link else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    return open(fd, "rb")


def contents(path: Path, bytes_max: int = SMALL_BYTES_MAX, *, through_link: bool = False) -> bytes:
    """All of a small file; `OSError` if it is longer than any of its kind, or no plain file."""
    with opened(path, through_link=through_link) as file:
        data = file.read(min(os.fstat(file.fileno()).st_size, bytes_max) + 1)  # so much memory is taken at once
        while len(data) <= bytes_max and (more := file.read(min(PIECE_BYTES, bytes_max + 1 - len(data)))):
            data += more  # it grows
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"is longer than {bytes_max} bytes", str(path))
    return data
