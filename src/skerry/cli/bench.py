"""skerry bench: measure.

codec     how quickly numbers are made small and large again, against a plain copy of memory
join      how long a learner takes to get the whole model, and what memory that takes
learner   what attaching to a syncer costs a training loop (key `ratio`: attached tokens/s over plain tokens/s)
merge     how quickly contributions become the next version, stage by stage, without network and disk
start     how long a syncer takes to open its port, fresh and after a kill, and what memory and disk that takes
syncer    what a syncer carries: merges/s, who is in them, CPU, delays and memory under synthetic learners
wire      what frames cost: CPU of both sides for payloads over loopback, against bare sockets
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from skerry import cli
from skerry import config as configs
from skerry.cli import bench_kernels, bench_processes
from skerry.cli.bench_tables import PARAMETERS, bytes_text, refuse_overrides, tell
from skerry.errors import Refusal
from skerry.shell.learner import STATES
from skerry.text import Kind, count, counted, mbit_per_s, milliseconds, number, seconds, size
from skerry.train.shapes import SHAPES

if TYPE_CHECKING:
    from skerry.proof.bench.floods import Found
    from skerry.proof.bench.join import Joined
    from skerry.proof.bench.learner import Attached
    from skerry.proof.bench.syncer import Load, Measured, Spread
    from skerry.proof.bench.viewers import Found as Viewed

LEARNERS = Kind(count, 1, configs.most("run.learners"))
STEP_S = Kind(seconds, 1e-3, 3600)
STEPS_PER_S = Kind(number, 1 / STEP_S.high, 1 / STEP_S.low)
EVERY = Kind(count, 1, configs.most("sync.sync_every"))
FRAGMENTS = Kind(count, 1, configs.most("sync.num_fragments"))
SECONDS = Kind(seconds, 0.5, 3600)
CORES = Kind(count, 0, 4096)
BATCH = Kind(count, 1, configs.most("data.batch"))
STEPS = Kind(count, 1, 1e6)
PAIRS = Kind(count, 1, 1e4)
RANKS = Kind(count, 2, 64)
VIEWERS = Kind(count, 1, 64)  # as many as a page lets in
ROUND_TRIP = Kind(milliseconds, 0, 60, "0 to 60 s")
RATE = Kind(mbit_per_s, 1e3, 1e12, "1kbit to 1Tbit")
OPTION_OF = {"run.learners": "--learners", "sync.sync_every": "--every", "sync.num_fragments": "--fragments"}
FEW_STEPS = 0.95  # of the steps asked for: with fewer the learners' own process is what is measured
MUCH_MISSED = 0.1  # of a core: with more the other work of this machine is measured too


def run(words: Sequence[str]) -> int:
    if words and words[0] in SUBJECTS:
        return SUBJECTS[words[0]](words[1:])
    parser = cli.Parser(prog="skerry bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=sorted(SUBJECTS))
    parser.parse_args(list(words))
    raise AssertionError(words)


# ---------------------------------------------------------------------------------------------- learner


def _learner(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry bench learner", description="What attaching to a syncer costs a training loop.")
    parser.add_argument("--model", choices=list(SHAPES), default="1m")
    parser.add_argument("--batch", type=cli.counting(BATCH), default=4)
    parser.add_argument("--device", default="cpu", help="torch device of the loop")
    parser.add_argument("--steps", type=cli.counting(STEPS), default=25, help="steps in one stretch")
    parser.add_argument(
        "--pairs", type=cli.counting(PAIRS), default=15, help="plain and attached stretches, in alternation"
    )
    parser.add_argument("--node", choices=["process", "thread"], help="where the learner's node runs (or SKERRY_NODE)")
    parser.add_argument("--state", choices=STATES, help="where the learner's state is (or SKERRY_STATE)")
    parser.add_argument("--island", choices=["ddp", "fsdp"], default="", help="several processes as one learner")
    parser.add_argument("--ranks", type=cli.counting(RANKS), default=0, help="how many (2)")
    parser.add_argument(
        "--cores", type=cli.typed(CORES), default=0, metavar="C", help="for the loop alone (0: all share all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    refuse_overrides(overrides)
    if options.ranks and not options.island:
        raise Refusal(f"--ranks {options.ranks}: it is how many processes an --island has, two or more")
    if options.island and options.device != "cpu":
        raise Refusal(f"--device {options.device}: an --island is measured on the CPU, with gloo")
    if options.island and options.cores:
        raise Refusal(f"--cores {options.cores:g}: it is for a learner of one process, not for an --island")
    cli.need("torch", "torch", "skerry bench learner")
    from skerry.proof.bench.learner import measure

    where = (options.device, options.node, options.state)
    ranks = (options.ranks or 2) if options.island else 1
    sizes = (options.model, options.steps, options.pairs, options.batch)
    found = measure(*sizes, *where, options.island, ranks, int(options.cores))
    cli.tell(found, options.json, _show_attached)
    return 0


def _show_attached(found: Attached) -> None:
    alone = f", {counted(found.cores, 'core')} for the loop alone" if found.cores else ""
    print(
        f"attached / plain: {found.ratio:.3f} (from {found.ratio_min:.3f} to {found.ratio_max:.3f} over "
        f"{found.pairs} pairs of {found.steps} steps, node in a {found.node}, state on the {found.state}{alone})\n"
        f"plain {found.plain_tokens_per_s:,.0f} tokens/s, attached {found.attached_tokens_per_s:,.0f}; "
        f"{found.merges} merges meanwhile"
    )
    if found.island:
        print(f"an island of {found.ranks} processes ({found.island}); times are those of rank 0")
    rows = (("plain", found.plain_step), ("attached", found.attached_step), ("its boundary", found.boundary))
    for name, step in rows:
        times = [f"{1e3 * s:.2f}" for s in (step.p50_s, step.p99_s, step.p999_s, step.max_s)]
        print(f"ms of a step, {name}: p50 {times[0]}, p99 {times[1]}, p99.9 {times[2]}, longest {times[3]}")
    print(
        f"trainer's memory: {bytes_text(found.trainer_plain_bytes)} plain, "
        f"{bytes_text(found.trainer_attached_bytes)} attached; "
        f"node process: {bytes_text(found.node_peak_bytes)} at most"
    )


# ---------------------------------------------------------------------------------------------- join


def _join(words: Sequence[str]) -> int:
    parser = cli.Parser(
        prog="skerry bench join",
        description="A real learner without a training loop gets a model of random numbers from a real syncer process. "
        "Dotted overrides (--sync.num_fragments 48) change the run's configuration. The run lies in the folder for "
        "temporary files (TMPDIR) and takes 4 bytes a parameter there.",
    )
    add = parser.add_argument
    add("--parameters", type=cli.counting(PARAMETERS), default="20M", metavar="N", help="of the model (%(default)s)")
    add("--rtt", type=cli.typed(ROUND_TRIP), default=0.0, metavar="MS", help="round trip of the link, through a proxy")
    add("--rate", type=cli.typed(RATE), default=0.0, metavar="MBIT", help="of the link each way, through a proxy")
    add("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    from skerry.proof.bench.join import Link, measure

    link = Link(options.rtt, options.rate)
    joined = measure(options.parameters, link, overrides, tell)
    cli.tell(joined, options.json, lambda found: print(_joined(found)))
    return 0


def _joined(found: Joined) -> str:
    needed = "" if found.needed_s is None else f"; the link needs {found.needed_s:.1f} s for the bytes"
    before, peak = found.syncer_before_bytes, found.syncer_peak_bytes
    more = None if before is None or peak is None else max(peak - before, 0)
    return (
        f"joined in {found.joined_s:.1f} s: {size(found.model_bytes)}, "
        f"{size(found.model_bytes / found.joined_s)} a second{needed}\n"
        f"syncer's memory: {bytes_text(before)} before the learner came, of which the model's values are "
        f"{size(found.model_bytes)}; at most {bytes_text(more)} more while it joined (no more than "
        f"{size(found.window_bytes)} of them are on the way at a time)\n"
        f"learner's memory: {bytes_text(found.learner_peak_bytes)} at most"
    )


# ---------------------------------------------------------------------------------------------- syncer


def _syncer(words: Sequence[str]) -> int:
    parser = cli.Parser(
        prog="skerry bench syncer",
        description="A real syncer process under synthetic learners over real sockets; they have no model and answer "
        "at their step boundaries. Dotted overrides (--merge.threads 2) change the run's configuration. The run "
        "lies in the folder for temporary files (TMPDIR).",
    )
    add = parser.add_argument
    add("--learners", type=cli.counting(LEARNERS), metavar="M", help="how many (default 8)")
    add("--step-s", type=cli.typed(STEP_S), metavar="S", help="seconds a step of each takes (default 0.07)")
    add("--rows", type=_rows, metavar="MxR,…", help="several loads instead, as learners x steps/s: 64x5,64x10,384x1")
    add("--every", type=cli.counting(EVERY), default=24, metavar="H", help="steps between two syncs of a fragment (24)")
    add("--parameters", type=cli.listed(PARAMETERS), default="1.3M", metavar="N,…", help="of the model (%(default)s)")
    add("--fragments", type=cli.counting(FRAGMENTS), default=24, metavar="P", help="that they are spread over (24)")
    add("--seconds", type=cli.typed(SECONDS), default=20.0, metavar="S", help="measured, after the first H steps (20)")
    add("--cores", type=cli.counting(CORES), default=0, metavar="C", help="for the syncer alone (0: all share all)")
    add("--tls", action="store_true", help="every learner has a key of its own, and all goes through TLS 1.3")
    add("--hostile", type=cli.counting(LEARNERS), metavar="N", help="so many others flood it, one kind after the other")
    add(
        "--viewers",
        type=cli.counting(VIEWERS),
        metavar="N",
        help="so many pages of the run are open, and none, in turn",
    )
    add("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    for key, _ in overrides:
        if key in OPTION_OF:
            raise Refusal(f"--{key}: say {OPTION_OF[key]}")
    from skerry.proof.bench.cores import can_pin
    from skerry.proof.bench.syncer import measure, prepared

    if options.hostile:
        return _floods(options, overrides)
    if options.viewers:
        return _viewers(options, overrides)
    jobs = [prepared(load, overrides) for load in _loads(options)]
    if options.cores and not can_pin():
        print("skerry: this system pins no process to cores: syncer and learners share all", file=sys.stderr)
    rows = [measure(job, _teller(job.load)) for job in jobs]
    cli.tell({"rows": rows}, options.json, lambda found: _show(found["rows"]))
    return 0


def _floods(options: argparse.Namespace, overrides: Sequence[tuple[str, Any]]) -> int:
    loads = _loads(options)
    if len(loads) > 1:
        raise Refusal("--hostile: is measured beside one load: leave --rows out, and give one number of --parameters")
    from skerry.proof.bench.floods import measure
    from skerry.proof.bench.syncer import prepared

    found = measure(prepared(loads[0], overrides, options.hostile), options.hostile, _teller(loads[0]))
    cli.tell(found, options.json, _show_floods)
    return 0


def _viewers(options: argparse.Namespace, overrides: Sequence[tuple[str, Any]]) -> int:
    loads = _loads(options)
    if len(loads) > 1:
        raise Refusal("--viewers: is measured beside one load: leave --rows out, and give one number of --parameters")
    from skerry.proof.bench.syncer import prepared
    from skerry.proof.bench.viewers import measure

    found = measure(prepared(loads[0], overrides), options.viewers, _teller(loads[0]))
    cli.tell(found, options.json, _show_viewers)
    return 0


def _show_viewers(found: Viewed) -> None:
    print(
        f"{found.learners} learners, {found.parameters / 1e6:g}M parameters, {found.merges_per_s_asked:.3g} merges/s "
        f"asked; stretches of {found.seconds:g} s on {found.cores} cores, load {found.load_average:.1f} before"
    )
    table = Table(box=None, pad_edge=False)
    spreads = ("a turn, ms, p50", "p99", "quorum to publication, ms, p50", "p99")
    for name in ("", "merges/s", "syncer's CPU, cores", "its deciding thread", *spreads):
        table.add_column(name, justify="right" if name else "left")
    for what, stretches in (("nobody looks", found.alone), (f"{found.viewers} viewers", found.watched)):
        table.add_row(
            what,
            ", ".join(f"{each.merges_per_s:.1f}" for each in stretches),
            ", ".join(_number(each.cpu, ".3f") for each in stretches),
            ", ".join(_number(each.cpu_deciding, ".3f") for each in stretches),
            *(", ".join(_milliseconds(each.turn_s, p, ".2f") for each in stretches) for p in ("p50", "p99")),
            *(", ".join(_milliseconds(each.quorum_to_publication_s, p) for each in stretches) for p in ("p50", "p99")),
        )
    Console().print(table)


def _show_floods(found: Found) -> None:
    print(
        f"{found.learners} learners, {found.hostile} hostile, {found.parameters / 1e6:g}M parameters in "
        f"{found.fragments} fragments, {found.merges_per_s_asked:.3g} merges/s asked; stretches of {found.seconds:g} s "
        f"on {found.cores} cores, load {found.load_average:.1f} before"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("flood", "ratio", "merges/s calm", "flooded", "sockets' CPU calm", "flooded", "memory", "links lost"):
        table.add_column(name, justify="left" if name == "flood" else "right")
    for row in found.kinds:
        table.add_row(
            row.kind,
            _number(row.ratio, ".3f"),
            ", ".join(f"{each.merges_per_s:.1f}" for each in row.calm),
            ", ".join(f"{each.merges_per_s:.1f}" for each in row.flooded),
            ", ".join(_number(each.sockets_cpu, ".2f") for each in row.calm),
            ", ".join(_number(each.sockets_cpu, ".2f") for each in row.flooded),
            bytes_text(max((each.rss_bytes or 0 for each in row.flooded), default=None)),
            str(row.links_lost),
        )
    Console().print(table)


def _rows(text: str) -> list[tuple[int, float]]:
    """64x5,384x1: learners and the seconds of a step."""
    rows = []
    for row in text.split(","):
        learners, times, steps_per_s = row.partition("x")
        if not times:
            raise argparse.ArgumentTypeError(f"{row!r} is not learners x steps/s, like 64x5")
        rows.append((cli.counting(LEARNERS)(learners), 1 / cli.typed(STEPS_PER_S)(steps_per_s)))
    return rows


def _loads(options: argparse.Namespace) -> list[Load]:
    from skerry.proof.bench.syncer import Load

    if options.rows and (options.learners or options.step_s):
        raise Refusal("--rows: says the learners and their steps, so --learners and --step-s have no place beside it")
    if (least := min(options.parameters)) < options.fragments:
        raise Refusal(f"--parameters {least}: fewer than the {options.fragments} fragments they are spread over")
    return [
        Load(
            learners, step_s, options.every, options.fragments, parameters, options.seconds, options.cores, options.tls
        )
        for learners, step_s in options.rows or [(options.learners or 8, options.step_s or 0.07)]
        for parameters in options.parameters
    ]


def _name(load: Load) -> str:
    return f"{load.learners} x {1 / load.step_s:.3g}/s, {load.parameters / 1e6:g}M"


def _teller(load: Load) -> Callable[[str], None]:
    """Progress, a line now and then."""
    return lambda text: tell(f"{_name(load)}: {text}")


def _show(rows: Sequence[Measured]) -> None:
    """A column for each load: there are few of them, and much to say of each."""
    table = Table(box=None, pad_edge=False)
    table.add_column("learners x steps, parameters")
    for row in rows:
        table.add_column(_name(row.load), justify="right")
    for lines in zip(*(_cells(row) for row in rows), strict=True):
        table.add_row(lines[0][0], *(value for _, value in lines))
    Console().print(table)
    for row in rows:
        for line in _remarks(row):
            print(f"{_name(row.load)}: {line}")


def _cells(row: Measured) -> list[tuple[str, str]]:
    return [
        ("merges/s", f"{row.merges_per_s:.3g}"),
        ("  asked", f"{row.merges_per_s_asked:.3g}"),
        ("merged parameters/s, M", f"{row.merged_parameters_per_s / 1e6:.3g}"),
        ("learners in a merge", _number(row.contributors_mean, ".2f")),
        ("steps a contribution spans", _number(row.span_steps_mean, ".1f")),
        ("gain", _number(row.gain_mean, ".2f")),
        ("quorum to publication, ms, p50", _milliseconds(row.quorum_to_publication_s, "p50")),
        ("  p99", _milliseconds(row.quorum_to_publication_s, "p99")),
        ("own contribution to its version, ms, p50", _milliseconds(row.sent_to_settled_s, "p50")),
        ("  p99", _milliseconds(row.sent_to_settled_s, "p99")),
        ("syncer's CPU, cores", _number(row.cpu, ".2f")),
        ("  its deciding thread", _number(row.cpu_deciding, ".2f")),
        ("  missed, as others ran", _number(row.cpu_missed, ".2f")),
        ("  ms a merge", _number(row.cpu_ms_per_merge, ".1f")),
        ("  ns a merged parameter", _number(row.cpu_ns_per_parameter, ".1f")),
        ("    of a plain copy's pace", _number(row.of_bandwidth, ".2f")),
        ("    sockets beside it", _number(row.sockets_ns_per_parameter, ".1f")),
        ("bytes written a merged parameter", _number(row.bytes_written_per_parameter, ".2f")),
        ("fsyncs/s of the tape", f"{row.fsyncs_per_s:.3g}"),
        ("  merges in one", _number(row.merges_per_fsync, ".2f")),
        ("oldest status, s", f"{row.status_age_s_max:.1f}"),
        ("SIGTERM to its end, s", _number(row.sigterm_s, ".1f")),
        ("syncer's memory, peak", bytes_text(row.memory_peak_bytes)),
        ("  bytes a parameter, at the end", _number(row.rss_bytes_per_parameter, ".1f")),
        ("  without learners", bytes_text(row.memory_idle_bytes)),
        ("  values and deltas", bytes_text(row.memory_state_bytes)),
    ]


def _remarks(row: Measured) -> list[str]:
    """What does not fit into a row, or should not be overlooked."""
    lines = []
    if row.cpu_by_thread is not None:
        threads = ", ".join(f"{name} {share:.2f}" for name, share in row.cpu_by_thread.items() if share >= 0.005)
        lines.append(f"cores by thread: {threads or 'next to nothing'}")
    if row.joined < row.load.learners:
        lines.append(
            f"only {row.joined} of {row.load.learners} learners were given the model, within {row.joined_s:.0f} s"
        )
    elif row.steps_per_s < FEW_STEPS * row.steps_per_s_asked:
        lines.append(
            f"the learners took {row.steps_per_s:.0f} of {row.steps_per_s_asked:.0f} steps/s: "
            "this machine is too small for both sides of this load"
        )
    if row.cpu_missed is not None and row.cpu_missed > MUCH_MISSED:
        lines.append(f"its threads waited {row.cpu_missed:.2f} s in each second for a core that others had")
    if row.fast_forwards or row.links_lost or row.refused:
        refused = ", ".join(f"{n} {reason}" for reason, n in row.refused.items()) or "none"
        lines.append(
            f"fast-forwards {row.fast_forwards}, links lost {row.links_lost}, contributions refused: {refused}"
        )
    return lines


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _milliseconds(spread: Spread | None, which: str, form: str = ".0f") -> str:
    return "–" if spread is None else format(1e3 * getattr(spread, which), form)


SUBJECTS = {
    "codec": bench_kernels.run_codec,
    "join": _join,
    "learner": _learner,
    "merge": bench_kernels.run_merge,
    "start": bench_processes.run_start,
    "syncer": _syncer,
    "wire": bench_processes.run_wire,
}
