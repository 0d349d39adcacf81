"""skerry top: a run's learners in a terminal, kept up to date, those that need attention first.

Keys: s sorts by something else, r the other way round, arrows and page keys scroll, q quits.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from skerry import cli
from skerry.cli import live
from skerry.cli.status import looked, progress_of, serving_of
from skerry.cli.watching import EVERY_S, Look, Rates, Record, Watching
from skerry.errors import Refusal, one_line
from skerry.text import amount, counted, size

POLL_S = 0.1  # how soon a key is obeyed and a window's new size is seen
HEAD_LINES = 8  # above the learners, with the table's own head
KEY_BYTES_MAX = 64
KEYS = {
    "q": "quit", "Q": "quit", "\x04": "quit", "s": "sort", "r": "reverse",
    "k": "up", "\x1b[A": "up", "\x1bOA": "up", "j": "down", "\x1b[B": "down", "\x1bOB": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", " ": "page down",
    "g": "home", "\x1b[H": "home", "\x1b[1~": "home", "G": "end", "\x1b[F": "end", "\x1b[4~": "end",
}  # fmt: skip
# What needs somebody to look comes first; what is over last.
STATES = ("lost", "stalled", "expelled", "joining", "leaving", "training", "stopped", "away", "left", "finished")

Learner = dict[str, Any]


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry top", description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR|HOST:PORT", help="a run directory, or the address of a syncer")
    cli.add_secrets(parser, ", for HOST:PORT")
    parser.add_argument("--json", action="store_true", help="look twice, a second apart, and print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    if options.json:
        cli.print_json(_measured(lambda: looked(options)))
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Refusal(f"top is for a terminal: use skerry status {options.run} --watch elsewhere")
    with contextlib.suppress(KeyboardInterrupt), Watching(lambda: looked(options)) as watching:
        _show(watching, options.run)
    return 0


def _measured(look: Callable[[], Record]) -> Record:
    rates = Rates()
    rates.take(look())
    time.sleep(EVERY_S)
    record = look()
    return record | {"rates": rates.take(record), "attention": by_attention(record)}


# ---------------------------------------------------------------------------------------------- in which order


class Order(NamedTuple):
    """A way to sort learners: by what, and a key of which the smallest comes first."""

    name: str
    key: Callable[[Record, Learner], Any]


def _attention(record: Record, m: Learner) -> tuple[int, bool, float]:
    state = STATES.index(m["state"]) if m["state"] in STATES else 0
    is_behind = (m.get("round_steps") or 0.0) > record["sync_every"]
    return state, not is_behind, -float(m.get("unmerged_steps") or 0)


ORDERS = (
    Order("attention", _attention),
    Order("name", lambda record, m: 0),
    Order("tokens/s", lambda record, m: -float(m.get("tokens_per_s") or 0.0)),
    Order("unmerged", lambda record, m: -float(m.get("unmerged_steps") or 0)),
    Order("loss", lambda record, m: -float(m.get("loss") or 0.0)),
    Order("heard", lambda record, m: -float(m.get("heard_s") or 0.0)),
)


def by_attention(record: Record) -> list[str]:
    return ordered(record, ORDERS[0])


def ordered(record: Record, order: Order, is_reversed: bool = False) -> list[str]:
    learners = record["learners"]
    return sorted(sorted(learners), key=lambda name: order.key(record, learners[name]), reverse=is_reversed)


# ---------------------------------------------------------------------------------------------- the page


@dataclass
class View:
    """What is shown: the last look, in which order, and from which learner on."""

    target: str
    look: Look
    rates: dict[str, float] = field(default_factory=dict)
    order: int = 0
    is_reversed: bool = False
    first: int = 0

    def obey(self, key: str, height: int) -> bool:
        """False if it is to end."""
        match KEYS.get(key):
            case "quit":
                return False
            case "sort":
                self.order, self.first = (self.order + 1) % len(ORDERS), 0
            case "reverse":
                self.is_reversed = not self.is_reversed
            case "up":
                self.first -= 1
            case "down":
                self.first += 1
            case "page up":
                self.first -= rows_in(height)
            case "page down":
                self.first += rows_in(height)
            case "home":
                self.first = 0
            case "end":
                self.first = len(self.look.record["learners"])
        return True

    def page(self, width: int, height: int) -> RenderableType:
        """Exactly so many lines, none wider than the window."""
        record, rows = self.look.record, rows_in(height)
        names = ordered(record, ORDERS[self.order], self.is_reversed)
        self.first = max(0, min(self.first, len(names) - rows))
        shown = names[self.first : self.first + rows]
        head = [_cut(line, width) for line in self._head()]
        bar = Table.grid()
        bar.add_row(ProgressBar(total=1.0, completed=min(1.0, max(0.0, _number(record["progress"]))), width=width))
        empty = [Text("") for _ in range(rows - len(shown))]
        return Group(*head[:2], bar, *head[2:], live.table_of(record, width, shown), *empty, self._foot(names, shown))

    def _head(self) -> list[Text]:
        record, rates = self.look.record, self.rates
        is_served = record.get("serving") == "served" and not self.look.trouble
        does = live.headline(record, self.look.trouble) if is_served or self.look.trouble else ""
        does = does or serving_of(record, Path(self.target))
        return [
            Text(f"{record['run']}  {does}", style="bold" if is_served else "bold red"),
            Text(progress_of(record)),
            Text(_merging(record, rates)),
            Text(_tokens(record, rates)),
            Text(_moving(record, rates)),
            Text(_warning(record), style="yellow"),
        ]

    def _foot(self, names: list[str], shown: list[str]) -> Table:
        where = f"{self.first + 1}–{self.first + len(shown)} of {counted(len(names), 'learner')}" if names else "nobody"
        order = f"{ORDERS[self.order].name}{', reversed' if self.is_reversed else ''}"
        foot = Table.grid(expand=True)
        foot.add_column(no_wrap=True)
        foot.add_column(no_wrap=True, justify="right")
        foot.add_row(Text(f"s sort: {order}   r reverse   ↑↓ scroll   q quit", style="dim"), Text(where, style="dim"))
        return foot


def rows_in(height: int) -> int:
    """Learners that a window has room for."""
    return max(1, height - HEAD_LINES - 1)


def _cut(line: Text, width: int) -> Text:
    line = Text(one_line(line.plain), style=line.style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _number(value: float) -> float:
    """A record has a NaN for a number that there is not."""
    return 0.0 if math.isnan(value) else value


def _merging(r: Record, rates: dict[str, float]) -> str:
    a_second = f", {rates['merges']:.2g}/s" if "merges" in rates else ""
    reached = f", {r['sync_every_reached']:.1f} reached" if r.get("sync_every_reached") else ""
    quorum = f"   K {r['quorum']} of {r['ready']} ready" if "quorum" in r else ""
    contributors = f" by {r['contributors_mean']:.1f}" if r["merges"] else ""
    return f"merges {r['merges']:,}{a_second}{contributors}   H {r['sync_every']} asked{reached}{quorum}"


def _tokens(r: Record, rates: dict[str, float]) -> str:
    tokens = r["tokens"]
    a_second = f" ({amount(rates['tokens'])}/s)" if "tokens" in rates else ""
    why = ", ".join(f"{amount(n)} {reason}" for reason, n in tokens["discarded"].items())
    return (
        f"tokens {amount(tokens['merged'])} merged{a_second}   {amount(tokens['pending'])} pending   "
        f"discarded {why or 'none'}"
    )


def _moving(r: Record, rates: dict[str, float]) -> str:
    if "bytes_in" not in r:
        return ""
    moving = f"{size(rates['bytes_in'])}/s in, {size(rates['bytes_out'])}/s out, " if "bytes_in" in rates else ""
    return f"wire {moving}{size(r['bytes_in'])} and {size(r['bytes_out'])} since this syncer began"


def _warning(r: Record) -> str:
    """What of it needs attention most."""
    if disk := r.get("disk"):
        return f"disk about to be full: {size(disk['free_bytes'])} free, {size(disk['needed_bytes'])} taken soon"
    for learner, why in r.get("ahead", {}).items():
        return f"turned away: {learner}: {why}"
    for row in r.get("turned_away", []):
        return f"turned away: {row['who']}: {row['why']} ({counted(row['count'], 'time')})"
    return str(r.get("behind") or r.get("warning") or "")


# ---------------------------------------------------------------------------------------------- the terminal


def _show(watching: Watching, target: str) -> None:
    console, rates = Console(), Rates()
    look = watching.next(None)
    assert look is not None, "the first look is there"
    view = View(target, look, rates.take(look.record))
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as shown:
        drawn: tuple[int, int] | None = None  # for a window of this size; None: it has to be drawn again
        while True:
            if (look := watching.next(0.0)) is not None:
                view.look, view.rates, drawn = look, rates.take(look.record), None
            if drawn != console.size:
                drawn = console.size
                shown.update(view.page(*drawn), refresh=True)
            for key in keys():
                if not view.obey(key, console.height):
                    return
                drawn = None


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], list[str]]]:
    """Keys as they are pressed, after waiting a moment for one; the terminal is afterwards as it was."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda: _pressed(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pressed(fd: int) -> list[str]:
    if not select.select([fd], [], [], POLL_S)[0]:
        return []
    data = os.read(fd, KEY_BYTES_MAX)
    if not data:
        return ["q"]  # the terminal is gone
    return _told_apart(data.decode(errors="replace"))


def _told_apart(text: str) -> list[str]:
    """Several keys that came at once, each with all of its letters."""
    found = []
    while text:
        key = max((known for known in KEYS if text.startswith(known)), key=len, default=text[0])
        found.append(key)
        text = text[len(key) :]
    return found
