"""Which files a path stands for, always in the same order, and which of them are text."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import NoReturn

from skerry.errors import DataError

STDLIB = "stdlib"  # the corpus on every machine with Python: the source of its standard library
SNIFF_BYTES = 4 << 10  # a NUL among these first bytes of a file: not text
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})  # half of the standard library; much of it is data


def corpus_files(path: str | Path) -> list[Path]:
    if path == STDLIB:
        return walk(Path(sysconfig.get_path("stdlib")), SKIPPED_FOLDERS | TEST_FOLDERS, suffix=".py")
    root = Path(path)
    try:
        if root.is_dir():
            return walk(root, SKIPPED_FOLDERS)
        if root.is_file():
            return [root]
        fault = "is neither a file nor a folder" if root.exists() else "does not exist"
    except OSError as error:
        refuse(error)
    raise DataError(f"{path} {fault}; name a text file, a folder of them, or {STDLIB!r}")


def walk(root: Path, skipped: frozenset[str], suffix: str = "") -> list[Path]:
    """Regular files in the order of their relative paths; nothing hidden, no links to folders."""
    found = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in skipped]
        found += [Path(folder, name) for name in files if name[0] != "." and name.endswith(suffix)]
    found.sort(key=lambda file: file.relative_to(root).as_posix())
    return [file for file in found if file.is_file()]


def is_text(opening: bytes) -> bool:
    """By its first bytes, `SNIFF_BYTES` of them."""
    return b"\0" not in opening


def refuse(error: OSError) -> NoReturn:
    what = f"{error.filename} cannot be read ({error.strerror})"
    raise DataError(f"{what}; make it readable or name another") from error
