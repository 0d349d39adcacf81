"""One question to a syncer, or one order: a connection that proves who asks, is answered once, and ends.

For its status the syncer's I/O thread answers, so that it comes however busy the syncer is. An order is carried out by
the node, and answered once what it changed is durable. Whoever asks is nobody's peer: no hello, no heartbeat, nothing
that the run could notice. Both wait for the answer, for a bounded time.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from skerry.core.messages import PROTOCOL, Message, Order, Outcome, Status
from skerry.errors import NoAnswer, ProtocolError, one_line
from skerry.wire import frames, handshake
from skerry.wire.connection import why
from skerry.wire.frames import NONCE_BYTES, Attached, Challenge, Delivery, Denied, Handshake, Inquire, Instruct, Parser
from skerry.wire.handshake import Credentials
from skerry.wire.tls import NO_KEYS_THERE, Tls, explain, is_plain

ANSWER_S = 5.0  # for everything, from dialling on
OUTCOME_S = 30.0  # likewise of an order, which may have to wait for the disk
Said = TypeVar("Said", Status, Outcome)
Question = Callable[[Credentials, bytes, Challenge], Inquire | Instruct]
TOO_OLD = (
    "this syncer is too old to be asked for its status: upgrade it, or look on its own machine: skerry status RUN_DIR"
)
TOO_OLD_FOR_ORDERS = "this syncer is too old to take orders: upgrade it first"


def ask_status(
    host: str, port: int, token: bytes | None, within_s: float = ANSWER_S, *, tls: Tls | None = None
) -> Status:
    """What the syncer at this address says of itself; `NoAnswer` says in one line why it does not."""
    where = _where(host, port)
    status = _told(host, port, token, within_s, tls, handshake.inquiry, Status, TOO_OLD)
    if not status.record:
        raise NoAnswer(f"{where}: this syncer has no status yet: it is starting, or repairs its run first")
    return status


def give_order(
    host: str, port: int, order: Order, token: bytes | None, within_s: float = OUTCOME_S, *, tls: Tls | None = None
) -> Outcome:
    """What became of an order; it is done, or not, whatever `NoAnswer` says: give it again to know."""
    encoded = frames.encode_order(order)

    def question(mine: Credentials, nonce: bytes, heard: Challenge) -> Instruct:
        return handshake.instruction(mine, nonce, heard, encoded)

    return _told(host, port, token, within_s, tls, question, Outcome, TOO_OLD_FOR_ORDERS)


def _told(
    host: str,
    port: int,
    token: bytes | None,
    within_s: float,
    tls: Tls | None,
    question: Question,
    kind: type[Said],
    too_old: str,
) -> Said:
    mine, where = Credentials(token, PROTOCOL), _where(host, port)
    ends_at = time.monotonic() + within_s
    try:
        with socket.create_connection((host, port), timeout=within_s) as sock:
            if tls is None:
                return _asked(sock, mine, where, ends_at, question, kind, too_old)
            with tls.dialled(sock) as secure:
                return _asked(secure, mine, where, ends_at, question, kind, too_old)
    except TimeoutError:
        raise NoAnswer(f"{where}: no answer within {within_s:g} s: is a syncer there, or a firewall between?") from None
    except ssl.SSLError as error:
        reason = NO_KEYS_THERE if is_plain(error) else explain(error, is_proved=True)
        raise NoAnswer(one_line(f"{where}: {reason}")) from None
    except (OSError, UnicodeError) as error:
        raise NoAnswer(f"{where}: {why(error)}: check the address, and that a syncer serves it") from None
    except ProtocolError as error:
        raise NoAnswer(one_line(f"{where}: what answers there is no syncer that can be understood ({error})")) from None


def _where(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _asked(
    sock: socket.socket,
    mine: Credentials,
    where: str,
    ends_at: float,
    question: Question,
    kind: type[Said],
    too_old: str,
) -> Said:
    nonce, heard_nonce = secrets.token_bytes(NONCE_BYTES), b""
    parser = Parser(frames.learner_dialect(_no_payload))
    for item in _heard(sock, parser, ends_at):
        match item:
            case Challenge():
                if item.protocol != handshake.HANDSHAKE:
                    raise NoAnswer(f"{where}: its handshake is of another version: upgrade the older side")
                heard_nonce = item.nonce
                sock.sendall(frames.encode(question(mine, nonce, item)))
            case Denied(final=True):
                raise NoAnswer(one_line(f"{where}: {item.reason}"))
            case Denied():
                raise NoAnswer(f"{where}: {too_old}")
            case Attached():
                handshake.check_welcome(mine, nonce, heard_nonce, item, b"")
                parser.legal = frames.CONTROL_LINE
            case Delivery(message=message) if isinstance(message, kind):
                return message
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
