"""skerry prune: remove what a long run does not need to go on: old tape, contributions recorded there, kept versions.

The model, the run and its repair from checkpoints need none of it. Replay audits from where the tape begins then, and
recomputes merges from the first kept version behind that. Nobody may be serving the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skerry import cli, text
from skerry import config as configs
from skerry.cli import voice
from skerry.core.state import RunState
from skerry.errors import DiskFull, Refusal
from skerry.run.holding import when_free
from skerry.run.last_words import check_whole, last_words, open_to_read, open_to_write, state_in
from skerry.run.prune import Choice, carry_out, choose, freed, make_way
from skerry.run.rollback import kept_version
from skerry.run.status import check_unserved
from skerry.store.store import Store

DAYS_MAX = 36500


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry prune", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--keep-days", type=float, metavar="N", help="remove what is older")
    parser.add_argument(
        "--before", type=cli.whole, metavar="VERSION", help="remove what replay from this kept version on does not need"
    )
    parser.add_argument(
        "--kept", type=cli.whole, metavar="N", help="leave the N newest kept versions, remove the others"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    _check(options.keep_days, options.before, options.kept)
    root: Path = options.run
    said = last_words(root)  # first: a live syncer only adds to the tape
    with open_to_read(root) as store:  # what is wrong is said before anything is written
        state = state_in(store)
        check_whole(store, state, said)
        choice = _chosen(store, state, options)
        record = _record(root, state, choice, options.before)
    if not options.dry_run:
        when_free(root, lambda: check_unserved(root), voice.say)
        try:
            _prune(root, options)
        except DiskFull:
            make_way(root, state, choice)
            _prune(root, options)
        record["removed"] = True
    cli.tell(record, options.json, _show)
    return 0


def _prune(root: Path, options: Any) -> None:
    with when_free(root, lambda: open_to_write(root), voice.say) as store:
        state = state_in(store)
        carry_out(store, state, _chosen(store, state, options))


def _check(days: float | None, before: int | None, kept: int | None) -> None:
    if days is None and before is None and kept is None:
        raise Refusal("nothing is removed unless it is said what: --keep-days N, --before VERSION or --kept N")
    if days is not None and before is not None:
        raise Refusal("--keep-days and --before both say where the tape is to begin: give one")
    if days is not None and not 0 <= days <= DAYS_MAX:
        raise Refusal(f"--keep-days {days:g}: must be from 0 to {DAYS_MAX}")
    if kept is not None and kept < 0:
        raise Refusal(f"--kept {kept}: must be 0 or more")


def _chosen(store: Store, state: RunState, options: Any) -> Choice:
    before = None if options.before is None else kept_version(state, options.before)
    return choose(store, state, time.time(), options.keep_days, before, options.kept)


def _record(root: Path, state: RunState, choice: Choice, before: int | None) -> dict[str, Any]:
    frees = freed(root, state, choice)
    kept = [version.number for version in state.kept if version.number not in choice.kept]
    return {
        "run_dir": str(root),
        "removed": False,
        "frees": frees | {"total": sum(frees.values())},
        "before": before,
        "first_segment": choice.first,
        "tape_stays": choice.first == state.first_segment,
        "merges_untold": choice.merges,
        "merges": state.merges,
        "kept_removed": list(choice.kept),
        "kept": kept,
        "record": configs.decode(state.config).store.record,
    }


def _show(record: dict[str, Any]) -> None:
    frees = record["frees"]
    did = "removed" if record["removed"] else "would be removed"
    print(
        f"{record['run_dir']}: {text.size(frees['total'])} {did}: {text.size(frees['tape'])} of tape, "
        f"{text.size(frees['contributions'])} of recorded contributions, "
        f"{text.size(frees['checkpoints'])} of checkpoints (kept versions: {_numbers(record['kept_removed'])})"
    )
    if record["before"] is not None and record["tape_stays"]:
        first = f"segment {record['first_segment']}, with which it begins"
        print(f"the tape stays: {first}, has merges that replay from version {record['before']} on needs")
    print(f"kept: {_numbers(record['kept'])}, and 0, the start; {_replay(record)}")


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _replay(record: dict[str, Any]) -> str:
    """What replay can do afterwards."""
    if not record["merges_untold"]:
        return "replay can do all it could"
    if record["merges_untold"] == record["merges"]:
        return "replay has no merge left to audit or recompute"
    audits = f"replay audits from merge {record['merges_untold'] + 1} of {record['merges']} on"
    if record["record"] != "full":
        return audits
    return f"{audits}, and recomputes from the first kept version behind that"
