"""skerry train: a local run, one syncer and several learners under one supervisor."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from skerry import cli
from skerry import config as configs
from skerry.cli import live, page, voice
from skerry.cli.export import export
from skerry.core.state import state_of
from skerry.engines import folder
from skerry.engines.spec import built_in
from skerry.engines.supervisor import LOCAL, Local, LocalRun, note_speeds
from skerry.errors import Refusal
from skerry.plan import layouts
from skerry.run import evaluations, provenance, repair, summary
from skerry.run.history import history_in
from skerry.run.holding import when_free
from skerry.run.last_words import cut_off, open_to_read, state_in
from skerry.run.tally import tally
from skerry.shell.syncer import write_json
from skerry.store.files import UNREADABLE, contents
from skerry.store.store import Store, check_unused
from skerry.train.data import open_data
from skerry.train.held_out import HeldOut
from skerry.train.shapes import SHAPES, resolved, shape_of
from skerry.train.start import check_room, create

MINUTES = 2.0  # when no budget is given
VICTIM = "learner-1"
GATHER_S = 10.0  # learners are started together: they begin together, but do not wait longer for one that fails to


def run(words: Sequence[str]) -> int:
    options, overrides = cli.parse(parser("skerry train"), words)
    return train(options, overrides)


def parser(prog: str, description: str | None = __doc__) -> cli.Parser:
    p = cli.Parser(
        prog=prog, description=description, epilog="Any key of the configuration is an option: --sync.quorum 2"
    )
    p.add_argument("--learners", type=cli.whole, metavar="M", help="how many (default: the preset's, 4)")
    p.add_argument("--speeds", metavar="1,1,0.5", help="relative speed of each learner")
    p.add_argument("--step-s", type=float, metavar="S", help="pad a step to S seconds / speed; 0 runs free")
    p.add_argument(
        "--data", metavar="PATH", help="a text file, a folder or a pack (default: Python's standard library)"
    )
    p.add_argument("--model", metavar="PRESET", help=", ".join(SHAPES))
    p.add_argument("--steps", type=cli.whole, help="budget: inner steps per learner, on average")
    p.add_argument("--tokens", type=cli.whole, help="budget: tokens in all")
    p.add_argument("--minutes", type=float, help=f"budget: time (default {MINUTES:.0f} minutes)")
    p.add_argument("--kill-learner", type=float, metavar="F", help="SIGKILL a learner at this fraction of the run")
    p.add_argument("--kill-syncer", type=float, metavar="F", help="SIGKILL the syncer at this fraction of the run")
    p.add_argument("--record", choices=["decisions", "full"], help="full: keep every contribution, for skerry replay")
    p.add_argument("--seed", type=cli.whole)
    p.add_argument("--out", type=Path, metavar="DIR", help="run directory (default runs/NAME-TIME)")
    p.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    cli.add_preset(p, "local")
    p.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in this directory")
    voice.add_log(p)
    page.add_options(p, page.ANY, "port of the live page; 0, which is the default: any that is free; off: no page")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return p


def train(options: argparse.Namespace, overrides: list[tuple[str, Any]], story: str = "") -> int:
    """Check, create or resume, run, sum up; `story` opens what is said to a person once nothing is refused."""
    cli.need("torch", "torch", "the built-in trainer")
    if (given := options.resume or options.out) is not None:
        folder.check_ours(given)
    if options.resume is not None:
        run_dir, config, speeds = _resumed(options, overrides)
    else:
        config = config_of(options, overrides)
        speeds = speeds_of(options.speeds, config.run.learners)
        run_dir = fresh_dir(options.out, config.run.name, resumable=True)
    kills = _kills(options, len(speeds))
    listener = page.opened(options)
    data = open_data(config)  # refuse bad data before anything is written
    layout = layouts.built_in(shape_of(config.model))
    check_room(run_dir, config, layout, made_in=run_dir if options.resume is None else None)
    voice.tell_making(layout.param_count)
    held_out = HeldOut(config, data)
    cli.check_interrupted()
    if not options.json and options.log == "text":
        _announce(story, config, speeds, held_out, run_dir)
    cli.warm_up()  # compiled once, here, rather than by every child at the same time
    if options.resume is None:
        create(run_dir, config, held_out.model)
        note_speeds(run_dir, speeds)
    provenance.note(run_dir, cli.command())
    quiet = options.log == "json" or (options.json and not sys.stderr.isatty())
    with live.counting("held-out loss at the start", quiet) as told:
        first = evaluations.read(run_dir, 0)
        val_loss_start = held_out.loss(first.arrays, told)
    is_evaluated = config.run.evaluate_every > 0
    if is_evaluated and options.resume is None:
        evaluations.keep(run_dir, evaluations.fact_of(first, {"loss": val_loss_start}))
    del first  # as large as the model
    own = ["--data", config.data.path, *_state_of(speeds)]
    form = ["--log", options.log]
    launch = built_in(config, speeds)
    record = folder.record_of(launch, "local", run_dir)
    local_run = LocalRun(run_dir, launch.islands, kills, form, [*own, *form], record, is_evaluated=is_evaluated)
    try:
        if listener is not None:
            voice.say(f"look at it: {page.told(options, listener)}", mark="")
        showing = live.telling() if options.log == "json" else live.showing(quiet)
        with page.beside(run_dir, options, listener), showing as show:
            local_run.run(lambda: show(local_run.status, local_run.news))
    except KeyboardInterrupt:
        voice.say(f"interrupted; go on with: skerry train --resume {run_dir}", mark="\nskerry: ")
        if options.json:
            cli.print_json({"error": "interrupted", "run_dir": str(run_dir)})
        return 130
    losses = {"val_loss_start": val_loss_start, **_losses_at_end(run_dir, held_out, is_evaluated, quiet)}
    result = _finish(run_dir, local_run, losses)
    cli.tell(result, options.json, live.print_summary)
    return 0


def _finish(run_dir: Path, done: LocalRun, losses: dict[str, float]) -> dict[str, Any]:
    with Store.open(run_dir, readonly=True) as store:
        path = run_dir / "model.safetensors"
        digest = export(store, state_of(store.records), path)
        told = tally(store)
        numbers = summary.summarise(told, done.status, done.kills, done.speeds)
        numbers |= summary.goodput_of(history_in(store), told, done.kills)
    result = {**losses, **numbers, "run_dir": str(run_dir), "model_path": str(path), "model_sha256": digest}
    write_json(run_dir / "summary.json", result)
    return result


def _losses_at_end(run_dir: Path, held_out: HeldOut, is_on_curve: bool, quiet: bool) -> dict[str, float]:
    """Held-out loss before and after the last merge; with it a curve that was begun is whole, and goes on the tape."""
    with live.counting("held-out loss before the last merge", quiet) as told:
        before = held_out.loss(evaluations.read(run_dir, before_close=True).arrays, told)
    with live.counting("held-out loss at the end", quiet) as told:
        last = evaluations.read(run_dir)
        end = held_out.loss(last.arrays, told)
    if is_on_curve:
        evaluations.keep(run_dir, evaluations.fact_of(last, {"loss": end}))
        evaluations.put_on_tape(run_dir)
    return {"val_loss_before_close": before, "val_loss_end": end}


# ---------------------------------------------------------------------------------------------- from options to a run


def config_of(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> configs.Config:
    flags = {
        "run.learners": options.learners if options.learners is not None else _count(options.speeds),
        "learner.step_s": options.step_s,
        "data.path": options.data,
        "model.preset": options.model,
        "run.seed": options.seed,
        "store.record": options.record,
        "run.steps": options.steps,
        "run.tokens": options.tokens,
        "run.minutes": options.minutes,
    }
    given = [(key, value) for key, value in flags.items() if value is not None]
    preset = configs.resolve(configs.PRESETS[options.preset](), None, [("run.gather_s", GATHER_S)])
    config = resolved(preset, options.config, [*given, *overrides])
    for key in ("steps", "tokens", "minutes"):
        if getattr(options, key) == 0:
            raise Refusal(f"--{key} 0: a budget is above zero")
    if not (config.run.steps or config.run.tokens or config.run.minutes):
        config = configs.resolve(config, None, [("run.minutes", MINUTES)])
    configs.validate(config)
    shape_of(config.model)
    return config


def measured_config_of(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> configs.Config:
    """Of a run whose speed is measured: who evaluates it beside that would take cores from what is compared."""
    config = config_of(options, overrides)
    if config.run.evaluate_every:
        raise Refusal(
            f"run.evaluate_every = {config.run.evaluate_every:g}: evaluating would take time from the run that is "
            "measured here: give --run.evaluate_every 0"
        )
    return config


def _state_of(speeds: Sequence[float]) -> list[str]:
    """Where local learners have their state: on a GPU that they share, for they share the host's cores and memory too.

    With eight of them at 23 ms steps the nodes alone took half of sixteen cores, and rounds twice as long.
    """
    return ["--state", "auto"] if len(speeds) > 1 and "SKERRY_STATE" not in os.environ else []


def _count(speeds: str | None) -> int | None:
    return len(speeds.split(",")) if speeds else None


def speeds_of(text: str | None, learners: int) -> list[float]:
    if text is None:
        return [1.0] * learners
    try:
        speeds = [float(word) for word in text.split(",")]
    except ValueError:
        raise Refusal(f"--speeds {text!r}: write numbers with commas between them, like 1,1,0.5") from None
    if len(speeds) != learners:
        raise Refusal(f"--speeds {text!r}: {len(speeds)} speeds for {learners} learners")
    if not all(0.001 <= speed <= 1000 for speed in speeds):
        raise Refusal(f"--speeds {text!r}: each must be from 0.001 to 1000")
    return speeds


def _kills(options: argparse.Namespace, learners: int) -> list[summary.Kill]:
    kills = []
    for flag, fraction, victim in (
        ("--kill-learner", options.kill_learner, VICTIM if learners > 1 else "learner-0"),
        ("--kill-syncer", options.kill_syncer, "syncer"),
    ):
        if fraction is None:
            continue
        if not 0 < fraction < 1:
            raise Refusal(f"{flag} {fraction}: a fraction of the run between 0 and 1")
        kills.append(summary.Kill(victim, fraction))
    return kills


def fresh_dir(out: Path | None, name: str, resumable: bool = False) -> Path:
    if out is None:
        return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            or_resume = ", or --resume it" if resumable else ""
            raise Refusal(f"--out {out}: is there already and not an empty folder; choose another{or_resume}")
    except OSError as error:
        raise Refusal(f"--out {out}: {error.strerror}; choose another") from None
    return out


def _resumed(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> tuple[Path, configs.Config, list[float]]:
    run_dir: Path = options.resume
    if run_dir.is_dir() and not os.access(run_dir, os.W_OK):
        raise Refusal(f"--resume {run_dir}: cannot be written: make it writable, or copy it elsewhere")
    if (run_dir / "tape").is_dir():
        when_free(run_dir, lambda: check_unused(run_dir), voice.say)
    fixed = (
        "learners", "speeds", "step_s", "data", "model", "steps", "tokens", "minutes",
        "record", "seed", "out", "config",
    )  # fmt: skip
    given = [f"--{key.replace('_', '-')}" for key in fixed if getattr(options, key) is not None]
    given += [f"--{key}" for key, _ in overrides]
    if given:
        raise Refusal(f"--resume {run_dir}: a run goes on with its own configuration; leave {given[0]} out")
    with open_to_read(run_dir) as store:
        state = state_in(store)
        if state.phase == "closed":
            raise Refusal(f"--resume {run_dir}: this run is closed; export it with: skerry export {run_dir}")
        if cut := cut_off(store, state):
            raise Refusal(cut)
        if damage := repair.damaged(store, state):
            raise Refusal(repair.explain(store, state, damage))
    config = configs.decode(state.config)
    try:
        speeds = msgspec.json.decode(contents(run_dir / LOCAL), type=Local).speeds
    except UNREADABLE:
        speeds = []
    return run_dir, config, speeds or [1.0] * config.run.learners


def _announce(story: str, config: configs.Config, speeds: Sequence[float], held_out: HeldOut, run_dir: Path) -> None:
    paces = ", ".join(f"{speed:g}" for speed in speeds)
    if story:
        print(story, file=sys.stderr)
    print(
        f"{held_out.parameter_count:,} parameters, {config.data.path}; {len(speeds)} learners at speeds {paces}; "
        f"P={held_out.fragment_count} H={config.sync.sync_every} K={config.sync.quorum} "
        f"{config.merge.rule} {config.outer.rule}({config.outer.lr}, {config.outer.momentum}) "
        f"{config.wire.codec_up} up {config.wire.codec_down} down\nrun directory: {run_dir}",
        file=sys.stderr,
    )
