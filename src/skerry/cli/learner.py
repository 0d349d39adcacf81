"""skerry learner: train as one learner of a run, dialling its syncer; the syncer says what to train."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

from skerry import cli
from skerry import config as configs
from skerry.cli import voice
from skerry.data.files import STDLIB
from skerry.errors import Refusal, RefusedError, one_line
from skerry.shell.address import parse_addresses
from skerry.shell.identity import check_private, identity
from skerry.shell.learner import STATES, fetch_config, join_timeout, node_kind, state_kind
from skerry.shell.signals import end_with, held_back, until_signalled
from skerry.text import Kind, count

MICRO_BATCH = Kind(count, 0, configs.most("learner.micro_batch"))
SWITCH_S = 0.001  # the node thread needs the GIL often and briefly beside the loop, and a round waits for it

log = logging.getLogger("skerry.learner")


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry learner", description=__doc__)
    parser.add_argument("--syncer", default=os.environ.get("SKERRY_SYNCER"), help="host:port (or SKERRY_SYNCER)")
    parser.add_argument("--name", help="who this is, also after a restart (or SKERRY_NAME; a key says it by itself)")
    cli.add_secrets(parser)
    parser.add_argument(
        "--join-timeout",
        metavar="SECONDS",
        help="give up if no syncer takes it in for so long (or SKERRY_JOIN_TIMEOUT_S; default: never, because a syncer "
        "that is late or being moved should not cost a service manager its learners)",
    )
    parser.add_argument("--speed", type=float, default=1.0, help="pace against learner.step_s; 0.5 is half as fast")
    parser.add_argument("--pace-file", type=Path, help="while it holds a number, train at that share of the pace")
    parser.add_argument(
        "--data",
        default=os.environ.get("SKERRY_DATA"),
        help=f"the data on this machine (or SKERRY_DATA): no syncer chooses what is read here; without it {STDLIB}, "
        "if that is what the run trains on",
    )
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.add_argument(
        "--node",
        choices=["process", "thread"],
        help="where all but the training itself happens (or SKERRY_NODE; default: process, where there can be one)",
    )
    parser.add_argument(
        "--state",
        choices=STATES,
        help='where its bases and open contributions are (or SKERRY_STATE; default: host); "device" takes a thread',
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--precision", choices=_choices("precision"), help="instead of the run's learner.precision")
    parser.add_argument("--compile", choices=_choices("compile"), help="instead of the run's learner.compile")
    parser.add_argument(
        "--micro-batch", type=cli.counting(MICRO_BATCH), metavar="N", help="instead of the run's learner.micro_batch"
    )
    parser.add_argument("--parent", type=int, default=0, help="end when this process is gone")
    voice.add_log(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options, overrides = cli.parse(parser, words)
    if node_kind(options.node) == "thread" or state_kind(options.state) != "host":
        sys.setswitchinterval(SWITCH_S)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: a learner's configuration comes from its syncer")
    if not options.syncer:
        raise Refusal("no syncer: give --syncer host:port or set SKERRY_SYNCER")
    if not 0.001 <= options.speed <= 1000:
        raise Refusal(f"--speed {options.speed}: must be from 0.001 to 1000")
    if not 1 <= options.threads <= 1024:
        raise Refusal(f"--threads {options.threads}: must be from 1 to 1024")
    cli.need("torch", "torch", "the built-in trainer")
    if state_kind(options.state) == "device":
        with held_back():
            from skerry.adapters.device import check_together

        check_together(options.state, options.node)
    who = identity(options.name, options.token_file, options.key_file, cli.flag)
    name = who.name
    voice.log_to_stderr(name)
    wanted = until_signalled(options.parent)
    end_with(options.parent)
    join_timeout_s = join_timeout(options.join_timeout, default_s=0.0)
    run_name = None
    (host, port), *others = addresses = parse_addresses(options.syncer)
    check_private(addresses, who.key_file, options.insecure, cli.flag)
    try:
        config = fetch_config(host, port, who.token, join_timeout_s, tuple(others), who.key_file)
        run_name = config.run.name
        _check_data(config, options)
        _train(configs.resolve(config, None, _own(options)), name, join_timeout_s, options, wanted)
    except KeyboardInterrupt:
        log.info("interrupted before it had joined; the same command tries again")
    except RefusedError as error:
        if error.why != "closed":
            raise
        log.info("%s", error)  # it came too late: nothing is left to do, and nothing is wrong
    if options.json:
        cli.print_json({"learner": name, "run": run_name})
    return 0


def _check_data(config: configs.Config, options: argparse.Namespace) -> None:
    """A syncer that chose the path would read this machine's files out through the model."""
    if options.data is None and config.data.path != STDLIB:
        said = one_line(repr(config.data.path))
        raise Refusal(
            f"the run trains on data.path = {said}, and what is read here is not the syncer's to choose: give --data "
            "PATH, where that data lies on this machine"
        )


def _choices(key: str) -> tuple[str, ...]:
    return get_args(get_type_hints(configs.Learner)[key])


def _own(options: argparse.Namespace) -> list[tuple[str, object]]:
    """What this machine has in its own way; everything else is the run's."""
    own = {
        "data.path": options.data,
        "learner.precision": options.precision,
        "learner.compile": options.compile,
        "learner.micro_batch": options.micro_batch,
    }
    return [(key, value) for key, value in own.items() if value is not None]


def _train(
    config: configs.Config,
    name: str,
    join_timeout_s: float,
    options: argparse.Namespace,
    wanted: Callable[[], bool],
) -> None:
    with held_back():
        import torch

        from skerry.train.device import device_of
        from skerry.train.loop import train

    torch.set_num_threads(options.threads)
    device = device_of(options.device)
    train(
        config,
        options.syncer,
        name,
        options.speed,
        options.token_file,
        options.key_file,
        join_timeout_s,
        device,
        options.pace_file,
        wanted,
        options.node,
        options.state,
    )
