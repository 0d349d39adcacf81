"""skerry set: change a run's configuration while it goes on, or while nobody serves it.

Keys are given as table.key=value, like sync.quorum=3. What may change is a short list; anything else is refused with
the reason. What was changed, by whom and when, stands on the run's tape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skerry import cli
from skerry import config as configs
from skerry.cli import ordering
from skerry.core.messages import SETTINGS_MAX, SetKeys
from skerry.errors import Refusal


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(
        prog="skerry set", description=__doc__, epilog=f"What may change: {', '.join(configs.CHANGEABLE)}."
    )
    ordering.add_target(parser)
    parser.add_argument("keys", nargs="+", metavar="KEY=VALUE", help="like sync.quorum=3")
    options = ordering.parsed(parser, words)
    return ordering.order(options, SetKeys(_settings(options.keys)))


def _settings(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, is_given, value = word.partition("=")
        if not is_given or not value:
            raise Refusal(f"{word!r}: write a key and its value, like sync.quorum=3")
        if key.count(".") != 1:
            raise Refusal(f"{word!r}: a key has its table before it: {configs.meant(key)}")
        if key in found:
            raise Refusal(f"{key}: is given twice")
        found[key] = cli.scalar(value)
    if len(found) > SETTINGS_MAX:
        raise Refusal(f"{len(found)} keys: at most {SETTINGS_MAX} are set at once")
    return found
