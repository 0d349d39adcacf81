"""A run's own keys: its certificate authority, the syncer's certificate, one for each learner and for each admin.

They lie in `RUN/keys`, which only its owner may enter:

    ca.pem       the authority: its private key and its certificate; whoever has it can make keys of this run
    syncer.pem   the syncer's key file
    admin.pem    an admin's key file, for orders from the syncer's own machine; the syncer makes it
    issued.json  the book: every learner's and admin's key that was ever made, and when it was revoked

A syncer serves without `ca.pem`, if the other files were brought from where that is kept: it makes no key then.

A *key file* is one PEM file with a private key, its certificate and the authority's certificate, in that order. The
syncer's certificate is good for serving only and a learner's for dialling only, so that no learner can play the syncer.
An admin's says so, and so does the book: it gives orders and joins nothing, and a learner's gives no order.

Rules that hold here: the book decides who is let in, so a key that is not in it is as bad as a revoked one; a name has
one good key at most. Files are replaced in one go, no link is followed, and two commands at a time wait for each other.
Times are UTC. Nothing here knows sockets, nor how a certificate is made (`run/certificates.py`).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from cryptography import x509

from skerry.core.vocabulary import LOCAL_ADMIN
from skerry.errors import DiskFull, KeysError, LocalError
from skerry.node.peers import NAME, no_name
from skerry.run import certificates
from skerry.run.certificates import Private, Role
from skerry.secrecy import objection
from skerry.store.lock import NO_ROOM, locker_of
from skerry.text import counted

KEYS, AUTHORITY, SYNCER, BOOK = "keys", "ca.pem", "syncer.pem", "issued.json"
ADMIN_FILE = "admin.pem"
SYNCER_DAYS = 730  # renewed by itself at a start, when less than a third is left
LEARNER_DAYS = 730  # two years: no run of a year meets its end
DAYS_MAX = certificates.AUTHORITY_DAYS  # no key outlives its authority
WARNED_DAYS = 30  # before a key expires
WARNS_S = 86_400.0  # how often a syncer says so
NAMES_SHOWN = 8
LOCK_S = 10.0  # for another command to be done with the book
LOCK_POLL_S = 0.02

log = logging.getLogger("skerry.keys")


# Without a zone it could be compared with no other, and the book is a file that people mend by hand.
Time = Annotated[dt.datetime, msgspec.Meta(tz=True)]


class Issued(msgspec.Struct, frozen=True, omit_defaults=True):
    """A learner's or an admin's key, as the book has it."""

    name: str
    serial: str  # hexadecimal
    issued: Time
    expires: Time
    revoked: Time | None = None
    role: Role = "learner"

    def state(self, now: dt.datetime) -> str:
        return "revoked" if self.revoked else "expired" if now >= self.expires else "good"


class Made(NamedTuple):
    """A key that was issued just now: the file's content, its line in the book, and the key that it replaces."""

    pem: bytes
    row: Issued
    replaced: Issued | None


class Keys:
    """The keys of one run directory, which is made where it is not there; the authority is made when it is needed."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / KEYS

    def check(self) -> None:
        """Refuse what no syncer could begin with, and write nothing; what is not there is made when it begins."""
        try:
            if os.path.lexists(self.run):
                _check_owner(os.stat(self.run), self.run)
        except OSError as error:
            raise _failure(self.run, error) from None
        if os.path.lexists(self.folder):
            with _Folder.made(self.run) as folder:
                folder.read(SYNCER)
                if self._kept_elsewhere(folder) is not None or self._found_authority(folder) is not None:
                    folder.rows()

    def init(self) -> bool:
        """Make the authority; False where there is one."""
        with _Folder.made(self.run) as folder:
            return self._authority(folder)[2]

    def check_name(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise KeysError(no_name(name))

    def issue(
        self,
        name: str,
        days: int = LEARNER_DAYS,
        hand_over: Callable[[bytes], None] | None = None,
        role: Role = "learner",
    ) -> Made:
        """A key for the learner, or admin, of this name; the one that it had is revoked.

        It is handed over before it is in the book: if that fails, the one before is as good as ever.
        """
        self.check_name(name)
        with _Folder.made(self.run) as folder:
            return self._issue(folder, name, days, hand_over, role)

    def _issue(
        self, folder: _Folder, name: str, days: int, hand_over: Callable[[bytes], None] | None, role: Role
    ) -> Made:
        authority, certificate, _ = self._authority(folder)
        now, rows = _now(), folder.rows()
        if any(row.name == name and row.role != role for row in rows):
            other = "a learner" if role == "admin" else "an admin"
            raise KeysError(f"{name}: {other} of this run has had this name: choose another")
        pem, serial, expires = certificates.leaf(authority, certificate, name, days, now, role)
        before = _good(rows, name)
        if before is not None:
            rows[rows.index(before)] = msgspec.structs.replace(before, revoked=now)
        rows.append(row := Issued(name, f"{serial:x}", now, expires, role=role))
        if hand_over is not None:
            hand_over(pem)
        folder.put(BOOK, _encoded(rows))
        return Made(pem, row, before)

    def revoke(self, name: str) -> Issued:
        """The key of this name is good no more; its line in the book, as it is now."""
        with self._opened() as folder:
            rows = folder.rows()
            good = _good(rows, name)
            if good is None:
                raise KeysError(self._no_key(rows, name))
            rows[rows.index(good)] = row = msgspec.structs.replace(good, revoked=_now())
            folder.put(BOOK, _encoded(rows))
        return row

    def rows(self) -> list[Issued]:
        with self._opened() as folder:
            return folder.rows()

    def files(self) -> dict[str, bytes]:
        """Everything that lies there, by name, as one command has left it: for a copy that is as well kept."""
        with self._opened() as folder:
            found = {name: folder.read(name) for name in (AUTHORITY, SYNCER, BOOK)}
        return {name: data for name, data in found.items() if data is not None}

    def syncer_file(self) -> Path:
        """The syncer's key file, made where there is none and made again where it is of no use, or soon will be."""
        with _Folder.made(self.run) as folder:
            if (lent := self._kept_elsewhere(folder)) is not None:
                return self._as_brought(lent, _now())
            authority, certificate, _ = self._authority(folder)
            pem, now = folder.read(SYNCER), _now()
            staleness = "" if pem is None else certificates.staleness(pem, certificate, now, self.folder / SYNCER)
            if pem is None or staleness:
                folder.put(SYNCER, certificates.leaf(authority, certificate, "", SYNCER_DAYS, now)[0])
            if staleness:
                log.warning("%s: the syncer's certificate was renewed: %s", self.folder / SYNCER, staleness)
            _warn(f"{self.folder / AUTHORITY}: the run's authority", certificate.not_valid_after_utc, now)
        return self.folder / SYNCER

    def admin_file(self) -> Path:
        """The key file for orders from this machine, made where there is none that is good for long."""
        where = self.folder / ADMIN_FILE
        with _Folder.made(self.run) as folder:
            if self._kept_elsewhere(folder) is not None:
                return where  # as it was brought; without it orders come from elsewhere
            certificate, pem = self._authority(folder)[1], folder.read(ADMIN_FILE)
            is_fresh = pem is not None and not certificates.staleness(pem, certificate, _now(), where)
            good = {row.serial for row in folder.rows() if not row.revoked}
            if pem is None or not is_fresh or certificates.serial_of(pem, where) not in good:
                self._issue(folder, LOCAL_ADMIN, SYNCER_DAYS, partial(folder.put, ADMIN_FILE), "admin")
        return where

    @contextlib.contextmanager
    def _opened(self) -> Iterator[_Folder]:
        """Of a run that has keys. The book is enough: who has lost the authority must still turn somebody out."""
        none = KeysError(f"{self.run}: has no keys: skerry keys issue {self.run} NAME makes the first")
        try:
            os.lstat(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            raise none from None
        except OSError as error:
            raise _failure(self.folder, error) from None
        with _Folder.made(self.run) as folder:
            if folder.read(BOOK) is None and folder.read(AUTHORITY) is None:
                raise none
            yield folder

    def _kept_elsewhere(self, folder: _Folder) -> x509.Certificate | None:
        """The syncer's certificate where the authority is on another machine, and all that serving needs is here."""
        pem = folder.read(SYNCER)
        if pem is None or folder.read(AUTHORITY) is not None or folder.read(BOOK) is None:
            return None
        return certificates.read(pem, self.folder / SYNCER)[1]

    def _as_brought(self, certificate: x509.Certificate, now: dt.datetime) -> Path:
        """The syncer's key file, which cannot be renewed here."""
        where, ends = self.folder / SYNCER, certificate.not_valid_after_utc
        if now >= ends:
            trouble = f"the syncer's key has expired on {ends:%Y-%m-%d}, and {AUTHORITY} is not here to make another"
            raise KeysError(f"{where}: {trouble}: bring both from where the run's keys are made")
        log.info("%s is not here: no key is made on this machine", self.folder / AUTHORITY)
        _warn(f"{where}: the syncer's key", ends, now)
        return where

    def _authority(self, folder: _Folder) -> tuple[Private, x509.Certificate, bool]:
        """Its key, its certificate, and whether it was made just now."""
        if (found := self._found_authority(folder)) is not None:
            return *found, False
        key, certificate = certificates.new_authority(_now())
        folder.put(BOOK, _encoded([]))
        folder.put(AUTHORITY, certificates.encoded(key, certificate))
        if (self.run / "tape").is_dir():  # a run that had keys has lost them, unless it begins to have some
            log.warning(
                "%s: made an authority; if the run had another before, no key of that is good any more",
                self.folder / AUTHORITY,
            )
        return key, certificate, True

    def _found_authority(self, folder: _Folder) -> tuple[Private, x509.Certificate] | None:
        """None where it is to be made."""
        pem, where = folder.read(AUTHORITY), self.folder / AUTHORITY
        if pem is not None:
            key, certificate = certificates.read(pem, where)
            self._check_time(certificate, _now())
            return key, certificate
        if folder.read(BOOK) is not None and folder.rows():  # an empty one is of an authority that was not finished
            advice = f"restore it from a copy, or move {self.folder} away and issue every key anew"
            raise KeysError(f"{where}: is missing, and {BOOK} names keys that it made: {advice}")
        return None

    def _check_time(self, authority: x509.Certificate, now: dt.datetime) -> None:
        """What is made while the clock is wrong by more than a day is refused by everybody else, with other words."""
        anew, where = f"move {self.folder} away and issue new keys", self.folder / AUTHORITY
        if now >= authority.not_valid_after_utc:
            raise KeysError(f"{where}: the run's authority has expired: {anew}")
        if now < (begins := authority.not_valid_before_utc):
            trouble = f"the run's authority is not good before {begins:%Y-%m-%d}, and this machine has {now:%Y-%m-%d}"
            raise KeysError(f"{where}: {trouble}: set the clock, or if that is right {anew}")

    def _no_key(self, rows: list[Issued], name: str) -> str:
        if any(row.name == name for row in rows):
            return f"{name}: its key is revoked already: skerry keys issue {self.run} {name} makes another"
        known = sorted({row.name for row in rows})[:NAMES_SHOWN]
        there = f"there are keys for {', '.join(known)}" if known else "the run has none"
        return f"{name}: no key of this name was issued ({there}): check the name"


class Book:
    """Who may come, as the book on disk has it at this moment; any thread may ask.

    A book that cannot be read says what it said last: a syncer must not lose its learners over a damaged file. So one
    that cannot be read at the start is refused: it would turn away every learner for good.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / KEYS / BOOK
        self._lock = threading.Lock()
        self._seen = (0, 0, 0)  # inode, time and size of what was read last
        self._rows: list[Issued] = []
        self._trouble = ""
        self._warned_at = float("-inf")
        self._rows, self._seen = self._read()

    def look(self) -> bool:
        """Read it again if it is another file; whether it was."""
        with self._lock:
            rows, seen, trouble = self._rows, self._seen, ""
            try:
                if self._stamp() != seen:
                    rows, seen = self._read()
            except (OSError, LocalError) as error:
                trouble = str(error)
            if trouble and trouble != self._trouble:
                log.warning("the book of keys cannot be read, what it said last holds: %s", trouble)
            elif self._trouble and not trouble:  # also where the very same file was brought back
                log.info("the book of keys can be read again: %s", self.path)
            has_changed = seen != self._seen
            self._rows, self._seen, self._trouble = rows, seen, trouble
            return has_changed

    def _stamp(self) -> tuple[int, int, int]:
        found = os.stat(self.path, follow_symlinks=False)
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> tuple[list[Issued], tuple[int, int, int]]:
        """Its lines, and of which file; one that is replaced meanwhile is read again at the next look."""
        try:
            seen = self._stamp()
            return _decoded(_content(self.path), self.path), seen
        except OSError as error:
            raise _failure(self.path, error) from None

    def refusal(self, name: str, serial: str, is_admin: bool = False) -> str:
        """Why this key is not let in; empty if it is. An expired one does not come so far: TLS ends it."""
        self.look()
        role = "admin" if is_admin else "learner"
        its = (row for row in self._rows if row.serial == serial and row.name == name and row.role == role)
        row = next(its, None)
        if row is None:
            return f"the key of {name} is not in the run's book: ask for one made with skerry keys issue"
        if row.revoked is not None:
            return revoked(name)
        return ""

    def standings(self) -> dict[str, str]:
        """Of every learner's name its good key's serial, or nothing if it has none any more."""
        learners = (row for row in self._rows if row.role == "learner")
        return {row.name: "" if row.revoked else row.serial for row in learners}

    def warn(self, monotonic_s: float) -> None:
        """Say once a day which keys have expired, and which are about to: a line for each of the two, however many."""
        if monotonic_s - self._warned_at < WARNS_S:
            return
        self._warned_at, now = monotonic_s, _now()
        rows = sorted((row for row in self._rows if not row.revoked), key=lambda row: row.expires)
        _warn_of("have expired", [row for row in rows if now >= row.expires], now)
        ending = [row for row in rows if now < row.expires and (row.expires - now).days < WARNED_DAYS]
        _warn_of(f"expire within {WARNED_DAYS} days", ending, now)


def revoked(name: str) -> str:
    """What is said to a learner that comes, or stays, with such a key."""
    return f"the key of {name} is revoked: ask whoever runs the syncer for another"


def owner_of(pem: bytes, where: Path) -> str:
    """The learner whose key file this is; it is said if the key is about to expire, and refused if it has."""
    _, certificate = certificates.read(pem, where, "ask for another, made with skerry keys issue")
    name = certificates.dialler_of(certificate)
    if name != LOCAL_ADMIN and not NAME.fullmatch(name):
        raise KeysError(f"{where}: is no learner's key: ask for one, made with skerry keys issue")
    expires, now = certificate.not_valid_after_utc, _now()
    if now >= expires:
        raise KeysError(f"{where}: the key of {name} has expired on {expires:%Y-%m-%d}: ask for another")
    _warn(f"{where}: the key of {name}", expires, now)
    return name


def _warn(what: str, expires: dt.datetime, now: dt.datetime) -> None:
    left = (expires - now).days
    if now >= expires:
        log.warning("%s has expired on %s: issue another", what, f"{expires:%Y-%m-%d}")
    elif left < WARNED_DAYS:
        log.warning("%s expires in %s, on %s: issue another before", what, counted(left, "day"), f"{expires:%Y-%m-%d}")


def _warn_of(what: str, rows: list[Issued], now: dt.datetime) -> None:
    """The first come first; of many only some are named."""
    if len(rows) == 1:
        _warn(f"the key of {rows[0].name}", rows[0].expires, now)
    elif rows:
        more = f" and {len(rows) - NAMES_SHOWN} more" if len(rows) > NAMES_SHOWN else ""
        names = ", ".join(row.name for row in rows[:NAMES_SHOWN]) + more
        first = f"{rows[0].expires:%Y-%m-%d}"
        log.warning("%d keys %s, the first on %s: %s: issue others (skerry keys list)", len(rows), what, first, names)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC).replace(microsecond=0)


# ----------------------------------------------------------------------------------------------------- files


def _good(rows: list[Issued], name: str) -> Issued | None:
    return next((row for row in rows if row.name == name and not row.revoked), None)


def _encoded(rows: list[Issued]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n"


def _decoded(data: bytes, where: Path) -> list[Issued]:
    try:
        return msgspec.json.decode(data, type=list[Issued])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise KeysError(f"{where}: cannot be read ({error}): restore it from a copy") from None


class _Folder:
    """`RUN/keys`, held by descriptor and locked until the end of the `with`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    @classmethod
    @contextlib.contextmanager
    def made(cls, run: Path) -> Iterator[_Folder]:
        """Made where it is not there; refused where it is not ours alone."""
        path = run / KEYS
        try:
            run.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(about := os.stat(run), run)
            if stat.S_IMODE(about.st_mode) & 0o022:  # who may put another folder in the place of the keys has the run
                raise KeysError(f"{run}: others may change what is in it: chmod go-w {run}")
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise _failure(path, error) from None
        try:
            found = os.fstat(fd)
            _check_owner(found, path)
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise KeysError(f"{path}: others may enter it: chmod 700 {path}")
            _lock(fd, path)
            yield cls(path, fd)
        except OSError as error:
            raise _failure(path, error) from None
        finally:
            os.close(fd)

    def read(self, name: str) -> bytes | None:
        """None where it is not there."""
        try:
            return _content(self.path / name, self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failure(self.path / name, error) from None

    def put(self, name: str, data: bytes) -> None:
        """In place of what is there, in one go, and durable."""
        temporary = f"{name}.{secrets.token_hex(4)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o600, dir_fd=self._fd), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._fd)
            raise _failure(self.path / name, error) from None

    def rows(self) -> list[Issued]:
        data = self.read(BOOK)
        if data is None:
            raise KeysError(f"{self.path / BOOK}: is missing: restore it from a copy, or move {self.path} away")
        return _decoded(data, self.path / BOOK)


def _content(path: Path, folder: int | None = None) -> bytes:
    """Of a file that is ours alone, through no link; looked for in the folder of this descriptor, if one is given."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path if folder is None else path.name, flags, dir_fd=folder)
    with open(fd, "rb") as file:
        if trouble := objection(os.fstat(fd), "it", f"chmod 600 {path}", "run this as that user"):
            raise KeysError(f"{path}: {trouble}")
        return file.read()


def _check_owner(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.geteuid():
        raise KeysError(f"{path}: belongs to another user (id {found.st_uid}): run this as that user")


def _lock(fd: int, path: Path) -> None:
    """Two commands at once would each write a book without the other's line."""
    ends_at = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= ends_at:
                pid = locker_of(fd)
                who = f"process {pid}" if pid else "another command"
                raise KeysError(f"{path}: {who} has held it for {LOCK_S:g} s: end that first") from None
            time.sleep(LOCK_POLL_S)


def _failure(path: Path, error: OSError) -> LocalError:
    if error.errno in NO_ROOM:
        return DiskFull(f"{path}: {error.strerror}: free space")
    remedy = {
        errno.ENOENT: "restore it from a copy",
        errno.EACCES: "check its owner and permissions",
        errno.EROFS: "mount it writable",
        errno.ENOTDIR: "a folder belongs there: move away what is in its place",
        errno.EEXIST: "a folder belongs there: move away what is in its place",
        errno.ELOOP: "a link is not followed: put the thing itself there",
    }.get(error.errno or 0, "check the disk")
    return KeysError(f"{path}: {error.strerror or error}: {remedy}")
