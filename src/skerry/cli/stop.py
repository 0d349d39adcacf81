"""skerry stop: end the process that serves a run, in order, as Ctrl-C does: the run is paused, and goes on later.

With --finish the run is closed instead, for good, whatever is left of its budget: as at every end, learners hand in
what is not merged yet, are told to end, and the model is final.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skerry import cli, text
from skerry.cli import ordering
from skerry.cli.going_on import command_for
from skerry.core.messages import FinishRun, PauseRun
from skerry.errors import Refusal
from skerry.run.status import status_of
from skerry.shell.stop import Ended, stop

WITHIN = text.Kind(text.seconds, 1.0, 86400.0)


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry stop", description=__doc__)
    ordering.add_target(parser)
    parser.add_argument("--finish", action="store_true", help="close the run now, instead of pausing it")
    parser.add_argument(
        "--within", type=cli.typed(WITHIN), default=60.0, metavar="TIME", help="wait this long for it to end (1min)"
    )
    options = ordering.parsed(parser, words)
    if options.finish:
        return ordering.order(options, FinishRun())
    root = Path(options.run)
    if not root.is_dir():
        return ordering.order(options, PauseRun())
    if options.key_file or options.token_file:
        raise Refusal(f"{root}: is a run directory, which needs no key or token: leave it out, or give host:port")
    status_of(root)  # a directory without a run is refused before anything is looked for
    ended = stop(root, options.within, _say)
    after = status_of(root)
    record = {
        "run_dir": str(root),
        "stopped": ended.pid if ended else None,
        "serving": after["serving"],
        **({"why": after["why"]} if "why" in after else {}),
        "phase": after["phase"],
        "merges": after["merges"],
        "go_on": _go_on(root, after, ended),
    }
    cli.tell(record, options.json, _show)
    return 0


def _say(line: str) -> None:
    print(f"skerry: {line}", file=sys.stderr, flush=True)


def _show(record: dict[str, Any]) -> None:
    was = f"process {record['stopped']} has ended" if record["stopped"] else "nothing runs here"
    merges = text.counted(record["merges"], "merge")
    why = f"; {record['why']}" if "why" in record else ""
    print(f"{record['run_dir']}: {was}; the run {_state(record['serving'])} after {merges}{why}\n{record['go_on']}")


def _state(serving: str) -> str:
    """How the run stands now."""
    words = {
        "closed": "is closed",
        "paused": "is paused",
        "new": "has not begun",
        "died": "was left by a syncer that died,",
    }
    return words.get(serving, "is served again already")


def _go_on(root: Path, after: dict[str, Any], ended: Ended | None) -> str:
    """What an operator does next, in one line."""
    if after["serving"] == "closed":
        return f"its model: skerry export {root}"
    if after["serving"] in ("served", "starting", "away"):
        return f"process {after['pid'] or after['supervisor']} was started meanwhile: stop whatever starts it again"
    room = f"make room first, as with skerry prune {root}; then " if "why" in after else ""
    if ended is None or ended.is_supervisor or "syncer" not in ended.words:
        return f"{room}go on with: {command_for(root)}"
    words = ["skerry", *ended.words[ended.words.index("syncer") :]]
    there = f"  (in {ended.folder})" if ended.folder != str(Path.cwd()) else ""
    return f"{room}go on with: {shlex.join(words)}{there}"
