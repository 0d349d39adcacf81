"""Which runs lie in a folder, and where each stands; it reads, and changes nothing.

A run is a folder with a tape, or one whose last words say that it had one. What is wrong with a run is said in its row:
others are no worse for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from skerry.errors import Refusal, SkerryError
from skerry.run.last_words import lost_tape
from skerry.run.status import status_of
from skerry.store.files import is_temporary

RUNS_MAX = 10_000  # folders that are looked at in one
ENTRIES_MAX = 1_000_000  # of a run, when its size is reckoned
DEPTH_MAX = 16  # folders in folders, likewise: a run's own are three deep


def runs_in(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """A row for each run in these folders, or that is one of them, each once; the one that did something last first."""
    roots: dict[str, Path] = {}
    for folder in folders:
        for root in _roots(folder):
            roots.setdefault(os.path.realpath(root), root)
    rows = [_row(root) for root in roots.values()]
    return sorted(rows, key=lambda row: (-(row["at"] or 0.0), row["run_dir"]))


def _roots(folder: Path) -> Iterator[Path]:
    if _is_run(folder):
        yield folder
        return
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not is_temporary(entry.name))
    except OSError as error:
        raise Refusal(f"{folder}: cannot be read ({error.strerror}): name a folder that has runs in it") from None
    for name in names[:RUNS_MAX]:
        if _is_run(folder / name):
            yield folder / name


def _is_run(root: Path) -> bool:
    return (root / "tape").is_dir() or bool(lost_tape(root))


def _row(root: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"run_dir": str(root), "bytes": taken(root), "damaged": "", "at": None}
    try:
        status = status_of(root)
    except (SkerryError, OSError) as error:
        return row | {"damaged": str(error)}
    keys = ("run", "phase", "serving", "progress", "merges", "at", "age_s", "lineage")
    learners = [each["state"] for each in status["learners"].values()]
    row |= {key: status.get(key) for key in keys}
    row["learners"], row["training"] = len(learners), learners.count("training")
    row["damaged"] = status.get("warning", "")
    return row


def taken(root: Path) -> int:
    """Bytes that a folder takes on its disk, as far as ENTRIES_MAX and DEPTH_MAX go: whoever may write there can put in
    it whatever he likes. Links in it are counted as links."""
    total, count, left = 0, 0, [(os.fspath(root), 0)]
    while left:
        folder, depth = left.pop()
        for entry in _entries(folder):
            count += 1
            if count > ENTRIES_MAX:
                return total
            size, is_folder = _size_of(entry)
            total += size
            if is_folder and depth < DEPTH_MAX:
                left.append((entry.path, depth + 1))
    return total


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """What is gone meanwhile, or may not be read, has none."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _size_of(entry: os.DirEntry[str]) -> tuple[int, bool]:
    """Bytes on the disk, and whether it is a folder, which is looked into."""
    try:
        is_folder = entry.is_dir(follow_symlinks=False)
        return (0 if is_folder else 512 * entry.stat(follow_symlinks=False).st_blocks), is_folder
    except OSError:
        return 0, False
