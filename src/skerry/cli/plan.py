"""skerry plan: what a run needs and would get, before anything is bought.

bandwidth   Gbit/s a site needs for a utilisation, data-parallel and Skerry, and the reverse; --paper: its Table 13
run         a configuration on concrete links: fragments, syncs, H, memory, disk, goodput, and what contradicts what
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from rich.console import Console
from rich.table import Table

from skerry import cli
from skerry import config as configs
from skerry import text as units
from skerry.algo.codecs import CODECS
from skerry.algo.fragments import Layout, fragments_wanted
from skerry.errors import Refusal
from skerry.plan import bandwidth, layouts, paper
from skerry.plan.forecast import report
from skerry.plan.needs import State
from skerry.plan.syncs import Failures, Island, RunPlan
from skerry.run.genesis import open_genesis
from skerry.text import Kind, counted, size
from skerry.train.shapes import resolved, shape_of

T = TypeVar("T")
RUN_PARAMS_MAX = 10**11  # a syncer is one process and holds 12 bytes of each
SITES_MAX = 10**5
LEARNERS = 8
UTILISATION = 0.95
RTT_MS = "50"


def run(words: Sequence[str]) -> int:
    if words and words[0] == "bandwidth":
        return _bandwidth(words[1:])
    if words and words[0] == "run":
        return _run(words[1:])
    parser = cli.Parser(prog="skerry plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bandwidth", "run"])
    parser.parse_args(list(words))
    raise AssertionError(words)


def _whole(text: str) -> int:
    try:
        return cli.whole(text)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a whole number") from None


PARAMS = Kind(units.count, 1, 1e15)
STEP_S = Kind(units.seconds, 1e-6, 86400, "1e-6 s to 1d")
LINK = Kind(units.bits_per_s, 1e3, 1e14, "1kbit to 100Tbit")
SHARE = Kind(units.share, 0, 1)
MBIT = LINK._replace(read=units.mbit_per_s)


# ---------------------------------------------------------------------------------------------- bandwidth


def _bandwidth(words: Sequence[str]) -> int:
    p = cli.Parser(
        prog="skerry plan bandwidth",
        description="Gbit/s each site needs, data-parallel and with Skerry, or the utilisation a link gives.",
        epilog="Any key of the configuration is an option: --sync.sync_every 48",
    )
    p.add_argument("--params", type=cli.typed(PARAMS), metavar="N", help="of the model: 5e9, 5B, 300M")
    p.add_argument("--step-s", type=cli.typed(STEP_S), metavar="T", help="a step's arithmetic: 1, 500ms")
    p.add_argument("--sites", type=cli.typed(Kind(_whole, 2, SITES_MAX)), metavar="N", help="(default: one a learner)")
    p.add_argument(
        "--learners",
        type=cli.typed(Kind(_whole, 2, 4096)),
        metavar="M",
        help=f"spread over the sites (default {LEARNERS})",
    )
    p.add_argument("--codec", choices=CODECS, help="both ways (default int4); else --wire.codec_up, --wire.codec_down")
    p.add_argument(
        "--utilisation", type=cli.typed(SHARE), metavar="U", help=f"share of time in steps (default {UTILISATION})"
    )
    p.add_argument("--link", type=cli.typed(LINK), metavar="RATE", help="of a site: 200Mbit, 5Gbit")
    p.add_argument("--paper", action="store_true", help="recompute the paper's Table 13 instead")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options, overrides = cli.parse(p, words)
    if options.paper:
        given = [k for k, v in vars(options).items() if v is not None and k not in ("paper", "json")]
        if given or overrides:
            name = given[0].replace("_", "-") if given else overrides[0][0]
            raise Refusal(f"--{name}: --paper recomputes the paper's own cases and takes nothing else")
        cli.tell(paper.table(), options.json, _print_paper)
    else:
        cli.tell(bandwidth.answer(*_question(options, overrides)), options.json, _print_bandwidth)
    return 0


def _question(
    options: argparse.Namespace, overrides: list[tuple[str, Any]]
) -> tuple[bandwidth.Question, configs.Config]:
    for name in ("params", "step_s"):
        if getattr(options, name) is None:
            option = name.replace("_", "-")
            raise Refusal(f"--{option}: is needed, for example --params 5e9 --step-s 1 (or --paper)")
    config = _asked_config(options, overrides)
    learners = config.run.learners
    sites = learners if options.sites is None else options.sites
    utilisation = UTILISATION if options.utilisation is None else options.utilisation
    if not 0 < utilisation < 1:
        raise Refusal(f"--utilisation {utilisation:g}: a share between 0 and 1, like 0.95")
    if sites > learners:
        raise Refusal(f"--sites {sites}: more than the {learners} learners (--learners) that could be at them")
    if (fragments := fragments_wanted(options.params, config.sync.num_fragments)) > options.params:
        many = counted(fragments, "fragment")
        raise Refusal(f"--params {options.params:g}: fewer than the {many} they would be in (sync.num_fragments)")
    question = bandwidth.Question(options.params, options.step_s, sites, learners, utilisation, options.link)
    return question, config


def _asked_config(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> configs.Config:
    flags = {"run.learners": "learners", "wire.codec_up": "codec", "wire.codec_down": "codec"}
    given = {key: getattr(options, name) for key, name in flags.items() if getattr(options, name) is not None}
    for key, value in overrides:
        if given.get(key, value) != value:
            raise Refusal(f"--{key} {value}: --{flags[key]} says {given[key]}; give one of the two")
    config = _valid(configs.resolve(configs.default(), None, [("run.learners", LEARNERS), *given.items(), *overrides]))
    if config.run.learners < 2:
        raise Refusal(f"--run.learners {config.run.learners}: links lie between 2 learners or more")
    return config


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
        f"{told['params']:.4g} parameters in {counted(told['fragments'], 'fragment')}, {told['step_s']:g} s a step, "
        f"{told['learners']} learners at {told['sites']} sites; Gbit/s a site, each way, for a utilisation of "
        f"{told['utilisation']:.0%}"
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
        description="A configuration on concrete links. A list has one value for all learners, or one for each. All "
        "from --genesis to --state may stand in the file's table [plan] instead: mbit = [200, 200, 50]; options win.",
        epilog="Any key of the configuration is an option: --sync.quorum 2",
    )
    p.add_argument("--config", type=Path, metavar="FILE", help="TOML file, as skerry syncer takes it, and [plan] in it")
    cli.add_preset(p, "default")
    p.add_argument("--genesis", metavar="FILE", help="your model's safetensors; only its header is read")
    p.add_argument("--params", metavar="N", help="your model's size, where there is no genesis yet")
    p.add_argument("--tensors", metavar="N", help="with --params (default: P)")
    p.add_argument("--mbit", metavar="LIST", help="links in Mbit/s, each way: 200 or 200,200,50 or 1Gbit")
    p.add_argument("--rtt-ms", metavar="LIST", help=f"round trips to the syncer (default {RTT_MS})")
    p.add_argument("--step-s", metavar="LIST", help="seconds a step takes: 0.5 or 500ms (default: learner.step_s)")
    p.add_argument("--syncer-mbit", metavar="RATE", help="its link, shared by all: 1000 or 1Gbit (default: no bound)")
    p.add_argument("--mtbi", metavar="TIME", help="of a learner, between interruptions: 2d (default: none)")
    p.add_argument("--repair", metavar="TIME", help="until an interrupted learner is back: 10min (default 0)")
    p.add_argument("--state", metavar="WHERE", help="of a learner's arrays, as it is told: host (default) or device")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options, overrides = cli.parse(p, words)
    cli.tell(report(_plan(options, overrides)), options.json, _print_run)
    return 0


STATES: tuple[State, ...] = get_args(State)
ASKED = {  # options of `plan run` that [plan] of its file may say, too; besides genesis, a path, and state, a word
    "params": PARAMS,
    "tensors": Kind(_whole, 1, 10**6),
    "mbit": MBIT,
    "rtt_ms": Kind(units.milliseconds, 0, 3600, "0 to 1h"),
    "step_s": STEP_S,
    "syncer_mbit": MBIT,
    "mtbi": Kind(units.seconds, 1, 1e11, "1s to 3000y"),
    "repair": Kind(units.seconds, 0, 1e11, "0 to 3000y"),
}


class Word(NamedTuple):
    """What was asked, and the place, for a refusal to name."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place} {self.text}"


def _plan(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> RunPlan:
    config = _valid(resolved(configs.PRESETS[options.preset](), options.config, overrides))
    asked = _asked(options)
    asked.setdefault("rtt_ms", Word("--rtt-ms", RTT_MS))
    if config.learner.step_s:
        asked.setdefault("step_s", Word("learner.step_s =", str(config.learner.step_s)))
    if "mbit" not in asked:
        raise Refusal("--mbit: is needed, the learners' links: --mbit 200 or 200,50, or mbit = 200 under [plan]")
    if "step_s" not in asked:
        raise Refusal("--step-s: is needed, seconds a step takes: --step-s 0.5, or step_s = 0.5 under [plan]")
    if "repair" in asked and "mtbi" not in asked:
        raise Refusal(f"{asked['repair']}: says how long an interruption takes; mtbi, how often one comes, is missing")
    rates, rtts, steps = (_each(asked, name, config.run.learners) for name in ("mbit", "rtt_ms", "step_s"))
    islands = tuple(
        Island(f"learner-{i}", step, rate, rtt)
        for i, (step, rate, rtt) in enumerate(zip(steps, rates, rtts, strict=True))
    )
    failures = Failures(_one(asked, "mtbi"), _one(asked, "repair", 0.0)) if "mtbi" in asked else None
    rate = _one(asked, "syncer_mbit", math.inf)
    layout, fixed_bytes = _model(asked, config)
    return RunPlan(config, layout, islands, failures, rate, state=_state(asked), fixed_bytes=fixed_bytes)


def _state(asked: dict[str, Word]) -> State:
    """Where learners have their arrays; what a device has free is not known here, so nothing is left to it."""
    word = asked.get("state", Word("--state", "host"))
    found = next((state for state in STATES if state == word.text), None)
    if found is None:
        raise Refusal(f"{word}: give {' or '.join(STATES)}")
    return found


def _asked(options: argparse.Namespace) -> dict[str, Word]:
    """What the options say and, where they are silent, [plan] of the file."""
    known = ("genesis", "state", *ASKED)
    table = {} if options.config is None else configs.plan_table(options.config, known)
    asked = {}
    for name, value in table.items():
        values = value if isinstance(value, list) else [value]
        asked[name] = Word(f"{options.config}: plan.{name} =", ",".join(map(str, values)))
    given = {name: getattr(options, name) for name in known if getattr(options, name) is not None}
    for one, others in (("genesis", ("params", "tensors")), ("params", ("genesis",))):
        if one in given:  # one model instead of the other
            asked = {name: word for name, word in asked.items() if name not in others}
    return asked | {name: Word(f"--{name.replace('_', '-')}", text) for name, text in given.items()}


def _model(asked: dict[str, Word], config: configs.Config) -> tuple[Layout, int]:
    """What is trained of it, and the bytes of what is not."""
    fixed_bytes = 0
    if "genesis" in asked and "params" in asked:
        raise Refusal(f"{asked['params']}: {asked['genesis']} says how large the model is; give one of the two")
    if "tensors" in asked and "params" not in asked:
        raise Refusal(f"{asked['tensors']}: goes with params, the model's size")
    if "genesis" in asked:
        layout, values = open_genesis(Path(asked["genesis"].text))
        fixed_bytes = values.fixed_bytes
    elif "params" in asked:
        params = _one(asked, "params")
        tensors = int(_one(asked, "tensors", fragments_wanted(params, config.sync.num_fragments)))
        if tensors > params:
            raise Refusal(f"{asked['params']}: fewer than the {counted(tensors, 'tensor')} they would be in")
        layout = layouts.even(params, tensors)
    else:
        layout = layouts.built_in(shape_of(config.model))
    if layout.param_count > RUN_PARAMS_MAX:
        raise Refusal(
            f"{layout.param_count:.3g} parameters: one syncer holds at most {RUN_PARAMS_MAX:.0e} "
            "(it has 12 bytes of each in memory)"
        )
    return layout, fixed_bytes


def _one(asked: dict[str, Word], name: str, default: float = math.nan) -> float:
    return _read(asked[name], ASKED[name].value) if name in asked else default


def _each(asked: dict[str, Word], name: str, count: int) -> list[float]:
    return _read(asked[name], lambda text: ASKED[name].values(text, count))


def _read(word: Word, read: Callable[[str], T]) -> T:
    try:
        return read(word.text)
    except ValueError as error:
        raise Refusal(f"{word}: {error}") from None


def _print_run(told: dict[str, Any]) -> None:
    console = Console()
    f, memory, disk = told["fragments"], told["memory"], told["disk"]
    console.print(
        f"{told['params']:,} parameters in {counted(told['tensors'], 'tensor')}, "
        f"{counted(told['learners'], 'learner')}, quorum {told['quorum']}; "
        f"{counted(f['count'], 'fragment')} of {f['smallest']:,} to {f['largest']:,}, the largest "
        f"{size(f['payload_bytes_up'])} up and {size(f['payload_bytes_down'])} down"
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
            size(phase["bytes_per_step_up"]),
            size(phase["bytes_per_step_down"]),
            f"{max(x['sync_steps'] for x in phase['learners']):.2f}",
            "all" if not late else f"[yellow]{told['learners'] - late} of {told['learners']}[/]",
        )
    console.print(table)
    table = _table("", "needed", "at worst")
    where = ("a learner's host", "a learner's device, without activations", "the syncer")
    for name, key in zip(where, ("learner_host", "learner_device", "syncer"), strict=True):
        table.add_row(f"memory, {name}", size(memory[key]["total"]), size(memory[key]["at_worst"]))
    table.add_row("disk, checkpoints", size(disk["files"]), "")
    table.add_row("disk, kept versions by the end", size(disk["kept"]), "")
    if disk["fixed"]:
        table.add_row("disk, what is not trained", size(disk["fixed"]), "")
    table.add_row("disk, journal at most", size(disk["journal"]), "")
    table.add_row("disk, grows in an hour", size(disk["grows_per_hour"]), "")
    table.add_row("disk, written in an hour", size(disk["written_per_hour"]), "")
    console.print(table)
    console.print(f"expected goodput {told['goodput']:.1%}; a quorum is there {told['quorum_share']:.2%} of the time")
    suggested = [f"--{key} {value}" for key, value in told["suggested"].items() if key != "why"]
    console.print("suggested: " + (" ".join(suggested) or "nothing, see the first warning"), soft_wrap=True)
    for line in told["suggested"].get("why", []):
        console.print(f"  {line}", soft_wrap=True)
    for line in told["warnings"]:
        console.print(f"[yellow]warning:[/] {line}", soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or name == "limit" else "right", no_wrap=True)
    return table
