"""Backing a run up while it goes: a consistent copy of one commit, of which only what is not there yet is copied.

The tape only grows, so its bytes up to a commit are that commit's for good. Files are collected by the syncer when a
later commit has made them needless: so whatever it may collect is opened first, which keeps its bytes there until they
are copied. Where one is gone before that, the tape has gone on and is read again (`run/facts.py` `read_run`).

Nothing is written in the run's directory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import skerry
from skerry import config as configs
from skerry.core.facts import Committed
from skerry.core.state import RunState
from skerry.disk import sync_folder
from skerry.errors import FileDamaged, FileMissing, Refusal
from skerry.run import backups
from skerry.run.backups import MARK, POOL, Backup, Mark, Part, Show
from skerry.run.evaluations import EVALUATIONS
from skerry.run.facts import begins_later, facts_of, first_segment, read_run
from skerry.run.genesis import FIXED
from skerry.run.keys import Keys
from skerry.run.last_words import Words, check_whole, last_words, open_to_read, state_in
from skerry.run.room import check_elsewhere
from skerry.run.status import holders_of
from skerry.store.files import opened
from skerry.store.store import FILES, Store

LOCAL = "local.json"  # of `skerry train`: what its learners are
BESIDE = (LOCAL, EVALUATIONS)  # small files of a run that its tape does not have


_LEFT = re.compile(r"backup(s|-[0-9]+)\.json\.[0-9a-f]{16}\.tmp")  # of a backup that was broken off


class Made(NamedTuple):
    """A backup that is whole, and what it took."""

    backup: Backup
    copied_bytes: int
    copied_files: int
    removed: tuple[int, ...]  # earlier backups
    damaged: tuple[str, ...]  # backups of the folder that cannot be read; while there are such, no file is removed


class _Source(NamedTuple):
    """A file of the run, its first `size` bytes; with its digest, where the tape or its name says it."""

    name: str
    size: int
    digest: str
    open: Callable[[], BinaryIO]
    is_held: bool = False  # open already, until all is copied


def back_up(
    root: Path,
    folder: Path,
    now: float,
    keep: int = 3,
    with_keys: bool = False,
    show: Show = lambda done, total: None,
) -> Made:
    """One more backup in this folder, whole and looked at when it has its name; the newest `keep` stay."""
    with open_to_read(root) as store:
        state = state_in(store)
    _prepare(folder, state)
    with backups.holding(folder, is_shared=False):
        try:
            return _made(root, folder, now, keep, with_keys, show)
        except OSError as error:
            raise backups.failure(folder, error) from error


def _prepare(folder: Path, state: RunState) -> None:
    """The folder, made where it is not there; refused where it is something else."""
    check_elsewhere(folder, ", best on another disk")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        backups.check_ours(folder)
        if not os.path.lexists(folder / MARK):
            if any(not _LEFT.fullmatch(name) for name in os.listdir(folder)):
                raise Refusal(f"{folder}: has other things in it: name an empty folder, or one that has backups")
            backups.put(folder / MARK, Mark(backups.FORMAT, state.created.run, backups.identity(state)))
        (folder / POOL).mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder)
    except OSError as error:
        raise backups.failure(folder, error) from None
    mark = backups.mark_of(folder)
    if mark.created != backups.identity(state):
        raise Refusal(f"{folder}: has backups of another run ({mark.run}): name another folder")


def _made(root: Path, folder: Path, now: float, keep: int, with_keys: bool, show: Show) -> Made:
    there, damaged = backups.listed(folder)
    _sweep(folder, there, damaged)
    number = backups.next_number(folder)
    words = last_words(root)  # first: a live syncer only adds to the tape
    count = _Count(show)

    def read(store: Store) -> Backup:
        return _copied(store, words, folder, number, now, with_keys, count)

    backup = read_run(root, read)
    if rotten := backups.damage(backup, places := _places(folder, backup), show):  # of an earlier one, by its age
        for name in rotten:
            places[name].unlink(missing_ok=True)
        backup = read_run(root, read)
        if still := backups.damage(backup, places := _places(folder, backup), show):
            raise FileDamaged(f"{min(still.values())}, though it was just copied: check the disk of {folder}")
    sync_folder(folder / POOL)
    _check(root, backup, places)
    backups.put(backups.file_of(folder, number), backup)
    stale = [*there, backup][:-keep]
    for each in stale:
        backups.file_of(folder, each.number).unlink(missing_ok=True)
    sync_folder(folder)
    _sweep(folder, [each for each in [*there, backup] if each not in stale], damaged)
    return Made(backup, count.bytes, count.files, tuple(each.number for each in stale), tuple(damaged))


def _check(root: Path, backup: Backup, places: dict[str, Path]) -> None:
    """The bytes are those that the run has: what is wrong with them is named where it lies there."""
    try:
        backups.check(root, backup, places)
    except FileDamaged as error:
        raise FileDamaged(f"{error}, or {_repair(root)}") from None


def _places(folder: Path, backup: Backup) -> dict[str, Path]:
    return {name: folder / POOL / part.digest for name, part in backup.parts.items()}


class _Count:
    """What was copied, over all readings."""

    def __init__(self, show: Show) -> None:
        self.bytes = self.files = self.total = 0
        self._show = show

    def add(self, count: int) -> None:
        self.bytes += count
        self._show(self.bytes, self.total)


def _sweep(folder: Path, there: list[Backup], damaged: list[str]) -> None:
    """Remove what no backup has, of ones that were removed or never finished; nothing while nobody knows."""
    for name in filter(_LEFT.fullmatch, os.listdir(folder)):
        (folder / name).unlink(missing_ok=True)
    needed = {part.digest for each in there for part in each.parts.values()}
    for name in filter(backups.IN_POOL.fullmatch, sorted(os.listdir(folder / POOL))):
        if name.endswith(".tmp") or (not damaged and name not in needed):
            (folder / POOL / name).unlink(missing_ok=True)


def _copied(
    store: Store, words: Words, folder: Path, number: int, now: float, with_keys: bool, count: _Count
) -> Backup:
    state = state_in(store)
    check_whole(store, state, words)
    with contextlib.ExitStack() as stack:
        left_out, parts = list[str](), dict[str, Part]()
        held = _collected(store, state, folder, stack, left_out)
        recorded = list(_recorded(store, state, folder, left_out))
        sources = [_known(each) for each in (*held, *recorded, *_kept(store, state))]
        keys = Keys(store.root).files() if with_keys else {}
        missing = sum(each.size for each in sources if not _has(folder, each.digest))
        backups.check_room(folder, missing, f"a backup of {store.root}")
        count.total = count.bytes + missing
        buffers = {f"{FILES}/{given.file}" for given in state.buffers.values()}
        dispensable = buffers | {source.name for source in recorded}
        for source in sources:
            part = _into_pool(store, source, folder, count, is_needed=source.name not in dispensable)
            if part is None:
                left_out.append(source.name)
            else:
                parts[source.name] = part
        parts |= {f"keys/{name}": _small(folder, data, count) for name, data in keys.items()}
    return Backup(
        number=number,
        made_at=now,
        skerry=skerry.__version__,
        run=state.created.run,
        head=store.tape.head.hex(),
        epoch=state.epoch,
        phase=state.phase,
        progress=state.progress,
        merges=state.merges,
        parts=parts,
        left_out=tuple(left_out),
    )


# ---------------------------------------------------------------------------------------------- which files


def _collected(
    store: Store, state: RunState, folder: Path, stack: contextlib.ExitStack, left_out: list[str]
) -> Iterator[_Source]:
    """What a syncer may remove at any moment: opened now, and so there until it is copied.

    Learners' buffers the run can do without: where they are lost, and no syncer has just collected them, they are left
    out.
    """
    buffers = {given.file for given in state.buffers.values()}
    files = {c.file for at in state.fragments for c in at.checkpoints} | buffers
    is_served = any(holders_of(store.root))
    for file in sorted(files):
        name = f"{FILES}/{file}"
        if _has(folder, file):
            yield _Source(name, (folder / POOL / file).stat().st_size, file, _nowhere)
        elif file in buffers and not is_served and not (store.root / name).exists():
            left_out.append(name)
        else:
            yield _held(store, name, None, file, stack)
    for name, count in sorted(backups.journal_sizes(state).items()):
        yield _held(store, name, count, "", stack)


def _recorded(store: Store, state: RunState, folder: Path, left_out: list[str]) -> Iterator[_Source]:
    """Contributions, which replay reads and nothing that the run needs: where they are lost, they are left out.

    Not where a prune has just removed them: the tape says so by then, and is read again.
    """
    if configs.decode(state.created.config).store.record != "full":
        return
    lost = list[str]()
    for file in sorted({fact.result.payloads for _, fact in facts_of(store) if isinstance(fact, Committed)} - {""}):
        name = backups.record_name(file)
        if _has(folder, file):
            yield _Source(name, (folder / POOL / file).stat().st_size, file, _nowhere)
        elif os.path.lexists(store.root / name):
            yield _source(store, name, None, file)
        else:
            lost.append(name)
    if lost and begins_later(store):
        raise FileMissing(f"{store.root}/{lost[0]} is missing: it was pruned while it was copied: begin again")
    left_out += lost


def _held(store: Store, name: str, count: int | None, digest: str, stack: contextlib.ExitStack) -> _Source:
    try:
        file = stack.enter_context(opened(store.root / name))
    except FileNotFoundError:
        raise FileMissing(f"{store.root}/{name} is missing: {_mend(store.root)}") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # as many as there may be; the rest is opened in its turn
            return _source(store, name, count, digest)
        raise FileDamaged(f"{store.root}/{name}: cannot be read ({error.strerror}): {_mend(store.root)}") from None
    there = os.fstat(file.fileno()).st_size
    return _Source(name, there if count is None else count, digest, lambda: file, is_held=True)


def _kept(store: Store, state: RunState) -> Iterator[_Source]:
    """What only a prune removes, while nobody serves the run, or nobody does."""
    kept = {c.file for version in state.kept for c in version.checkpoints} | set(state.created.files)
    held = {c.file for at in state.fragments for c in at.checkpoints}
    for file in sorted(kept - held):
        yield _source(store, f"{FILES}/{file}", None, file)
    if state.created.fixed:
        yield _source(store, FIXED, None, state.created.fixed)
    for name in BESIDE:
        if (store.root / name).is_file():
            yield _source(store, name, None, "")
    *before, last = backups.tape_names(first_segment(store), store.tape.number)
    for name in before:
        yield _source(store, name, None, "")
    yield _source(store, last, store.tape.size, "")


def _source(store: Store, name: str, count: int | None, digest: str) -> _Source:
    path = store.root / name
    try:
        there = path.stat(follow_symlinks=False).st_size
    except OSError as error:
        kind = FileMissing if error.errno == errno.ENOENT else FileDamaged
        raise kind(f"{path}: cannot be read ({error.strerror}): {_mend(store.root)}") from None
    return _Source(name, there if count is None else count, digest, lambda: opened(path))


def _nowhere() -> BinaryIO:
    raise AssertionError("it lies in the pool already")


# ---------------------------------------------------------------------------------------------- into the pool


def _known(source: _Source) -> _Source:
    """With its digest: that of what has no name by it is taken now."""
    if source.digest:
        return source
    file = source.open()
    digest = backups.digest_of(file, source.size)
    if source.is_held:
        return source._replace(digest=digest)
    file.close()
    return source._replace(digest=digest)


def _has(folder: Path, digest: str) -> bool:
    return (folder / POOL / digest).is_file()


def _into_pool(store: Store, source: _Source, folder: Path, count: _Count, is_needed: bool) -> Part | None:
    """Copied, unless it is there; None of a damaged file that the run can do without."""
    part, where = Part(source.digest, source.size), store.root / source.name
    if _has(folder, source.digest):
        return part
    if not is_needed and not source.is_held and _is_damaged(store, source.name):
        return None
    try:
        file = source.open()
    except FileNotFoundError:
        raise FileMissing(f"{where} is missing: {_mend(store.root)}") from None
    with file:
        if backups.copied(file, part, folder / POOL / part.digest, count.add):
            count.files += 1
            return part
    if is_needed:
        raise FileDamaged(f"{where} differs from what was written: {_mend(store.root)}")
    return None


def _is_damaged(store: Store, name: str) -> bool:
    """Read through the store, which tells a file that cannot be read from a machine that cannot read it now."""
    folder, digest = name.split("/")
    try:
        store.get(digest, folder)
    except FileMissing:  # it was there: removed since, by who has said so on the tape
        raise
    except FileDamaged:
        return True
    return False


def _small(folder: Path, data: bytes, count: _Count) -> Part:
    part = Part(hashlib.sha256(data).hexdigest(), len(data))
    if not _has(folder, part.digest):
        backups.copied(BytesIO(data), part, folder / POOL / part.digest, count.add)
        count.files += 1
    return part


def _mend(root: Path) -> str:
    return f"a backup has to be whole: {_repair(root)}"


def _repair(root: Path) -> str:
    return f"stop the run and try skerry syncer --run {root} --repair"
