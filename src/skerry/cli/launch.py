"""skerry launch: start a run and its islands from one file, on this machine, Ray, Slurm or Kubernetes.

On this machine it stays as their supervisor until the run has ended, and Ctrl-C ends all of it in order; with --detach
the supervisor stays in the background. On the other engines it returns when all is submitted. Give the folder that it
names to skerry ps, logs, scale and down.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skerry import cli
from skerry.cli import live, page, ps, voice
from skerry.cli.going_on import command_for
from skerry.core.state import state_of
from skerry.engines import NAMES, OVER, Engine, NotAsked, engine, folder, last_line_of, local, spec
from skerry.engines.supervisor import LocalRun
from skerry.errors import Refusal, RunFailed, printable
from skerry.python import module_argv
from skerry.run import provenance, summary
from skerry.run.room import check_elsewhere
from skerry.run.status import holders_of
from skerry.run.tally import tally
from skerry.store.files import appended
from skerry.store.lock import SUPERVISOR
from skerry.store.store import Store
from skerry.text import counted

UP_S = 180.0  # for a supervisor in the background to have a syncer that answers
POLL_S = 0.1
INTERRUPTED = 130
LOOK = "look at it: "
SUPERVISOR_LOG = Path("logs") / "supervisor.log"  # below the folder of the launch
BEFORE = ("logs", SUPERVISOR)  # what a launch makes there before it can be found


def run(words: Sequence[str]) -> int:
    options, overrides = cli.parse(parser(), words)
    launch = spec.read(options.file, overrides)
    where = engine(options.engine)
    root = options.run or Path("runs") / f"{launch.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if options.engine != "local":
        root = root.absolute()  # now: Ray may unpack a job's folder again, and this process is in what it was
    try:
        for problem in where.problems(launch):
            raise Refusal(f"{options.file}: {problem}")
    except NotAsked as error:
        if not options.dry_run:
            raise
        voice.say(f"what the cluster has was not looked at: {error}", "warning")
    check_folder(root, launch, options.engine, where)
    if options.dry_run:
        text = where.dry(launch, root)
        cli.tell({"engine": options.engine, "run": str(root), "would_start": text}, options.json, _show_dry)
        return 0
    if options.engine != "local":
        if options.detach:
            raise Refusal(f"--detach: what --engine {options.engine} starts stays there by itself: leave it out")
        if left := where.start(launch, root):
            cli.tell({"engine": options.engine, "run": str(root), "next": left}, options.json, _show_next)
            return 0
    else:
        record = local.record_of(launch, root)
        folder.made(root)
        folder.made(local.run_dir_of(record))
        _tell_scaled(record, launch)
        if not options.detach:
            return _supervise(launch, root, options)
        _detach(record, root, words)
    cli.tell(ps.looked(root) | {"page": _page_of(root) if options.detach else ""}, options.json, _show)
    return 0


def parser() -> cli.Parser:
    p = cli.Parser(
        prog="skerry launch",
        description=__doc__,
        epilog="Any key of the configuration is an option: --run.tokens 1e9 --sync.quorum 2",
    )
    p.add_argument("file", type=Path, metavar="FILE", help="TOML, with [syncer] and [[islands]] (docs/ENGINES.md)")
    p.add_argument("--engine", choices=NAMES, default="local", help="where (default: local, this machine)")
    p.add_argument("--run", type=Path, metavar="DIR", help="folder of the launch (default runs/NAME-TIME)")
    p.add_argument("--dry-run", action="store_true", help="print what would be started, and touch nothing")
    p.add_argument("--detach", action="store_true", help="of --engine local: return when the syncer answers")
    voice.add_log(p)
    page.add_options(p, page.ANY, "port of the live page; 0, which is the default: any that is free; off: no page")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return p


def check_folder(root: Path, launch: spec.Launch, name: str, where: Engine) -> None:
    """A folder that holds a launch is gone on with, if that is the same one and nothing of it is up."""
    folder.check_ours(root)
    if not (root / folder.LAUNCHED).exists():
        if root.exists() and (not root.is_dir() or any(path.name not in BEFORE for path in root.iterdir())):
            raise Refusal(f"--run {root}: is there already and holds no launch: choose another")
        check_elsewhere(root)
        return
    record = folder.read(root)
    if record.engine != name:
        raise Refusal(f"--run {root}: was launched with --engine {record.engine}: give that, or choose another folder")
    is_same = record.text == launch.text and [*map(tuple, record.overrides)] == [*launch.overrides]
    if not is_same and (name != "local" or local.has_begun(local.run_dir_of(record))):
        raise Refusal(f"--run {root}: holds {_other(record, launch, root)}, or choose another folder")
    if any(member.state not in OVER for member in where.members(record)):
        raise Refusal(f"--run {root}: it is up: skerry down {shlex.quote(str(root))} first")


def _other(record: folder.Record, launch: spec.Launch, root: Path) -> str:
    """A launch that is not the one asked for, and what goes on with it."""
    if record.file == str(launch.file) and record.text != launch.text:
        then = f"what it said then is the text in {root / folder.LAUNCHED}"
        return f"a launch of {record.file}, which says something else by now ({then}): let it say that again"
    what = f"a launch of {record.file or 'skerry train'} that says something else"
    return f"{what}: go on with {command_for(root)}"


def _tell_scaled(record: folder.Record, launch: spec.Launch) -> None:
    for island in launch.islands:
        if record.counts[island.name] != island.count:
            said = counted(record.counts[island.name], "learner")
            voice.say(f"{island.name}: {said}, as it was last scaled; the file says {island.count}", mark="")


# ---------------------------------------------------------------------------------------------- on this machine


def _supervise(launch: spec.Launch, root: Path, options: argparse.Namespace) -> int:
    """Until the run has ended; 130 if somebody ends it before."""
    listener = page.opened(options)
    form = ["--log", options.log]
    run = local.supervisor(launch, root, form, form)
    quiet = options.json and not sys.stderr.isatty()
    try:
        with run.supervising(), run.ends_everything():  # from here on skerry down finds it, and ends it in order
            provenance.note(run.run_dir, cli.command())
            cli.warm_up()  # compiled once, here, rather than by every child at the same time
            voice.say(f"{launch.name}: {_islands(launch)}; folder {root}", mark="")
            if listener is not None:
                voice.say(f"{LOOK}{page.told(options, listener)}", mark="")
            showing = live.telling() if options.log == "json" else live.showing(quiet)
            with page.beside(run.run_dir, options, listener), showing as show:
                run.supervise(lambda: show(run.status, run.news))
    except KeyboardInterrupt:
        go_on = command_for(root)
        voice.say(f"interrupted; go on with: {go_on}", mark="\nskerry: ")
        if options.json:
            cli.print_json({"error": "interrupted", "run": str(root), "go_on": go_on})
        return 130
    cli.tell(_finished(root, run), options.json, _show_end)
    return 0


def _finished(root: Path, run: LocalRun) -> dict[str, Any]:
    """What came of it, as far as any model can tell."""
    with Store.open(run.run_dir, readonly=True) as store:
        phase = state_of(store.records).phase
        numbers = summary.summarise(tally(store), run.status, [], run.speeds)
    run_dir = root if run.run_dir == root.absolute() else run.run_dir  # as it was typed
    go_on = f"skerry export {shlex.quote(str(run_dir))}" if phase == "closed" else command_for(root)
    return {**ps.looked(root), "run_dir": str(run_dir), "phase": phase, "go_on": go_on, **numbers}


def _show_end(r: dict[str, Any]) -> None:
    discarded = ", ".join(f"{n:,.0f} {why}" for why, n in r["tokens_discarded"].items()) or "none"
    rows = [
        ("tokens merged", f"{r['tokens_merged']:,.0f} of {r['tokens_produced']:,.0f} produced; discarded: {discarded}"),
        ("merges", f"{r['merges']:,} with {r['contributors_mean']:.2f} contributors on average"),
        ("recoveries", f"{r['learner_restarts']} learner, {r['syncer_restarts']} syncer"),
        ("run", r["run_dir"]),
        ("model" if r["phase"] == "closed" else "go on with", r["go_on"]),
    ]
    live.console_of_stdout().print(live.listed(rows))


def _islands(launch: spec.Launch) -> str:
    return ", ".join(f"{counted(island.count, 'learner')} of {island.name}" for island in launch.islands)


def _detach(record: folder.Record, root: Path, words: Sequence[str]) -> None:
    """The same command in the background, with its words in logs/supervisor.log; back when its syncer answers."""
    own = [word for word in words if word not in ("--detach", "--json")]
    log = root / SUPERVISOR_LOG
    folder.made(log.parent)
    with folder.writing(root), appended(log) as file:
        process = subprocess.Popen(
            module_argv("skerry", "launch", *own, "--run", str(root)),
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        _until_up(record, process, log)
    except KeyboardInterrupt:
        where = shlex.quote(str(root))
        look = f"look at it with skerry ps {where}, end it with skerry down {where}"
        raise _failed(f"interrupted; it goes on in the background: {look}", INTERRUPTED) from None


def _until_up(record: folder.Record, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + UP_S
    while not _is_up(record, process.pid):
        if (code := process.poll()) is not None:
            raise _failed(f"it ended: {last_line_of(log).removeprefix('skerry: ')} (log: {log})", code)
        if time.monotonic() > deadline:
            process.terminate()
            raise RunFailed(f"the syncer did not answer within {UP_S:.0f} s, and all of it was told to end: see {log}")
        time.sleep(POLL_S)


def _failed(text: str, code: int) -> RunFailed:
    """With this exit code, if it is one that tells of a failure: what can be done later is said by it."""
    failed = RunFailed(text)
    failed.code = code if code > 0 else RunFailed.code
    return failed


def _page_of(root: Path) -> str:
    """Where a supervisor in the background has its page, by its own last word on it."""
    lines = (root / SUPERVISOR_LOG).read_text(errors="replace").splitlines()
    return next((printable(line[len(LOOK) :]) for line in reversed(lines) if line.startswith(LOOK)), "")


def _is_up(record: folder.Record, supervisor: int) -> bool:
    """Whether this supervisor, and no other that was or is there, has a syncer that answers."""
    _, holder = holders_of(local.run_dir_of(record))
    if holder is None or holder.pid != supervisor:
        return False
    return any(member.name == "syncer" and member.state == "running" for member in local.members(record))


# ---------------------------------------------------------------------------------------------- for a person


def _show_dry(record: dict[str, Any]) -> None:
    print(record["would_start"])


def _show_next(record: dict[str, Any]) -> None:
    where = shlex.quote(record["run"])
    print(f"all is written down; begin it: {record['next']}\nthen look at it: skerry ps {where}")


def _show(record: dict[str, Any]) -> None:
    ps.show(record)
    where = shlex.quote(record["run"])
    page_line = f"{LOOK}{record['page']}\n" if record["page"] else ""
    print(f"\n{page_line}what there is of it: skerry ps {where}\nits end: skerry down {where}")
