"""The page's options, which several commands have, and the page itself beside what such a command does."""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from skerry import cli
from skerry.errors import Refusal
from skerry.shell.address import is_loopback
from skerry.shell.identity import read_token
from skerry.shell.page import LOOPBACK, Beside, address_of, listening

OFF = "off"
ANY = "0"
LOG = Path("logs") / "page.log"  # below the run directory


def add_options(parser: cli.Parser, default: str, why: str) -> None:
    parser.add_argument("--http-port", default=default, metavar="PORT", help=why)
    parser.add_argument(
        "--http-host", default=LOOPBACK, metavar="HOST",
        help="address to serve the page on; beyond this machine it needs --http-token-file",
    )  # fmt: skip
    parser.add_argument("--http-token-file", metavar="FILE", help="the secret that who looks at the page must know")


def is_local(options: argparse.Namespace) -> bool:
    return is_loopback(options.http_host)


def token_of(options: argparse.Namespace) -> bytes | None:
    """The secret of the page; refused if it needs one and has none."""
    if options.http_token_file:
        return read_token(options.http_token_file)
    if not is_local(options):
        raise Refusal(
            f"--http-host {options.http_host}: beyond this machine the page needs a token: make one with openssl rand "
            "-hex 32 > page.token; chmod 600 page.token, and give --http-token-file page.token; or leave --http-host "
            "out and reach the page through ssh -L"
        )
    return None


def opened(options: argparse.Namespace) -> socket.socket | None:
    """The socket of the page that these options ask for, if they do; everything about them is refused here."""
    if options.http_port == OFF:
        return None
    text = options.http_port
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port < 65536:
        raise Refusal(f"--http-port {text}: must be from 0 to 65535 (0: any that is free), or off")
    token_of(options)
    return listening(options.http_host, port)


@contextlib.contextmanager
def beside(root: Path, options: argparse.Namespace, listener: socket.socket | None) -> Iterator[None]:
    """The page of the run in `root`, in a process of its own, until this ends."""
    if listener is None:
        yield
        return
    words = ["--http-host", options.http_host]
    words += ["--http-token-file", str(Path(options.http_token_file).absolute())] if options.http_token_file else []
    with Beside(root, listener, words, root / LOG):
        yield


def told(options: argparse.Namespace, listener: socket.socket) -> str:
    """Where a person finds it."""
    asked = f"  (?token=... once, from {options.http_token_file})" if options.http_token_file else ""
    return f"{address_of(listener)}{asked}"
