"""skerry status: where a run stands, from its directory on this machine or asked of its syncer anywhere.

With --watch again and again, in place on a terminal; a syncer that is away is waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from skerry import cli
from skerry.cli import live
from skerry.cli.going_on import command_for
from skerry.cli.watching import Look, Watching
from skerry.errors import NoAnswer, Refusal, one_line, printable
from skerry.node.record import legible
from skerry.run.status import status_of
from skerry.shell.address import parse_address
from skerry.shell.evaluate import figures_told
from skerry.shell.identity import check_private, secrets_of, tls_of
from skerry.text import counted, lasting, size
from skerry.wire.inquiry import ask_status

UNSPENT_SHARE = 1e-3  # of the budget, from which on it is told: sums of all fragments are rounded
SAID = {  # by the rows below, or of no use to a person who looks once
    "run", "at", "epoch", "phase", "progress", "elapsed_s", "budget", "over_budget", "merges", "contributors_mean",
    "rounds_open", "waiting", "sync_every", "sync_every_configured", "sync_every_reached", "behind",
    "quorum", "ready", "versions", "tokens", "refused", "ahead", "turned_away", "starting_s", "disk",
    "bytes_in", "bytes_out", "learners", "serving", "age_s", "pid", "is_here", "supervisor", "address", "threads",
    "turns", "evaluated", "curve", "lineage", "orders", "dropped", "finishing", "admin", "unwritten_bytes",
    "free_bytes", "why",
}  # fmt: skip


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry status", description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR|HOST:PORT", help="a run directory, or the address of a syncer")
    cli.add_secrets(parser, ", for HOST:PORT")
    parser.add_argument("--watch", action="store_true", help="again and again, until the run is closed or Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch one a line")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    if options.watch:
        _watch(options)
    else:
        cli.tell(looked(options), options.json, lambda record: _show(record, options.run))
    return 0


def _watch(options: argparse.Namespace) -> None:
    """In place on a terminal, else an object or a line for each look; a syncer that is away is waited for."""
    with contextlib.suppress(KeyboardInterrupt), Watching(lambda: looked(options)) as watching:
        console = live.console_of_stdout()
        if options.json:
            for look in watching:
                cli.print_json({"error": look.trouble} if look.trouble else look.record)
                sys.stdout.flush()
        elif not console.is_terminal:
            for look in watching:
                print(one_line(live.headline(look.record, look.trouble)), flush=True)
        else:
            with live.in_place(console) as show:
                for look in watching:
                    show(_page(look, options.run, console.width))


def looked(options: argparse.Namespace) -> dict[str, Any]:
    """The record of a run, whichever way it is named."""
    target: str = options.run
    if Path(target).is_dir():
        return status_of(Path(target))
    if Path(target).exists() or ":" not in target:
        raise Refusal(f"{target}: is no run directory: check the path, or name a syncer as host:port")
    token, key_file = secrets_of(options.token_file, options.key_file, cli.flag)
    check_private([parse_address(target)], key_file, options.insecure, cli.flag)
    status = ask_status(*parse_address(target), token, tls=tls_of(key_file))
    try:
        record = legible(status.record)
    except ValueError as error:
        raise NoAnswer(
            one_line(f"{target}: its status cannot be read ({error}): install the same version on both")
        ) from None
    return record | {"serving": "served", "age_s": status.age_s}


# ---------------------------------------------------------------------------------------------- for a person


def _show(record: dict[str, Any], target: str) -> None:
    console = live.console_of_stdout()
    console.print(Group(*_shown(record, target, console.width)))


def _shown(record: dict[str, Any], target: str, width: int) -> list[RenderableType]:
    rows = [(name, printable(what) if name == "serving" else one_line(what)) for name, what in _rows(record, target)]
    shown: list[RenderableType] = [live.listed(rows)]
    if record["learners"]:
        shown += ["", live.table_of(record, width)]
    return shown


def _page(look: Look, target: str, width: int) -> Group:
    trouble = [Text(one_line(look.trouble), style="red")] if look.trouble else []
    return Group(*_shown(look.record, target, width), *trouble)


def _rows(r: dict[str, Any], target: str) -> Iterator[tuple[str, str]]:
    """A record in lines; keys that this version does not know are shown as they are."""
    yield "run", f"{r['run']} in {target}" if Path(target).is_dir() else f"{r['run']} at {target}"
    if isinstance(lineage := r.get("lineage"), dict):
        yield "forked from", live.forked_from(lineage)
    yield "serving", serving_of(r, Path(target))
    yield "progress", progress_of(r)
    if over := live.over_budget(r):
        yield "over budget", over
    if found := r.get("evaluated"):
        yield "evaluated", _evaluated(found)
    rounds = f", {counted(r['rounds_open'], 'round')} open" if "rounds_open" in r else ""
    mean = f" with {r['contributors_mean']:.2f} contributors on average" if r["merges"] else ""
    yield "merges", f"{r['merges']:,} of {counted(len(r['versions']), 'fragment')}{mean}{rounds}"
    reached = f", {r['sync_every_reached']:.1f} reached" if r.get("sync_every_reached") else ""
    configured = r.get("sync_every_configured", r["sync_every"])
    asked = f" of {configured} configured" if configured != r["sync_every"] else ""
    yield "H", f"{r['sync_every']} steps asked{asked}{reached}"
    if r.get("behind"):
        yield "behind", r["behind"]
    if "quorum" in r:
        yield "quorum", f"K = {r['quorum']}, {counted(r['ready'], 'learner')} ready"
        yield "waiting", r["waiting"]
    if r.get("orders"):
        closing = "it was closed by an order" if r.get("phase") == "closed" else "it closes, by an order"
        closes = f"; {closing}" if r.get("finishing") else ""
        out = f"; kept out: {', '.join(r['dropped'])}" if r.get("dropped") else ""
        yield "orders", f"{r['orders']:,} so far{closes}{out}"
    yield "tokens", tokens_of(r)
    if r.get("refused"):
        yield "refused", ", ".join(f"{n} {why}" for why, n in r["refused"].items())
    for learner, why in r.get("ahead", {}).items():
        yield "turned away", f"{learner}: {why}"
    for row in [row for row in r.get("turned_away", []) if row["who"] not in r.get("ahead", {})]:
        times = f"{counted(row['count'], 'time')}, last {lasting(row['ago_s'])} ago"
        yield "turned away", f"{row['who']}: {row['why']} ({times})"
    if disk := r.get("disk"):
        yield "disk", f"about to be full: {size(disk['free_bytes'])} free, {size(disk['needed_bytes'])} taken soon"
    if "bytes_in" in r:
        yield "on the wire", f"{size(r['bytes_in'])} in, {size(r['bytes_out'])} out since this syncer began"
    for key, value in r.items():
        if key not in SAID and value not in (None, "", [], {}):
            yield key.replace("_", " "), f"{value:g}" if isinstance(value, float) else str(value)


def serving_of(r: dict[str, Any], root: Path) -> str:
    """Whole, however long the command is with which it goes on."""
    since = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(r['at']))} ({lasting(r['age_s'])} ago)"
    match r["serving"]:
        case "served":
            where = "" if r.get("is_here", True) else ", on another machine or in another container,"
            old = f" but silent for {lasting(r['age_s'])}" if r["age_s"] > live.SILENT_S else ""
            return f"on {one_line(r['address'])} by process {r['pid']}{where}{old}"
        case "starting":
            return f"not yet: process {r['pid']} has been starting or repairing it for {lasting(r['starting_s'])}"
        case "away":
            return f"not now: its supervisor, process {r['supervisor']}, is starting the syncer again"
        case "closed":
            return f"not running; closed at {since}; its model: skerry export {root}"
        case "new":
            return f"not running; created at {since}; begin with: {command_for(root)}"
        case "paused":
            return f"not running; paused at {since}; go on with: {command_for(root)}"
        case "died" if why := r.get("why"):
            room = f"{why}: make room first, as with skerry prune {root}"
            return f"not running, last commit at {since}; {room}; then go on with: {command_for(root)}"
        case _:
            return f"not running; its syncer died, last commit at {since}; go on with: {command_for(root)}"


def progress_of(r: dict[str, Any]) -> str:
    unit, n = next(iter(r.get("budget", {}).items()), ("", 0))
    of = f" of {n:,.12g} {unit}" if unit else ""
    spent, elapsed_s = r["progress"], r["elapsed_s"]
    is_under_way = r["serving"] == "served" and 0 < spent < 1 and (unit == "minutes" or _is_training(r))
    left = f", about {lasting(elapsed_s * (1 - spent) / spent)} left" if is_under_way and elapsed_s else ""
    return f"{r['phase']}: {100 * spent:.1f} %{of} after {lasting(elapsed_s)} of training{left}"


def _is_training(r: dict[str, Any]) -> bool:
    """Somebody does, and as many are there as a merge needs; else only minutes are spent."""
    states = [each["state"] for each in r["learners"].values()]
    present = sum(state in ("training", "stalled", "joining") for state in states)
    return "training" in states and present >= r.get("quorum", 1)


def _evaluated(found: dict[str, Any]) -> str:
    ago = lasting(max(0.0, time.time() - found["at"]))
    share = f"{100 * found['progress']:.1f} % of the budget"
    return f"{figures_told(found['figures'])} at {share}, {found['tokens']:,.0f} tokens merged, {ago} ago"


def _unspent(r: dict[str, Any]) -> str:
    """Why progress and what was merged part: work done alone for long is in the model, and the budget is not for it."""
    unit, n = next(iter(r.get("budget", {}).items()), ("", 0))
    unspent = r["tokens"]["merged"] + r["tokens"]["pending"] - r["progress"] * n
    if unit != "tokens" or r["progress"] >= 1 or unspent < UNSPENT_SHARE * n:
        return ""
    return f"; {unspent:,.0f} of them are not of the budget: done alone for more than learner.alone_steps_max steps"


def tokens_of(r: dict[str, Any]) -> str:
    tokens = r["tokens"]
    discarded = ", ".join(f"{n:,.0f} {why}" for why, n in tokens["discarded"].items()) or "none"
    return (
        f"{tokens['merged']:,.0f} merged of {tokens['produced']:,.0f} produced, {tokens['pending']:,.0f} pending; "
        f"discarded: {discarded}{_unspent(r)}"
    )
