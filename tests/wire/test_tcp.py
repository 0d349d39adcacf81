"""Sockets: who is let in, what a bad peer can do, and what the weather does to a good one."""

import contextlib
import errno
import logging
import queue
import socket
import ssl
import threading
import time
import types

import msgspec
import pytest

from e2e.processes import until
from skerry.core.messages import PROTOCOL, Contribution, Hello, Publication, Pull, Refused, Report
from skerry.errors import WireError
from skerry.wire import client as client_module
from skerry.wire import frames, handshake, quotas
from skerry.wire import server as server_module
from skerry.wire.client import Client
from skerry.wire.connection import SMALL_BYTES
from skerry.wire.frames import (
    Attached,
    Challenge,
    Denied,
    Parser,
    Proof,
    encode,
    learner_dialect,
    syncer_dialect,
)
from skerry.wire.handshake import HANDSHAKE, Credentials
from skerry.wire.peer import Peer
from skerry.wire.repeats import Repeats
from skerry.wire.server import Server
from skerry.wire.transport import Inbox, Lost, Opened, Received, Sent
from wire.certificates import learner_tls, syncer_tls
from wire.samples import sample

WAIT_S = 60
MIB = 1 << 20


HELLO = sample(Hello, protocol=PROTOCOL, learner="fern")
PULL = sample(Pull, fragment=3)


@pytest.fixture(params=["plain", "tls"])
def net(request):
    """Makes endpoints and sockets, all of them with TLS or none, and closes them all."""
    with contextlib.ExitStack() as stack:
        yield Net(stack, request.param == "tls")


class Net:
    def __init__(self, stack, has_tls):
        self._stack, self.has_tls = stack, has_tls

    def server(self, host="127.0.0.1", port=0, token=None, bound=10_000, **options):
        inbox = Inbox(bound)
        options = ({"tls": syncer_tls()} if self.has_tls else {}) | options
        server = Server(host, port, token, inbox, lambda m: m.to_tokens, **options)
        self._stack.callback(server.close)
        return server, inbox

    def client(self, port, host="127.0.0.1", token=None, bound=10_000, **options):
        inbox = Inbox(bound)
        options = ({"tls": learner_tls()} if self.has_tls else {}) | options
        client = Client(host, port, token, inbox, lambda m: m.version, **({"jitter": lambda: 0.0} | options))
        self._stack.callback(client.close)
        return client, inbox

    def dial(self, port):
        sock = self.dial_bare(port)
        return self._closed(learner_tls().dialled(sock)) if self.has_tls else sock

    def listen(self):
        sock = self.listen_bare()
        context = syncer_tls()._context
        return self._closed(context.wrap_socket(sock, server_side=True)) if self.has_tls else sock

    def dial_bare(self, port):
        return self._closed(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))

    def listen_bare(self):
        sock = self._closed(socket.create_server(("127.0.0.1", 0)))
        sock.settimeout(WAIT_S)
        return sock

    def _closed(self, sock):
        self._stack.callback(sock.close)
        return sock


def expect(inbox, kind):
    event = inbox.get(timeout=WAIT_S)
    assert isinstance(event, kind), event
    return event


def expect_sooner_or_later(inbox, kind):
    while not isinstance(event := inbox.get(timeout=WAIT_S), kind):
        pass
    return event


def check_works(server, server_inbox, client, client_inbox):
    """A message there and back, between the endpoints' newest peers."""
    at_client = expect(client_inbox, Opened).peer
    at_server = expect(server_inbox, Opened).peer
    client.send(at_client, HELLO)
    assert expect(server_inbox, Received) == Received(at_server, HELLO, None)
    server.send(at_server, PULL)
    assert expect(client_inbox, Received) == Received(at_client, PULL, None)
    return at_server, at_client


def read_handshake(sock, dialect):
    """The next handshake message on a plain socket."""
    parser = Parser(dialect)
    while True:
        count = sock.recv_into(parser.buffer())
        assert count, "closed"
        if (item := parser.received(count)) is not None:
            return item


def read_to_end(sock):
    """What is left on a plain socket until the other side closes it."""
    data = b""
    with contextlib.suppress(ConnectionResetError, ssl.SSLError):
        while more := sock.recv(65536):
            data += more
    return data


LEARNER = learner_dialect(lambda m: 0)
SYNCER = syncer_dialect(lambda m: 0)


# --------------------------------------------------------------------------------------------------- who is let in


@pytest.mark.parametrize(
    ("syncer_token", "learner_token", "words"),
    [
        (b"right", b"wrong", "wrong token"),
        (b"right", None, "requires a token: name a copy of its file as token_file"),
        (None, b"right", "has no token"),
    ],
)
def test_tokens_that_differ_are_refused_for_good(net, syncer_token, learner_token, words):
    server, server_inbox = net.server(token=syncer_token)
    client, client_inbox = net.client(server.port, token=learner_token)
    refused = expect(client_inbox, Received).message
    assert isinstance(refused, Refused) and words in refused.text and "\n" not in refused.text
    check_works(server, server_inbox, *net.client(server.port, token=syncer_token))
    assert client_inbox.empty() and client._dial_at == float("inf")


@pytest.mark.parametrize(("syncer", "learner"), [(1, 2), (2, 1)])
def test_a_protocol_mismatch_names_both_versions_and_the_learner_dials_until_it_is_gone(net, syncer, learner):
    server, _ = net.server(protocol=syncer, token=b"right")
    client, inbox = net.client(server.port, protocol=learner, token=b"right")
    for _ in range(2):
        refused = expect(inbox, Received).message
        assert isinstance(refused, Refused) and not refused.is_final
        assert f"syncer speaks protocol {syncer}" in refused.text and f"learner {learner}" in refused.text
        assert client.trouble == refused.text
    server.close()
    _, server_inbox = net.server(port=server.port, protocol=learner, token=b"right")
    assert isinstance(expect_sooner_or_later(inbox, Opened), Opened) and expect(server_inbox, Opened)
    assert not client.trouble


def test_the_syncer_refuses_another_protocol_before_it_looks_at_the_token(net):
    server, _ = net.server(token=b"right")
    sock = net.dial(server.port)
    assert read_handshake(sock, LEARNER).locked
    sock.sendall(encode(Proof(HANDSHAKE + 1, bytes(32), b"")))
    denied = read_handshake(sock, LEARNER)
    assert not denied.final and f"protocol {HANDSHAKE}" in denied.reason and f"learner {HANDSHAKE + 1}" in denied.reason


def test_a_proof_is_good_for_one_challenge_only(net):
    server, inbox = net.server(token=b"right")
    first, second = net.dial(server.port), net.dial(server.port)
    challenge = read_handshake(first, LEARNER)
    assert read_handshake(second, LEARNER).nonce != challenge.nonce
    proof = handshake.answer(Credentials(b"right", PROTOCOL), bytes(32), challenge, b"")
    second.sendall(encode(proof))
    assert read_handshake(second, LEARNER).reason.startswith("wrong token")
    first.sendall(encode(proof))
    assert isinstance(read_handshake(first, LEARNER), Attached)
    assert expect(inbox, Opened).peer == 1


def test_a_learner_does_not_talk_to_a_syncer_that_lacks_the_token(net):
    listener = net.listen()
    client, inbox = net.client(listener.getsockname()[1], token=b"right")
    for _ in range(2):  # it is not fatal: the real one may come back to this address
        sock, _ = listener.accept()
        with sock:
            sock.sendall(encode(Challenge(HANDSHAKE, bytes(32), True, PROTOCOL)))
            assert isinstance(read_handshake(sock, SYNCER), Proof)
            sock.sendall(encode(Attached(bytes(16), b"x" * 32)))
            assert read_to_end(sock) == b""
    assert inbox.empty() and "does not hold the token" in client.trouble


def test_beyond_loopback_there_is_tls_or_somebody_says_insecure_and_has_a_token(net):
    for host in ("0.0.0.0", "", "::"):
        with pytest.raises(WireError, match=r"skerry keys issue RUN NAME, or say --insecure .* 127\.0\.0\.1"):
            net.server(host, token=b"right", tls=None)
        with pytest.raises(WireError, match=r"pass --token-file, or listen on 127\.0\.0\.1"):
            net.server(host, tls=None, insecure=True)
    server, inbox = net.server("0.0.0.0", token=b"right", insecure=not net.has_tls)
    check_works(server, inbox, *net.client(server.port, token=b"right"))
    with pytest.raises(WireError, match="empty"):
        net.server(token=b" \n")


def test_a_port_in_use_is_named(net):
    server, _ = net.server()
    with pytest.raises(WireError, match=f"127.0.0.1:{server.port} is in use: .* another port"):
        net.server(port=server.port)


def test_bad_addresses_are_one_line(net):
    for host, port in (("127.0.0.1", 70000), ("no.such.host.invalid", 0), ("192.0.2.1", 0)):
        with pytest.raises(WireError) as caught:
            net.server(host, port, token=b"right", insecure=True)
        assert "\n" not in str(caught.value)
    for host, port in (("", 1), ("127.0.0.1", 0), ("127.0.0.1", 70000)):
        with pytest.raises(WireError):
            net.client(port, host)


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 address, as many containers")
def test_ipv6_literals_work(net):
    server, inbox = net.server("::1")
    client, client_inbox = net.client(server.port, "::1")
    assert client.address == server.address == f"[::1]:{server.port}"
    check_works(server, inbox, client, client_inbox)


def test_names_are_looked_up_and_every_address_is_tried(net):
    server, inbox = net.server()
    check_works(server, inbox, *net.client(server.port, "localhost"))


# ------------------------------------------------------------------------------------------------------ bad peers


def junk():
    header = frames._header
    return {
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "tls": bytes.fromhex("16030100c8010000c40303") + bytes(60),
        "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
        "redis": b"PING\r\n",
        "4 GB": header(frames.HANDSHAKE, 2**32 - 1, 0),
        "hello before the handshake": encode(HELLO),
        "the syncer's own words": encode(Challenge(1, bytes(32), True)),
        "short nonce": encode(Proof(HANDSHAKE, b"", b"")),
        "unknown session": encode(frames.Attach(HANDSHAKE, bytes(32), bytes(16), b"")),
    }


@pytest.mark.parametrize("name", junk())
def test_junk_on_the_port_is_answered_and_harms_nobody(net, name):
    server, inbox = net.server()
    good = net.client(server.port)
    at_server, at_client = check_works(server, inbox, *good)
    sock = net.dial(server.port)
    assert isinstance(read_handshake(sock, LEARNER), Challenge)
    sock.sendall(junk()[name])
    denied = read_handshake(sock, LEARNER)
    assert isinstance(denied, Denied) and not denied.final and denied.reason.isprintable()
    if net.has_tls:
        sock = sock.unwrap()
    sock.shutdown(socket.SHUT_WR)
    assert read_to_end(sock) == b""
    good[0].send(at_client, HELLO)
    assert expect(inbox, Received).peer == at_server


def test_junk_after_the_handshake_loses_that_peer_only(net):
    server, inbox = net.server()
    sock = net.dial(server.port)
    read_handshake(sock, LEARNER)
    sock.sendall(encode(Proof(HANDSHAKE, bytes(32), b"")))
    assert isinstance(read_handshake(sock, LEARNER), Attached)
    bad = expect(inbox, Opened).peer
    sock.sendall(encode(HELLO) + b"\0" * 100)
    assert expect(inbox, Received) == Received(bad, HELLO, None)
    lost = expect(inbox, Lost)
    assert lost.peer == bad and "not a Skerry frame" in lost.reason
    check_works(server, inbox, *net.client(server.port))


def test_a_bulk_frame_on_the_control_connection_is_refused(net):
    server, inbox = net.server()
    sock = net.dial(server.port)
    read_handshake(sock, LEARNER)
    sock.sendall(encode(Proof(HANDSHAKE, bytes(32), b"")))
    sock.sendall(b"".join(next(frames.encode_bulk(1, sample(Contribution), memoryview(b"")))))
    expect(inbox, Opened)
    assert "bulk frame where only message or ping may come" in expect(inbox, Lost).reason


def test_a_stream_of_a_session_is_had_once(net):
    server, inbox = net.server()
    client, client_inbox = net.client(server.port)
    at_server, at_client = check_works(server, inbox, client, client_inbox)
    client.send(at_client, sample(Contribution), b"")
    expect(inbox, Received)  # its bulk connection is there
    sock = net.dial(server.port)
    read_handshake(sock, LEARNER)
    sock.sendall(encode(frames.Attach(HANDSHAKE, bytes(32), client._peers[at_client].session, b"")))
    assert "session" in read_handshake(sock, LEARNER).reason
    client.send(at_client, HELLO)
    assert expect(inbox, Received).peer == at_server


def test_a_connection_that_never_shakes_hands_is_closed(net):
    server, inbox = net.server(handshake_s=0.2)
    sock = net.dial(server.port)
    sock.sendall(encode(Proof(HANDSHAKE, bytes(32), b""))[:10])  # and never the rest
    read_to_end(sock)
    check_works(server, inbox, *net.client(server.port))


def test_silent_strangers_do_not_keep_learners_out(net):
    server, inbox = net.server()
    strangers = [net.dial(server.port) for _ in range(quotas.STRANGERS_MAX + 10)]
    check_works(server, inbox, *net.client(server.port))
    for oldest in strangers[:10]:
        read_to_end(oldest)


def test_a_client_gives_up_on_a_syncer_that_never_shakes_hands(net):
    listener = net.listen()
    client, _ = net.client(listener.getsockname()[1], handshake_s=0.1)
    for _ in range(2):
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(WAIT_S)
            assert read_to_end(sock) == b""
    assert client.trouble


def test_the_last_words_count_even_if_the_bulk_connection_was_never_had(net):
    listener = net.listen()
    _, inbox = net.client(listener.getsockname()[1])
    control, _ = listener.accept()
    with control:
        control.sendall(encode(Challenge(HANDSHAKE, bytes(32), False, PROTOCOL)))
        read_handshake(control, SYNCER)
        control.sendall(encode(Attached(bytes(16), b"")))
        bulk, _ = listener.accept()
        with bulk:
            bulk.sendall(encode(Denied("no such session", False)))
            assert read_to_end(bulk) == b""
        control.sendall(encode(Refused("no room")))
    peer = expect(inbox, Opened).peer
    assert expect(inbox, Received) == Received(peer, Refused("no room"), None)
    assert expect(inbox, Lost).peer == peer


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", encode(Attached(bytes(16), b"")), bytes(99)])
def test_a_client_survives_something_else_on_the_syncers_port(net, words):
    listener = net.listen()
    port = listener.getsockname()[1]
    client, inbox = net.client(port)
    sock, _ = listener.accept()
    sock.sendall(words)
    read_to_end(sock)
    sock.close()
    listener.close()
    server, server_inbox = net.server(port=port)
    check_works(server, server_inbox, client, inbox)


# --------------------------------------------------------------------------------------------------------- weather


def test_a_client_waits_for_its_syncer_and_finds_it_again_after_a_restart(net):
    reserve = net.listen()
    port = reserve.getsockname()[1]
    reserve.close()
    client, client_inbox = net.client(port)
    for restart in range(3):
        server, inbox = net.server(port=port)
        _, at_client = check_works(server, inbox, client, client_inbox)
        assert at_client == restart + 1
        server.close()
        assert expect(client_inbox, Lost).peer == at_client
        client.send(at_client, HELLO)  # to a dead peer: ignored


class Relay:
    """Forwards connections to a port until told to freeze: then nothing moves, and nobody is told."""

    def __init__(self, net, port):
        self._net, self._target = net, port
        self._listener = net.listen_bare()
        self.port = self._listener.getsockname()[1]
        self.frozen = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        for _ in range(2):  # a control and a bulk connection
            left, right = self._listener.accept()[0], self._net.dial_bare(self._target)
            threading.Thread(target=self._pump, args=(left, right), daemon=True).start()
            threading.Thread(target=self._pump, args=(right, left), daemon=True).start()

    def _pump(self, source, target):
        with contextlib.suppress(OSError), source:
            while data := source.recv(65536):
                if not self.frozen.is_set():
                    target.sendall(data)
            self.frozen.wait(WAIT_S)  # never pass the end on


def test_silence_is_noticed_by_both_sides(net):
    server, inbox = net.server(heartbeat_s=0.05, timeout_s=1.0)
    relay = Relay(net, server.port)
    client, client_inbox = net.client(relay.port, heartbeat_s=0.05, timeout_s=1.0)
    at_server, _ = check_works(server, inbox, client, client_inbox)
    server.send(at_server, sample(Publication), b"")
    expect(client_inbox, Received)  # so the bulk connection is there
    relay.frozen.set()
    assert expect(inbox, Lost).reason == "silent for 1 s"
    assert expect(client_inbox, Lost).reason == "silent for 1 s"


def test_heartbeats_keep_idle_peers(net):
    server, inbox = net.server(heartbeat_s=0.05, timeout_s=2.0)
    client, client_inbox = net.client(server.port, heartbeat_s=0.05, timeout_s=2.0)
    at_server, at_client = check_works(server, inbox, client, client_inbox)
    with pytest.raises(queue.Empty):
        inbox.get(timeout=3.0)
    client.send(at_client, HELLO)
    assert expect(inbox, Received).peer == at_server


def test_a_peer_without_bulk_connection_is_lost(net):
    server, inbox = net.server(heartbeat_s=0.02, timeout_s=0.5)
    sock = net.dial(server.port)
    read_handshake(sock, LEARNER)
    sock.sendall(encode(Proof(HANDSHAKE, bytes(32), b"")))
    expect(inbox, Opened)
    with contextlib.suppress(OSError), sock:
        while server._peers:
            sock.sendall(frames.PING_FRAME)
            sock.recv(65536)
    assert "no bulk connection" in expect(inbox, Lost).reason


def test_a_slow_reader_does_not_hold_up_the_others(net):
    server, inbox = net.server()
    _, slow_inbox = net.client(server.port, bound=1)  # its inbox is full with `Opened`: it stops reading
    at_slow = expect(inbox, Opened).peer
    fast, fast_inbox = net.client(server.port)
    at_fast, _ = check_works(server, inbox, fast, fast_inbox)
    payload = bytes(8 * MIB)
    message = sample(Publication, version=len(payload))
    for tag in range(4):
        server.send(at_slow, message, payload, tag=("slow", tag))
    for tag in range(4):
        server.send(at_fast, message, payload, tag=("fast", tag))
    for _ in range(4):
        assert len(expect(fast_inbox, Received).payload) == len(payload)
    expect(slow_inbox, Opened)
    for _ in range(4):
        assert len(expect(slow_inbox, Received).payload) == len(payload)
    tags = [expect(inbox, Sent).tag for _ in range(8)]
    assert sorted(tags) == [(who, tag) for who in ("fast", "slow") for tag in range(4)]


def test_control_messages_pass_a_saturated_bulk_connection(net):
    server, inbox = net.server(bound=1)
    client, client_inbox = net.client(server.port)
    at_client = expect(client_inbox, Opened).peer
    expect(inbox, Opened)
    payload = bytes(64 * MIB)
    client.send(at_client, sample(Contribution, to_tokens=len(payload)), payload, tag="bulk")
    client.send(at_client, HELLO)
    assert expect(inbox, Received).message == HELLO
    assert len(expect(inbox, Received).payload) == len(payload)


def test_a_full_inbox_holds_the_sender_back_and_nothing_is_lost(net):
    server, inbox = net.server(bound=2, heartbeat_s=0.05, timeout_s=2.0)
    client, client_inbox = net.client(server.port, heartbeat_s=0.05, timeout_s=2.0)
    at_client = expect(client_inbox, Opened).peer
    payload = bytes(16 * MIB)
    for number in range(20):
        client.send(at_client, sample(Report, number=number))
    for seq in range(4):
        client.send(at_client, sample(Contribution, seq=seq, to_tokens=len(payload)), payload, tag=seq)
    with pytest.raises(queue.Empty):  # longer than timeout_s: a node that is busy is not a peer that is silent
        while expect_within(client_inbox, 3.0).tag != 3:
            pass
    assert inbox.full()
    expect(inbox, Opened)
    events = [expect(inbox, Received) for _ in range(24)]
    assert [event.message.number for event in events if event.payload is None] == list(range(20))
    assert [event.message.seq for event in events if event.payload is not None] == list(range(4))
    assert expect_sooner_or_later(client_inbox, Sent).tag is not None


def test_control_that_fills_the_inbox_does_not_keep_bulk_out(net):
    """A read takes messages by the hundred; after one that left no room for bulk, bulk is read first."""
    server, inbox = net.server(bound=2)
    client, client_inbox = net.client(server.port)
    at_client = expect(client_inbox, Opened).peer
    before = client.bytes_out
    for number in range(1000):
        client.send(at_client, sample(Report, number=number), tag=number)
    client.send(at_client, sample(Contribution, to_tokens=1000), bytes(1000), tag="bulk")
    tags = {expect(client_inbox, Sent).tag for _ in range(1001)}
    assert "bulk" in tags and inbox.full(), "all is on its way, and nothing of it was taken"
    in_a_read = 1 + 1000 * SMALL_BYTES // (client.bytes_out - before - 2000)
    expect(inbox, Opened)
    events = [expect(inbox, Received) for _ in range(1001)]
    assert [event.payload is not None for event in events].index(True) <= 3 * in_a_read < 500
    assert [event.message.number for event in events if event.payload is None] == list(range(1000))


def expect_within(inbox, seconds):
    event = inbox.get(timeout=seconds)
    assert isinstance(event, Sent), event
    return event


def test_a_peer_that_never_reads_is_dropped_when_messages_for_it_pile_up(net):
    server, inbox = net.server(queue_bytes_max=4 * MIB)
    net.client(server.port, bound=1)  # never reads: its inbox stays full
    peer = expect(inbox, Opened).peer
    for _ in range(40 * 64):
        server.send(peer, Refused("x" * (16 << 10)))
    lost = expect(inbox, Lost)
    assert lost.peer == peer and "reads too slowly" in lost.reason


def test_a_slow_reader_of_large_payloads_is_not_dropped(net):
    """However much waits for it: what it has not taken lies with the sender, who keeps to a window."""
    server, inbox = net.server(queue_bytes_max=1000)
    client, client_inbox = net.client(server.port, bound=1)
    peer, _ = check_works(server, inbox, client, client_inbox)
    for number in range(20):
        server.send(peer, sample(Publication, version=3 * MIB, fragment=number), bytes(3 * MIB), tag=number)
    arrived = [expect(client_inbox, Received).message.fragment for _ in range(20)]
    assert arrived == list(range(20)) == [expect(inbox, Sent).tag for _ in range(20)]


def test_no_more_payloads_are_read_than_fit_the_inbox_and_control_goes_on(net):
    """Nobody takes anything out: the bytes stop, messages do not, and a silence that is ours is forgiven."""
    server, inbox = net.server(heartbeat_s=0.1, timeout_s=0.5, streams=2)
    inbox.bytes_max = 5 * MIB
    client, client_inbox = net.client(server.port, heartbeat_s=0.1, timeout_s=0.5)
    peer, at_client = check_works(server, inbox, client, client_inbox)
    for number in range(40):
        client.send(at_client, sample(Contribution, to_tokens=MIB, seq=number), bytes(MIB), lane=number)
    until(lambda: not inbox.has_room, "a full inbox")
    reports = [sample(Report, number=number) for number in range(50)]
    for report in reports:
        client.send(at_client, report)
        time.sleep(0.03)  # not a wait for anything: together longer than any silence would be borne
    taken = [expect(inbox, Received) for _ in range(inbox.qsize())]
    assert [event.message for event in taken if event.payload is None] == reports
    payloads = [event.message.seq for event in taken if event.payload is not None]
    assert 5 < len(payloads) <= 5 + 2, "the bound, and one a stream beyond it"
    assert not inbox.has_room, "what was taken out and is not done with still counts"
    while len(payloads) < 40:
        inbox.settle()
        payloads.append(expect(inbox, Received).message.seq)
    assert sorted(payloads) == list(range(40)) and inbox.empty()
    assert payloads[-1] in (38, 39) and list(server._peers) == [peer]


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_rate_holds_payloads_back_and_nothing_else(net, way):
    """A megabyte at 8 Mbit/s over two streams takes nearly a second at least; what is said after it does not wait."""
    server, inbox = net.server(streams=2, mbit_max=8 if way == "down" else 0)
    client, client_inbox = net.client(server.port)
    client.keep_rate(8 if way == "up" else 0)
    at_server, at_client = check_works(server, inbox, client, client_inbox)
    half, began = bytes(500_000), time.monotonic()
    down = (server, at_server, client_inbox, sample(Publication, version=len(half)), PULL)
    up = (client, at_client, inbox, sample(Contribution, to_tokens=len(half)), HELLO)
    sender, peer, arrivals, bulk, word = down if way == "down" else up
    for lane in range(2):
        sender.send(peer, bulk, half, lane=lane)
    sender.send(peer, word)
    assert expect(arrivals, Received).payload is None
    assert [len(expect(arrivals, Received).payload) for _ in range(2)] == [len(half)] * 2
    assert time.monotonic() - began > 0.9


# --------------------------------------------------------------------------------------------------------- streams


def test_payloads_of_one_lane_keep_their_order_over_any_number_of_streams(net):
    """Both ways at once, sizes of all kinds, and the first of them sent before any bulk connection is there."""
    server, inbox = net.server(streams=3)
    client, client_inbox = net.client(server.port)
    at_client, at_server = expect(client_inbox, Opened).peer, expect(inbox, Opened).peer
    for number in range(60):
        size = 1 + (number * 7919) % MIB
        client.send(at_client, sample(Contribution, to_tokens=size, seq=number), bytes(size), lane=number % 5)
        server.send(at_server, sample(Publication, version=size, settled_step=number), bytes(size), lane=number % 5)
    up = [expect(inbox, Received).message.seq for _ in range(60)]
    down = [expect(client_inbox, Received).message.settled_step for _ in range(60)]
    for lane in range(5):
        ordered = list(range(lane, 60, 5))
        assert [number for number in up if number % 5 == lane] == ordered
        assert [number for number in down if number % 5 == lane] == ordered
    assert sorted(server._peers[at_server].bulk) == sorted(client._peers[at_client].bulk) == [0, 1, 2]


def test_losing_one_stream_loses_the_peer(net):
    server, inbox = net.server(streams=3)
    client, client_inbox = net.client(server.port)
    peer, at_client = check_works(server, inbox, client, client_inbox)
    for lane in range(3):
        client.send(at_client, sample(Contribution, to_tokens=1), b"x", lane=lane)
        expect(inbox, Received)
    server._loop.call(server._peers[peer].bulk[1].sock.shutdown, socket.SHUT_RDWR)
    assert expect(inbox, Lost).peer == peer and expect(client_inbox, Lost)
    expect(inbox, Opened)  # and it comes back


def test_a_learner_that_knows_nothing_of_streams_has_one(net):
    """It says nothing of them, and attaches as it always did: both are defaults of fields that it does not send."""
    server, inbox = net.server(streams=4)
    control, bulk = net.dial(server.port), net.dial(server.port)
    read_handshake(control, LEARNER)
    control.sendall(old_frame(Proof, protocol=HANDSHAKE, nonce=bytes(32), mac=b""))
    attached = read_handshake(control, LEARNER)
    peer = expect(inbox, Opened).peer
    read_handshake(bulk, LEARNER)
    bulk.sendall(old_frame(frames.Attach, protocol=HANDSHAKE, nonce=bytes(32), session=attached.session, mac=b""))
    assert isinstance(read_handshake(bulk, LEARNER), Attached)
    contribution = sample(Contribution, to_tokens=3, fragment=7)
    for part in frames.encode_bulk(1, contribution, memoryview(b"abc")):
        bulk.sendall(b"".join(part))
    received = expect(inbox, Received)
    assert (received.peer, received.message, bytes(received.payload)) == (peer, contribution, b"abc")
    for lane in (1, 2, 3):
        server.send(peer, sample(Publication, version=0), b"", tag=lane, lane=lane)
        assert expect(inbox, Sent).tag == lane


def test_a_syncer_that_knows_nothing_of_streams_is_dialled_once_more(net):
    listener = net.listen()
    client, inbox = net.client(listener.getsockname()[1])
    control, _ = listener.accept()
    control.sendall(encode(Challenge(HANDSHAKE, bytes(32), False, PROTOCOL)))
    read_handshake(control, SYNCER)
    control.sendall(old_frame(Attached, session=bytes(16), mac=b""))
    assert client._peers[expect(inbox, Opened).peer].streams == 1
    bulk, _ = listener.accept()
    bulk.sendall(encode(Challenge(HANDSHAKE, bytes(32), False, PROTOCOL)))
    assert read_handshake(bulk, SYNCER).stream == 0
    control.close()
    bulk.close()


def old_frame(kind, **fields):
    """A message of the handshake as it was before it had further fields."""
    return frames._frame(frames.HANDSHAKE, msgspec.msgpack.encode({"type": kind.__name__} | fields))


@pytest.mark.parametrize("stream", [-1, 3, 10**9])
def test_a_stream_that_a_session_does_not_have_is_refused(net, stream):
    server, inbox = net.server(streams=3)
    client, client_inbox = net.client(server.port)
    _, at_client = check_works(server, inbox, client, client_inbox)
    sock = net.dial(server.port)
    read_handshake(sock, LEARNER)
    sock.sendall(encode(frames.Attach(HANDSHAKE, bytes(32), client._peers[at_client].session, b"", stream)))
    assert "no such session" in read_handshake(sock, LEARNER).reason


@pytest.mark.parametrize(
    ("asked", "offered", "streams"), [(1, 4, 1), (64, 4, 4), (0, 4, 1), (-5, 4, 1), (10**9, 10**9, 64)]
)
def test_the_number_of_streams_is_bounded_whatever_is_asked(asked, offered, streams):
    assert handshake.agreed(asked, offered) == streams


def test_the_time_of_payloads_side_by_side_is_counted_once():
    """0 to 10 and 5 to 6 side by side, then 20 to 23: thirteen seconds in all."""
    first, second = (types.SimpleNamespace(began=None, last_began=0.0, heard=0.0) for _ in range(2))
    peer = Peer(1, "", b"", first, 0.0, 0.0, 2, {0: first, 1: second})
    first.began, second.last_began, second.heard = 0.0, 5.0, 6.0
    told = [peer.busy_s(second)]
    first.began, first.last_began, first.heard = None, 0.0, 10.0
    told.append(peer.busy_s(first))
    second.last_began, second.heard = 20.0, 23.0
    told.append(peer.busy_s(second))
    assert told == [6.0, 4.0, 3.0]


def test_closing_delivers_what_was_sent_on_both_connections(net):
    server, inbox = net.server()
    client, client_inbox = net.client(server.port)
    _, at_client = check_works(server, inbox, client, client_inbox)
    payload = bytes(3 * MIB)
    client.send(at_client, sample(Contribution, to_tokens=len(payload)), payload, tag="last")
    expect(client_inbox, Sent)
    client.send(at_client, HELLO)
    client.close()
    events = [expect(inbox, Received), expect(inbox, Received)]
    assert sorted(event.payload is None for event in events) == [False, True]
    expect(inbox, Lost)
    assert not client._loop.thread.is_alive()


def test_close_is_bounded_when_the_other_side_never_reads(net):
    server, inbox = net.server()
    net.client(server.port, bound=1)
    peer = expect(inbox, Opened).peer
    server.send(peer, sample(Publication, version=64 * MIB), bytes(64 * MIB))
    server.close()
    server.close()
    assert not server._loop.thread.is_alive()


def test_a_bug_in_the_io_thread_surfaces_at_the_next_send(net):
    def broken(message):
        raise KeyError("fragment 7")

    inbox = Inbox(10)
    server = Server("127.0.0.1", 0, None, inbox, broken, tls=syncer_tls() if net.has_tls else None)
    client, client_inbox = net.client(server.port)
    at_server, at_client = check_works(server, inbox, client, client_inbox)
    client.send(at_client, sample(Contribution, to_tokens=1), b"x")
    assert "KeyError" in expect(inbox, Lost).reason
    with pytest.raises(WireError, match="KeyError"):
        server.send(at_server, PULL)
    server.close()


def test_running_out_of_sockets_pauses_accepting(net, monkeypatch):
    monkeypatch.setattr(server_module, "ACCEPT_PAUSE_S", 0.05)
    server, inbox = net.server()
    server._listener, real = Exhausted(server._listener, 3), server._listener
    check_works(server, inbox, *net.client(server.port))
    server._listener = real


class Exhausted:
    """A listening socket that cannot accept the first few times."""

    def __init__(self, listener, failures):
        self._listener, self._failures = listener, failures

    def accept(self):
        self._failures -= 1
        if self._failures >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name):
        return getattr(self._listener, name)

    def __eq__(self, other):
        """The loop watches it as the socket that it stands for."""
        return other is self or other is self._listener

    def __hash__(self):
        return hash(self._listener)


# ---------------------------------------------------------------------------------------------- dialling, and the log


def lines(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def free_port(net):
    with net.listen() as reserve:
        return reserve.getsockname()[1]


def test_the_wait_between_dials_doubles_to_a_cap_and_is_jittered_by_half():
    assert [client_module.redial_s(failures, 1.0) for failures in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert client_module.redial_s(10_000, 1.0) == client_module.REDIAL_S_MAX
    assert client_module.redial_s(3, 0.0) == 0.4


def test_closing_a_client_neither_dials_nor_says_so(net, caplog):
    caplog.set_level(logging.DEBUG, "skerry.wire")
    server, inbox = net.server()
    client, client_inbox = net.client(server.port)
    check_works(server, inbox, client, client_inbox)
    client.close()
    expect(inbox, Lost)
    assert client._dial_at == float("inf")
    assert not [line for line in lines(caplog, logging.INFO) + lines(caplog, logging.DEBUG) if "dialling" in line]


def test_a_peer_that_was_opened_is_lost_quietly_for_the_node_is_told(net, caplog):
    caplog.set_level(logging.DEBUG, "skerry.wire")
    server, inbox = net.server()
    client, client_inbox = net.client(server.port)
    at_server, at_client = check_works(server, inbox, client, client_inbox)
    client.send(at_client, sample(Contribution), b"")
    expect(inbox, Received)  # its bulk connection is there
    server.drop(at_server, "enough")
    assert expect(client_inbox, Lost).peer == at_client
    expect(client_inbox, Opened)  # it came back
    assert any("lost: enough" in line for line in lines(caplog, logging.DEBUG))
    assert not lines(caplog, logging.INFO) and not lines(caplog, logging.WARNING)


def test_a_learner_of_another_protocol_is_named_once_by_the_syncer_and_counted(net, caplog):
    caplog.set_level(logging.INFO, "skerry.wire")
    turned_away = Repeats()
    server, inbox = net.server(protocol=3, token=b"right", turned_away=turned_away)
    _, told = net.client(server.port, protocol=2, token=b"right", name="fern")
    wait_for(told, 3)
    until(lambda: turned_away.rows(0.0) and turned_away.rows(0.0)[0]["count"] >= 3, "three refusals")
    (row,) = turned_away.rows(0.0)
    text = "the syncer speaks protocol 3 and the learner 2: upgrade the older"
    assert (row["who"], row["why"]) == ("fern at 127.0.0.1", text)
    assert lines(caplog, logging.WARNING) == [f"fern at 127.0.0.1 refused: {text}"]
    assert not lines(caplog, logging.INFO) and inbox.empty()


def test_learners_of_several_protocols_each_have_their_row_where_no_proof_is_asked_for(net):
    turned_away = Repeats()
    server, _ = net.server(protocol=3, turned_away=turned_away)
    _, told = net.client(server.port, protocol=2, name="fern")
    wait_for(told, 2)
    _, told = net.client(server.port, protocol=4, name="moss")
    wait_for(told, 2)
    until(lambda: len(turned_away.rows(0.0)) == 2, "a row for each")
    differs = "the syncer speaks protocol 3 and the learner {}: upgrade the older"
    rows = {row["who"]: row["why"] for row in turned_away.rows(0.0)}
    assert rows == {"fern at 127.0.0.1": differs.format(2), "moss at 127.0.0.1": differs.format(4)}


def test_bulk_connections_of_a_learner_that_was_just_dropped_are_no_news(net, caplog):
    caplog.set_level(logging.INFO, "skerry.wire")
    server, _ = net.server()
    sock = net.dial(server.port)
    read_handshake(sock, LEARNER)
    sock.sendall(encode(frames.Attach(HANDSHAKE, bytes(32), bytes(16), b"", 0)))
    assert "no such session" in read_handshake(sock, LEARNER).reason
    assert not lines(caplog, logging.INFO) and not lines(caplog, logging.WARNING)


def test_who_comes_and_goes_without_a_word_is_told_of_once(net, caplog):
    caplog.set_level(logging.INFO, "skerry.wire")
    server, inbox = net.server()
    for _ in range(3):
        with net.dial(server.port) as sock:
            read_handshake(sock, LEARNER)
    check_works(server, inbox, *net.client(server.port))
    until(lambda: sum(not connection.peer for connection in list(server._connections)) == 0, "strangers to be gone")
    assert lines(caplog, logging.INFO) == ["127.0.0.1, not let in yet: closed by the other side"]


def test_a_stranger_is_refused_aloud(net, caplog):
    server, _ = net.server(token=b"right")
    _, inbox = net.client(server.port, token=b"wrong")
    expect(inbox, Received)
    assert ["wrong token" in line for line in lines(caplog, logging.WARNING)] == [True]


def test_a_syncer_that_stays_away_is_logged_once_in_a_while(net, caplog):
    caplog.set_level(logging.DEBUG, "skerry.wire")
    port, waits = free_port(net), queue.Queue()
    client, inbox = net.client(port, jitter=lambda: waits.put("one more") or 0.0)
    wait_for(waits, 4)
    assert [line.split(";")[0] for line in lines(caplog, logging.INFO)] == [f"127.0.0.1:{port}: connection refused"]
    assert sum("dialling again" in line for line in lines(caplog, logging.DEBUG)) >= 2
    server, server_inbox = net.server(port=port)
    check_works(server, server_inbox, client, inbox)
    server.close()
    expect(inbox, Lost)
    waits.queue.clear()
    wait_for(waits, 3)
    assert len(lines(caplog, logging.INFO)) == 2  # the next time it is away is told again


def wait_for(waits, count):
    for _ in range(count):
        waits.get(timeout=WAIT_S)


def test_a_client_with_a_file_finds_a_syncer_that_came_up_elsewhere(net, tmp_path):
    """The file is read at each dialling: while there is none, while it says nothing, and when it says another port."""
    file = tmp_path / "a, b:c"
    client, inbox = net.client(7077, host=f"@{file}")
    until(lambda: "no such file" in client.trouble, "a look at the file")
    file.write_text("soon\n")
    until(lambda: "says no host:port" in client.trouble, "a look into it")
    first, _ = net.server()
    file.write_text(f"127.0.0.1:{first.port}\n")
    assert isinstance(inbox.get(timeout=WAIT_S), Opened)
    second, _ = net.server()
    file.write_text(f"127.0.0.1:{second.port}\n")
    first.close()
    assert isinstance(inbox.get(timeout=WAIT_S), Lost)
    assert isinstance(inbox.get(timeout=WAIT_S), Opened) and not client.trouble
    assert client.address == f"@{file}"
