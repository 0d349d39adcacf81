"""TLS: whose key opens which door, what is said where it does not, and what somebody on the way can do."""

import contextlib
import datetime as dt
import os
import queue
import random
import re
import select
import socket
import struct
import threading
import time

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from skerry.core.messages import PROTOCOL, Contribution, Hello, Publication, Refused
from skerry.errors import KeysError, NoAnswer
from skerry.wire import connection as connections
from skerry.wire import frames
from skerry.wire.client import Client
from skerry.wire.frames import Denied, Parser, encode, learner_dialect
from skerry.wire.handshake import HANDSHAKE
from skerry.wire.inquiry import ask_status
from skerry.wire.quotas import PEERS_PER_NAME, Quotas
from skerry.wire.server import Server
from skerry.wire.stream import IDLE_RECORDS_MAX, RECORD_COST_BYTES, RECORDS_MAX, Records
from skerry.wire.tls import Tls, name_of
from skerry.wire.transport import Inbox, Lost, Opened, Received, Sent
from wire import certificates
from wire.certificates import Authority, learner_tls, private, syncer_tls
from wire.samples import sample

WAIT_S = 60
MIB = 1 << 20
HELLO = sample(Hello, protocol=PROTOCOL, learner="fern")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another run's authority, which calls itself the same."""
    return Authority(tmp_path_factory.mktemp("other"))


@pytest.fixture
def made():
    """Makes a server and clients with these keys, or without any, and closes them."""
    with contextlib.ExitStack() as stack:

        class Made:
            def server(self, tls, port=0, bound=10_000, **options):
                inbox = Inbox(bound)
                server = Server("127.0.0.1", port, None, inbox, lambda m: m.to_tokens, tls=tls, **options)
                stack.callback(server.close)
                return server, inbox

            def client(self, port, tls, bound=10_000, **options):
                inbox = Inbox(bound)
                options = {"jitter": lambda: 0.0} | options
                client = Client("127.0.0.1", port, None, inbox, lambda m: m.version, tls=tls, **options)
                stack.callback(client.close)
                return client, inbox

            def own(self, sock):
                stack.callback(sock.close)
                return sock

        yield Made()


def expect(inbox, kind):
    event = inbox.get(timeout=WAIT_S)
    assert isinstance(event, kind), event
    return event


def until(is_so, what):
    ends_at = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < ends_at, what
        time.sleep(0.01)


# ----------------------------------------------------------------------------------------------------- who comes in


def test_each_side_knows_the_others_name(made):
    server, inbox = made.server(syncer_tls())
    for name in ("fern", "moss"):
        _, client_inbox = made.client(server.port, learner_tls(name))
        assert expect(inbox, Opened).principal == name
        assert expect(client_inbox, Opened).principal == "syncer"


def test_no_tls_no_principal(made):
    server, inbox = made.server(None)
    made.client(server.port, None)
    assert expect(inbox, Opened).principal == ""


def test_a_revoked_key_is_refused_for_good_in_every_handshake(made):
    revoked = {}
    server, inbox = made.server(syncer_tls(lambda name, serial, is_admin: revoked.get((name, serial), "")))
    client, client_inbox = made.client(server.port, learner_tls())
    peer = expect(inbox, Opened).peer
    expect(client_inbox, Opened)
    revoked["fern", certificates.run().serials["fern"]] = "the key of fern is revoked"
    server.drop(peer, "revoked")
    expect(client_inbox, Lost)
    refused = expect(client_inbox, Received).message  # though it was let in before: who says so has proved itself
    assert refused == Refused("the key of fern is revoked") and refused.is_final
    assert client._dial_at == float("inf")
    expect(inbox, Lost)
    made.client(server.port, learner_tls("moss"))
    assert expect(inbox, Opened).principal == "moss"


def test_a_key_that_is_revoked_between_being_shown_and_the_proof_opens_nothing(made):
    revoked = []
    server, inbox = made.server(syncer_tls(lambda name, serial, is_admin: "it is revoked" if revoked else ""))
    early = made.own(learner_tls().dialled(socket.create_connection(("127.0.0.1", server.port), WAIT_S)))
    assert read_item(early).locked is False  # it is let in as far as this
    revoked.append(True)
    early.sendall(encode(frames.Proof(HANDSHAKE, bytes(32), b"", 1, PROTOCOL, "fern")))
    assert read_item(early) == Denied("it is revoked", final=True) and inbox.empty()


@pytest.mark.parametrize("days", [(-9, -1), (1, 9)])
def test_a_key_out_of_its_time_is_refused_before_it_is_used(days):
    path = certificates.run().key_file("fern-late", *days)
    with pytest.raises(KeysError, match=r"has expired on|is not good before") as caught:
        Tls(path)
    assert str(path) in str(caught.value) and "skerry keys issue" in str(caught.value)


def expired_tls(name, monkeypatch, refusal=None):
    """As a key is that was good when its process began."""
    with monkeypatch.context() as patch:
        patch.setattr("skerry.wire.tls._out_of_time", lambda *_: "")
        return Tls(certificates.run().key_file(name, -9, -1), refusal)


def test_a_learner_whose_key_has_expired_is_told_so(made, monkeypatch):
    server, inbox = made.server(syncer_tls())
    _, client_inbox = made.client(server.port, expired_tls("fern", monkeypatch))
    refused = expect(client_inbox, Received).message
    assert refused.is_final and "our certificate has expired" in refused.text and "skerry keys issue" in refused.text
    assert inbox.empty()


@pytest.mark.parametrize("days", [(2, 9), (-9, -1)], ids=["behind", "ahead"])
def test_a_syncer_whose_clock_is_wrong_ends_no_learner(made, monkeypatch, days):
    server, inbox = made.server(syncer_tls())
    with monkeypatch.context() as patch:
        patch.setattr("skerry.wire.tls._out_of_time", lambda *_: "")
        tls = Tls(certificates.run().key_file("fern", *days))
    tls._ends = dt.datetime.now(dt.UTC) + dt.timedelta(days=9)  # by the learner's clock it is good
    client, client_inbox = made.client(server.port, tls)
    until(lambda: "by its clock" in client.trouble, client.trouble)
    assert client_inbox.empty() and inbox.empty() and client._dial_at < float("inf")


def test_a_syncer_whose_key_has_expired_is_not_believed_and_dialled_on(made, monkeypatch):
    server, inbox = made.server(expired_tls("syncer", monkeypatch, certificates.everybody))
    client, client_inbox = made.client(server.port, learner_tls())
    until(lambda: "its certificate has expired" in client.trouble, client.trouble)
    assert client_inbox.empty() and inbox.empty() and client._dial_at < float("inf")


def test_a_key_of_another_run_opens_nothing_on_either_side(made, other, caplog):
    caplog.set_level("INFO", "skerry.wire")
    server, inbox = made.server(syncer_tls())
    client, client_inbox = made.client(server.port, Tls(other.key_file("fern")))
    until(lambda: "its certificate is of another run" in client.trouble, client.trouble)
    assert client_inbox.empty() and inbox.empty()
    until(lambda: "our certificate is of another run" in caplog.text, caplog.text)
    for said in (client.trouble, caplog.text):  # each reader's own key may be the wrong one
        assert "check that both sides' keys are of one run" in said


def test_who_is_of_this_run_and_dials_with_another_runs_key_is_told_which(made, tmp_path):
    """It believes the syncer, for its file has the right authority; only its own certificate is wrong."""
    server, inbox = made.server(syncer_tls())
    mixed = Tls(Authority(tmp_path, "another").key_file("fern"))
    mixed._context.load_verify_locations(cadata=certificates.public(certificates.run().certificate).decode())
    _, client_inbox = made.client(server.port, mixed)
    refused = expect(client_inbox, Received).message
    assert refused.is_final and "our certificate is of another run" in refused.text
    assert inbox.empty()


def test_no_learner_can_play_the_syncer(made):
    server, inbox = made.server(Tls(certificates.run().files["moss"], certificates.everybody))
    client, client_inbox = made.client(server.port, learner_tls())
    until(lambda: "its certificate is not" in client.trouble, client.trouble)
    assert client_inbox.empty() and inbox.empty()


def test_nor_one_that_has_the_name_of_the_syncer_in_a_learners_key(made):
    path = certificates.run().key_file("syncer", is_syncer=False)
    server, _ = made.server(Tls(path, certificates.everybody))
    client, client_inbox = made.client(server.port, learner_tls())
    until(lambda: "its certificate is not" in client.trouble, client.trouble)
    assert client_inbox.empty()


def test_the_syncers_key_is_no_learners(made):
    server, inbox = made.server(syncer_tls())
    _, client_inbox = made.client(server.port, Tls(certificates.run().files["syncer"]))
    assert "not for this side" in expect(client_inbox, Received).message.text and inbox.empty()


def test_a_bulk_connection_is_of_the_principal_whose_session_it_is(made):
    server, inbox = made.server(syncer_tls())
    client, client_inbox = made.client(server.port, learner_tls())
    peer = expect(client_inbox, Opened).peer
    expect(inbox, Opened)
    until(lambda: server._peers[1].bulk, "its bulk connection")
    server._loop.call(server._peers[1].bulk.clear)  # so that there would be room for one
    thief = made.own(learner_tls("moss").dialled(socket.create_connection(("127.0.0.1", server.port), WAIT_S)))
    assert read_item(thief).locked is False
    thief.sendall(encode(frames.Attach(HANDSHAKE, bytes(32), client._peers[peer].session, b"", 0)))
    assert "no such session" in read_item(thief).reason


def read_item(sock):
    parser = Parser(learner_dialect(lambda m: 0))
    while True:
        count = sock.recv_into(parser.buffer())
        assert count, "closed"
        if (item := parser.received(count)) is not None:
            return item


# ------------------------------------------------------------------------------------------- one side has no TLS


def test_a_learner_without_a_key_is_told_that_it_needs_one(made):
    server, inbox = made.server(syncer_tls(), handshake_s=0.4)
    _, client_inbox = made.client(server.port, None)
    refused = expect(client_inbox, Received).message
    assert refused.is_final and "this syncer asks for a key: name a key file" in refused.text and inbox.empty()


def test_but_one_that_was_let_in_before_dials_on(made):
    plain, _ = made.server(None)
    client, client_inbox = made.client(plain.port, None)
    expect(client_inbox, Opened)
    plain.close()
    expect(client_inbox, Lost)
    server, _ = made.server(syncer_tls(), port=plain.port, handshake_s=0.4)
    until(lambda: "this syncer asks for a key" in client.trouble, client.trouble)
    server.close()
    made.server(None, port=plain.port)
    expect(client_inbox, Opened)


def test_a_learner_with_a_key_names_a_syncer_that_has_none(made, caplog):
    server, inbox = made.server(None)
    client, client_inbox = made.client(server.port, learner_tls())
    until(lambda: "what answers there speaks without TLS" in client.trouble, client.trouble)
    until(lambda: "it speaks TLS, and this side does not" in caplog.text, caplog.text)
    assert client_inbox.empty() and inbox.empty()


def test_who_asks_for_the_status_is_told_the_same(made, other):
    plain, _ = made.server(None)
    secure, _ = made.server(syncer_tls(), handshake_s=0.4)
    for port, tls, words in (
        (plain.port, learner_tls(), "speaks without TLS"),
        (secure.port, None, "this syncer asks for a key"),
        (secure.port, Tls(other.key_file("fern")), "its certificate is of another run"),
    ):
        with pytest.raises(NoAnswer, match=words) as caught:
            ask_status("127.0.0.1", port, None, tls=tls)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", encode(HELLO), os.urandom(4096), b"\x16\x03\x01\xff\xff"])
def test_junk_on_a_tls_port_harms_nobody(made, words):
    server, inbox = made.server(syncer_tls(), handshake_s=1.0)
    sock = made.own(socket.create_connection(("127.0.0.1", server.port), WAIT_S))
    sock.sendall(words)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(65536):
            pass
    made.client(server.port, learner_tls())
    assert expect(inbox, Opened).principal == "fern"


def test_a_refusal_by_who_has_proved_nothing_is_not_believed_by_who_has_a_key(made):
    """Plain words where TLS is spoken, which anybody on the way could say."""
    listener = made.own(socket.create_server(("127.0.0.1", 0)))
    client, inbox = made.client(listener.getsockname()[1], learner_tls())
    for _ in range(2):
        sock = made.own(listener.accept()[0])
        sock.sendall(encode(Denied("go away", final=True)))
        with contextlib.suppress(OSError):
            while sock.recv(65536):
                pass
        sock.close()
    assert inbox.empty() and "without TLS" in client.trouble


# --------------------------------------------------------------------------------------------- somebody on the way


class Between:
    """Carries every connection to a port, keeps what it saw, and may change one byte of what goes up."""

    def __init__(self, made, port):
        self._made, self._port = made, port
        self._listener = made.own(socket.create_server(("127.0.0.1", 0)))
        self.port = self._listener.getsockname()[1]
        self.seen = bytearray()
        self.change_after = None  # so many bytes more
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                left = self._made.own(self._listener.accept()[0])
                right = self._made.own(socket.create_connection(("127.0.0.1", self._port)))
                threading.Thread(target=self._pump, args=(left, right, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(right, left, False), daemon=True).start()

    def _pump(self, source, target, is_up):
        with contextlib.suppress(OSError), source, target:
            while data := bytearray(source.recv(65536)):
                if is_up and self.change_after is not None and len(data) > 1000:
                    data[len(data) // 2] ^= 1
                    self.change_after = None
                self.seen += data
                target.sendall(data)


@pytest.mark.parametrize("has_tls", [True, False])
def test_what_goes_by_is_readable_without_tls_and_not_with_it(made, has_tls):
    server, inbox = made.server(syncer_tls() if has_tls else None)
    between = Between(made, server.port)
    client, client_inbox = made.client(between.port, learner_tls() if has_tls else None)
    peer, at_server = expect(client_inbox, Opened).peer, expect(inbox, Opened).peer
    secret = b"a contribution that nobody else is to read" * 1000
    client.send(peer, sample(Contribution, to_tokens=len(secret)), secret)
    assert expect(inbox, Received).payload == secret
    server.send(at_server, sample(Publication, version=len(secret)), secret)
    assert expect(client_inbox, Received).payload == secret
    for words in (secret[:42], frames.MAGIC, b"Contribution", b"fern"):
        assert (words in between.seen) == (not has_tls and words != b"fern"), words


def test_a_byte_that_was_changed_on_the_way_costs_the_connection_and_nothing_else(made):
    server, inbox = made.server(syncer_tls())
    between = Between(made, server.port)
    client, client_inbox = made.client(between.port, learner_tls())
    peer, at_server = expect(client_inbox, Opened).peer, expect(inbox, Opened).peer
    payload = os.urandom(MIB)
    client.send(peer, sample(Contribution, to_tokens=len(payload)), payload)
    assert expect(inbox, Received).payload == payload
    between.change_after = 0
    client.send(peer, sample(Contribution, to_tokens=len(payload)), payload)
    lost = expect(inbox, Lost)
    assert lost.peer == at_server and "decryption failed or bad record mac" in lost.reason
    expect(client_inbox, Lost)
    peer = expect(client_inbox, Opened).peer  # it dials on
    expect(inbox, Opened)
    client.send(peer, sample(Contribution, to_tokens=len(payload)), payload)
    assert expect(inbox, Received).payload == payload


# ----------------------------------------------------------------------------- what the socket does not say


@contextlib.contextmanager
def held(server):
    """Its I/O thread does nothing meanwhile, so that all that is sent comes at once."""
    goes_on = threading.Event()
    server._loop.call(goes_on.wait, WAIT_S)
    yield
    goes_on.set()


def test_what_is_decrypted_and_not_read_in_one_turn_is_read_in_the_next(made, monkeypatch):
    """With room for one event: all that waits has come from the socket long before it may be read, and none follows."""
    monkeypatch.setattr(connections, "WORK_BYTES", 1000)
    server, inbox = made.server(syncer_tls(), bound=1, heartbeat_s=30.0, timeout_s=120.0)
    client, client_inbox = made.client(server.port, learner_tls(), heartbeat_s=30.0, timeout_s=120.0)
    peer = expect(client_inbox, Opened).peer
    until(lambda: client._peers[peer].bulk, "its bulk connection")
    with held(server):
        for number in range(200):
            client.send(peer, sample(Hello, protocol=number))
        client.send(peer, sample(Contribution, to_tokens=50_000), bytes(50_000), tag="last")
        expect(client_inbox, Sent)
    expect(inbox, Opened)
    events = [expect(inbox, Received) for _ in range(201)]
    assert [event.message.protocol for event in events if event.payload is None] == list(range(200))


def test_while_it_may_not_be_read_nobody_spins(made):
    server, inbox = made.server(syncer_tls(), bound=1)
    client, client_inbox = made.client(server.port, learner_tls())
    peer = expect(client_inbox, Opened).peer
    with held(server):
        for number in range(3000):
            client.send(peer, sample(Hello, protocol=number), tag=number if number == 2999 else None)
        expect(client_inbox, Sent)
    until(lambda: server._paused and server._loop._again, "something that is not read")
    turns, step = [], server._step
    server._loop._step = lambda: turns.append(0) or step()
    with pytest.raises(queue.Empty):
        client_inbox.get(timeout=0.5)
    assert len(turns) < 1000, "at most one turn in FULL_INBOX_POLL_S"
    expect(inbox, Opened)
    assert [expect(inbox, Received).message.protocol for _ in range(3000)] == list(range(3000))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_rate_below_a_record_loses_and_repeats_nothing(made, chunk):
    """The bound cuts wherever it likes: what was begun to be sent is sent, and the rest after it."""
    server, inbox = made.server(syncer_tls())
    client, client_inbox = made.client(server.port, learner_tls())
    peer = expect(client_inbox, Opened).peer
    expect(inbox, Opened)
    payload = os.urandom(100 * chunk)
    for each in (client,):
        each._loop.call(setattr, each._peers[peer], "bucket", Trickle(chunk))
    client.send(peer, sample(Contribution, to_tokens=len(payload)), payload)
    assert expect(inbox, Received).payload == payload


class Trickle:
    """A bucket that lets so many bytes through each time it is asked."""

    def __init__(self, count):
        self._count = count

    def allowed(self, now):
        return self._count

    def spend(self, count):
        assert count <= self._count


# ----------------------------------------------------------------------------------------- records with little in them


@pytest.fixture
def line():
    """What a learner says through TLS, record by record as it likes, and the syncer's connection that hears it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname(), WAIT_S)
        near, _ = listener.accept()
    parser = Parser(frames.syncer_dialect(lambda message: message.to_tokens))
    scratch = memoryview(bytearray(connections.SCRATCH_BYTES))
    heard = connections.Connection(near, "far", parser, connections.Meter(), scratch, float("inf"), syncer_tls())
    said = []
    dialling = threading.Thread(target=lambda: said.append(learner_tls().dialled(far)))
    dialling.start()
    while heard.is_shaking:
        assert select.select([near], [], [], WAIT_S)[0]
        heard.shake()
    dialling.join(WAIT_S)
    yield said[0], heard
    heard.close()
    said[0].close()


def test_what_comes_in_short_records_is_read_a_few_at_a_time_and_none_of_it_is_lost(line):
    """However much of it lies in the socket, for a turn is over when the others may wait for no longer."""
    said, heard = line
    heard.parser.legal = frames.BULK_LINE
    payload = os.urandom(300)
    message = sample(Contribution, to_tokens=len(payload))
    stream = b"".join(b"".join(f) for f in frames.encode_bulk(1, message, memoryview(payload)))
    for byte in stream:
        said.sendall(bytes([byte]))
    turns = []
    while heard.bytes_in < len(stream):
        assert heard.has_more or select.select([heard.sock], [], [], WAIT_S)[0]
        before = heard.bytes_in, heard.taken
        turns.append((list(heard.read(lambda: True)), heard.bytes_in - before[0], heard.taken - before[1]))
    assert all(bytes <= 2 * RECORDS_MAX for _, bytes, _ in turns)
    assert all(taken >= bytes * RECORD_COST_BYTES for _, bytes, taken in turns), "and what they are is charged"
    assert [item.payload for items, _, _ in turns for item in items] == [payload]


class Renewal:
    """Asks the other side to expect new keys, again and again: records of TLS that have nothing in them.

    What they are encrypted with is in RFC 8446, section 7; `secret` is what TLS tells whoever wants to look into it.
    """

    def __init__(self, secret, said):
        self._secret, self._said = bytes.fromhex(secret), said  # so many records were encrypted by the first of them

    def records(self, count):
        return b"".join(self._next() for _ in range(count))

    def _next(self):
        key, nonce = self._expanded(b"key", 32), bytearray(self._expanded(b"iv", 12))
        nonce[-1] ^= self._said
        header = b"\x17\x03\x03\x00\x16"
        record = header + AESGCM(key).encrypt(bytes(nonce), b"\x18\x00\x00\x01\x00\x16", header)
        self._secret, self._said = self._expanded(b"traffic upd", 48), 0
        return record

    def _expanded(self, label, length):
        info = struct.pack(">HB", length, 6 + len(label)) + b"tls13 " + label + b"\0"
        return HKDFExpand(hashes.SHA384(), length, info).derive(self._secret)


def test_who_sends_records_without_anything_in_them_is_hung_up_on(made, tmp_path):
    server, inbox = made.server(syncer_tls())
    tls = learner_tls()
    tls._context.keylog_filename = tmp_path / "secrets"
    sock = made.own(tls.dialled(socket.create_connection(("127.0.0.1", server.port), WAIT_S)))
    assert sock.cipher()[0] == "TLS_AES_256_GCM_SHA384"
    assert read_item(sock).locked is False
    sock.sendall(encode(frames.Proof(HANDSHAKE, bytes(32), b"", 1, PROTOCOL, "fern")))
    expect(inbox, Opened)
    secret = re.search(r"CLIENT_TRAFFIC_SECRET_0 \w+ (\w+)", (tmp_path / "secrets").read_text()).group(1)
    with socket.socket(fileno=os.dup(sock.fileno())) as plain:
        plain.sendall(Renewal(secret, said=1).records(IDLE_RECORDS_MAX + 10))
    assert "have nothing in them" in expect(inbox, Lost).reason


def test_and_who_sends_something_in_each_is_not(line):
    said, heard = line
    heard.parser.legal = frames.CONTROL_LINE
    for _ in range(2 * IDLE_RECORDS_MAX):
        said.sendall(frames.PING_FRAME)
        list(heard.read(lambda: True))
    assert not heard.broken and not heard._stream._idle


def test_records_are_counted_however_their_bytes_come():
    draw = random.Random(1)
    sizes = [draw.choice([1, 17, 22, 300, 16401]) for _ in range(300)]
    sent = b"".join(b"\x17\x03\x03" + size.to_bytes(2) + bytes(size) for size in sizes)
    for _ in range(50):
        records, given, rest = Records(), 0, b""
        while given < len(sent):
            rest = rest or sent[given : given + draw.choice([1, 2, 3, 30, 70_000])]
            before, most = records.count, draw.choice([1, 2, 64])
            count = records.within(memoryview(rest), most)
            given, rest = given + count, rest[count:]
            assert records.count - before <= most
        assert records.count == len(sizes)
        assert records.cost == sum(max(5 + size, RECORD_COST_BYTES) for size in sizes)


# ------------------------------------------------------------------------------------------------------ key files


def test_a_key_file_says_whose_it_is():
    assert name_of(certificates.run().files["moss"]) == "moss"


def test_a_bad_key_file_is_refused_in_one_line(tmp_path):
    good = certificates.run().files["fern"].read_bytes()
    parts = good.split(b"-----BEGIN CERTIFICATE-----")
    from cryptography.hazmat.primitives.asymmetric import ec

    wrong_key = private(ec.generate_private_key(ec.SECP256R1())) + good[len(parts[0]) :]
    cases = {
        "missing": (None, 0o600, "cannot be read"),
        "open": (good, 0o644, "others may read or change this key: chmod 600"),
        "empty": (b"", 0o600, "is no key file"),
        "text": (b"hello\n", 0o600, "is no key file"),
        "cut": (good[:-100], 0o600, "is no key file"),
        "no authority": (parts[0] + b"-----BEGIN CERTIFICATE-----" + parts[1], 0o600, "1 certificates instead of 2"),
        "wrong key": (wrong_key, 0o600, "its key is not its certificate's"),
    }
    for name, (content, mode, words) in cases.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
            path.chmod(mode)
        for use in (Tls, name_of):
            with pytest.raises(KeysError, match=words) as caught:
                use(path)
            line = str(caught.value)
            assert line.startswith(f"{path}: ") and "skerry keys issue" in line and line.isprintable()


# ------------------------------------------------------------------------------------------------------------ quotas


def test_a_name_has_one_allowance_however_often_it_comes_and_a_few_connections(made):
    room = Quotas(peers_max=20, strangers_max=16, connections_max=100, payloads_burst=10, payload_bytes_burst=1e9)
    server, inbox = made.server(syncer_tls(), quotas=room)
    clients = [made.client(server.port, learner_tls("fern"))[0] for _ in range(PEERS_PER_NAME)]
    peers = [expect(inbox, Opened).peer for _ in clients]
    assert len({id(server._peers[peer].intake) for peer in peers}) == 1
    late, _ = made.client(server.port, learner_tls("fern"))
    until(lambda: late.trouble.startswith("full: fern has"), "one more than is enough to be told so")
    made.client(server.port, learner_tls("moss"))
    moss = expect(inbox, Opened)
    assert moss.principal == "moss" and server._peers[moss.peer].intake is not server._peers[peers[0]].intake


def test_a_short_record_is_charged_to_its_sender_as_what_it_costs(made, monkeypatch):
    monkeypatch.setattr("skerry.wire.quotas.MESSAGE_BYTES_PER_S", 1.0)
    monkeypatch.setattr("skerry.wire.quotas.MESSAGE_BYTES_BURST", 100.0 * RECORD_COST_BYTES)
    room = Quotas(peers_max=20, strangers_max=16, connections_max=100, payloads_burst=10, payload_bytes_burst=1e9)
    server, inbox = made.server(syncer_tls(), quotas=room)
    sock = made.own(learner_tls().dialled(socket.create_connection(("127.0.0.1", server.port), WAIT_S)))
    assert read_item(sock).locked is False
    sock.sendall(encode(frames.Proof(HANDSHAKE, bytes(32), b"", 1, PROTOCOL, "fern")))
    peer = server._peers[expect(inbox, Opened).peer]
    for byte in encode(sample(Hello, learner="fern", layout=bytes(1000))):
        sock.sendall(bytes([byte]))
    before = server.bytes_in
    until(lambda: peer.control in server._held_off, "it to be held back")
    assert server.bytes_in - before < 100 + 2 * RECORDS_MAX and inbox.empty()
