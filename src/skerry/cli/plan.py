"""skerry plan: what a run needs and would get, before anything is bought.

bandwidth   Gbit/s a site needs for a utilisation, data-parallel and Skerry, and the reverse; --paper: its Table 13
run         a configuration on concrete links: fragments, syncs, H, memory, disk, goodput, and what contradicts what
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from skerry import cli
from skerry import config as configs
from skerry.algo.codecs import CODECS
from skerry.algo.fragments import Layout
from skerry.plan import bandwidth, model, paper, units
from skerry.plan.run import report
from skerry.plan.syncs import Failures, Island, Plan
from skerry.train.shapes import shape_of

PARAMS_MAX = 1e15
RUN_PARAMS_MAX = 10**11  # a syncer is one process and holds 12 bytes of each
STEP_S_MAX = 86400.0
SITES_MAX = 10**5
TENSORS_MAX = 10**6
UTILISATION = 0.95


def run(words: Sequence[str]) -> int:
    if words and words[0] == "bandwidth":
        return _bandwidth(words[1:])
    if words and words[0] == "run":
        return _run(words[1:])
    parser = cli.Parser(prog="skerry plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bandwidth", "run"])
    parser.parse_args(list(words))
    raise AssertionError(words)


def _reader(read: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    """An argparse type whose complaint says why; `low` itself is too little."""

    def convert(text: str) -> float:
        try:
            value = read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not low < value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} must be above {low:g} and at most {high:g}")
        return value

    return convert


def _between(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = cli.whole(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} must be from {low} to {high}")
        return value

    return convert


_params = _reader(units.count, 0, PARAMS_MAX)
_step_s = _reader(units.seconds, 0, STEP_S_MAX)
_time = _reader(units.seconds, 0, 1e11)


# ---------------------------------------------------------------------------------------------- bandwidth


def _bandwidth(words: Sequence[str]) -> int:
    p = cli.Parser(
        prog="skerry plan bandwidth",
        description="Gbit/s each site needs, data-parallel and with Skerry, or the utilisation a link gives.",
        epilog="Any key of the configuration is an option: --sync.sync_every 48",
    )
    p.add_argument("--params", type=_params, metavar="N", help="of the model: 5e9, 5B, 300M")
    p.add_argument("--step-s", type=_step_s, metavar="T", help="a step's arithmetic: 1, 500ms")
    p.add_argument("--sites", type=_between(2, SITES_MAX), metavar="N", help="(default: one a learner)")
    p.add_argument("--learners", type=_between(2, 4096), metavar="M", help="spread over the sites (default 8)")
    p.add_argument("--codec", choices=CODECS, help="both ways (default int4); else --wire.codec_up, --wire.codec_down")
    p.add_argument("--utilisation", type=float, metavar="U", help=f"share of time in steps (default {UTILISATION})")
    p.add_argument("--link", type=_reader(units.bits_per_s, 0, 1e18), metavar="RATE", help="of a site: 200Mbit, 5Gbit")
    p.add_argument("--paper", action="store_true", help="recompute the paper's Table 13 instead")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options, overrides = cli.parse(p, words)
    if options.paper:
        given = [k for k, v in vars(options).items() if v is not None and k not in ("paper", "json")]
        if given or overrides:
            name = given[0].replace("_", "-") if given else overrides[0][0]
            raise cli.Refusal(f"--{name}: --paper recomputes the paper's own cases and takes nothing else")
        return _tell(paper.table(), options.json, _print_paper)
    return _tell(bandwidth.answer(*_question(options, overrides)), options.json, _print_bandwidth)


def _tell(told: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> int:
    if as_json:
        cli.print_json(told)
    else:
        show(told)
    return 0


def _question(
    options: argparse.Namespace, overrides: list[tuple[str, Any]]
) -> tuple[bandwidth.Question, configs.Config]:
    for name in ("params", "step_s"):
        if getattr(options, name) is None:
            option = name.replace("_", "-")
            raise cli.Refusal(f"--{option}: is needed, for example --params 5e9 --step-s 1 (or --paper)")
    learners = 8 if options.learners is None else options.learners
    sites = learners if options.sites is None else options.sites
    utilisation = UTILISATION if options.utilisation is None else options.utilisation
    if not 0 < utilisation < 1:
        raise cli.Refusal(f"--utilisation {utilisation}: a share between 0 and 1, like 0.95")
    if sites > learners:
        raise cli.Refusal(f"--sites {sites}: more than the {learners} learners (--learners) that could be at them")
    flags = {"run.learners": learners, "wire.codec_up": options.codec, "wire.codec_down": options.codec}
    given = [(key, value) for key, value in flags.items() if value is not None]
    config = _valid(configs.resolve(configs.default(), None, [*given, *overrides]))
    if config.sync.num_fragments > options.params:
        raise cli.Refusal(f"--params {options.params:g}: fewer than sync.num_fragments = {config.sync.num_fragments}")
    question = bandwidth.Question(options.params, options.step_s, sites, learners, utilisation, options.link)
    return question, config


def _valid(config: configs.Config) -> configs.Config:
    """Checked as a run would be; a plan needs no budget, so one is put in where there is none."""
    if not (config.run.steps or config.run.tokens or config.run.minutes):
        configs.validate(configs.resolve(config, None, [("run.steps", 10**6)]))
        return config
    return configs.validate(config)


def _print_bandwidth(told: dict[str, Any]) -> None:
    console = Console()
    skerry, link = told["skerry"], told.get("at_link")
    console.print(
        f"{told['params']:.4g} parameters, {told['step_s']:g} s a step, {told['learners']} learners at {told['sites']} "
        f"sites; Gbit/s a site, each way, for a utilisation of {told['utilisation']:.0%}"
    )
    table = _table("", "Gbit/s", *(["at the link"] if link else []))
    codecs = f"{skerry['codec_up']} up and {skerry['codec_down']} down"
    dp = told["data_parallel"]["gbit_s"]
    rows = [
        ("data-parallel, 16 bits a parameter", dp, link and f"{link['data_parallel']:.1%}"),
        (f"Skerry, {codecs}, the whole run", skerry["gbit_s"], link and f"{link['skerry']:.1%}"),
    ]
    for phase in skerry["phases"]:
        effective = link and f"H = {phase['sync_every_effective']:.0f}"
        rows.append((f"  {phase['phase']}, H = {phase['sync_every']}", phase["gbit_s"], effective))
    at_syncer = link and f"{link['skerry_syncer_site']:.1%}"
    rows.append(("  at the site with the syncer, all other learners'", skerry["syncer_site_gbit_s"], at_syncer))
    for name, gbit, more in rows:
        table.add_row(name, f"{gbit:.3g}", *([more] if link else []))
    console.print(table)
    if link:
        console.print(
            f"The link has {link['gbit_s']:g} Gbit/s. Skerry's learners never wait: its utilisation is that of keeping "
            "H; what happens instead is the H in the last column."
        )


def _print_paper(told: dict[str, Any]) -> None:
    console = Console()
    console.print(f"{told['source']}: Gbit/s needed, ours / the paper's (5B parameters)")
    table = _table("", *(f"{u:.0%}" for u in paper.UTILISATIONS))
    cells, width = told["cells"], len(paper.UTILISATIONS)
    for i in range(0, len(cells), width):
        first = cells[i]
        if i % (3 * width) == 0:
            table.add_row(f"{first['step_s']:g} s a step, {first['sites']} sites")
        texts = [f"{c['ours']:.3g}/{c['paper']:g}" + ("*" if c["left_out"] else "") for c in cells[i : i + width]]
        table.add_row(f"  {first['method']}", *texts)
    console.print(table)
    console.print(
        f"deviation of {told['cells_counted']} cells: {told['deviation_max']:.1%} at most, "
        f"{told['deviation_mean']:.1%} in the mean; data-parallel {told['deviation_max_data_parallel']:.1%} at most"
    )
    for left in told["left_out"]:
        console.print(f"* {left['why']}")


# ---------------------------------------------------------------------------------------------- run


def _run(words: Sequence[str]) -> int:
    p = cli.Parser(
        prog="skerry plan run",
        description="A configuration on concrete links. A list has one value for all learners, or one for each.",
        epilog="Any key of the configuration is an option: --sync.quorum 2",
    )
    p.add_argument("--config", type=Path, metavar="FILE", help="TOML file, as skerry syncer takes it")
    p.add_argument("--preset", choices=sorted(configs.PRESETS), default="default")
    p.add_argument("--genesis", type=Path, metavar="FILE", help="your model's safetensors; only its header is read")
    p.add_argument("--params", type=_params, metavar="N", help="your model's size, where there is no genesis yet")
    p.add_argument("--tensors", type=_between(1, TENSORS_MAX), metavar="N", help="with --params (default: P)")
    p.add_argument("--mbit", metavar="LIST", help="links in Mbit/s, each way: 200 or 200,200,50")
    p.add_argument("--rtt-ms", metavar="LIST", default="50", help="round trips to the syncer (default 50)")
    p.add_argument("--step-s", metavar="LIST", help="seconds a step takes (default: learner.step_s)")
    p.add_argument("--syncer-mbit", type=_reader(units.count, 0, 1e12), metavar="RATE", help="its link, shared by all")
    p.add_argument("--mtbf", type=_time, metavar="TIME", help="between a learner's failures: 2d (default: none)")
    p.add_argument("--repair", type=_time, metavar="TIME", help="until a failed learner is back: 10min")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options, overrides = cli.parse(p, words)
    return _tell(report(_plan(options, overrides)), options.json, _print_run)


def _plan(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> Plan:
    config = _valid(configs.resolve(configs.PRESETS[options.preset](), options.config, overrides))
    learners = config.run.learners
    if options.mbit is None:
        raise cli.Refusal("--mbit: is needed, the learners' links in Mbit/s, for example --mbit 200 or --mbit 200,50")
    if options.step_s is None and not config.learner.step_s:
        raise cli.Refusal("--step-s: is needed, seconds a step takes (or learner.step_s in the configuration)")
    rates = _list("--mbit", options.mbit, learners, units.count, 1e-6, 1e12)
    rtts = _list("--rtt-ms", options.rtt_ms, learners, units.count, 0.0, 1e7)
    step_s = options.step_s if options.step_s is not None else str(config.learner.step_s)
    steps = _list("--step-s", step_s, learners, units.seconds, 1e-6, STEP_S_MAX)
    if options.repair is not None and options.mtbf is None:
        raise cli.Refusal("--repair: says how long a failure takes; --mtbf, how often there is one, is missing")
    islands = tuple(
        Island(f"learner-{i}", step, 1e6 * rate, rtt / 1e3)
        for i, (step, rate, rtt) in enumerate(zip(steps, rates, rtts, strict=True))
    )
    failures = None if options.mtbf is None else Failures(options.mtbf, options.repair or 0.0)
    syncer = math.inf if options.syncer_mbit is None else 1e6 * options.syncer_mbit
    layout = _layout(options, config)
    if layout.param_count > RUN_PARAMS_MAX:
        raise cli.Refusal(
            f"{layout.param_count:.3g} parameters: one syncer holds at most {RUN_PARAMS_MAX:.0e} "
            "(it has 12 bytes of each in memory)"
        )
    return Plan(config, layout, islands, failures, syncer)


def _layout(options: argparse.Namespace, config: configs.Config) -> Layout:
    if options.genesis is not None and options.params is not None:
        raise cli.Refusal("--params: --genesis says how large the model is; give one of the two")
    if options.tensors is not None and options.params is None:
        raise cli.Refusal("--tensors: goes with --params")
    if options.genesis is not None:
        return model.of_file(options.genesis)
    if options.params is None:
        return model.built_in(shape_of(config.model))
    tensors = options.tensors or config.sync.num_fragments
    if tensors > options.params:
        raise cli.Refusal(f"--tensors {tensors}: more than --params {options.params:g}")
    return model.even(options.params, tensors)


def _list(
    name: str, text: str, learners: int, read: Callable[[str], float], low: float, high: float
) -> Sequence[float]:
    try:
        values = [read(word) for word in text.split(",")]
    except ValueError as error:
        raise cli.Refusal(f"{name} {text}: {error}") from None
    if not all(low <= value <= high for value in values):
        raise cli.Refusal(f"{name} {text}: each must be from {low:g} to {high:g}")
    if len(values) == 1:
        return values * learners
    if len(values) != learners:
        raise cli.Refusal(f"{name} {text}: {len(values)} values for {learners} learners (run.learners)")
    return values


def _print_run(told: dict[str, Any]) -> None:
    console = Console()
    f, memory, disk = told["fragments"], told["memory"], told["disk"]
    console.print(
        f"{told['params']:,} parameters in {told['tensors']} tensors, {told['learners']} learners, quorum "
        f"{told['quorum']}; {f['count']} fragments of {f['smallest']:,} to {f['largest']:,}, the largest "
        f"{units.size(f['payload_bytes_up'])} up and {units.size(f['payload_bytes_down'])} down"
    )
    table = _table("phase", "of run", "H", "H really", "limit", "up/step", "down/step", "sync, steps", "fits τ")
    for phase in told["phases"]:
        late = sum(not x["fits"] for x in phase["learners"])
        table.add_row(
            phase["phase"],
            f"{phase['share']:.0%}",
            str(phase["sync_every"]),
            f"{phase['sync_every_effective']:.1f}",
            phase["limited_by"],
            units.size(phase["bytes_per_step_up"]),
            units.size(phase["bytes_per_step_down"]),
            f"{max(x['sync_steps'] for x in phase['learners']):.2f}",
            "all" if not late else f"[yellow]{told['learners'] - late} of {told['learners']}[/]",
        )
    console.print(table)
    table = _table("", "needed", "at worst")
    host, syncer = memory["learner_host"], memory["syncer"]
    table.add_row("memory, a learner's host", units.size(host["total"]), units.size(host["at_worst"]))
    table.add_row("memory, a learner's device, without activations", units.size(memory["learner_device"]), "")
    table.add_row("memory, the syncer", units.size(syncer["total"]), units.size(syncer["at_worst"]))
    table.add_row("disk, the syncer's files", units.size(disk["files"]), "")
    table.add_row("disk, grows in an hour", units.size(disk["grows_per_hour"]), "")
    table.add_row("disk, written in an hour", units.size(disk["written_per_hour"]), "")
    console.print(table)
    console.print(f"expected goodput {told['goodput']:.1%}; a quorum is there {told['quorum_share']:.2%} of the time")
    suggested = {key: value for key, value in told["suggested"].items() if key != "why"}
    console.print("suggested: " + " ".join(f"--{key} {value}" for key, value in suggested.items()), soft_wrap=True)
    for line in told["suggested"]["why"]:
        console.print(f"  {line}", soft_wrap=True)
    for line in told["warnings"]:
        console.print(f"[yellow]warning:[/] {line}", soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or name == "limit" else "right", no_wrap=True)
    return table
