"""skerry syncer: serve a run directory to learners anywhere."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skerry import cli
from skerry import config as configs
from skerry.algo import fragments
from skerry.algo.contents import decode_contents
from skerry.algo.fragments import decode_layout
from skerry.cli import live, page, voice
from skerry.core.state import RunState, state_of
from skerry.errors import FileDamaged, ProtocolError, Refusal
from skerry.plan import layouts
from skerry.python import code_argv
from skerry.run import last_words, provenance, repair, room
from skerry.run.facts import fragments_of
from skerry.run.genesis import GENESIS, GenesisFile, create_run, is_from, open_genesis, read_genesis
from skerry.run.holding import when_free
from skerry.run.keys import BOOK, KEYS, Keys
from skerry.shell.address import PORT, is_loopback
from skerry.shell.identity import read_token
from skerry.shell.repair import make_whole
from skerry.shell.signals import until_signalled
from skerry.shell.syncer import SyncerShell
from skerry.store.store import Store, check_unused
from skerry.train.shapes import resolved, shape_of
from skerry.train.start import check_room
from skerry.wire.server import Server
from skerry.wire.transport import Inbox

First = tuple[configs.Config, fragments.Layout, GenesisFile]
Overrides = list[tuple[str, Any]]
DIFFERENCES_SHOWN = 3

log = logging.getLogger("skerry.syncer")


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(
        prog="skerry syncer",
        description=__doc__,
        epilog="Any key of the configuration is an option: --run.tokens 1e9 --sync.quorum 2",
    )
    parser.add_argument(
        "--run", type=Path, required=True, metavar="DIR", help="the run directory; resumed if it holds a run"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve; beyond this machine learners need keys (skerry keys issue)",
    )
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--keys", action="store_true", help="ask for keys on this machine too")
    parser.add_argument(
        "--insecure", action="store_true", help="beyond this machine a token instead of keys, and nothing is encrypted"
    )
    parser.add_argument("--token-file", metavar="FILE", help="the shared secret that learners must know, without keys")
    parser.add_argument(
        "--genesis", type=Path, help="safetensors with the first values (default: the built-in GPT, seeded)"
    )
    parser.add_argument("--config", type=Path, help="TOML file")
    cli.add_preset(parser, None)
    parser.add_argument(
        "--repair",
        nargs="?",
        const="same",
        choices=["same", "previous"],
        help="restore damaged fragments first: the same version from records or a learner, or go on from the previous",
    )
    page.add_options(parser, page.OFF, "serve the live page there; 0: any port that is free (default: off)")
    parser.add_argument("--parent", type=int, default=0, help="end when this process is gone")
    voice.add_log(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options, overrides = cli.parse(parser, words)
    if not 0 <= options.port < 65536:
        raise Refusal(f"--port {options.port}: must be from 0 to 65535")
    voice.log_to_stderr("syncer")
    uses_keys = _uses_keys(options)
    token = read_token(options.token_file) if options.token_file else None
    keys = Keys(options.run) if uses_keys else None
    if keys is not None:
        keys.check()
    port = _check_address(options, secrets.token_bytes() if uses_keys else token, options.insecure or uses_keys)
    listener = page.opened(options)
    wanted = until_signalled(options.parent)
    store = open_run(options, overrides)
    if options.repair:
        options.port = port  # learners dial again where they were asked for their copies
        store = _repaired(store, options, token, keys, wanted)
    with store:
        provenance.note(options.run, cli.command())
        if os.stat(options.run).st_mode & stat.S_IWOTH:
            voice.say(f"{options.run}: every user of this machine may write there: chmod o-w it", "warning")
        if (state := state_of(store.records)).phase == "closed":
            return _tell_end("closed", state, options)  # a service manager that starts it again hears that all is well
        try:
            cli.warm_up()  # before anybody can connect: where nothing is compiled yet it takes a while
        except KeyboardInterrupt:
            return _tell_end("interrupted", state, options)
        shell = _shell(store, options, token, keys)
        state = shell.node.machine.state
        stage = f"goes on after {state.merges} merges" if state.merges else "no merge yet"
        voice.say(f"serving {options.run} on {shell.server.address} ({stage})")
        if uses_keys:
            voice.say(f"learners need keys: skerry keys issue {shlex.quote(str(options.run))} NAME")
        elif os.path.exists(options.run / KEYS / BOOK):
            voice.say(f"its keys are not asked for on {options.host}: --keys does, as learners elsewhere need them")
        elif options.insecure:
            voice.say(f"nothing is encrypted: whoever can listen to {options.host} reads all", "warning")
        if listener is not None:
            voice.say(f"look at it: {page.told(options, listener)}")
        with page.beside(options.run, options, listener):
            reason = shell.run(wanted)
    return _tell_end(reason, state, options)


def _tell_end(reason: str, state: RunState, options: argparse.Namespace) -> int:
    voice.say(_last_line(reason, state, options.run))
    if options.json:
        cli.print_json({"ended": reason, "phase": state.phase, "merges": state.merges, "run_dir": str(options.run)})
    return 0


def _last_line(reason: str, state: RunState, root: Path) -> str:
    """How it ended, and what an operator does next."""
    if reason == "closed":
        return f"the run is closed after {state.merges} merges; its model: skerry export {root}"
    return f"interrupted after {state.merges} merges; the same command goes on from there"


def _uses_keys(options: argparse.Namespace) -> bool:
    """Beyond this machine always, unless somebody says in words that nothing is to be encrypted."""
    if options.keys and options.insecure:
        raise Refusal("--keys and --insecure: give one of them")
    uses_keys = options.keys or not (options.insecure or is_loopback(options.host))
    if uses_keys and options.token_file:
        raise Refusal(
            f"--token-file {options.token_file}: learners that dial {options.host} have keys, and need no token: leave "
            "it out, or add --insecure to go without encryption, as inside a VPN"
        )
    return bool(uses_keys)


def _shell(store: Store, options: argparse.Namespace, token: bytes | None, keys: Keys | None) -> SyncerShell:
    try:
        return SyncerShell(store, options.host, options.port, token, keys, options.insecure)
    except FileDamaged:
        state = state_of(store.records)
        raise Refusal(repair.explain(store, state, repair.damaged(store, state), genesis=options.genesis)) from None


def _repaired(
    store: Store, options: argparse.Namespace, token: bytes | None, keys: Keys | None, wanted: Callable[[], bool]
) -> Store:
    """The same run with every fragment whole, opened anew so that it begins with what the repair wrote."""
    with store:
        cli.warm_up()  # merges may have to be done again
        listen = (options.host, options.port, token)
        genesis = options.genesis or options.run / GENESIS
        if not make_whole(store, listen, options.repair == "previous", wanted, genesis, keys, options.insecure):
            raise KeyboardInterrupt
    return opened(options.run)


def _check_address(options: argparse.Namespace, token: bytes | None, insecure: bool) -> int:
    """Refuse what cannot be served before a run is created or its next epoch written; the port it would be."""
    server = Server(options.host, options.port, token, Inbox(1), _no_payload, insecure=insecure)
    server.close()
    return server.port


def _no_payload(message: object) -> int:
    raise ProtocolError(f"{type(message).__name__} before the run is open")


def opened(root: Path) -> Store:
    """To be written; who holds it for a moment, like an order that came just now, is waited for."""
    return when_free(root, lambda: Store.open(root), voice.say)


def open_run(options: argparse.Namespace, overrides: Overrides) -> Store:
    """The run in this directory, created if it holds none; bad input is refused before anything is written."""
    _check_whole(options.run)
    if options.repair and not os.path.isdir(options.run / "tape"):
        raise Refusal(f"--repair: {options.run} holds no run: check the path")
    first = None if os.path.isdir(options.run / "tape") else _first(options, overrides)
    store = opened(options.run)
    try:
        if store.records:
            _check_resume(store, options, overrides)
            return store
        with live.counting(f"creating {options.run}", quiet=False, of="fragments") as show:
            create_run(store, *(first or _first(options, overrides)), show)
    except BaseException:
        store.close()
        raise
    store.close()
    return opened(options.run)


def _check_whole(root: Path) -> None:
    """A tape that was cut off is not gone on with, and not even opened for writing, which would cut it clean."""
    if not os.path.isdir(root / "tape"):
        if lost := last_words.lost_tape(root):
            raise Refusal(lost)
        return
    when_free(root, lambda: check_unused(root), voice.say)
    with Store.open(root, readonly=True) as store:
        cut = last_words.cut_off(store, last_words.state_in(store) if store.records else None)
    if cut:
        raise Refusal(cut)


def _check_resume(store: Store, options: argparse.Namespace, overrides: Overrides) -> None:
    """The command that began a run goes on with it, so that a service manager need not know which it does."""
    state = state_of(store.records)
    config = configs.decode(state.config)
    _check_config(store.root, config, configs.decode(state.created.config), options, overrides)
    room.check(store.root, config, fragments_of(state.created), is_new=False)
    if options.genesis is not None and not options.genesis.exists():
        log.warning("%s is gone; that does no harm, the run has its own values", options.genesis)
    elif options.genesis is not None:
        layout = decode_layout(state.created.layout)
        given, values = open_genesis(options.genesis)
        frozen = (values.contents.frozen, decode_contents(state.created.contents).frozen)
        difference = fragments.first_difference(given, layout, *frozen)
        if difference:
            where = f"(here: {options.genesis}, there: the run)"
            raise Refusal(f"{store.root}: holds a run of another model: {difference} {where}")
        if not is_from(options.genesis, layout, state.created):
            log.warning("%s has other values than the run began with; the run goes on with its own", options.genesis)


def _check_config(
    root: Path,
    recorded: configs.Config,
    first: configs.Config,
    options: argparse.Namespace,
    overrides: Overrides,
) -> None:
    """Refuse what is said and differs from the run's own configuration; what is not said may have a new default.

    What an order has changed since may also be said as it was at `first`: the command that began the run still says so.
    """
    base = _base(options)
    given = configs.resolve(base, options.config, overrides)
    said = configs.said(base, options.config, overrides)
    ordered = {key for key, *_ in configs.changes(first, recorded)}
    as_it_was = [key for key in said if key in ordered and not configs.differences(given, first, [key])]
    differences = configs.differences(given, recorded, [key for key in said if key not in as_it_was])
    for line in configs.differences(given, recorded, as_it_was):
        log.info("%s, which an order has changed since the run began", line)
    if differences:
        more = len(differences) - DIFFERENCES_SHOWN
        shown = ", ".join(differences[:DIFFERENCES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        advice = "leave out what differs, or give --run a fresh directory"
        raise Refusal(f"{root}: holds a run, which goes on with its own configuration: {shown}: {advice}")


def _base(options: argparse.Namespace) -> configs.Config:
    return configs.PRESETS[options.preset or "default"]()


def _first(options: argparse.Namespace, overrides: Overrides) -> First:
    """The configuration, layout and first values of a new run."""
    config = configs.validate(resolved(_base(options), options.config, overrides))
    shape = shape_of(config.model)
    if options.genesis is not None:
        return _that_fits(options.run, config, options.genesis)
    cli.need("torch", "torch", "the built-in model, without --genesis FILE")
    layout = layouts.built_in(shape)
    check_room(options.run, config, layout, made_in=Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory() as folder:
        voice.tell_making(layout.param_count)
        made = Path(folder) / "genesis.safetensors"
        make_genesis(config, made)
        return config, *read_genesis(made)


def _that_fits(root: Path, config: configs.Config, genesis: Path) -> First:
    """Refused before a value is read if this machine cannot hold it."""
    layout, values = open_genesis(genesis)
    split = fragments.split(layout, config.sync.num_fragments, config.sync.cut_tensors)
    room.check(root, config, split, is_new=True, fixed_bytes=values.fixed_bytes)
    values.check()
    return config, layout, values


def make_genesis(config: configs.Config, path: Path) -> None:
    """Initialise the built-in model in a process of its own, because this one never loads torch."""
    code = (
        "import sys; from skerry import config, save_genesis; from skerry.train.loop import model_of;"
        "save_genesis(model_of(config.decode(sys.stdin.buffer.read())), sys.argv[1])"
    )
    done = subprocess.run(code_argv(code, str(path)), input=configs.encode(config), capture_output=True, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise Refusal(f"the built-in model could not be made ({' '.join(last)}): give --genesis FILE")
