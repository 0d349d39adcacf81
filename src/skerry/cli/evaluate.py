"""skerry evaluate: what a run's model is worth, measured beside the run, which goes on meanwhile.

The newest model, a kept version, or each of them (--every-kept): the held-out loss of the built-in model, or what a
function of yours says. With --watch again and again while the run goes, at every share of its budget; what is found
then goes on the tape when the run is closed. Otherwise nothing is written.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skerry import cli
from skerry import config as configs
from skerry.algo.fragments import decode_layout
from skerry.cli import live
from skerry.core.facts import Evaluated
from skerry.core.state import RunState
from skerry.errors import FileDamaged, HookFailed, Refusal
from skerry.plan import layouts
from skerry.run import evaluations, hook
from skerry.run.last_words import whole_state
from skerry.shell.evaluate import Measure, figures_told, finish, follow, looks
from skerry.shell.signals import end_with
from skerry.text import Kind, count, share
from skerry.train.data import open_data
from skerry.train.shapes import shape_of

NICE = 19  # of a process that watches: learners on the same cores go first
EVERY = Kind(share, configs.SHARE_MIN, 1)
THREADS = Kind(count, 0, 1024)
BUILT_IN = ("data", "device", "threads")  # options that a function of one's own has no use for


def run(words: Sequence[str]) -> int:
    options, overrides = cli.parse(_parser(), words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    end_with(options.parent)
    root: Path = options.run
    state = whole_state(root)
    if options.every_kept and (options.watch or options.version is not None):
        raise Refusal("--every-kept: is every version that the run has kept: leave --watch and --version out")
    every = _every(options, state) if options.watch else 0.0
    try:
        measure = _measure(options, state)
        cli.check_interrupted()
        if options.every_kept:
            cli.tell(_over_kept(root, state, measure), options.json, _show_kept)
        elif not options.watch:
            cli.tell(_once(root, options.version, measure), options.json, _show)
        else:
            curve = _watched(root, every, measure, is_supervised=options.parent > 0)
            points = [evaluations.shown(one) for one in curve]
            cli.tell({"run_dir": str(root), "curve": points}, options.json, lambda _: None)
    except HookFailed as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        raise
    return 0


def _parser() -> cli.Parser:
    p = cli.Parser(prog="skerry evaluate", description=__doc__)
    p.add_argument("run", type=Path, metavar="RUN_DIR")
    p.add_argument(
        "--version",
        type=cli.whole,
        metavar="N",
        help="a kept version (skerry rollback RUN_DIR lists them); 0: the start",
    )
    p.add_argument(
        "--with", dest="hook", metavar="MODULE:FUNCTION",
        help="a function that takes {name: float32 array} and returns a number, or {name: number}",
    )  # fmt: skip
    p.add_argument("--every-kept", action="store_true", help="the start, each kept version and the newest, one by one")
    p.add_argument("--watch", action="store_true", help="while the run goes, until it is closed")
    p.add_argument(
        "--every", type=cli.typed(EVERY), metavar="SHARE", help="of the budget (default: run.evaluate_every)"
    )
    p.add_argument("--data", metavar="PATH", help="the data on this machine, if it lies elsewhere than the run says")
    p.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    p.add_argument("--threads", type=cli.counting(THREADS), metavar="N", help="on a CPU (default: one a core)")
    p.add_argument("--parent", type=int, default=0, help="end when this process is gone, which sees to the run's end")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def _every(options: argparse.Namespace, state: RunState) -> float:
    """The share of the budget between two evaluations; whatever makes watching senseless is refused."""
    if options.version is not None:
        raise Refusal("--version: a kept version does not change: leave --watch out")
    if state.phase == "closed" and not evaluations.waiting(options.run):
        raise Refusal(f"{options.run}: is closed, there is nothing to watch: leave --watch out")
    every: float = options.every or configs.decode(state.config).run.evaluate_every
    if not every:
        raise Refusal("--watch: the run has no run.evaluate_every: give --every, like --every 0.05")
    return every


def _measure(options: argparse.Namespace, state: RunState) -> Measure:
    """What is asked of each model."""
    if options.hook is None:
        return _held_out(options, state)
    for name in BUILT_IN:
        if getattr(options, name) is not None:
            raise Refusal(f"--{name}: is for the built-in model; {options.hook} has its own way")
    judge = hook.find(options.hook)
    return lambda model: hook.ask(judge, options.hook, model.arrays)


def _held_out(options: argparse.Namespace, state: RunState) -> Measure:
    config = configs.decode(state.config)
    if layouts.built_in(shape_of(config.model)) != decode_layout(state.created.layout):
        raise Refusal(f"{options.run}: its model is not the built-in one: give --with module:function")
    cli.need("torch", "torch", "the built-in model's loss")
    if options.data is not None:
        config = configs.resolve(config, None, [("data.path", options.data)])
    data = open_data(config)
    from skerry.train.held_out import HeldOut

    held_out = HeldOut(config, data, options.device, options.threads or 0)
    quiet = (options.json or options.watch) and not sys.stderr.isatty()

    def loss(model: evaluations.Model) -> dict[str, float]:
        with live.counting("held-out loss", quiet) as told:
            return {"loss": held_out.loss(model.arrays, told)}

    return loss


def _once(root: Path, number: int | None, measure: Measure) -> dict[str, Any]:
    model = evaluations.read(root, number)
    return {
        "run_dir": str(root),
        "version": number,
        "fragment_versions": list(model.versions),
        "progress": model.progress,
        "figures": evaluations.finite(measure(model)),
    }


def _over_kept(root: Path, state: RunState, measure: Measure) -> dict[str, Any]:
    """The curve over what the run has kept; a version that cannot be had is named, and the others are told of."""
    points, left_out = list[dict[str, Any]](), list[str]()
    for number in [0, *(version.number for version in state.kept), None]:
        try:
            points.append(_once(root, number, measure))
        except FileDamaged as error:
            left_out.append(f"{_which(number)}: {error}")
    return {"run_dir": str(root), "versions": points, "left_out": left_out}


def _show_kept(record: dict[str, Any]) -> None:
    for line in record["left_out"]:
        _say(f"left out: {line}")
    for point in record["versions"]:
        print(f"{point['progress']:7.1%}  {_which(point['version']):16s}  {figures_told(point['figures'])}")


def _which(number: int | None) -> str:
    return "newest model" if number is None else f"kept version {number}" if number else "the start"


def _watched(root: Path, every: float, measure: Measure, is_supervised: bool) -> list[Evaluated]:
    os.nice(NICE)
    follow(root, every, measure, looks(root), _say)
    return evaluations.waiting(root) if is_supervised else finish(root, measure, _say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(record: dict[str, Any]) -> None:
    which, found = _which(record["version"]), figures_told(record["figures"])
    print(f"{record['run_dir']}: {which}, at {record['progress']:.1%} of the budget: {found}")
