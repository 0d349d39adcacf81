"""skerry fork: begin another run with a run's model: its newest while nobody serves it, or a version that it kept.

The new run has the same model and the run's configuration, with what is given here in its place; it has a budget and
books of its own, and its tape says where it came from. The run that it comes from is not changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from skerry import cli
from skerry import config as configs
from skerry.algo.fragments import decode_layout
from skerry.cli import live, voice
from skerry.cli.going_on import command_for
from skerry.core.facts import RunCreated
from skerry.engines.supervisor import LOCAL, Local, note_speeds
from skerry.errors import ConfigError
from skerry.run.backups import failure
from skerry.run.export import lineage_of
from skerry.run.fork import BUDGETS, Overrides, fork, taken_over
from skerry.run.holding import when_free
from skerry.run.last_words import whole_state
from skerry.store.files import UNREADABLE, contents
from skerry.train.shapes import with_pack


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(
        prog="skerry fork",
        description=__doc__,
        epilog="Any key of the configuration but the model's is an option: --run.tokens 2e9 --learner.lr 1e-4",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("directory", type=Path, metavar="DIR", help="of the new run; it is not there yet")
    parser.add_argument(
        "--version",
        type=cli.whole,
        metavar="N",
        help="a kept version (skerry rollback RUN_DIR lists them); 0: the start",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    config = _config(options.run, overrides)
    quiet = options.json or not sys.stderr.isatty()
    with live.counting(f"creating {options.directory}", quiet, of="fragments") as show:
        made = partial(fork, options.run, options.directory, config, options.version, show)
        created = when_free(options.run, made, voice.say)
    _go_on_locally(options.run, options.directory, config.run.learners)
    cli.tell(_record(created, config, options.directory), options.json, _show)
    return 0


def _config(parent: Path, overrides: Overrides) -> configs.Config:
    recorded = configs.decode(whole_state(parent).config)
    config = taken_over(recorded, overrides)
    if any(key == "data.path" for key, _ in overrides):
        config = with_pack(config)
        if config.model != recorded.model:
            raise ConfigError(
                f"data.path = {config.data.path}: its vocabulary is not that of the run's model: name other data"
            )
    return config


def _go_on_locally(parent: Path, root: Path, learners: int) -> None:
    """A fork of a local run is one, which skerry train goes on with; learners are as quick as there, if as many."""
    try:
        speeds = msgspec.json.decode(contents(parent / LOCAL), type=Local).speeds
    except UNREADABLE:  # of a run that skerry syncer began
        return
    try:
        note_speeds(root, speeds if len(speeds) == learners else [])
    except OSError as error:
        raise failure(root / LOCAL, error) from None


def _record(created: RunCreated, config: configs.Config, root: Path) -> dict[str, Any]:
    return {
        "run_dir": str(root),
        "run": created.run,
        "parameters": decode_layout(created.layout).param_count,
        "fragments": len(created.files),
        "budget": {key.removeprefix("run."): n for key in BUDGETS if (n := getattr(config.run, key[4:]))},
        "lineage": lineage_of(created),
        "go_on": command_for(root),
    }


def _show(record: dict[str, Any]) -> None:
    unit, n = next(iter(record["budget"].items()))
    parent = live.forked_from(record["lineage"])
    print(
        f"{record['run_dir']}: a run of {record['parameters']:,} parameters, from {parent}; "
        f"its budget is {n:,.12g} {unit}\nbegin with: {record['go_on']}"
    )
