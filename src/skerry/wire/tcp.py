"""Sockets: the endpoint of a syncer (`Server`) and of a learner (`Client`), one I/O thread over epoll each.

Rules that hold here: a syncer takes no more than a few strangers at a time, and the oldest makes way. A
learner dials until it is let in, again whenever it loses the syncer or that speaks another protocol, and stops
only when it is closed, or refused for a reason that would stay. Who dials on is turned away again and again, which a
syncer says once. What happens on a connection after that is the
same on both sides: see `endpoint`. What is said in a handshake is in `handshake`.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import random
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from skerry.core.messages import PROTOCOL, Refused, Status
from skerry.errors import ProtocolError, WireError, one_line
from skerry.wire import frames, handshake
from skerry.wire.connection import Connection, Outgoing, why
from skerry.wire.endpoint import Limits, TcpEndpoint
from skerry.wire.frames import (
    SESSION_BYTES,
    Attach,
    Attached,
    Challenge,
    Denied,
    Handshake,
    Inquire,
    PayloadLimit,
    Proof,
)
from skerry.wire.handshake import Credentials
from skerry.wire.loop import READ
from skerry.wire.peer import DRAIN_S, NEVER, Peer
from skerry.wire.repeats import Repeats
from skerry.wire.transport import Inbox, Received

STRANGERS_MAX = 256  # connections that are not authenticated
ACCEPTS_PER_TURN = 16
ACCEPT_PAUSE_S = 1.0  # after the system could not give us a socket
REDIAL_S_MIN, REDIAL_S_MAX = 0.1, 2.0  # the longest is what a returned syncer waits for its last learner
REDIAL_LOG_S = 10.0  # at most one line in this time about a syncer that stays away
SHORTAGES = {  # of this machine, by the system's number, and what to look at
    errno.EMFILE: "ulimit -n",
    errno.ENFILE: "fs.file-max",
    errno.ENOMEM: "its memory",
    errno.ENOBUFS: "its memory",
}

log = logging.getLogger("skerry.wire")


class Server(TcpEndpoint):
    """The syncer's endpoint: lets in who holds the token. Without a token it serves only loopback.

    `turned_away` is where whoever is not let in is counted, by what it calls itself and where it is.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes | None,
        inbox: Inbox,
        payload_limit: PayloadLimit,
        *,
        streams: int = 1,
        protocol: int = PROTOCOL,
        turned_away: Repeats | None = None,
        **limits: Unpack[Limits],
    ) -> None:
        self._credentials = Credentials(token, protocol)
        self._turned_away = turned_away or Repeats()
        self._gone = Repeats()  # who left before anything came of it: a learner that cannot speak to us, or a probe
        self._streams = streams
        self._listener = _listen(host, port, open_to_all=token is None)
        super().__init__(inbox, frames.syncer_dialect(payload_limit), **limits)
        self.port: int = self._listener.getsockname()[1]
        self.address = _name(self._listener.getsockname())
        self._status = (b"", 0.0)  # what whoever asks is told, and when it was made
        self._sessions: dict[bytes, Peer] = {}
        self._accept_after = NEVER  # when accepting goes on after a pause
        self._loop.watch(self._listener, READ, 0, self._accept)
        self._loop.thread.start()

    def __repr__(self) -> str:
        return f"<Server {self.address}, {len(self._peers)} peers>"

    def show(self, status: bytes) -> None:
        """From now on this is told to whoever asks for the status. From any thread."""
        self._status = (status, time.monotonic())

    def _accept(self, events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, name = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it left before we came
            except OSError as error:  # most likely out of file descriptors: let some close first
                log.error("cannot accept connections: %s", why(error))
                self._loop.forget(self._listener)
                self._accept_after = time.monotonic() + ACCEPT_PAUSE_S
                return
            self._welcome(sock, _name(name))

    def _welcome(self, sock: socket.socket, address: str) -> None:
        strangers = [connection for connection in self._connections if not connection.peer]
        if len(strangers) >= STRANGERS_MAX:
            self._fail(strangers[0], f"made way: {STRANGERS_MAX} connections are not authenticated")
        connection = self._adopt(sock, address)
        self._write_frame(connection, frames.encode(handshake.challenge(self._credentials, connection.nonce)))

    def _shake(self, connection: Connection, item: Handshake) -> None:
        assert isinstance(item, Proof | Attach | Inquire)  # the dialect decodes nothing else
        if (denied := handshake.refusal(self._credentials, connection.nonce, item)) is not None:
            self._turn_away(connection, denied, item.name if isinstance(item, Proof) else "")
        elif isinstance(item, Proof):
            session, streams = secrets.token_bytes(SESSION_BYTES), handshake.agreed(item.streams, self._streams)
            self._say(connection, handshake.welcome(self._credentials, connection.nonce, item, session, streams))
            self._sessions[session] = self._open_peer(connection, session, streams)
            self._write(connection)
        elif isinstance(item, Inquire):
            self._tell_status(connection, item)
        else:
            peer = self._sessions.get(item.session)
            if peer is None or item.stream in peer.bulk or not 0 <= item.stream < peer.streams:
                # Dialled by a learner that was let in and then given up by the node, which has said why.
                self._deny(connection, Denied("no such session, or it has this bulk connection", final=False))
                return
            self._say(connection, handshake.welcome(self._credentials, connection.nonce, item, item.session))
            self._attach_bulk(connection, peer, item.stream)

    def _tell_status(self, connection: Connection, item: Inquire) -> None:
        """From here, not by the node: however much that has to do, and though its inbox be full."""
        self._say(connection, handshake.welcome(self._credentials, connection.nonce, item, bytes(SESSION_BYTES)))
        record, made_at = self._status
        self._say(connection, Status(record, time.monotonic() - made_at))
        self._drain(connection, DRAIN_S)

    def _turn_away(self, connection: Connection, denied: Denied, name: str = "") -> None:
        who = one_line(f"{name} at {connection.host}" if name else connection.host)
        if self._turned_away.is_news(who, one_line(denied.reason), time.monotonic()):
            log.warning("%s refused: %s", who, one_line(denied.reason))
        self._deny(connection, denied)

    def _deny(self, connection: Connection, denied: Denied) -> None:
        self._say(connection, Denied(one_line(denied.reason), denied.final))
        self._drain(connection, DRAIN_S)

    def _say(self, connection: Connection, item: Handshake | Status) -> None:
        connection.outgoing.append(Outgoing(iter([(frames.encode(item),)]), 0))

    def _broke_protocol(self, connection: Connection, reason: str) -> None:
        if connection.peer:
            self._fail(connection, reason)
        else:
            self._turn_away(connection, Denied(reason, final=False))

    def _stranger_failed(self, connection: Connection, reason: str) -> None:
        if self._gone.is_news(connection.host, reason, time.monotonic()):
            log.info("%s, not let in yet: %s", connection.host, reason)

    def _after_loss(self, peer: Peer, reason: str) -> None:
        del self._sessions[peer.session]

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if now > self._accept_after and not self._closing:
            self._accept_after = NEVER
            self._loop.watch(self._listener, READ, 0, self._accept)

    def _release(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.forget(self._listener)
            self._listener.close()


class Client(TcpEndpoint):
    """The learner's endpoint: dials the syncer, and dials again whenever it is lost, until closed or refused.

    `others` are further addresses at which the syncer may be, tried in turn after the first. `jitter` returns a number
    in [0, 1): it spreads the learners of a syncer that went away over its return.
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
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                trouble = trouble or error
            else:
                self._routes.extend((family, address) for family, _, _, _, address in found)
        if not self._routes and trouble is not None:
            raise trouble

    def _connect(self, family: int, address: Any) -> Connection:
        connection = self._adopt(socket.socket(family, socket.SOCK_STREAM), _name(address))
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
            self._refused(connection, item.reason)
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
        self.trouble, self._quiet_until = "", 0.0
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

    def _refused(self, connection: Connection, reason: str) -> None:
        """Dialling again would not help: tell the node, and stop."""
        self._close(connection)
        self.trouble = one_line(reason)
        self._emit(Received(next(self._peer_ids), Refused(self.trouble), None))

    def _stranger_failed(self, connection: Connection, reason: str) -> None:
        self._unreachable(reason)

    def _unreachable(self, reason: str) -> None:
        """Dial again: at once if the host has another address, after a while otherwise."""
        self.trouble = one_line(reason)
        if self._routes:
            self._dial_at = 0.0
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


def _listen(host: str, port: int, open_to_all: bool) -> socket.socket:
    """A listening socket on the first address of the host that can be had."""
    where = address_of(host, port)
    if not 0 <= port < 65536:
        raise WireError(f"{where}: a port is a number below 65536")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise WireError(f"cannot listen on {where}: {why(error)}") from None
    trouble = ""
    for family, _, _, _, address in found:
        if open_to_all and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise WireError(f"{where} can be reached from other machines: pass --token-file, or listen on 127.0.0.1")
        try:
            return _bound(family, address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise WireError(f"{where} is in use: stop what listens there, or pass another port") from None
            trouble = why(error)
    raise WireError(f"cannot listen on {where}: {trouble}")


def _bound(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _name(address: Any) -> str:
    return address_of(str(address[0]), int(address[1]))


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def addresses_of(addresses: Iterable[tuple[str, int]]) -> str:
    return ", ".join(address_of(*address) for address in addresses)
