"""skerry keys: who may take part in a run from another machine.

init    make the run's own authority; the first issue does so by itself
issue   a key for one learner, in a file to copy to its machine; a key that the name has already is revoked.
        with --admin a key that gives orders (skerry set, extend, drop, stop) from another machine, and joins nothing
revoke  turn a learner out: at once where the run is served, and for good
list    every key that was issued, whether it is good, and until when
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from skerry import cli
from skerry.errors import DiskFull, Refusal
from skerry.run.certificates import Role
from skerry.run.keys import AUTHORITY, DAYS_MAX, LEARNER_DAYS, Issued, Keys
from skerry.run.last_words import STATUS, last_words
from skerry.run.status import holders_of
from skerry.shell.address import PORT
from skerry.shell.identity import ADMIN_TOKEN
from skerry.store.lock import NO_ROOM
from skerry.text import Kind, days

LIFE = Kind(days, 1, DAYS_MAX)
ACTIONS = {
    "init": "Make a run's own authority.",
    "issue": "Make a key for one learner, in a file to copy to its machine.",
    "revoke": "Turn a learner out, for good.",
    "list": "Every key that was issued.",
}


def run(words: Sequence[str]) -> int:
    if not words or words[0] not in ACTIONS:
        about = argparse.RawDescriptionHelpFormatter
        parser = cli.Parser(prog="skerry keys", description=__doc__, formatter_class=about)
        parser.add_argument("what", choices=list(ACTIONS))
        parser.parse_args(list(words))
    action, options = words[0], _options(words[0], words[1:])
    keys = Keys(options.run)
    match action:
        case "init":
            cli.tell(_init(keys), options.json, _show_init)
        case "issue":
            cli.tell(_issue(keys, options), options.json, _show_issued)
        case "revoke":
            cli.tell(_record(keys.revoke(options.name)), options.json, _show_revoked)
        case "list":
            record = {"run_dir": str(options.run), "keys": [_record(row) for row in keys.rows()]}
            cli.tell(record, options.json, _show_list)
    return 0


def _options(action: str, words: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser(prog=f"skerry keys {action}", description=ACTIONS[action])
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="of a run that is there, or is to be")
    if action in ("issue", "revoke"):
        parser.add_argument("name", metavar="NAME", help="the learner's")
    if action == "issue":
        parser.add_argument("--admin", action="store_true", help="one that gives orders, and is no learner's")
        parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: NAME.key)")
        parser.add_argument(
            "--days", type=cli.counting(LIFE), default=LEARNER_DAYS, metavar="N",
            help=f"how long it is good (default {LEARNER_DAYS})",
        )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    return options


def _init(keys: Keys) -> dict[str, Any]:
    return {"run_dir": str(keys.run), "authority": str(keys.folder / AUTHORITY), "made": keys.init()}


def _issue(keys: Keys, options: argparse.Namespace) -> dict[str, Any]:
    path: Path = options.out or Path(f"{options.name}.key")
    keys.check_name(options.name)
    with _new_file(path) as file:
        role: Role = "admin" if options.admin else "learner"
        made = keys.issue(options.name, options.days, partial(_write, file, path), role)
    address = f"{os.uname().nodename}:{_port(keys.run)}"
    return {
        **_record(made.row),
        "file": str(path),
        "replaced": made.replaced.serial if made.replaced else None,
        "run_dir": str(keys.run),
        "has_run": (keys.run / "tape").is_dir(),
        "served_without_keys": _is_served_without_keys(keys.run),
        "next": f"skerry status {address} --key-file {shlex.quote(path.name)}"
        if options.admin
        else f"SKERRY_SYNCER={address} SKERRY_KEY_FILE={shlex.quote(path.name)} python train.py",
    }


def _write(fd: int, path: Path, pem: bytes) -> None:
    """All of it, on the disk."""
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(pem)
            file.flush()
            os.fsync(fd)
    except OSError as error:
        kind = DiskFull if error.errno in NO_ROOM else Refusal
        raise kind(f"{path}: cannot be written ({error.strerror}): name another file with --out") from None


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """One that was not there, for its owner alone; there is none if what follows fails."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise Refusal(f"{path}: is in the way: move it, or name another file with --out") from None
    except OSError as error:
        kind = DiskFull if error.errno in NO_ROOM else Refusal
        raise kind(f"{path}: cannot be written ({error.strerror}): name another file with --out") from None
    try:
        yield fd
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _port(run: Path) -> int:
    """Where the run was served last, or else is by default."""
    said = dict(last_words(run)).get(STATUS, {})
    port = str(said.get("address", "")).rpartition(":")[2]
    return int(port) if port.isdigit() else PORT


def _is_served_without_keys(run: Path) -> bool:
    """By the word of the process that serves it at this moment."""
    syncer, _ = holders_of(run)
    said = dict(last_words(run)).get(STATUS, {})
    return syncer is not None and said.get("pid") == syncer.pid and said.get("admin") == ADMIN_TOKEN


def _record(row: Issued) -> dict[str, Any]:
    state = row.state(dt.datetime.now(dt.UTC))
    times = {"issued": row.issued, "expires": row.expires, "revoked": row.revoked}
    return {"name": row.name, "role": row.role, "state": state, "serial": row.serial, **times}


# ------------------------------------------------------------------------------------------------- for people


def _show_init(record: dict[str, Any]) -> None:
    if record["made"]:
        print(f"made {record['authority']}: keep a copy of it where nobody else can read it")
    else:
        print(f"{record['authority']} is there already: nothing was changed")
    print(f"a key for a learner: skerry keys issue {shlex.quote(record['run_dir'])} NAME")


def _show_issued(record: dict[str, Any]) -> None:
    name, file = record["name"], record["file"]
    if record["replaced"]:
        print(f"the key that {name} had is revoked", file=sys.stderr)
    if not record["has_run"]:
        print(f"{record['run_dir']} has no run yet: begin it there with skerry syncer --run", file=sys.stderr)
    if record["served_without_keys"]:
        print(
            f"{record['run_dir']} is being served without keys, and its syncer will not take this one: end it, and "
            "start it with --keys, or on an address beyond this machine without --insecure",
            file=sys.stderr,
        )
    what = f"an admin's key, {name}" if record["role"] == "admin" else f"the key of {name}"
    print(f"{file} is {what}, good until {_day(record['expires'])}. Copy it to that machine, then there:")
    print(f"  {record['next']}")


def _show_revoked(record: dict[str, Any]) -> None:
    name = record["name"]
    follows = "it gives no order any more" if record["role"] == "admin" else f"{name} is out within a second"
    print(f"the key of {name} is revoked: where the run is served with keys, {follows}")


def _show_list(record: dict[str, Any]) -> None:
    if not record["keys"]:
        print("no key was issued yet")
    width = max((len(row["name"]) for row in record["keys"]), default=0)
    for row in record["keys"]:
        is_good = f"{row['state']}, until {_day(row['expires'])}"
        standing = f"revoked on {_day(row['revoked'])}" if row["revoked"] else is_good
        admin = "an admin's, " if row["role"] == "admin" else ""
        print(f"{row['name']:{width}s}  {admin}issued on {_day(row['issued'])}, {standing}")


def _day(time: dt.datetime) -> str:
    return f"{time:%Y-%m-%d}"
