"""skerry rollback: take a run back to a version that it kept, after a divergence; without --to, list what is kept.

Nobody may be serving the run. Every fragment gets a new version with the kept values, all or none. The budget that was
spent stays spent: the run goes on from there with what is left of it. Learners that come back give up what they learned
from what was rolled back. A version is kept every `store.keep_every`; 0 is the start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skerry import cli
from skerry.algo.fragments import decode_layout
from skerry.cli import voice
from skerry.cli.going_on import command_for
from skerry.core.state import KeptVersion
from skerry.errors import Refusal
from skerry.node import telemetry
from skerry.run.holding import when_free
from skerry.run.last_words import STATUS, cut_off, last_words, open_to_read, open_to_write, state_in, whole_state
from skerry.run.rollback import kept_version, roll_back
from skerry.run.room import STATE_BYTES
from skerry.run.status import check_unserved
from skerry.shell.syncer import write_json
from skerry.store.store import FILES
from skerry.text import counted, lasting, size


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry rollback", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--to", type=cli.whole, metavar="VERSION", help="its number in the list; 0: the start")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    root: Path = options.run
    if options.to is None:
        cli.tell(_listed(root), options.json, _show)
    else:
        cli.tell(_rolled_back(root, options.to), options.json, _show_back)
    return 0


def _listed(root: Path) -> dict[str, Any]:
    words = last_words(root)  # first: a live syncer only adds to the tape
    with open_to_read(root) as store:
        state = state_in(store)
        warning = cut_off(store, state, words)
    parameters = decode_layout(state.created.layout).param_count
    return {
        "run_dir": str(root),
        "phase": state.phase,
        "merges": state.merges,
        "progress": state.progress,
        "bytes_each": STATE_BYTES * parameters,
        "kept": [_about(root, version) for version in [state.start, *state.kept]],
    } | ({"warning": warning} if warning else {})


def _about(root: Path, version: KeptVersion) -> dict[str, Any]:
    files = [root / FILES / checkpoint.file for checkpoint in version.checkpoints]
    return {
        "version": version.number,
        "progress": version.progress,
        "elapsed_s": version.elapsed_s,
        "fragment_versions": list(version.versions),
        "files_missing": sum(not file.is_file() for file in files),
    }


def _rolled_back(root: Path, number: int) -> dict[str, Any]:
    kept_version(whole_state(root), number)  # what is wrong is said before anything is written
    when_free(root, lambda: check_unserved(root), voice.say)
    with when_free(root, lambda: open_to_write(root), voice.say) as store:
        state = state_in(store)
        facts = roll_back(store, state, number)
        for fact in facts:
            state.apply(fact)
        with contextlib.suppress(OSError):  # a last word, by which a tape that loses this commit is known
            write_json(root / STATUS, telemetry.recorded(state, time.time()))
    return {
        "run_dir": str(root),
        "version": number,
        "epoch": state.epoch,
        "fragment_versions": [at.version for at in state.fragments],
        "progress": state.progress,
        "go_on": command_for(root),
    }


def _show(record: dict[str, Any]) -> None:
    if warning := record.get("warning"):
        voice.say(warning, "warning")
    print(f"{record['run_dir']}: {record['progress']:.1%} of the budget spent, {record['merges']} merges; kept are")
    for kept in record["kept"]:
        versions = kept["fragment_versions"]
        when = f"at {kept['progress']:6.1%}, after {lasting(kept['elapsed_s'])}" if kept["version"] else "the start"
        lacks = f"; {counted(kept['files_missing'], 'file')} missing" if kept["files_missing"] else ""
        print(f"  {kept['version']:4d}  {when}; fragments at version {_spread(versions)}{lacks}")
    is_over = record["phase"] in ("closing", "closed")
    way = "take the model of one with skerry export" if is_over else "go back to one with skerry rollback"
    print(f"{size(record['bytes_each'])} each; {way} {record['run_dir']} {'--version' if is_over else '--to'} VERSION")


def _spread(versions: Sequence[int]) -> str:
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low} to {high}"


def _show_back(record: dict[str, Any]) -> None:
    versions = _spread(record["fragment_versions"])
    print(
        f"{record['run_dir']}: is back at version {record['version']}, as version {versions} of its fragments, with "
        f"{record['progress']:.1%} of the budget spent\ngo on with: {record['go_on']}"
    )
