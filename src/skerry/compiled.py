"""`kernel`: a function compiled by numba, whose machine code is kept on the disk where nobody else can write.

numba keeps compiled code as pickles, beside the sources, where NUMBA_CACHE_DIR says or in the user's cache folder, and
runs what it finds there. So a folder that others can write to is one from which they run code in this process. Before
anything is loaded the folder that numba has chosen is looked at, with what lies in it and every folder above it: all of
it has to be this user's or root's, and writable by nobody else. Else the code is kept in a folder of our own, and where
that is no better, nowhere: it is compiled anew by each process.
"""

from __future__ import annotations

import functools
import grp
import logging
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import NullCache

LINKS_MAX = 40  # on the way to a folder, as the system has it

log = logging.getLogger("skerry")
F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F, **options: Any) -> F:
    """Compiled when it is first called, or loaded from where it was kept; it lets go of the GIL."""
    compiled: Any = numba.njit(nogil=True, **options)(function)
    for chosen in (None, _own_folder):
        with _no_folder(), _cache_dir(chosen() if chosen is not None else None):
            compiled.enable_caching()
            if _is_trusted(str(compiled.stats.cache_path)):
                return cast(F, compiled)
    compiled._cache = NullCache()
    _say_nowhere()
    return cast(F, compiled)


def is_private(path: Path) -> bool:
    """Whether nobody but this user and root can change what is found at this path, now or later.

    A folder in which all may write but only owners may remove (/tmp) is no way to change what is not theirs.
    """
    return all(_is_ours(step) for step in _way(path))


@functools.cache
def _is_trusted(folder: str) -> bool:
    with os.scandir(folder) as files:
        kept = [file for file in files if file.name.endswith((".nbi", ".nbc"))]
        are_ours = all(file.is_file(follow_symlinks=False) and _is_ours(Path(file.path)) for file in kept)
    if are_ours and is_private(Path(folder)):
        return True
    log.info("compiled kernels in %s are not used, for others can write there: take that from them", folder)
    return False


def _own_folder() -> str:
    """A new one is for this user alone; one that is there is looked at as any."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "skerry", "kernels")
    folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    return str(folder)


@contextmanager
def _cache_dir(folder: str | None) -> Iterator[None]:
    """For our own kernels alone: those of others in this process are kept where they were."""
    config: Any = numba.config
    before = config.CACHE_DIR
    try:
        config.CACHE_DIR = folder or before
        yield
    finally:
        config.CACHE_DIR = before


@contextmanager
def _no_folder() -> Iterator[None]:
    """numba finds none that can be written, or it cannot be looked at: then it is not used."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        log.debug("no folder for compiled kernels: %s", error)


@functools.cache
def _say_nowhere() -> None:
    log.warning(
        "compiled kernels are kept nowhere, and compiled anew by each process, which takes a minute: others can write "
        "to every folder for them; set NUMBA_CACHE_DIR to one of your own (mode 0700)"
    )


def _way(path: Path) -> Iterator[Path]:
    """Every folder and every link that leads to it, and itself."""
    left, at, links = list(reversed(Path(os.path.abspath(path)).parts)), Path("/"), 0
    while left:
        at = at / left.pop()
        yield at
        if at.is_symlink():
            links += 1
            if links > LINKS_MAX:
                raise OSError(f"{path}: too many links lead there")
            left += reversed(Path(os.path.normpath(at.parent / os.readlink(at))).parts)


def _is_ours(path: Path) -> bool:
    found = path.lstat()
    if found.st_uid not in (os.geteuid(), 0):
        return False
    if stat.S_ISLNK(found.st_mode):
        return True  # nobody changes a link: it is removed, which is its folder's affair
    is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    others = bool(found.st_mode & stat.S_IWOTH)
    group = bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid)
    return bool(is_sticky) or not (others or group)


@functools.cache
def _is_own_group(gid: int) -> bool:
    """Of this user alone, as many systems make one for each: what it may write, nobody else may. So may root's."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    is_alone = not set(group.gr_mem) - {user.pw_name, "root"}
    return is_alone and (gid == 0 or (gid == user.pw_gid and group.gr_name == user.pw_name))
