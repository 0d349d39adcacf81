"""A run out of a backup, in a directory of its own that was not there before.

It is made under a name beside the one it gets, where its tape lies in a folder that nothing takes for one. All of it is
durable and was looked at before the tape, and then the directory, get their names: so what a crash leaves is no run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from skerry.disk import sync_folder
from skerry.errors import FileDamaged, Refusal, StoreError
from skerry.run import backups
from skerry.run.backups import POOL, Backup, Show
from skerry.run.leftovers import UNFINISHED, held, remove_left
from skerry.run.room import check_elsewhere
from skerry.store.files import opened, temporary
from skerry.store.journal import JOURNAL
from skerry.store.store import FILES, RECORD


def chosen(folder: Path, number: int | None) -> Backup:
    """The newest backup, or the one that a person names; which is the newest, nobody knows if one cannot be read."""
    backups.mark_of(folder)
    found, damaged = backups.listed(folder)
    there = ", ".join(str(each.number) for each in found) or "none"
    if number is not None:
        for each in found:
            if each.number == number:
                return each
        raise Refusal(f"{folder}: has no backup {number} that can be read: there are {there}")
    if damaged:
        raise Refusal(f"{damaged[0]} with --at: there are {there}")
    if not found:
        raise Refusal(f"{folder}: has no backup yet: skerry backup RUN_DIR {folder}")
    return found[-1]


def restore(folder: Path, root: Path, number: int | None = None, show: Show = lambda done, total: None) -> Backup:
    """Make the run of a backup in this new directory, whole and durable on return; which backup it was."""
    if os.path.lexists(root):
        raise Refusal(f"{root}: is there already: name a directory that is not; a restore overwrites nothing")
    check_elsewhere(root)
    chosen(folder, number)  # what is wrong is said before a file is opened
    with backups.holding(folder, is_shared=True):
        backup = chosen(folder, number)
        remove_left(root)
        backups.check_room(root, backup.bytes, f"backup {backup.number}")
        anew = temporary(root)
        try:
            anew.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            anew.mkdir(mode=0o700)
            with held(anew):
                _make(folder, anew, backup, show)
                (anew / UNFINISHED).rename(anew / "tape")
                sync_folder(anew)
                anew.rename(root)
            sync_folder(root.absolute().parent)
        except OSError as error:
            shutil.rmtree(anew, ignore_errors=True)
            raise backups.failure(root, error) from error
        except BaseException:
            shutil.rmtree(anew, ignore_errors=True)
            raise
    return backup


def _make(folder: Path, anew: Path, backup: Backup, show: Show) -> None:
    folders = [UNFINISHED, FILES, RECORD, JOURNAL, *(["keys"] if backup.has_keys else [])]
    for name in folders:
        (anew / name).mkdir(mode=0o700)
    done, places = 0, {}

    def add(count: int) -> None:
        nonlocal done
        show(done := done + count, backup.bytes)

    for name, part in backup.parts.items():
        source, places[name] = folder / POOL / part.digest, anew / name.replace("tape/", f"{UNFINISHED}/")
        try:
            with opened(source) as file:
                is_right = backups.copied(file, part, places[name], add)
        except FileNotFoundError:
            raise StoreError(f"{source}: is missing: take another backup with --at") from None
        if not is_right:
            raise FileDamaged(f"{source}: is not what was written: take another backup with --at")
    for name in folders:
        sync_folder(anew / name)
    if damaged := backups.damage(backup, places):
        raise FileDamaged(f"{min(damaged.values())}, though it was just copied: check the disk")
    backups.check(anew, backup, places)
