"""The suite that every transport passes: what a node may rely on."""

import random

import pytest

from skerry.core.messages import PROTOCOL, Contribution, Hello, Publication, Pull, Refused, Report
from skerry.wire.client import Client
from skerry.wire.frames import CHUNK_BYTES, learner_dialect, syncer_dialect
from skerry.wire.server import Server
from skerry.wire.transport import Inbox, Lost, MemoryEndpoint, Opened, Received, Sent, join
from wire.certificates import learner_tls, syncer_tls
from wire.samples import sample

WAIT_S = 60


HELLO = sample(Hello, protocol=PROTOCOL, learner="fern", layout=b"layout")
PULL = sample(Pull, fragment=3)


def report(number):
    return sample(Report, number=number)


def contribution(payload, seq=1):
    return sample(Contribution, seq=seq, to_tokens=len(payload))


def publication(payload):
    return sample(Publication, version=len(payload))


class Pair:
    """A syncer's and a learner's endpoint that have found each other."""

    def __init__(self, kind):
        self.server_inbox, self.client_inbox = Inbox(1000), Inbox(1000)
        if kind == "memory":
            self.server = MemoryEndpoint(self.server_inbox, syncer_dialect(lambda m: m.to_tokens))
            self.client = MemoryEndpoint(self.client_inbox, learner_dialect(lambda m: m.version))
            join(self.server, self.client)
        else:
            token = b"secret" if "token" in kind else None
            ours, theirs = (syncer_tls(), learner_tls()) if "tls" in kind else (None, None)
            self.server = Server("127.0.0.1", 0, token, self.server_inbox, lambda m: m.to_tokens, tls=ours)
            where = ("127.0.0.1", self.server.port, token)
            self.client = Client(*where, self.client_inbox, lambda m: m.version, tls=theirs)
        self.at_server = self.at_server_event(Opened).peer
        self.at_client = self.at_client_event(Opened).peer

    def at_server_event(self, kind):
        return expect(self.server_inbox, kind)

    def at_client_event(self, kind):
        return expect(self.client_inbox, kind)


def expect(inbox, kind):
    event = inbox.get(timeout=WAIT_S)
    assert isinstance(event, kind), event
    return event


@pytest.fixture(params=["memory", "tcp", "tcp with token", "tls", "tls with token"])
def pair(request):
    pair = Pair(request.param)
    yield pair
    pair.client.close()
    pair.server.close()


def test_messages_go_both_ways(pair):
    pair.client.send(pair.at_client, HELLO)
    assert pair.at_server_event(Received) == Received(pair.at_server, HELLO, None)
    pair.server.send(pair.at_server, PULL)
    assert pair.at_client_event(Received) == Received(pair.at_client, PULL, None)
    assert pair.client.bytes_out >= 24 and pair.server.bytes_in >= 24


@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 13])
def test_payloads_arrive_whole_both_ways(pair, length):
    payload = random.Random(length).randbytes(length)
    pair.client.send(pair.at_client, contribution(payload), payload)
    received = pair.at_server_event(Received)
    assert received.message == contribution(payload) and bytes(received.payload) == payload
    pair.server.send(pair.at_server, publication(payload), memoryview(bytearray(payload)))
    received = pair.at_client_event(Received)
    assert received.message == publication(payload) and bytes(received.payload) == payload


def test_messages_keep_their_order_and_so_do_payloads(pair):
    payloads = [random.Random(seq).randbytes(seq * 100_003 % 700_000) for seq in range(20)]
    for number, payload in enumerate(payloads):
        pair.client.send(pair.at_client, report(number))
        pair.client.send(pair.at_client, contribution(payload, number), payload)
    received = [pair.at_server_event(Received) for _ in range(40)]
    reports = [event.message.number for event in received if event.payload is None]
    bulk = [(event.message.seq, bytes(event.payload)) for event in received if event.payload is not None]
    assert reports == list(range(20))
    assert bulk == list(enumerate(payloads))


def test_a_tag_comes_back_when_the_message_has_left(pair):
    payload = bytearray(3 * CHUNK_BYTES)
    tags = [("tag", 1), 2, "three"]
    for tag in tags:
        pair.client.send(pair.at_client, contribution(payload), payload, tag=tag)
    assert [pair.at_client_event(Sent).tag for _ in tags] == tags
    for _ in tags:
        pair.at_server_event(Received)


def test_a_received_payload_belongs_to_the_receiver(pair):
    payload = bytearray(b"abc")
    pair.client.send(pair.at_client, contribution(payload), payload)
    received = pair.at_server_event(Received).payload
    received[0] = ord("x")
    assert bytes(received) == b"xbc" and payload == b"abc"


def test_the_last_message_before_a_drop_arrives(pair):
    pair.server.send(pair.at_server, Refused("no room"))
    pair.server.drop(pair.at_server, "refused")
    assert pair.at_client_event(Received).message == Refused("no room")
    assert pair.at_client_event(Lost).peer == pair.at_client
    assert pair.at_server_event(Lost) == Lost(pair.at_server, "refused")


def test_a_dead_or_unknown_peer_is_ignored(pair):
    pair.server.drop(pair.at_server, "enough")
    pair.at_server_event(Lost)
    pair.server.send(pair.at_server, PULL)
    pair.server.send(12345, PULL)
    pair.server.drop(pair.at_server, "again")
    assert pair.server_inbox.empty() or isinstance(pair.server_inbox.get(), Opened)


def test_closing_one_side_is_a_loss_for_the_other(pair):
    pair.client.send(pair.at_client, HELLO)
    pair.client.close()
    assert pair.at_server_event(Received).message == HELLO
    assert pair.at_server_event(Lost).peer == pair.at_server
    assert pair.client_inbox.empty()
    pair.client.send(pair.at_client, HELLO)


def test_an_illegal_payload_costs_the_connection(pair):
    message = sample(Contribution, to_tokens=5)
    pair.client.send(pair.at_client, message, b"sixsix")
    lost = pair.at_server_event(Lost)
    assert lost.peer == pair.at_server and "6 bytes, 5 are legal" in lost.reason
    assert pair.at_client_event(Lost).peer == pair.at_client


def test_our_own_mistakes_are_caught_here(pair):
    with pytest.raises(AssertionError):
        pair.client.send(pair.at_client, contribution(b""))


def test_memory_endpoint_waits_for_a_full_inbox():
    inbox = Inbox(1)
    server = MemoryEndpoint(inbox, syncer_dialect(lambda m: 0))
    client = MemoryEndpoint(Inbox(10), learner_dialect(lambda m: 0))
    at_server, at_client = join(server, client)
    for number in range(3):
        client.send(at_client, report(number))
    events = []
    while len(events) < 4:
        events.append(inbox.get(timeout=WAIT_S))
        server.deliver()
    assert events[0] == Opened(at_server, f"memory:{at_server}")
    assert [event.message.number for event in events[1:]] == [0, 1, 2]


def test_an_inbox_is_emptied_in_one_go():
    inbox = Inbox(4)
    assert inbox.drain(4, timeout_s=0.0) == []
    lost = [Lost(peer, "gone") for peer in range(4)]
    for event in lost:
        inbox.put_nowait(event)
    assert inbox.drain(3, timeout_s=0.0) == lost[:3]
    inbox.put_nowait(None)
    assert inbox.drain(9, timeout_s=0.0) == [lost[3], None]


def test_a_full_inbox_takes_no_more():
    inbox = Inbox(2)
    lost = [Lost(peer, "gone") for peer in range(3)]
    assert [inbox.offer(event) for event in lost] == [True, True, False]
    assert inbox.drain(1, timeout_s=0.0) == lost[:1]
    assert inbox.offer(lost[2])
    assert inbox.drain(9, timeout_s=0.0) == lost[1:]


def test_what_is_drained_counts_until_it_is_settled():
    inbox = Inbox(bytes_max=10)
    for size in (6, 7):
        inbox.put_nowait(Received(1, contribution(bytes(size)), memoryview(bytes(size))))
    inbox.drain(9, timeout_s=0.0)
    assert not inbox.has_room
    inbox.settle(5)
    assert inbox.has_room
