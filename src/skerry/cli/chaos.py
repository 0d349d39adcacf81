"""skerry chaos: torture a local run by a fault plan, and measure what it takes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skerry import cli
from skerry import config as configs
from skerry.cli import chaos_table, live, train
from skerry.engines.spec import learners
from skerry.engines.supervisor import LocalRun, note_speeds
from skerry.errors import Refusal
from skerry.proof.chaos import plan as plans
from skerry.proof.chaos import report
from skerry.proof.chaos.proxy import Proxy
from skerry.proof.chaos.supervisor import ChaosRun
from skerry.run import evaluations
from skerry.shell.syncer import write_json
from skerry.train.data import open_data
from skerry.train.held_out import HeldOut
from skerry.train.shapes import SHAPES
from skerry.train.start import create

TWIN_S = 30.0


def run(words: Sequence[str]) -> int:
    if words[:1] == ["table"]:
        return chaos_table.run(words[1:])
    options, overrides = cli.parse(parser(), words)
    if options.list:
        return _list(options.json)
    if options.plan is None:
        raise Refusal("no plan: name a preset (skerry chaos --list) or the path of a .toml file")
    return chaos(options, overrides)


def parser() -> cli.Parser:
    p = cli.Parser(
        prog="skerry chaos",
        description=f"{__doc__} `skerry chaos table` compares with plain data-parallel training.",
        epilog="Any key of the configuration is an option: --sync.quorum 2",
    )
    p.add_argument("plan", nargs="?", metavar="PLAN", help="a preset or the path of a .toml file")
    p.add_argument("--list", action="store_true", help="name the presets")
    p.add_argument("--minutes", type=float, help="how long (default: the plan's)")
    p.add_argument("--seed", type=cli.whole, help="of the faults and of the run (default 0)")
    p.add_argument("--learners", type=cli.whole, metavar="M", help="how many (default: the plan's)")
    p.add_argument("--speeds", metavar="1,1,0.5", help="relative speed of each learner")
    p.add_argument("--step-s", type=float, metavar="S", help="pad a step to S seconds / speed; 0 runs free")
    p.add_argument("--data", metavar="PATH", help="a file or a folder (default: Python's standard library)")
    p.add_argument("--model", metavar="PRESET", help=", ".join(SHAPES))
    p.add_argument("--twin-s", type=float, default=TWIN_S, metavar="S",
                   help="length of the undisturbed run before it; 0 leaves it out")  # fmt: skip
    p.add_argument("--out", type=Path, metavar="DIR", help="run directory (default runs/NAME-TIME)")
    p.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    p.add_argument("--preset", choices=sorted(configs.PRESETS), default="local")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    p.set_defaults(steps=None, tokens=None, record=None)  # a plan is in minutes; the rest can be overridden
    return p


def chaos(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> int:
    """Check everything, run the twin, run under faults, report; 1 if anything was violated."""
    plan, config, speeds, run_dir = _checked(options, overrides)
    faults = plans.schedule(plan, config.run.minutes, config.run.learners, config.run.seed)
    held_out = HeldOut(config, open_data(config))
    cli.check_interrupted()
    if not options.json:
        print(f"{plan.name}: {plan.about}\n{len(faults)} faults in {config.run.minutes:g} minutes on "
              f"{config.run.learners} learners, seed {config.run.seed}\nrun directory: {run_dir}",
              file=sys.stderr)  # fmt: skip
    cli.warm_up()
    began, news = time.monotonic(), list[str]()
    try:
        with live.showing(quiet=options.json and not sys.stderr.isatty()) as show:
            rates = {}
            if options.twin_s:
                news.append(f"an undisturbed twin first, {options.twin_s:g} s")
                rates = _twin(run_dir / "twin", config, speeds, options.twin_s, held_out, lambda s: show(s, news))
            result = _run(run_dir, config, speeds, faults, held_out, rates, news, show)
    except KeyboardInterrupt:
        print(f"\nskerry: interrupted; what there is lies in {run_dir}", file=sys.stderr)
        if options.json:
            cli.print_json({"error": "interrupted", "run_dir": str(run_dir)})
        return 130
    result |= {"plan": plan.name, "seed": config.run.seed, "minutes": config.run.minutes}
    result |= {"wall_s": time.monotonic() - began, "run_dir": str(run_dir)}
    write_json(run_dir / report.REPORT, result)
    cli.tell(result, options.json, print_report)
    return 1 if result["violations"] else 0


def _checked(
    options: argparse.Namespace, overrides: list[tuple[str, Any]]
) -> tuple[plans.FaultPlan, configs.Config, list[float], Path]:
    """Everything that can be refused is, before anything is written."""
    plan = plans.read_plan(options.plan)
    if options.speeds is None:
        options.learners = plan.learners if options.learners is None else options.learners
        if plan.speeds and options.learners == plan.learners:
            options.speeds = ",".join(f"{speed:g}" for speed in plan.speeds)
    if options.minutes is None:
        options.minutes = plan.minutes
    if not options.twin_s >= 0:
        raise Refusal(f"--twin-s {options.twin_s}: must be 0 or more seconds")
    cli.need("torch", "torch", "the built-in trainer")
    config = train.measured_config_of(options, overrides)
    return plan, config, train.speeds_of(options.speeds, config.run.learners), train.fresh_dir(options.out, "chaos")


def _twin(
    run_dir: Path,
    config: configs.Config,
    speeds: list[float],
    seconds: float,
    held_out: HeldOut,
    show: Callable[[dict[str, Any]], None],
) -> dict[str, float]:
    """A run of the same configuration that nobody disturbs: how fast its learners are."""
    run = msgspec.structs.replace(config.run, minutes=seconds / 60)
    create(run_dir, msgspec.structs.replace(config, run=run), held_out.model)
    note_speeds(run_dir, speeds)
    local = LocalRun(run_dir, [learners(speeds)], [], learner_arguments=["--data", config.data.path])
    local.run(lambda: show(local.status))
    return report.rates_of(report.read(run_dir)[0])


def _run(
    run_dir: Path,
    config: configs.Config,
    speeds: list[float],
    faults: list[plans.Fault],
    held_out: HeldOut,
    rates: dict[str, float],
    news: list[str],
    show: live.Show,
) -> dict[str, Any]:
    create(run_dir, config, held_out.model)
    note_speeds(run_dir, speeds)
    with Proxy(config.run.seed) as proxy:
        own = ["--data", config.data.path]
        local = ChaosRun(run_dir, [learners(speeds)], [], learner_arguments=own, news=news, faults=faults, proxy=proxy)
        try:
            local.run(lambda: show(local.status, local.news))
        finally:
            local.write_to_tape()
    tally, audit = report.read(run_dir)
    by_name = {f"learner-{n}": speed for n, speed in enumerate(speeds)}
    violated = report.violations(tally, audit, run_dir, local.crashes, by_name)
    return {
        "violations": len(violated),
        "violated": violated,
        "invariants_checked": audit.checks,
        **report.report(tally, local.status, rates, by_name),
        "rates": rates,
        "val_loss_start": held_out.loss(evaluations.read(run_dir, 0).arrays),
        "val_loss_end": held_out.loss(evaluations.read(run_dir).arrays),
    }


# ---------------------------------------------------------------------------------------------- for people


def _list(as_json: bool) -> int:
    if as_json:
        cli.print_json({plan.name: plan.about for plan in plans.presets()})
    else:
        for plan in plans.presets():
            print(f"  {plan.name:9s} {plan.about}")
    return 0


def print_report(r: dict[str, Any]) -> None:
    """The short end of a run under faults; violations in red."""
    faults = ", ".join(f"{count} {kind}" for kind, count in r["faults"].items()) or "none"
    recovery = "; ".join(
        f"{stage} {at['p50']:.1f} / {at['p99']:.1f} s ({at['n']})" for stage, at in r["recovery_s"].items() if at["n"]
    )
    back_s = r["syncer_restart_to_merge_s"]
    back = f" (first merge after at most {back_s:.1f} s)" if back_s is not None else ""
    discarded = ", ".join(f"{n:,.0f} {why}" for why, n in r["tokens_discarded"].items()) or "none"
    merged = f"{r['tokens_merged']:,.0f} of {r['tokens_produced']:,.0f} produced ({r['merged_share']:.1%})"
    rows = [
        ("faults", faults),
        ("goodput", f"{r['goodput']:.1%}; of the capacity no fault took away {r['goodput_of_capacity']:.1%}"),
        ("learners", f"live {r['live']:.1%} of the time; of the live ones {r['participation']:.1%} in each merge"),
        ("tokens merged", f"{merged}; discarded: {discarded}; balance {r['ledger_balance']}"),
        ("merges", f"{r['merges']:,}, longest gap {r['merge_gap_max_s']:.1f} s"),
        ("recovery p50 / p99", recovery or "nothing had to recover"),
        ("restarts", f"{r['learner_restarts']} learner, {r['syncer_restarts']} syncer{back}"),
        ("held-out loss", f"{r['val_loss_start']:.3f} → {r['val_loss_end']:.3f} nats/byte"),
        ("run", r["run_dir"]),
    ]  # fmt: skip
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    bad = r["violated"]
    said = "\n".join(bad) if bad else f"none in {r['invariants_checked']:,} checks"
    table.add_row("violations", Text(said, style="bold red" if bad else "green"))
    Console(width=None if sys.stdout.isatty() else live.PIPED_COLUMNS).print(table)
