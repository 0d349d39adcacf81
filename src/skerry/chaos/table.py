"""skerry chaos table: what four faults cost a run of Skerry and plain data-parallel training, side by side.

For each fault a fresh local run and a fresh run of plain torch DDP (`ddp.py`), one after the other, of the same model
on the same text at the same pace: for a while undisturbed, then as long under the fault.

Rules that hold here: a rate is tokens/s of steps completed, on both sides; both windows begin when every learner has
stepped. Of Skerry's tokens it is also told which share was merged in the end. What a fault itself takes away (a dead
learner's quarter) is told apart from what is lost beyond it; noise below zero is told as it is.
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skerry import algo, cli
from skerry import config as configs
from skerry.chaos import ddp, report
from skerry.chaos.ddp_net import DELAY_MS, RATE, Network, NoNetwork
from skerry.chaos.plan import Fault
from skerry.chaos.proxy import Proxy
from skerry.chaos.run import ChaosRun
from skerry.cli import live, train
from skerry.shell.local import RunFailed
from skerry.shell.syncer import write_json
from skerry.train.data import Corpus
from skerry.train.shapes import shape_of

WARM_S = 2.0  # from the first step of the last learner to the undisturbed window
SPARE_S = 4.0  # in a run, for learners that come up later than the first
SECONDS_MIN, STEPS_MIN = 2.0, 10  # in a window, to make a rate


def run(words: Sequence[str]) -> int:
    options, overrides = cli.parse(parser(), words)
    faults, config, out = _checked(options, overrides)
    judge = train.Judge(config, Corpus.open(config.data.path, config.data.bytes_max))
    cli.check_interrupted()
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # ends the children first, as Ctrl-C does
    if not options.json:
        minutes = len(faults) * 2 * (config.run.minutes + SPARE_S / 60)
        print(f"{', '.join(faults)}: about {minutes:.0f} minutes\nruns in {out}", file=sys.stderr)
    algo.warm_up()
    began = time.monotonic()
    try:
        with _showing(quiet=options.json) as show:
            table = Resilience(config, judge, out, options.seconds, show)
            rows = [table.row(fault) for fault in faults]
    except RunFailed as error:
        raise cli.Refusal(str(error)) from None
    result = {
        "rows": rows,
        "violations": table.violations,
        "seconds": options.seconds,
        "learners": config.run.learners,
        "model": config.model.preset,
        "parameters": judge.parameter_count,
        "step_s": config.learner.step_s,
        "rate_set": config.run.learners * config.data.batch * shape_of(config.model).context / config.learner.step_s,
        "cores": len(os.sched_getaffinity(0)),
        "hardware": _hardware(),
        "wall_s": time.monotonic() - began,
        "out": str(out),
    }
    write_json(out / "table.json", result)
    if options.json:
        cli.print_json(result)
    else:
        print_table(result)
    return 1 if table.violations else 0


def parser() -> cli.Parser:
    p = cli.Parser(
        prog="skerry chaos table",
        description="What four faults cost a run of Skerry and plain data-parallel training, both measured here.",
        epilog="Any key of the configuration is an option: --sync.quorum 2",
    )
    p.add_argument("--seconds", type=float, default=20.0, metavar="S", help="undisturbed, and again under the fault")
    p.add_argument("--faults", default=",".join(ddp.FAULTS), metavar="A,B", help=f"of {', '.join(ddp.FAULTS)}")
    p.add_argument("--learners", type=cli.whole, metavar="M", help="how many, and as many ranks (default 4)")
    p.add_argument("--step-s", type=float, metavar="S", help="pad a step to S seconds")
    p.add_argument("--data", metavar="PATH", help="a file or a folder (default: Python's standard library)")
    p.add_argument("--model", metavar="PRESET", help="tiny, 1m, 3m, 10m")
    p.add_argument("--seed", type=cli.whole)
    p.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default runs/table-TIME)")
    p.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    p.add_argument("--preset", choices=sorted(configs.PRESETS), default="local")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    p.set_defaults(speeds=None, steps=None, tokens=None, record=None)
    return p


def _checked(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> tuple[list[str], configs.Config, Path]:
    """Everything that can be refused is, before anything is written."""
    wanted = [word.strip() for word in options.faults.split(",")]
    for word in wanted:
        if word not in ddp.FAULTS:
            near = difflib.get_close_matches(word, ddp.FAULTS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(ddp.FAULTS)}"
            raise cli.Refusal(f"--faults: unknown fault {word!r}: {hint}")
    if not options.seconds >= SECONDS_MIN:
        raise cli.Refusal(f"--seconds {options.seconds:g}: must be {SECONDS_MIN:g} or more")
    options.minutes = (WARM_S + 2 * options.seconds + SPARE_S) / 60
    config = train.config_of(options, overrides)
    if config.run.minutes != options.minutes:
        raise cli.Refusal(f"run.minutes = {config.run.minutes:g}: a row's length is set with --seconds")
    if config.run.learners < 2:
        raise cli.Refusal(f"run.learners = {config.run.learners}: one may fail, so 2 or more are needed")
    if not config.learner.step_s:
        raise cli.Refusal("learner.step_s = 0: both halves run at one set pace; set it, like 0.3")
    if options.seconds < STEPS_MIN * config.learner.step_s:
        least = STEPS_MIN * config.learner.step_s
        raise cli.Refusal(f"--seconds {options.seconds:g}: at learner.step_s = {config.learner.step_s:g} "
                          f"{least:g} or more make a rate")  # fmt: skip
    return [fault for fault in ddp.FAULTS if fault in wanted], config, train.fresh_dir(options.out, "table")


# ---------------------------------------------------------------------------------------------- measuring


@dataclass
class Resilience:
    """What the rows of one table have in common; `violations` are those of all of them so far."""

    config: configs.Config
    judge: train.Judge
    out: Path
    seconds: float
    show: ddp.Show
    violations: list[str] = field(default_factory=list)

    def row(self, fault: str) -> dict[str, Any]:
        lost = share_lost(fault, self.config.run.learners)
        return {"fault": fault, "share_lost": lost, "skerry": self._skerry(fault, lost), "ddp": self._ddp(fault, lost)}

    def _ddp(self, fault: str, lost: float) -> dict[str, Any]:
        r = ddp.measure(
            self.config, fault, learners=self.config.run.learners, seconds=self.seconds, warm_s=WARM_S, show=self.show
        )
        if not r.measured:
            return {"measured": False, "why_not": r.why_not}
        impact = impact_of(r.rate_before, r.rate_during, lost)
        return {"measured": True, **impact, "is_bound": r.is_bound, "what_happened": r.what_happened}

    def _skerry(self, fault: str, lost: float) -> dict[str, Any]:
        run_dir = self.out / fault.replace(" ", "-")
        speeds = [1.0] * self.config.run.learners
        delay_s = _delay_s() if fault == ddp.WAN else 0.0
        faults = faults_of(fault, len(speeds), WARM_S + self.seconds, self.seconds, delay_s)
        train.create(run_dir, self.config, train.Local(speeds), self.judge)
        with Proxy(self.config.run.seed) as proxy:
            watched = Watched(run_dir, speeds, [], faults=list(faults), proxy=proxy)
            watched.run(lambda: self.show(f"Skerry, {fault}: {watched.doing(self.seconds)}"))
        watched.write_to_tape()
        return self._result(watched, fault, lost, _told(fault, faults))

    def _result(self, watched: Watched, fault: str, lost: float, what_happened: str) -> dict[str, Any]:
        tally, audit = report.read(watched.run_dir)
        struck = max((one.at for one in watched.done), default=time.time())
        end = struck + self.seconds
        if watched.faults or report.end_of(tally) < end:
            raise RunFailed(
                f"{fault}: the learners did not come up within {SPARE_S:g} s of each other: this machine is too busy; "
                f"try again, or with fewer --learners (logs: {watched.run_dir / 'logs'})"
            )
        found = report.violations(tally, audit, watched.run_dir, watched.crashes, {})
        self.violations += [f"{fault}: {one}" for one in found]
        before = rate_of(watched.looks, watched.done[0].at - self.seconds, watched.done[0].at)
        return {
            **impact_of(before, rate_of(watched.looks, struck, end), lost),
            "merges_during": sum(struck < commit.at <= end for commit in tally.commits),
            "merged_share": tally.merged / tally.produced,
            "violations": len(found),
            "what_happened": what_happened,
        }


@dataclass
class Watched(ChaosRun):
    """A run whose faults count from when every learner has stepped; `looks` is how many tokens there were when."""

    looks: list[tuple[float, int]] = field(default_factory=list)

    def disturb(self) -> None:
        members = self.status["learners"].values()
        if not self.looks or self.looks[-1][0] < self.status["at"]:
            self.looks.append((self.status["at"], sum(member["tokens"] for member in members)))
        if self.began is not None or sum(member["step"] > 0 for member in members) == len(self.speeds):
            super().disturb()

    def doing(self, seconds: float) -> str:
        """For a person."""
        passed_s = time.monotonic() - self.began if self.began is not None else 0.0
        left_s = WARM_S + seconds - passed_s
        if self.began is None:
            return "starting"
        if left_s > seconds:
            return f"warming up, {left_s - seconds:.0f} s to go"
        if left_s > 0:
            return f"undisturbed, {left_s:.0f} s to go"
        return f"under the fault for {-left_s:.0f} s" if -left_s < seconds else "ending"


def faults_of(fault: str, learners: int, at_s: float, for_s: float, delay_s: float) -> list[Fault]:
    """What is done to which learners: to the last ones, as with the ranks."""
    names = [f"learner-{n}" for n in range(learners)]
    if fault == ddp.FAILED_LEARNER:
        return [Fault("kill", names[-1], at_s, for_s, {})]
    if fault == ddp.REGIONAL_OUTAGE:
        return [Fault("kill", name, at_s, for_s, {}) for name in names[-(learners // 2) :]]
    if fault == ddp.THROTTLING:
        return [Fault("slow", names[-1], at_s, for_s, {"speed": 1 / ddp.THROTTLE})]
    narrow = [Fault("bandwidth", name, at_s, for_s, {"mbit": float(RATE.removesuffix("mbit"))}) for name in names]
    return [*narrow, *(Fault("delay", name, at_s, for_s, {"delay_s": delay_s}) for name in names if delay_s)]


def share_lost(fault: str, learners: int) -> float:
    """The share of all computing that the fault itself takes away."""
    if fault == ddp.FAILED_LEARNER:
        return 1 / learners
    if fault == ddp.REGIONAL_OUTAGE:
        return learners // 2 / learners
    return (1 - 1 / ddp.THROTTLE) / learners if fault == ddp.THROTTLING else 0.0


def impact_of(before: float, during: float, lost: float) -> dict[str, float]:
    return {
        "impact": 1 - during / before,
        "impact_beyond": 1 - during / (before * (1 - lost)),
        "rate_before": before,
        "rate_during": during,
    }


def rate_of(looks: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Tokens/s of all learners between the first and the last look in a window."""
    inside = [look for look in looks if begin < look[0] <= end]
    if len(inside) < 2:
        raise RunFailed(f"the syncer wrote its status {len(inside)} times in {end - begin:g} s; measure for longer")
    (first_at, first), (last_at, last) = inside[0], inside[-1]
    return (last - first) / (last_at - first_at)


def _delay_s() -> float:
    """One way: what the other half's links are delayed by, nothing where this kernel cannot."""
    try:
        with Network(2) as network:
            return DELAY_MS / 1000 if network.has_delay else 0.0
    except NoNetwork:
        return 0.0


def _told(fault: str, faults: Sequence[Fault]) -> str:
    names = ", ".join(dict.fromkeys(one.target for one in faults))
    if fault == ddp.THROTTLING:
        return f"{names} at 1/{ddp.THROTTLE} of its pace"
    if fault == ddp.WAN:
        delays = [one.parameters["delay_s"] for one in faults if one.kind == "delay"]
        return f"every learner's link at {RATE} each way, " + (f"{DELAY_MS} ms one way" if delays else "no delay")
    return f"{names} killed and away"


def _hardware() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


# ---------------------------------------------------------------------------------------------- for people


@contextmanager
def _showing(quiet: bool) -> Iterator[ddp.Show]:
    """What is being measured now: one line in place on a terminal, else one now and then, or none."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda text: status.update(text)
    else:
        yield (lambda text: None) if quiet else _Lines()


class _Lines:
    def __init__(self) -> None:
        self._at = float("-inf")

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._at > live.LINE_S:
            self._at = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def print_table(result: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("fault", "takes away", "Skerry loses", "beyond it", "merged", "DDP loses", "beyond it"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    table.add_column("what happened to DDP", overflow="fold")
    for row in result["rows"]:
        ours, theirs = row["skerry"], row["ddp"]
        mine = (f"{ours['impact']:.1%}", f"{ours['impact_beyond']:.1%}", f"{ours['merged_share']:.1%}")
        table.add_row(row["fault"], f"{row['share_lost']:.1%}", *mine, *_of_ddp(theirs))
    console = Console(width=None if sys.stdout.isatty() else live.PIPED_COLUMNS)
    console.print(table)
    console.print(
        f"tokens/s of completed steps, {result['seconds']:g} s undisturbed against {result['seconds']:g} s under the "
        f"fault; {result['learners']} learners at {result['step_s']:g} s a step make "
        f"{result['rate_set']:,.0f}/s if nothing else slows them; {result['parameters']:,} parameters, "
        f"{result['cores']} cores ({result['hardware']}); {result['wall_s']:.0f} s; runs in {result['out']}",
        highlight=False,
    )
    for line in result["violations"]:
        console.print(Text(line, style="bold red"))


def _of_ddp(half: dict[str, Any]) -> tuple[str, str, str]:
    if not half["measured"]:
        return "–", "–", half["why_not"]
    least = "≥ " if half["is_bound"] else ""
    return f"{least}{half['impact']:.1%}", f"{least}{half['impact_beyond']:.1%}", half["what_happened"]
