"""skerry dashboard: the live page of a run, also of one that is paused or finished. It is for looking only."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from skerry import cli
from skerry.cli import page, voice
from skerry.errors import Refusal

NICE = 10  # what trains and merges on this machine goes first


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry dashboard", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run directory")
    page.add_options(parser, page.ANY, "port of the page; 0, which is the default: any that is free")
    parser.add_argument("--listener", type=int, help="a socket that this process was started with, to serve on")
    parser.add_argument("--parent", type=int, default=0, help="end when this process is gone")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    if not (options.run / "tape").is_dir() and not options.parent:
        raise Refusal(f"{options.run}: is no run directory: check the path")
    if options.http_port == page.OFF:
        raise Refusal("--http-port off: there is nothing else that this command does: leave it out")
    token = page.token_of(options)
    listener = socket.socket(fileno=options.listener) if options.listener is not None else page.opened(options)
    assert listener is not None
    voice.log_to_stderr("page")
    from skerry.page.server import serve  # a web server's libraries, which no other command needs

    address = page.told(options, listener)
    if options.parent:
        os.nice(NICE)
    else:
        print(f"skerry: {options.run} is shown at {address}; end with Ctrl-C", file=sys.stderr)
    serve(options.run, listener, token, page.is_local(options), options.parent)
    if options.json:
        cli.print_json({"run_dir": str(options.run), "address": address})
    return 0
