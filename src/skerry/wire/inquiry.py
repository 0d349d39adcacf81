"""Asking a syncer for its status: one connection that proves the token, is told, and ends. It waits for the answer.

The syncer's I/O thread answers, so that it comes however busy the syncer is. Whoever asks is nobody's peer: no hello,
no heartbeat, nothing that the run could notice.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator

from skerry.core.messages import PROTOCOL, Message, Status
from skerry.errors import NoAnswer, ProtocolError, one_line
from skerry.wire import frames, handshake
from skerry.wire.connection import why
from skerry.wire.frames import NONCE_BYTES, Attached, Challenge, Delivery, Denied, Handshake, Parser
from skerry.wire.handshake import Credentials

ANSWER_S = 5.0  # for everything, from dialling on


def ask_status(host: str, port: int, token: bytes | None, within_s: float = ANSWER_S) -> Status:
    """What the syncer at this address says of itself; `NoAnswer` says in one line why it does not."""
    mine, where = Credentials(token, PROTOCOL), f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    ends_at = time.monotonic() + within_s
    try:
        with socket.create_connection((host, port), timeout=within_s) as sock:
            return _asked(sock, mine, where, ends_at)
    except TimeoutError:
        raise NoAnswer(f"{where}: no answer within {within_s:g} s: is a syncer there, or a firewall between?") from None
    except (OSError, UnicodeError) as error:
        raise NoAnswer(f"{where}: {why(error)}: check the address, and that a syncer serves it") from None
    except ProtocolError as error:
        raise NoAnswer(one_line(f"{where}: what answers there is no syncer that can be understood ({error})")) from None


def _asked(sock: socket.socket, mine: Credentials, where: str, ends_at: float) -> Status:
    nonce, heard_nonce = secrets.token_bytes(NONCE_BYTES), b""
    parser = Parser(frames.learner_dialect(_no_payload))
    for item in _heard(sock, parser, ends_at):
        match item:
            case Challenge():
                if item.protocol != handshake.HANDSHAKE:
                    raise NoAnswer(f"{where}: its handshake is of another version: upgrade the older side")
                heard_nonce = item.nonce
                sock.sendall(frames.encode(handshake.inquiry(mine, nonce, item)))
            case Denied(final=True):
                raise NoAnswer(one_line(f"{where}: {item.reason}"))
            case Denied():
                raise NoAnswer(
                    f"{where}: this syncer is too old to be asked for its status: upgrade it, or look on its own "
                    "machine: skerry status RUN_DIR"
                )
            case Attached():
                handshake.check_welcome(mine, nonce, heard_nonce, item, b"")
                parser.legal = frames.CONTROL_LINE
            case Delivery(message=Status() as status):
                if not status.record:
                    raise NoAnswer(f"{where}: this syncer has no status yet: it is starting, or repairs its run first")
                return status
            case _:
                raise ProtocolError("it says what nobody asked for")
    raise ProtocolError("it hung up")


def _heard(sock: socket.socket, parser: Parser, ends_at: float) -> Iterator[Delivery | Handshake]:
    """Everything that is said to us, until the other side hangs up."""
    while True:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        count = sock.recv_into(parser.buffer())
        if not count:
            return
        if (item := parser.received(count)) is not None:
            yield item


def _no_payload(message: Message) -> int:
    raise ProtocolError(f"{type(message).__name__} with a payload")
