"""The syncer's endpoint over sockets: who is listened to, who proves what, who is let in; one I/O thread over epoll.

Rules that hold here: a syncer takes no more than a few strangers at a time, and who has been silent for longest makes
way; how many peers there may be, and how often an address may come to nothing, is in `quotas`. Who proves itself is let
in, whatever else its address does. Who dials on is turned away again and again, which a syncer says once. What happens
on a connection after that is the same on both sides: see `endpoint`. What is said in a handshake is in `handshake`.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import secrets
import socket
import time
from typing import Any, Unpack

from skerry.addresses import is_of_this_machine, place_of
from skerry.core.messages import PROTOCOL, Outcome, Refused, Status
from skerry.core.vocabulary import LOCAL_ADMIN
from skerry.errors import AddressInUse, ProtocolError, WireError, one_line
from skerry.wire import frames, handshake
from skerry.wire.connection import Connection, Outgoing, Role, address_of, name_of, why
from skerry.wire.endpoint import Limits, TcpEndpoint
from skerry.wire.frames import (
    SESSION_BYTES,
    Attach,
    Denied,
    Handshake,
    Inquire,
    Instruct,
    PayloadLimit,
    Proof,
    TooLong,
)
from skerry.wire.handshake import Credentials
from skerry.wire.loop import READ
from skerry.wire.neighbours import Neighbours
from skerry.wire.peer import DRAIN_S, NEVER, Peer
from skerry.wire.quotas import (
    BRIEF_BYTES_BURST,
    BRIEF_BYTES_PER_S,
    BRIEF_S,
    BRIEF_WAIT_S_MAX,
    GUESS_DELAY_S,
    GUESSES_WAITING_MAX,
    PEERS_PER_NAME,
    STRANGERS_MAX,
    Places,
    Strangers,
)
from skerry.wire.repeats import Repeats
from skerry.wire.tls import NEEDS_KEY
from skerry.wire.transport import Inbox, Instructed

BACKLOG = 1024  # connections that the system keeps for us until we accept them
ACCEPTS_PER_TURN = 16
ACCEPT_PAUSE_S = 1.0  # after the system could not give us a socket
TOO_MANY = "too many connections that came to nothing"
NO_TLS = (
    "without keys all of it can be read and changed on the way: make keys with skerry keys issue RUN NAME, or say "
    "--insecure with --token-file, or listen on 127.0.0.1"
)
NO_TOKEN = "pass --token-file, or listen on 127.0.0.1"
GUESSING = "too many wrong proofs came from this address: try again in a moment"
NO_ORDERS = "this syncer takes no orders at present: it is starting, or repairs its run first"
TOO_MANY_ORDERS = "too many orders wait to be carried out: try again in a moment"
ORDERS_MAX = 16  # that wait for the node at once: each is a person's, or a script's
ORDER_S = 60.0  # in which one is answered, or given up
NOT_OURS = (
    "with neither token nor keys only the syncer's own user and root may join: start it with --token-file or --keys"
)

log = logging.getLogger("skerry.wire")


class Server(TcpEndpoint):
    """The syncer's endpoint: lets in who has a key of the run, or holds the token; without either, this user and root.

    Without TLS it serves only loopback, unless it is told to be `insecure`, and then only with a token.
    `turned_away` is where whoever is not let in is counted, by what it calls itself and where it is. Where it
    `takes_orders`, they are proved by an admin's key, or without TLS by the token `admin`.
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
        insecure: bool = False,
        admin: bytes | None = None,
        takes_orders: bool = False,
        **limits: Unpack[Limits],
    ) -> None:
        self._credentials = Credentials(token, protocol)
        self._admin = Credentials(admin, protocol) if takes_orders else None
        self._givers: dict[int, Connection] = {}  # ticket -> who waits for what becomes of its order
        self._turned_away = turned_away or Repeats()
        self._gone = Repeats()  # who left before anything came of it: a learner that cannot speak to us, or a probe
        self._streams = streams
        is_open = limits.get("tls") is not None or (insecure and token is not None)
        self._listener = _listen(host, port, "" if is_open else NO_TOKEN if insecure else NO_TLS)
        bounds = limits.get("quotas")
        longest = bounds.message_bytes_max if bounds else frames.MESSAGE_BYTES_MAX
        self._asks_for_proof = token is not None or limits.get("tls") is not None
        self._neighbours = Neighbours(self._listener)
        super().__init__(inbox, frames.syncer_dialect(payload_limit, longest), **limits)
        self._strangers: Strangers[Connection] = Strangers(
            self._quotas.strangers_max if self._quotas else STRANGERS_MAX
        )
        self.port: int = self._listener.getsockname()[1]
        self.address = name_of(self._listener.getsockname())
        self._status = (b"", 0.0)  # what whoever asks is told, and when it was made
        self._sessions: dict[bytes, Peer] = {}
        self._brief = Places(BRIEF_BYTES_PER_S, BRIEF_BYTES_BURST)  # by name or address: what was said for nothing
        self._guessed: dict[Connection, tuple[float, Denied]] = {}  # when each is answered, and what; the oldest first
        self._accept_after = NEVER  # when accepting goes on after a pause
        self._loop.watch(self._listener, READ, 0, self._accept)
        self._loop.thread.start()

    def __repr__(self) -> str:
        return f"<Server {self.address}, {len(self._peers)} peers>"

    def show(self, status: bytes) -> None:
        """From now on this is told to whoever asks for the status. From any thread."""
        self._status = (status, time.monotonic())

    def answer(self, ticket: int, outcome: Outcome) -> None:
        """Tell whoever gave an order what became of it. From any thread."""
        self._loop.call(self._tell_outcome, ticket, outcome)

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
            self._welcome(sock, name_of(name))

    def _welcome(self, sock: socket.socket, address: str) -> None:
        place, now = self._place(sock, _host(address)), time.monotonic()
        has_failed = self._strangers.failures.wait_s(place, now) > 0
        if has_failed and not self._strangers.is_awaited(place):
            sock.close()
            if who := self._gone.stranger(place, place_of(_host(address)), TOO_MANY, now):
                log.warning("%s not let in for a moment: %s", who, TOO_MANY)
            return
        if (first := self._strangers.first_out(lambda stranger: stranger.is_silent, now)) is not None:
            self._fail(first, f"made way: {self._strangers.count_max} connections are not authenticated")
        self._make_room()
        connection = self._adopt(sock, address)
        connection.place, connection.is_exception = place, has_failed
        connection.is_own = not self._asks_for_proof and not self._neighbours.is_strange(sock)
        self._strangers.enter(connection, place, now)
        if self._tls is None:
            self._challenge(connection)
        else:
            self._watch(connection)

    def _place(self, sock: socket.socket, host: str) -> str:
        """Whom a connection stands for: its address, or on this machine the user who has dialled it and is still there.

        So no other user's connections are held against a learner's; it asks the system, which takes microseconds.
        """
        user = self._neighbours.user_of(sock) if is_of_this_machine(host) else None
        return place_of(host) if user is None else f"{place_of(host)} (user {user})"

    def _challenge(self, connection: Connection) -> None:
        self._write_frame(connection, frames.encode(handshake.challenge(self._credentials, connection.nonce)))

    def _make_room(self) -> None:
        """For one connection more: who was dropped is waited for no longer if the descriptors run out."""
        if self._quotas is None or len(self._connections) < self._quotas.connections_max:
            return
        if (draining := next((each for each in self._connections if each.draining), None)) is not None:
            self._close(draining)

    def _secured(self, connection: Connection) -> None:
        if objection := connection.objection:
            self._turn_away(connection, Denied(objection, final=True), connection.principal)
        else:
            self._challenge(connection)

    def _bind(self, connection: Connection, peer: Peer, role: Role) -> None:
        self._strangers.leave(connection)
        super()._bind(connection, peer, role)

    def _close(self, connection: Connection) -> None:
        super()._close(connection)
        self._guessed.pop(connection, None)
        for ticket in [ticket for ticket, each in self._givers.items() if each is connection]:
            del self._givers[ticket]
        place = self._strangers.leave(connection)
        if place is not None and not connection.is_exception:  # it was let in for the learner's sake
            self._strangers.failures.charge(place, time.monotonic())

    def _judged(self, connection: Connection, item: Proof | Attach | Inquire | Instruct) -> Denied | None:
        """Why it is not let in; None if it is. Who proves the token is, whatever others do at its address."""
        if objection := connection.objection:  # its key may have been revoked since it was shown
            return Denied(objection, final=True)
        if connection.is_secure and (denied := handshake.out_of_role(connection.principal, connection.is_admin, item)):
            return denied
        mine = self._admin if isinstance(item, Instruct) else self._credentials
        if mine is None:
            return Denied(NO_ORDERS, final=True)
        denied = handshake.refusal(mine, connection.nonce, item)
        if denied is not None:
            return denied
        if isinstance(item, Attach):  # of a session, which only who was let in knows
            return None
        if not self._asks_for_proof and self._neighbours.is_strange(connection.sock):
            return Denied(NOT_OURS, final=isinstance(item, Inquire))
        return self._fullness(connection.principal) if isinstance(item, Proof) else None

    def _is_guess(self, connection: Connection, item: Handshake, denied: Denied) -> bool:
        """A wrong proof of an address that had too many: it is not told so, and what it is told it is told late."""
        mine = self._admin if isinstance(item, Instruct) else self._credentials
        if mine is None or mine.token is None or not denied.final or connection.objection:
            return False
        place, now = connection.place, time.monotonic()
        is_one = self._strangers.guesses.wait_s(place, now) > 0
        if not is_one:
            self._strangers.guesses.charge(place, now)
        return is_one

    def _put_off(self, connection: Connection, item: Handshake) -> None:
        """Answer a guess later, and read nothing more of it: who guesses is to wait, and so many may wait."""
        now = time.monotonic()
        self._guessed[connection] = (now + GUESS_DELAY_S, Denied(GUESSING, final=isinstance(item, Inquire | Instruct)))
        self._held_off[connection] = NEVER
        self._watch(connection)
        if len(self._guessed) > GUESSES_WAITING_MAX:
            self._close(next(iter(self._guessed)))

    def _answer_guesses(self, now: float) -> None:
        for connection in [each for each, (at, _) in self._guessed.items() if now >= at]:
            _, denied = self._guessed.pop(connection)
            self._turn_away(connection, denied)

    def _fullness(self, principal: str) -> Denied | None:
        """Why there is no room for one more peer at present, if there is none."""
        if self._quotas is None:
            return None
        namesakes = sum(peer.control.principal == principal for peer in self._peers.values()) if principal else 0
        if namesakes >= PEERS_PER_NAME:
            return Denied(f"full: {principal} has {namesakes} connections, and one is enough", final=False)
        if len(self._peers) >= self._quotas.peers_max:
            return Denied(f"full: {len(self._peers)} connections are all that this syncer takes at once", final=False)
        return None

    def _shake(self, connection: Connection, item: Handshake) -> None:
        assert isinstance(item, Proof | Attach | Inquire | Instruct)  # the dialect decodes nothing else
        if connection in self._givers.values():
            raise ProtocolError("it goes on before its order is answered")
        if (denied := self._judged(connection, item)) is not None:
            if self._is_guess(connection, item, denied):
                self._put_off(connection, item)
            else:
                name = item.name if isinstance(item, Proof) else ""
                self._turn_away(connection, denied, name, connection.is_own or self._proves(item, denied))
        elif isinstance(item, Proof):
            session, streams = secrets.token_bytes(SESSION_BYTES), handshake.agreed(item.streams, self._streams)
            self._say(connection, handshake.welcome(self._credentials, connection.nonce, item, session, streams))
            self._sessions[session] = self._open_peer(connection, session, streams)
            self._strangers.await_from(connection.place, streams)
            self._make_wait(connection)
            self._write(connection)
        elif isinstance(item, Inquire):
            self._tell_status(connection, item)
        elif isinstance(item, Instruct):
            self._take_order(connection, item)
        else:
            peer = self._sessions.get(item.session)
            is_theirs = peer is not None and peer.control.principal == connection.principal
            if not peer or not is_theirs or item.stream in peer.bulk or not 0 <= item.stream < peer.streams:
                # Dialled by a learner that was let in and then given up by the node, which has said why.
                self._deny(connection, Denied("no such session, or it has this bulk connection", final=False))
                return
            self._say(connection, handshake.welcome(self._credentials, connection.nonce, item, item.session))
            self._strangers.await_from(peer.control.place, -1)
            self._attach_bulk(connection, peer, item.stream)

    def _make_wait(self, connection: Connection) -> None:
        """Do not read a peer yet, if others of its name or address came before it and said much for nothing."""
        now = time.monotonic()
        if self._quotas is not None and (wait_s := self._brief.wait_s(_principal_of(connection), now)):
            self._held_off[connection] = now + min(wait_s, BRIEF_WAIT_S_MAX)
            self._watch(connection)

    def _tell_status(self, connection: Connection, item: Inquire) -> None:
        """From here, not by the node: however much that has to do, and though its inbox be full."""
        self._say(connection, handshake.welcome(self._credentials, connection.nonce, item, bytes(SESSION_BYTES)))
        record, made_at = self._status
        self._say(connection, Status(record, time.monotonic() - made_at))
        self._drain(connection, DRAIN_S)

    def _take_order(self, connection: Connection, item: Instruct) -> None:
        """Hand it to the node, whose answer is waited for; who gives it is no peer, and no stranger any more."""
        assert self._admin is not None
        if len(self._givers) >= ORDERS_MAX:
            self._turn_away(connection, Denied(TOO_MANY_ORDERS, final=True))
            return
        try:
            order = frames.decode_order(item.order)
        except ProtocolError as error:
            self._turn_away(connection, Denied(f"the order makes no sense here: {error}", final=True))
            return
        ticket = next(self._peer_ids)
        self._say(connection, handshake.welcome(self._admin, connection.nonce, item, bytes(SESSION_BYTES)))
        self._write(connection)
        self._strangers.leave(connection)
        self._givers[ticket] = connection
        connection.deadline = time.monotonic() + ORDER_S
        self._emit(Instructed(ticket, order, _credential(connection)))

    def _tell_outcome(self, ticket: int, outcome: Outcome) -> None:
        connection = self._givers.pop(ticket, None)
        if connection is not None and not connection.closed and not connection.draining:
            self._say(connection, outcome)
            self._drain(connection, DRAIN_S)

    def _turn_away(self, connection: Connection, denied: Denied, name: str = "", is_known: bool = False) -> None:
        """Say why, to it and to whoever reads the log; who has proved something is spoken of apart from strangers."""
        who = said = one_line(f"{name} at {connection.host}" if name else connection.host)
        reason, now = one_line(denied.reason), time.monotonic()
        if connection.principal or is_known:
            is_said = self._turned_away.is_news(who, reason, now)
        else:
            said = self._turned_away.stranger(who, place_of(connection.host), reason, now)
            is_said = bool(said)
        if is_said:
            log.warning("%s refused: %s", said, reason)
        self._deny(connection, denied)

    def _proves(self, item: Proof | Attach | Inquire | Instruct, denied: Denied) -> bool:
        """It holds the token, and is turned away for something else."""
        return self._credentials.token is not None and item.protocol == handshake.HANDSHAKE and not denied.final

    def _deny(self, connection: Connection, denied: Denied) -> None:
        self._say(connection, Denied(one_line(denied.reason), denied.final))
        self._drain(connection, DRAIN_S)

    def _say(self, connection: Connection, item: Handshake | Status | Refused | Outcome) -> None:
        connection.outgoing.append(Outgoing(iter([(frames.encode(item),)]), 0))

    def _broke_protocol(self, connection: Connection, error: ProtocolError) -> None:
        peer = self._peers.get(connection.peer)
        if peer is None:
            self._turn_away(connection, Denied(str(error), final=False))
        elif isinstance(error, TooLong):
            self._say(connection, Refused(f"{error}: its model has far more tensors than the run's"))
            self._lose(peer, str(error), drain_s=DRAIN_S)
        else:
            self._fail(connection, str(error))

    def _stranger_failed(self, connection: Connection, reason: str) -> None:
        if who := self._gone.stranger(connection.host, place_of(connection.host), reason, time.monotonic()):
            log.info("%s, not let in yet: %s", who, reason)

    def _after_loss(self, peer: Peer, reason: str) -> None:
        del self._sessions[peer.session]
        if (now := time.monotonic()) - peer.opened < BRIEF_S:
            self._brief.charge(_principal_of(peer.control), now, peer.control.bytes_in)
        self._strangers.await_from(peer.control.place, len(peer.bulk) - peer.streams)

    def _tick(self, now: float) -> None:
        super()._tick(now)
        self._answer_guesses(now)
        if self._tls is not None:
            self._hint(now)
        if now > self._accept_after and not self._closing:
            self._accept_after = NEVER
            self._loop.watch(self._listener, READ, 0, self._accept)

    def _hint(self, now: float) -> None:
        """Who speaks TLS speaks first, and who does not waits for us: it is told, while it still waits."""
        for connection in [each for each in self._connections if each.is_shaking and each.is_silent]:
            if now > connection.deadline - self._handshake_s / 2:
                connection.speak_plainly()
                self._turn_away(connection, Denied(NEEDS_KEY, final=True))

    def _release(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.forget(self._listener)
            self._listener.close()
        self._neighbours.close()


def _listen(host: str, port: int, objection: str) -> socket.socket:
    """A listening socket on the first address of the host that can be had; `objection` is to other than loopback."""
    where = address_of(host, port)
    if not 0 <= port < 65536:
        raise WireError(f"{where}: a port is a number below 65536")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise WireError(f"cannot listen on {where}: {why(error)}") from None
    trouble = ""
    for family, _, _, _, address in found:
        if objection and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise WireError(f"{where} can be reached from other machines: {objection}")
        try:
            return _bound(family, address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(f"{where} is in use: stop what listens there, or pass another port") from None
            trouble = why(error)
    raise WireError(f"cannot listen on {where}: {trouble}")


def _bound(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _principal_of(connection: Connection) -> str:
    """Whom what it does is held against: the name that its key proves, or else where it comes from."""
    return connection.principal or connection.place


def _credential(connection: Connection) -> str:
    """By what an order was proved, for whoever reads of it later."""
    if not connection.is_secure:
        return "admin.token"
    return "admin.pem" if connection.principal == LOCAL_ADMIN else f"the key of {connection.principal}"


def _host(address: str) -> str:
    return address.rpartition(":")[0]
