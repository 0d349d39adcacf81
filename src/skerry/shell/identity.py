"""Who a process is to a syncer: by its own key, by the token that all share, or by what it calls itself.

A key says the name, and whoever has one is not asked for anything else. Both kinds of secret are files that only their
owner may read or change.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from skerry.errors import ConfigError, WireError
from skerry.secrecy import objection
from skerry.shell.address import is_loopback
from skerry.store.files import fresh, opened, temporary
from skerry.wire.connection import address_of, is_file
from skerry.wire.tls import Tls, name_of

TOKEN_BITS_MIN = 128  # where it is random
TOKEN_KINDS_MIN = 8  # of different bytes: sixteen times the same letter is no secret
SECRET_BYTES_MAX = 1 << 20
ADMIN_TOKEN = "admin.token"  # in a run directory
ADMIN_KEY = "keys/admin.pem"  # likewise, where the run has keys
ADMIN_TOKEN_BYTES = 32  # of randomness

Spelled = Callable[[str], str]  # an option's name as this user writes it: an argument of Python's, or a flag


class Identity(NamedTuple):
    """What a process dials with; at most one of the two secrets."""

    name: str
    token: bytes | None = None
    key_file: str | None = None  # from the root, for a process beside this one reads it too


def identity(
    name: str | None, token_file: str | Path | None, key_file: str | Path | None, spelled: Spelled = str
) -> Identity:
    """By what is given, else what the environment says; what no syncer takes as a name is refused before dialling."""
    from skerry.node.peers import NAME, no_name  # not where only secrets are asked for: a command begins sooner

    name = name or os.environ.get("SKERRY_NAME")
    if name and not NAME.fullmatch(name):
        raise ConfigError(no_name(name))
    token, key_file = secrets_of(token_file, key_file, spelled)
    if key_file is None:
        return Identity(name or _own_name(), token)
    owner = name_of(key_file)
    if not NAME.fullmatch(owner):
        raise ConfigError(f"{key_file}: is no learner's key: ask for one, made with skerry keys issue")
    if name and name != owner:
        raise ConfigError(
            f"{spelled('name')} (or SKERRY_NAME) = {name}, and {key_file} is the key of {owner}: leave the name "
            f"out, or give the key of {name}"
        )
    return Identity(owner, key_file=key_file)


def secrets_of(
    token_file: str | Path | None, key_file: str | Path | None, spelled: Spelled = str
) -> tuple[bytes | None, str | None]:
    """The token, or the key file's path from the root; neither where nobody names one."""
    if not token_file and not key_file:
        token_file, key_file = (os.environ.get(f"SKERRY_{word}_FILE") for word in ("TOKEN", "KEY"))
    if token_file and key_file:
        raise ConfigError(
            f"{spelled('key_file')} (or SKERRY_KEY_FILE) and {spelled('token_file')} (or SKERRY_TOKEN_FILE) are both "
            "given: with a key no token is needed, so leave the token out"
        )
    if key_file:
        read_owner(key_file)
        Tls(key_file)  # what it would be refused for in the process beside this one is said here
        return None, os.path.abspath(key_file)
    return read_token(token_file) if token_file else None, None


def check_private(
    addresses: Iterable[tuple[str, int]], key_file: str | None, insecure: bool, spelled: Spelled = str
) -> None:
    """Beyond this machine nothing is said in the clear, unless somebody says so in words: whoever answers at that
    address, or is on the way, would read and change what is sent. A file may name another machine at any time."""
    word = os.environ.get("SKERRY_INSECURE", "")
    if word not in ("", "0", "1"):
        raise ConfigError(
            f"SKERRY_INSECURE = {word}: give 1 to dial another machine without a key, or leave it out to dial none so"
        )
    if key_file or insecure or word == "1":
        return
    for host, port in addresses:
        if is_file(host) and not os.path.exists(host[1:]):
            raise ConfigError(f"{host}: there is no file {host[1:]!r}: name the one that the syncer's host:port is in")
        if not is_loopback(host or "localhost"):
            how = spelled("insecure") if spelled is not str else "insecure=True"
            what = "names a file, which may lead to another machine" if is_file(host) else "is another machine"
            raise ConfigError(
                f"{address_of(host, port)} {what}; without a key anybody on the way reads and changes what is sent: "
                f"give {spelled('key_file')} (or SKERRY_KEY_FILE), made there with skerry keys issue; inside a VPN "
                f"{how} (or SKERRY_INSECURE=1) does without"
            )


def tls_of(key_file: str | None) -> Tls | None:
    return Tls(key_file) if key_file else None


def admin_token(root: Path) -> bytes:
    """The secret that orders to a syncer without keys are proved by, made where its run directory has none."""
    path = root / ADMIN_TOKEN
    if not os.path.lexists(path):
        return _made_token(path)
    token = read_admin_token(root)
    return token if len(token) * _bits_a_byte(token) >= TOKEN_BITS_MIN else _made_token(path)


def read_admin_token(root: Path) -> bytes:
    """As it lies in the run directory: through no link, and a file of this user's alone (`secrecy.py`)."""
    path, remedy = root / ADMIN_TOKEN, "remove it, and start the syncer again"
    try:
        with opened(path) as file:
            about = os.fstat(file.fileno())
            if trouble := objection(about, "the admin token", remedy, "run this as that user"):
                raise WireError(f"{path}: {trouble}")
            return file.read(SECRET_BYTES_MAX).strip()
    except OSError as error:
        raise WireError(f"{path}: the admin token cannot be read ({error.strerror}): {remedy}") from None


def _made_token(path: Path) -> bytes:
    token, anew = secrets.token_hex(ADMIN_TOKEN_BYTES).encode(), temporary(path)
    with fresh(anew, 0o600) as file:
        file.write(token + b"\n")
        file.flush()
        os.fsync(file.fileno())
    anew.replace(path)
    return token


def read_owner(key_file: str | Path) -> str:
    """The name of the learner whose key this is."""
    pem = read_secret(key_file, "key")
    from skerry.run.keys import owner_of  # its libraries take a while to load, and most have no key

    return owner_of(pem, Path(key_file))


def read_token(file: str | Path) -> bytes:
    """The shared secret: the file's content without surrounding white space."""
    token = read_secret(file, "token").strip()
    bits = len(token) * _bits_a_byte(token)
    if bits < TOKEN_BITS_MIN or len(set(token)) < TOKEN_KINDS_MIN:
        amount = f"of {bits} bits at most, and at least {TOKEN_BITS_MIN} are needed" if token else "empty"
        amount = "easily guessed" if bits >= TOKEN_BITS_MIN else amount
        raise WireError(f"{file}: the token is {amount}: make one with openssl rand -hex 32 > {file}")
    return token


def _bits_a_byte(token: bytes) -> int:
    """At most, by the letters that it is written in."""
    if all(byte in b"0123456789abcdef" for byte in token.lower()):
        return 4
    return 6 if token.isascii() else 8


def read_secret(file: str | Path, what: str) -> bytes:
    """A file of this user's alone (`secrecy.py`); a link to one will do."""
    try:
        with opened(Path(file), through_link=True) as found:
            mend, instead = f"chmod 600 {file}, or make another", f"run this as that user, or give a {what} of your own"
            if trouble := objection(os.fstat(found.fileno()), f"this {what}", mend, instead):
                raise WireError(f"{file}: {trouble}")
            return found.read(SECRET_BYTES_MAX)
    except OSError as error:
        raise WireError(
            f"{file}: the {what} cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _own_name() -> str:
    """Of this host and process, so that every start is somebody else."""
    host = "".join(c if c.isalnum() or c in "._-" else "-" for c in os.uname().nodename.lower())
    return f"{host.lstrip('._-')[:48] or 'learner'}-{os.getpid()}"
