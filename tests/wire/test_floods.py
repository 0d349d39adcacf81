"""Floods on real sockets: what a peer or a stranger takes of one side is bounded, and others do not feel it."""

import contextlib
import dataclasses
import itertools
import socket
import struct
import time

import pytest

from e2e.processes import until
from skerry.core.messages import PROTOCOL, Contribution, Hello, Pull, Refused, Report
from skerry.wire import frames, handshake, quotas
from skerry.wire import server as server_module
from skerry.wire.client import Client
from skerry.wire.connection import SCRATCH_BYTES, Connection, Meter
from skerry.wire.frames import Attached, Challenge, Denied, Parser, Proof, encode, learner_dialect
from skerry.wire.handshake import HANDSHAKE, Credentials
from skerry.wire.quotas import Quotas
from skerry.wire.repeats import Repeats
from skerry.wire.server import Server
from skerry.wire.transport import Inbox, Lost, Opened, Received
from wire.samples import sample

WAIT_S = 60
MIB = 1 << 20
OTHER = "127.0.0.2"  # where the flood comes from
ROOM = Quotas(peers_max=3, strangers_max=16, connections_max=100, payloads_burst=1000, payload_bytes_burst=1e9)
WIDE = Quotas(peers_max=3, strangers_max=256, connections_max=400, payloads_burst=1000, payload_bytes_burst=1e9)
LEARNER = learner_dialect(lambda m: 0)


@pytest.fixture
def net():
    with contextlib.ExitStack() as stack:
        yield Net(stack)


class Net:
    def __init__(self, stack):
        self._stack = stack

    def server(self, token=None, room=ROOM, **options):
        inbox = Inbox(10_000)
        server = Server("127.0.0.1", 0, token, inbox, lambda m: m.to_tokens, quotas=room, **options)
        self._stack.callback(server.close)
        return server, inbox

    def client(self, port, token=None, **options):
        inbox = Inbox(options.pop("bound", 10_000))
        client = Client("127.0.0.1", port, token, inbox, lambda m: m.version, jitter=lambda: 0.0, **options)
        self._stack.callback(client.close)
        return client, inbox

    def dial(self, port, source="127.0.0.1"):
        sock = socket.create_connection(("127.0.0.1", port), WAIT_S, (source, 0))
        self._stack.callback(sock.close)
        return sock

    def listen(self):
        sock = socket.create_server(("127.0.0.1", 0))
        sock.settimeout(WAIT_S)
        self._stack.callback(sock.close)
        return sock

    def peer(self, port, streams=1, source="127.0.0.1"):
        """A control connection that is let in, and its bulk connections, as plain sockets."""
        control, *bulk = [self.dial(port, source) for _ in range(1 + streams)]
        heard(control)
        control.sendall(encode(Proof(HANDSHAKE, bytes(32), b"", streams=streams)))
        session = heard(control).session
        for stream, each in enumerate(bulk):
            heard(each)
            each.sendall(encode(frames.Attach(HANDSHAKE, bytes(32), session, b"", stream=stream)))
            assert isinstance(heard(each), Attached)
        return control, *bulk


def heard(sock):
    """The next word of a handshake; None if there is none any more."""
    parser = Parser(LEARNER)
    with contextlib.suppress(ConnectionError):
        while count := sock.recv_into(parser.buffer()):
            if (item := parser.received(count)) is not None:
                return item
    return None


def event(inbox, kind):
    while not isinstance(found := inbox.get(timeout=WAIT_S), kind):
        pass
    return found


def pour(sock, data, bytes_max):
    """Send without end until the other side takes no more; how much it took."""
    sock.settimeout(1.0)  # longer than whoever reads at all lets the socket stay full
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < bytes_max:
            sent += sock.send(data)
    return sent


def announced(transfer, size):
    pieces = frames.encode_bulk(transfer, sample(Contribution, to_tokens=size), memoryview(bytes(size)))
    return [b"".join(piece) for piece in pieces]


# ------------------------------------------------------------------------------------------------------- strangers


def test_one_address_cannot_take_the_place_of_a_handshake_from_another(net):
    server, _inbox = net.server()
    honest = net.dial(server.port)
    challenge = heard(honest)
    flood = [net.dial(server.port, OTHER) for _ in range(5 * ROOM.strangers_max)]
    assert isinstance(challenge, Challenge) and len(server._strangers) <= ROOM.strangers_max
    until(lambda: heard(flood[0]) is None, "the oldest of the flood to make way")
    honest.sendall(encode(Proof(HANDSHAKE, bytes(32), b"")))
    assert isinstance(heard(honest), Attached)


def crowd(net, port, count, first=0):
    """Strangers that say nothing, each from an address of its own."""
    return [net.dial(port, f"127.1.{number // 250}.{1 + number % 250}") for number in range(first, first + count)]


def test_strangers_of_many_addresses_do_not_keep_a_learner_with_several_connections_out(net):
    """Once it has proved itself, its connections for payloads are awaited and take nobody's place."""
    server, _inbox = net.server(streams=4)
    crowd(net, server.port, ROOM.strangers_max)
    control = net.dial(server.port)
    heard(control)
    control.sendall(encode(Proof(HANDSHAKE, bytes(32), b"", streams=4)))
    session = heard(control).session
    bulk = [net.dial(server.port) for _ in range(4)]
    for each in bulk:
        heard(each)
    later = crowd(net, server.port, 3 * ROOM.strangers_max, ROOM.strangers_max)
    assert heard(later[0]) and heard(later[0]) is None, "the first of them makes way"
    for stream, each in enumerate(bulk):
        each.sendall(encode(frames.Attach(HANDSHAKE, bytes(32), session, b"", stream=stream)))
        assert isinstance(heard(each), Attached)
    assert not server._strangers._awaited and len(server._strangers) <= ROOM.strangers_max


def test_who_has_said_nothing_makes_way_before_who_is_proving_itself(net, monkeypatch):
    monkeypatch.setattr(quotas, "SILENT_S", 0.0)
    server, _inbox = net.server()
    slow = net.dial(server.port)
    heard(slow)
    proof = encode(Proof(HANDSHAKE, bytes(32), b""))
    slow.sendall(proof[:10])
    until(lambda: server.bytes_in, "its first bytes")
    later = crowd(net, server.port, 3 * ROOM.strangers_max)
    assert heard(later[0]) and heard(later[0]) is None, "the first of them makes way"
    slow.sendall(proof[10:])
    assert isinstance(heard(slow), Attached)


def test_strangers_do_not_crowd_who_proved_the_token_out_of_log_and_status(net, caplog):
    turned_away = Repeats()
    server, _inbox = net.server(token=b"right", turned_away=turned_away)
    for number in range(200):
        with net.dial(server.port, f"127.1.0.{1 + number}") as sock:
            heard(sock)
            sock.sendall(b"X%dX" % number)
            heard(sock)
    net.client(server.port, token=b"right", protocol=PROTOCOL + 1, name="fern")
    until(lambda: any("fern at" in row["who"] for row in turned_away.rows(0.0)), "the honest one's row")
    assert any(line.startswith("fern at 127.0.0.1 refused: the syncer speaks") for line in caplog.messages)
    crowd = turned_away.rows(0.0)[-1]
    assert (crowd["who"], crowd["why"]) == ("200 connections from 200 addresses", "not a Skerry frame")
    assert sum("not a Skerry frame" in line for line in caplog.messages) < 10


def test_an_address_that_comes_to_nothing_again_and_again_is_not_let_in_and_others_are(net):
    server, inbox = net.server()
    turned_away = 0
    for _ in range(3 * int(quotas.FAILURES_BURST)):
        with net.dial(server.port, OTHER) as sock, contextlib.suppress(OSError):
            turned_away += heard(sock) is None
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            heard(sock)
    assert turned_away, "without a word, for a word costs us more than it costs them"
    net.client(server.port)
    assert event(inbox, Opened).peer


def test_what_comes_while_a_learners_connections_are_awaited_is_not_held_against_its_address(net, monkeypatch):
    monkeypatch.setattr(quotas, "FAILURES_PER_S", 1e-6)
    server, inbox = net.server(streams=2)
    control = net.dial(server.port)
    heard(control)
    control.sendall(encode(Proof(HANDSHAKE, bytes(32), b"", streams=2)))
    session = heard(control).session
    (place,) = server._strangers._awaited
    server._loop.call(server._strangers.failures.charge, place, time.monotonic(), quotas.FAILURES_BURST + 1)
    debt_s = []
    for _ in range(100):
        with net.dial(server.port) as sock:
            assert isinstance(heard(sock), Challenge), "it may be one of those"
        until(lambda: not len(server._strangers), "it to be gone")
        debt_s.append(server._strangers.failures.wait_s(place, time.monotonic()))
    assert debt_s[0] > 0 and debt_s[-1] <= debt_s[0]
    for stream in range(2):
        bulk = net.dial(server.port)
        heard(bulk)
        bulk.sendall(encode(frames.Attach(HANDSHAKE, bytes(32), session, b"", stream=stream)))
        assert isinstance(heard(bulk), Attached)
    assert event(inbox, Opened).peer


def guess(net, port, token, session=b""):
    """A connection that has said its proof and has not heard what comes of it."""
    sock = net.dial(port)
    sock.sendall(encode(handshake.answer(Credentials(token, PROTOCOL), bytes(32), heard(sock), session)))
    return sock


def test_guesses_of_an_address_are_slowed_and_who_holds_the_token_comes_in_from_there_at_once(net, monkeypatch):
    # So all that are put off still wait when the right one comes.
    monkeypatch.setattr(server_module, "GUESS_DELAY_S", WAIT_S)
    monkeypatch.setattr(server_module, "GUESSES_WAITING_MAX", 16)
    server, _inbox = net.server(token=b"right", room=WIDE)
    guesses = [guess(net, server.port, f"guess {number}".encode()) for number in range(100)]
    control = heard(guess(net, server.port, b"right"))
    assert isinstance(control, Attached), "nobody is kept out for others' guesses"
    assert isinstance(heard(guess(net, server.port, b"right", control.session)), Attached)
    assert len(server._guessed) <= 16
    server.close()
    answers = [heard(sock) for sock in guesses]
    judged = [denied for denied in answers if denied is not None]
    assert quotas.GUESSES_BURST <= len(judged) < 50, "two a second are told, others wait or are hung up on"
    assert all("wrong token" in denied.reason and denied.final for denied in judged), "a mistyped one is told at once"


def test_who_guesses_too_often_is_told_late_to_come_again(net):
    server, _inbox = net.server(token=b"right", room=WIDE)
    answers = [heard(sock) for sock in [guess(net, server.port, b"wrong") for _ in range(40)]]
    put_off = [denied for denied in answers if "too many wrong proofs" in denied.reason]
    assert put_off and not any(denied.final for denied in put_off), "nobody ends for others' guesses"


# ------------------------------------------------------------------------------------------------------------ peers


def test_peers_beyond_the_most_are_told_that_it_is_full_and_come_in_when_one_has_gone(net):
    server, inbox = net.server()
    clients = [net.client(server.port) for _ in range(ROOM.peers_max)]
    peers = [event(inbox, Opened).peer for _ in clients]
    sock = net.dial(server.port)
    heard(sock)
    sock.sendall(encode(Proof(HANDSHAKE, bytes(32), b"")))
    denied = heard(sock)
    assert isinstance(denied, Denied) and not denied.final and denied.reason.startswith("full: 3 connections")
    late, late_inbox = net.client(server.port)
    clients[0][0].close()
    assert event(inbox, Lost).peer in peers
    assert event(late_inbox, Opened) and not late.trouble


def test_a_flood_of_messages_is_held_back_and_others_are_read(net):
    """The sender feels it: what it cannot get rid of stays with it, and nothing is dropped for a burst."""
    server, inbox = net.server()
    control, _ = net.peer(server.port)
    flooder = event(inbox, Opened).peer
    report = encode(sample(Report))
    limit = 64 * MIB
    assert pour(control, report * 100, limit) < limit, "it was read for ever"
    honest, honest_inbox = net.client(server.port)
    at_honest = event(honest_inbox, Opened).peer
    honest.send(at_honest, sample(Hello, learner="fern"))
    until(lambda: "fern" in str(inbox.queue), "the honest one to be heard")
    assert flooder in server._peers


def test_a_message_longer_than_any_that_a_run_needs_is_refused_before_it_is_read_and_its_sender_is_told(net):
    server, inbox = net.server(room=dataclasses.replace(ROOM, message_bytes_max=MIB))
    client, client_inbox = net.client(server.port)
    client.send(event(client_inbox, Opened).peer, sample(Hello, layout=bytes(4 * MIB)))
    refused = event(client_inbox, Received).message
    assert isinstance(refused, Refused) and refused.is_final and "far more tensors" in refused.text
    assert "1048576 are enough here" in event(inbox, Lost).reason


def test_what_peers_of_an_address_said_for_nothing_makes_the_next_from_there_wait_and_no_others(net):
    server, inbox = net.server(streams=1)
    hello = encode(sample(Hello, learner="flood", layout=bytes(4 * MIB)))
    for _ in range(2):
        control = net.peer(server.port, source=OTHER)[0]
        control.sendall(hello)
        server.drop(event(inbox, Received).peer, "not this model")
        event(inbox, Lost)
    late, _ = net.peer(server.port, source=OTHER)
    late.sendall(encode(sample(Hello, learner="late")))
    honest, _ = net.peer(server.port)
    honest.sendall(encode(sample(Hello, learner="fern")))
    assert [event(inbox, Received).message.learner for _ in range(2)] == ["fern", "late"]


def test_a_flood_that_does_not_stop_ends(net, monkeypatch):
    monkeypatch.setattr(quotas, "FLOOD_S", 0.5)
    server, inbox = net.server()
    control, _ = net.peer(server.port)
    report = encode(sample(Report))
    with contextlib.suppress(OSError):
        while True:
            control.sendall(report * 100)
    assert "does not stop" in event(inbox, Lost).reason


def test_a_flood_of_heartbeats_is_a_flood(net):
    server, _inbox = net.server()
    control, _ = net.peer(server.port)
    limit = 64 * MIB
    assert pour(control, frames.PING_FRAME * 1000, limit) < limit
    assert server.bytes_in < MIB


def test_what_has_begun_to_come_and_stands_costs_the_peer_its_link(net, monkeypatch):
    monkeypatch.setattr(quotas, "TRANSFER_LOOK_S", 1.0)
    server, inbox = net.server()
    slow, slow_inbox = net.client(server.port, mbit_max=2)  # an honest one that takes longer than a few of those
    at_slow = event(slow_inbox, Opened).peer
    honest = event(inbox, Opened).peer
    slow.send(at_slow, sample(Contribution, to_tokens=MIB), bytes(MIB))
    _control, bulk = net.peer(server.port)
    stands = event(inbox, Opened).peer
    announcement, chunk = announced(1, MIB)
    bulk.sendall(announcement + chunk[:-1])
    lost = event(inbox, Lost)
    assert lost.peer == stands and "does not go on" in lost.reason
    assert len(event(inbox, Received).payload) == MIB and honest in server._peers


def test_a_stream_that_starves_beside_one_that_goes_on_costs_no_link(net, monkeypatch):
    """As they do on a narrow link, which one of them may have to itself for long."""
    monkeypatch.setattr(quotas, "TRANSFER_LOOK_S", 0.2)
    server, inbox = net.server(streams=2)
    _control, starving, other = net.peer(server.port, streams=2)
    announcement, chunk = announced(1, MIB)
    starving.sendall(announcement + chunk[:-1])
    looks_end = time.monotonic() + 1.0
    for transfer in itertools.count(2):
        other.sendall(b"".join(announced(transfer, 4096)))
        assert len(event(inbox, Received | Lost).payload) == 4096
        if time.monotonic() > looks_end:
            break
    starving.sendall(chunk[-1:])
    assert len(event(inbox, Received | Lost).payload) == MIB


def test_one_payload_at_a_time_is_on_its_way_over_a_connection(net):
    """So what a peer can have us keep is its streams times a fragment, whatever it announces."""
    server, inbox = net.server()
    _, bulk = net.peer(server.port)
    bulk.sendall(announced(1, MIB)[0] + announced(2, MIB)[0])
    assert "while 1 is in progress" in event(inbox, Lost).reason


def test_payloads_of_one_peer_do_not_keep_those_of_another_from_being_read(net):
    """Nobody takes anything out: the greedy one stops at its share, and there is room for the other."""
    server, inbox = net.server()
    inbox.bytes_max = 8 * MIB
    greedy, greedy_inbox = net.client(server.port)
    at_greedy, flooder = event(greedy_inbox, Opened).peer, event(inbox, Opened).peer
    for _ in range(20):
        greedy.send(at_greedy, sample(Contribution, to_tokens=MIB), bytes(MIB))
    until(lambda: inbox.bytes_of(flooder) > MIB, "its share to be full")
    honest, honest_inbox = net.client(server.port)
    at_honest = event(honest_inbox, Opened).peer
    honest.send(at_honest, sample(Contribution, to_tokens=MIB), bytes(MIB))
    other = event(inbox, Opened).peer
    until(lambda: inbox.bytes_of(other), "the honest one's payload")
    until(lambda: inbox.bytes_of(flooder) > MIB, "its share to be full again, for the search above took it out")
    assert inbox.bytes_of(flooder) <= 3 * MIB and inbox.has_room


def test_while_too_much_is_on_its_way_a_peer_has_one_stream_and_all_come_through(net):
    room = Quotas(**{name: getattr(ROOM, name) for name in ROOM.__slots__} | {"transfer_bytes_max": MIB})
    server, inbox = net.server(room=room, streams=4)
    clients = [net.client(server.port) for _ in range(2)]
    for client, client_inbox in clients:
        peer = event(client_inbox, Opened).peer
        for lane in range(8):
            client.send(peer, sample(Contribution, to_tokens=2 * MIB), bytes(2 * MIB), lane=lane)
    assert [len(event(inbox, Received).payload) for _ in range(16)] == [2 * MIB] * 16


# ------------------------------------------------------------------------------------------------- the learner's side


def denying(listener, final=True):
    """Answer the next that dials as a syncer that will never have it."""
    sock, _ = listener.accept()
    with sock:
        sock.sendall(encode(Challenge(HANDSHAKE, bytes(32), True, PROTOCOL)) + encode(Denied("go away", final)))
        sock.settimeout(WAIT_S)
        with contextlib.suppress(OSError):
            while sock.recv(4096):
                pass


def test_a_learner_that_was_let_in_once_does_not_end_for_what_anybody_could_say(net):
    server, _inbox = net.server()
    _client, client_inbox = net.client(server.port)
    event(client_inbox, Opened)
    port = server.port
    server.close()
    event(client_inbox, Lost)
    with socket.create_server(("127.0.0.1", port)) as impostor:
        impostor.settimeout(WAIT_S)
        for _ in range(2):
            denying(impostor)
    again = Server("127.0.0.1", port, None, Inbox(), lambda m: 0)
    try:
        assert isinstance(client_inbox.get(timeout=WAIT_S), Opened), "and it was not told to end"
    finally:
        again.close()


def test_one_that_is_denied_tries_its_other_addresses_before_it_ends(net):
    impostor = net.listen()
    server, _ = net.server()
    client, inbox = net.client(impostor.getsockname()[1], others=[("127.0.0.1", server.port)])
    denying(impostor)
    assert isinstance(inbox.get(timeout=WAIT_S), Opened) and not client.trouble


def test_one_that_is_denied_everywhere_is_told_at_once(net):
    impostor, gone = net.listen(), net.listen()
    nobody = gone.getsockname()[1]
    gone.close()
    _, inbox = net.client(impostor.getsockname()[1], others=[("127.0.0.1", nobody)])
    denying(impostor)
    refused = inbox.get(timeout=WAIT_S).message
    assert refused == Refused("go away") and refused.is_final


def test_a_syncer_that_says_more_than_a_learner_takes_in_is_held_back(net):
    listener = net.listen()
    client, inbox = net.client(listener.getsockname()[1], bound=100)
    sock, _ = listener.accept()
    with sock:
        sock.sendall(encode(Challenge(HANDSHAKE, bytes(32), False, PROTOCOL)))
        heard_proof = sock.recv(4096)
        sock.sendall(encode(Attached(bytes(16), b"")))
        limit = 64 * MIB
        assert heard_proof and pour(sock, encode(sample(Pull)) * 100, limit) < limit
    assert inbox.full() and len(client._backlog) < 1000


def test_one_that_is_hung_up_on_while_it_looks_whether_it_got_through_has_only_lost_a_connection(net):
    """The system tells of the reset once; after that, asking who is there is an error."""
    listener = net.listen()
    dialled = net.dial(listener.getsockname()[1])
    accepted, _ = listener.accept()
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()
    until(lambda: dialled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "the reset")
    connection = Connection(dialled, "127.0.0.1:1", Parser(LEARNER), Meter(), memoryview(bytearray(SCRATCH_BYTES)), 0.0)
    connection.dialled()
    assert "not connected" in connection.broken
