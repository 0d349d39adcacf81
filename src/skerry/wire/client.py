"""The learner's endpoint over sockets: dialling the syncer until it is let in; one I/O thread over epoll.

Rules that hold here: a learner dials until it is let in, again whenever it loses the syncer or that speaks another
protocol, and stops only when it is closed, or refused for a reason that would stay, by all addresses it was given. Once
it was let in no such refusal ends it: whoever can answer in the syncer's place could say that. What happens on a
connection after that is the same on both sides: see `endpoint`. What is said in a handshake is in `handshake`.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from skerry.core.messages import PROTOCOL, Refused
from skerry.errors import ProtocolError, WireError, one_line
from skerry.wire import frames, handshake
from skerry.wire.connection import Connection, address_of, addresses_of, is_file, name_of, why
from skerry.wire.endpoint import Limits, TcpEndpoint
from skerry.wire.frames import Attached, Challenge, Denied, Handshake, PayloadLimit
from skerry.wire.handshake import Credentials
from skerry.wire.peer import DRAIN_S, NEVER, Peer
from skerry.wire.transport import Inbox, Received

REDIAL_S_MIN, REDIAL_S_MAX = 0.1, 2.0  # the longest is what a returned syncer waits for its last learner
ADDRESS_BYTES_MAX = 4096  # of a file that says where the syncer is
REDIAL_LOG_S = 10.0  # at most one line in this time about a syncer that stays away
SHORTAGES = {  # of this machine, by the system's number, and what to look at
    errno.EMFILE: "ulimit -n",
    errno.ENFILE: "fs.file-max",
    errno.ENOMEM: "its memory",
    errno.ENOBUFS: "its memory",
}

log = logging.getLogger("skerry.wire")


class Client(TcpEndpoint):
    """The learner's endpoint: dials the syncer, and dials again whenever it is lost, until closed or refused.

    `others` are further addresses at which the syncer may be, tried in turn after the first. A host "@/path" is a file
    that says where it is now. `jitter` returns a number in [0, 1): it spreads the learners of a syncer that went away
    over its return.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes | None,
        inbox: Inbox,
        payload_limit: PayloadLimit,
        *,
        others: Sequence[tuple[str, int]] = (),
        name: str = "",
        protocol: int = PROTOCOL,
        jitter: Callable[[], float] = random.random,
        **limits: Unpack[Limits],
    ) -> None:
        self._addresses = ((host, port), *others)
        for address in self._addresses:
            if not address[0] or not 0 < address[1] < 65536:
                raise WireError(f"{address_of(*address)} is no address of a syncer: give host:port")
        self._credentials = Credentials(token, protocol, name)
        super().__init__(inbox, frames.learner_dialect(payload_limit), **limits)
        self.address = addresses_of(self._addresses)
        self.trouble = "connecting"  # why there is no connection at present, for a person
        self._jitter = jitter
        self._routes: deque[tuple[int, Any]] = deque()  # (family, address) not tried yet in this attempt
        self._dial_at = 0.0  # NEVER: a connection is there or under way, or we were refused
        self._failures = 0  # in a row
        self._was_let_in = False  # by who proved the token, if there is one
        self._denial = ""  # for good, by one of the addresses; the others are tried first
        self._quiet_until = 0.0  # the log has been told that the syncer is away
        self._loop.thread.start()

    def __repr__(self) -> str:
        return f"<Client of {self.address}, {self.trouble or 'connected'}>"

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if now >= self._dial_at and not self._closing:
            self._dial_at = NEVER
            self._dial()

    def _dial(self) -> None:
        """Try the next address; when none is left, look them up again."""
        try:
            if not self._routes:
                self._look_up()
            self._connect(*self._routes.popleft())
        except (OSError, UnicodeError) as error:
            self._unreachable(_trouble(error))

    def _look_up(self) -> None:
        """All that the syncer's names lead to now; a name that leads nowhere matters if all do."""
        trouble: Exception | None = None
        for host, port in self._addresses:
            try:
                if is_file(host):
                    host, port = _said_in(host.removeprefix("@"))
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                trouble = trouble or error
            else:
                self._routes.extend((family, address) for family, _, _, _, address in found)
        if not self._routes and trouble is not None:
            raise trouble

    def _connect(self, family: int, address: Any) -> Connection:
        connection = self._adopt(socket.socket(family, socket.SOCK_STREAM), name_of(address))
        connection.dialling = True
        result = connection.sock.connect_ex(address)
        if result not in (0, errno.EINPROGRESS):
            self._close(connection)
            raise OSError(result, os.strerror(result))
        self._watch(connection)
        return connection

    def _shake(self, connection: Connection, item: Handshake) -> None:
        if isinstance(item, Challenge) and not connection.heard_nonce:
            self._challenged(connection, item)
        elif isinstance(item, Attached) and connection.heard_nonce:
            self._attached(connection, item)
        elif isinstance(item, Denied) and item.final and not connection.session:
            self._refused(connection, item.reason, is_proved=connection.is_secure)
        elif isinstance(item, Denied):
            self._fail(connection, item.reason)
        else:
            raise ProtocolError(f"{type(item).__name__} out of turn")

    def _challenged(self, connection: Connection, item: Challenge) -> None:
        if handshake.can_be_told(item):  # also where we part: it is the only word that the syncer has of us
            answer = handshake.answer(self._credentials, connection.nonce, item, connection.session, connection.stream)
            connection.heard_nonce = item.nonce
            self._write_frame(connection, frames.encode(answer))
        if reason := handshake.disagreement(self._credentials, item):
            self._turned_away(connection, reason)

    def _attached(self, connection: Connection, item: Attached) -> None:
        nonces = connection.nonce, connection.heard_nonce
        handshake.check_welcome(self._credentials, *nonces, item, connection.session)
        if connection.session:
            self._attach_bulk(connection, self._peers[connection.peer], connection.stream)
            return
        self.trouble, self._quiet_until, self._was_let_in, self._denial = "", 0.0, True, ""
        peer = self._open_peer(connection, item.session, handshake.agreed(item.streams, handshake.STREAMS_MAX))
        try:
            for stream in range(peer.streams):
                bulk = self._connect(connection.sock.family, connection.sock.getpeername())
                bulk.peer, bulk.session, bulk.stream = peer.id, item.session, stream
        except OSError as error:
            self._lose(peer, _trouble(error))

    def _turned_away(self, connection: Connection, reason: str) -> None:
        """Not as both sides are now: tell the node, and dial again, for either may be upgraded."""
        if connection.session:
            self._fail(connection, reason)
            return
        self._drain(connection, DRAIN_S)
        self.trouble = one_line(reason)
        self._emit(Received(next(self._peer_ids), Refused(self.trouble, "ahead"), None))
        self._routes.clear()
        self._back_off()

    def _refused(self, connection: Connection, reason: str, is_proved: bool) -> None:
        """Dialling again would not help, if this is the syncer: try the other addresses, then tell the node, and stop.

        Where nobody has proved anything, who was let in before knows better than to end for it.
        """
        self._close(connection)
        if self._was_let_in and not is_proved:
            self._unreachable(f"turned away by what answers there now: {reason}")
            return
        self._denial = one_line(reason)
        if self._routes:
            self.trouble, self._dial_at = self._denial, 0.0
        else:
            self._give_up()

    def _give_up(self) -> None:
        self.trouble = self._denial
        self._emit(Received(next(self._peer_ids), Refused(self._denial), None))

    def _stranger_failed(self, connection: Connection, reason: str) -> None:
        if connection.is_refused and not connection.session:
            self._refused(connection, reason, is_proved=True)
        else:
            self._unreachable(reason)

    def _unreachable(self, reason: str) -> None:
        """Dial again: at once if the host has another address, after a while otherwise."""
        self.trouble = one_line(reason)
        if self._routes:
            self._dial_at = 0.0
            return
        if self._denial:
            self._give_up()
            return
        now, delay_s = time.monotonic(), self._back_off()
        level = logging.INFO if now >= self._quiet_until else logging.DEBUG
        log.log(level, "%s: %s; dialling again in %.1f s", self.address, self.trouble, delay_s)
        if level == logging.INFO:
            self._quiet_until = now + REDIAL_LOG_S

    def _after_loss(self, peer: Peer, reason: str) -> None:
        self.trouble = one_line(reason)
        if time.monotonic() - peer.opened > REDIAL_S_MAX:
            self._failures = 0  # it was a good connection: this is not the same trouble again
        self._routes.clear()
        self._back_off()

    def _back_off(self) -> float:
        """Dial again after a while, which is returned."""
        delay_s = redial_s(self._failures, self._jitter())
        self._failures += 1
        self._dial_at = time.monotonic() + delay_s
        return delay_s


def _trouble(error: Exception) -> str:
    """Why there is no connection, and whether that is this machine's doing: then no syncer can help it."""
    shortage = SHORTAGES.get(getattr(error, "errno", None) or 0)
    return f"this machine cannot open a socket: {why(error)} ({shortage})" if shortage else why(error)


def redial_s(failures: int, jitter: float) -> float:
    """How long to wait after this many failures in a row: twice as long each time, and at least half of that."""
    whole_s = min(REDIAL_S_MAX, REDIAL_S_MIN * 2.0 ** min(failures, 10))
    return whole_s * (0.5 + jitter / 2)


def _said_in(file: str) -> tuple[str, int]:
    """The address in a file, which another machine may replace at any time; `OSError` if it says none."""
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        said = os.read(fd, ADDRESS_BYTES_MAX).decode("utf-8", "replace")
    finally:
        os.close(fd)
    host, _, port = said.strip().rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise OSError(errno.EINVAL, "says no host:port", file)
    return host.strip("[]"), int(port)
