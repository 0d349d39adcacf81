"""skerry restore: make the run of a backup in a new directory; without a directory, list the backups.

Nothing is overwritten. What comes out was looked at: every digest, the tape's chain of hashes, and the audit. Serve one
copy of a run only: two would each give out versions that the other does not know.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skerry import cli
from skerry.cli import live
from skerry.cli.going_on import command_for
from skerry.errors import Refusal
from skerry.run import backups
from skerry.run.backups import Backup, lost_lines
from skerry.run.restore import restore
from skerry.text import lasting, size


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry restore", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="that skerry backup wrote to")
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN_DIR", help="a directory that is not there yet")
    parser.add_argument("--at", type=cli.whole, metavar="WHICH", help="the backup's number (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    if options.run is None:
        if options.at is not None:
            raise Refusal("--at: a directory is missing for the run: skerry restore DIR RUN_DIR --at WHICH")
        cli.tell(_listed(options.folder), options.json, _show_list)
        return 0
    quiet = options.json or not sys.stderr.isatty()
    with live.counting(f"restoring {options.run}", quiet, of="bytes") as show:
        backup = restore(options.folder, options.run, options.at, show)
    cli.tell(_record(backup, options.run), options.json, _show)
    return 0


def _listed(folder: Path) -> dict[str, Any]:
    mark = backups.mark_of(folder)
    found, damaged = backups.listed(folder)
    return {"folder": str(folder), "run": mark.run, "backups": [_about(each) for each in found], "damaged": damaged}


def _about(backup: Backup) -> dict[str, Any]:
    return {
        "backup": backup.number,
        "at": backup.made_at,
        "phase": backup.phase,
        "progress": backup.progress,
        "merges": backup.merges,
        "bytes": backup.bytes,
        "has_keys": backup.has_keys,
    }


def _record(backup: Backup, root: Path) -> dict[str, Any]:
    about = {"run_dir": str(root), "epoch": backup.epoch, "go_on": command_for(root)}
    return _about(backup) | about | {"left_out": list(backup.left_out)}


def _show_list(record: dict[str, Any]) -> None:
    for line in record["damaged"]:
        print(line, file=sys.stderr)
    print(f"{record['folder']}: {len(record['backups'])} of run {record['run']}")
    for each in record["backups"]:
        keys = ", with keys" if each["has_keys"] else ""
        print(
            f"  {each['backup']:4d}  {_when(each['at'])}; {each['phase']} at {each['progress']:6.1%}, "
            f"{each['merges']} merges; {size(each['bytes'])}{keys}"
        )


def _when(at: float) -> str:
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return f"{date} ({lasting(max(0.0, time.time() - at))} ago)"


def _show(record: dict[str, Any]) -> None:
    root = shlex.quote(record["run_dir"])
    for line in lost_lines(record["run_dir"], record["left_out"]):
        print(line, file=sys.stderr)
    whole = "it is whole but for what is named above" if record["left_out"] else "it is whole"
    print(f"{record['run_dir']}: is backup {record['backup']}, after {record['merges']} merges; {whole}")
    if record["phase"] == "closed":
        print(f"the run is closed; its model: skerry export {root}")
        return
    print("Serve one copy of a run only: if the other one is still there, do not serve it any more.")
    print(
        "A learner that has seen a later version is told that it is ahead of this tape. It trains on and dials again, "
        "and is not merged: restart it, and it begins from here and gives up what it holds."
    )
    if not record["has_keys"]:
        print(f"Keys are not in this backup: where learners need some, make new ones (skerry keys issue {root} NAME).")
    print(f"go on with: {record['go_on']}")
