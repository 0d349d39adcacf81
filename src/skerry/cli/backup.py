"""skerry backup: copy a run to a folder of backups, also while it is served; each backup is whole and was looked at.

A second backup in the same folder copies only what is not there yet. Keys are left out unless --with-keys is given;
without them learners on other machines need new ones after a restore.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skerry import cli
from skerry.cli import live
from skerry.errors import Refusal
from skerry.run.backup import Made, back_up
from skerry.run.backups import lost_lines
from skerry.text import Kind, count, size

KEEP = Kind(count, 1, 10**6)


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry backup", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("folder", type=Path, metavar="DIR", help="for the backups of this run; best on another disk")
    parser.add_argument(
        "--keep", type=cli.counting(KEEP), default=3, metavar="N", help="leave the N newest, remove the others (3)"
    )
    parser.add_argument("--with-keys", action="store_true", help="with the run's authority and keys: guard the folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    quiet = options.json or not sys.stderr.isatty()
    with live.counting(f"backing up {options.run}", quiet, of="bytes") as show:
        made = back_up(options.run, options.folder, time.time(), options.keep, options.with_keys, show)
    cli.tell(_record(made, options.run, options.folder), options.json, _show)
    return 0


def _record(made: Made, root: Path, folder: Path) -> dict[str, Any]:
    backup = made.backup
    return {
        "run_dir": str(root),
        "folder": str(folder),
        "backup": backup.number,
        "phase": backup.phase,
        "progress": backup.progress,
        "merges": backup.merges,
        "files": len(backup.parts),
        "bytes": backup.bytes,
        "copied_files": made.copied_files,
        "copied_bytes": made.copied_bytes,
        "has_keys": backup.has_keys,
        "left_out": list(backup.left_out),
        "removed": list(made.removed),
        "damaged": list(made.damaged),
    }


def _show(record: dict[str, Any]) -> None:
    for line in record["damaged"]:
        print(f"{line}; while it lies there no file of the folder is removed", file=sys.stderr)
    for line in lost_lines(record["run_dir"], record["left_out"]):
        print(line, file=sys.stderr)
    whole = "whole but for what is named above" if record["left_out"] else "whole"
    copied = f"{size(record['copied_bytes'])} copied, {size(record['bytes'])} in all"
    print(
        f"{record['folder']}: backup {record['backup']} of {record['run_dir']} after {record['merges']} merges is "
        f"{whole}: {copied}, {'with' if record['has_keys'] else 'without'} keys"
    )
    if record["removed"]:
        print(f"removed: backup {', '.join(map(str, record['removed']))}")
    print(f"get it back with: skerry restore {record['folder']} NEW_RUN_DIR --at {record['backup']}")
