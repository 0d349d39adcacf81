"""What the commands that give an order have in common: whom it goes to, by which credential, and how it is told."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skerry import cli
from skerry.cli.going_on import command_for
from skerry.core.messages import Order
from skerry.errors import Refusal
from skerry.shell.orders import Answered, give, record_of


def add_target(parser: cli.Parser) -> None:
    parser.add_argument("run", metavar="RUN_DIR|HOST:PORT", help="a run directory, or the address of its syncer")
    parser.add_argument("--key-file", metavar="FILE", help="an admin's, made by skerry keys issue --admin")
    parser.add_argument("--token-file", metavar="FILE", help="a copy of RUN_DIR/admin.token, of a syncer without keys")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def parsed(parser: cli.Parser, words: Sequence[str]) -> argparse.Namespace:
    options, overrides = cli.parse(parser, words)
    if overrides:
        key, value = overrides[0]
        raise Refusal(f"--{key}: a key is changed with skerry set RUN {key}={value}")
    return options


def order(options: argparse.Namespace, what: Order) -> int:
    """Give it, and tell what became of it."""
    answered = give(options.run, what, options.token_file, options.key_file, cli.flag)
    cli.tell(told(options.run, answered), options.json, show)
    return 0


def told(target: str, answered: Answered) -> dict[str, Any]:
    record = {"run": target, "served": answered.is_served, "text": answered.outcome.text, "go_on": None}
    if not answered.is_served:
        record["go_on"] = command_for(Path(target))
    return record_of(answered.outcome) | record


def show(record: dict[str, Any]) -> None:
    print(f"{record['run']}: {record['text']}")
    if record["go_on"]:
        print(
            f"nobody serves the run: it is written in its directory, and the next syncer goes by it: {record['go_on']}"
        )
