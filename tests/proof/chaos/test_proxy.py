"""The proxy: what it may do to a connection, and that it does nothing else."""

import contextlib
import itertools
import queue
import random
import selectors
import socket
import struct
import threading

import pytest

from skerry.core.messages import Contribution, Publication, Pull, Report
from skerry.proof.chaos.proxy import CLEAR, Lane, Proxy, Weather
from skerry.wire.client import Client
from skerry.wire.server import Server
from skerry.wire.transport import Inbox, Lost, Opened, Received
from wire.samples import sample

WAIT_S = 60
KIB, MIB = 1 << 10, 1 << 20
BLOCKED = Lane(blocked=True)


class Upstream:
    """A server whose every connection is handled by a function in a thread of its own."""

    def __init__(self, stack, handle):
        self._stack, self._handle = stack, handle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        stack.callback(self._stop)

    def _serve(self):
        while True:
            sock, _ = self._listener.accept()
            if self._stack is None:
                return sock.close()
            sock.settimeout(WAIT_S)
            threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock):
        with contextlib.suppress(ConnectionError), sock:
            self._handle(sock)

    def _stop(self):
        self._stack = None
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join(WAIT_S)
        self._listener.close()


def echo(sock):
    while data := sock.recv(64 * KIB):
        sock.sendall(data)


class Sinks:
    """Keeps what each connection brings; `ends` tells how each stream ended."""

    def __init__(self):
        self.ends = queue.Queue()  # (bytes, "end" or "reset")

    def __call__(self, sock):
        data = bytearray()
        try:
            while more := sock.recv(64 * KIB):
                data += more
            self.ends.put((bytes(data), "end"))
        except ConnectionResetError:
            self.ends.put((bytes(data), "reset"))


class Net:
    """A proxy, servers behind it and connections to it, all closed in the end."""

    def __init__(self, stack):
        self._stack = stack
        self.proxy = stack.enter_context(Proxy(seed=7))

    def route(self, name, handle=echo):
        return self.proxy.add(name, "127.0.0.1", Upstream(self._stack, handle).port)

    def dial(self, port):
        sock = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self._stack.callback(sock.close)
        return sock

    def own(self, thing):
        self._stack.callback(thing.close)
        return thing

    def send_behind(self, sock, data):
        """Send from a thread and half close."""

        def run():
            with contextlib.suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)

        threading.Thread(target=run, daemon=True).start()


@pytest.fixture
def net():
    with contextlib.ExitStack() as stack:
        yield Net(stack)


def noise(count, seed=0):
    return random.Random(seed).randbytes(count)


def receive(sock, count):
    data = bytearray()
    while len(data) < count:
        more = sock.recv(count - len(data))
        assert more, f"ended after {len(data)} bytes of {count}"
        data += more
    return bytes(data)


def receive_all(sock):
    data = bytearray()
    while more := sock.recv(64 * KIB):
        data += more
    return bytes(data)


def round_trip(sock, data=b"hello"):
    sock.sendall(data)
    assert receive(sock, len(data)) == data


def hears_nothing(*socks):
    """Nothing has come, though the proxy has had many turns."""
    return not select(socks, 0.3)


def select(socks, seconds):
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def dies(sock):
    with pytest.raises(ConnectionResetError):
        while sock.recv(64 * KIB):
            pass
    return True


# ------------------------------------------------------------------------------------------------- clear weather


def test_bytes_pass_unchanged_both_ways_to_the_end(net):
    sock, data = net.dial(net.route("a")), noise(8 * MIB)
    net.send_behind(sock, data)
    assert receive_all(sock) == data
    counts = net.proxy.counts("a")
    assert (counts.bytes_up, counts.bytes_down, counts.connections) == (len(data), len(data), 1)
    assert counts.resets == counts.corrupted == counts.truncated == 0


def test_an_answer_still_passes_after_the_question_has_ended(net):
    def answer(sock):
        question = receive_all(sock)
        sock.sendall(question[::-1] * 1000)

    sock = net.dial(net.route("a", answer))
    sock.sendall(b"abc")
    sock.shutdown(socket.SHUT_WR)
    assert receive_all(sock) == b"cba" * 1000


def test_a_reader_that_waits_holds_the_sender_back(net):
    go = threading.Event()
    sinks = Sinks()

    def late(sock):
        go.wait(WAIT_S)
        sinks(sock)

    sock, data = net.dial(net.route("a", late)), noise(16 * MIB)
    sock.settimeout(1.0)
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < len(data):
            sent += sock.send(data[sent : sent + 64 * KIB])
    go.set()
    sock.settimeout(WAIT_S)
    sock.sendall(data[sent:])
    sock.shutdown(socket.SHUT_WR)
    assert sinks.ends.get(timeout=WAIT_S) == (data, "end")


def test_an_upstream_that_is_down_aborts_the_connection(net):
    with socket.socket() as reserve:
        reserve.bind(("127.0.0.1", 0))  # and does not listen
        port = net.proxy.add("a", "127.0.0.1", reserve.getsockname()[1])
        for _ in range(3):
            with pytest.raises(ConnectionResetError):  # by the dial itself, or after it
                net.dial(port).recv(1)


def test_a_reset_of_the_near_end_reaches_the_far_one_after_what_was_said(net):
    sinks = Sinks()
    sock = net.dial(net.route("a", sinks))
    sock.sendall(b"last words")
    while net.proxy.counts("a").bytes_up < 10:
        pass
    hang_up(sock)
    assert sinks.ends.get(timeout=WAIT_S) == (b"last words", "reset")


def test_a_reset_of_the_far_end_reaches_the_near_one_with_more_on_its_way(net):
    port = net.route("a", lambda sock: (sock.recv(1), hang_up(sock)))
    net.proxy.set("a", Weather(up=Lane(rate_bps=8e6)))
    sock = net.dial(port)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        sock.sendall(bytes(8 * MIB))
    round_trip(net.dial(net.route("b")))


def hang_up(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# ----------------------------------------------------------------------------------------------- delay, partition


def test_delay_keeps_order(net):
    sock, data = net.dial(net.route("a")), noise(300 * KIB)
    net.proxy.set("a", Weather(up=Lane(delay_s=0.05), down=Lane(delay_s=0.02)))
    for start in range(0, len(data) // 2, 1000):
        sock.sendall(data[start : min(start + 1000, len(data) // 2)])
    net.proxy.set("a", Weather(up=Lane(delay_s=0.01)))  # what follows is due before what went ahead
    net.send_behind(sock, data[len(data) // 2 :])
    assert receive_all(sock) == data


def test_what_is_delayed_is_not_there_before(net):
    sock = net.dial(net.route("a"))
    round_trip(sock)
    net.proxy.set("a", Weather(up=Lane(delay_s=1e6)))
    sock.sendall(b"late")
    assert hears_nothing(sock)
    net.proxy.set("a", CLEAR)
    assert receive(sock, 4) == b"late"


def test_a_partition_keeps_everything_and_delivers_it_when_it_heals(net):
    sock, data = net.dial(net.route("a")), noise(2 * MIB)
    round_trip(sock)
    net.proxy.set("a", Weather(BLOCKED, BLOCKED))
    before = net.proxy.counts("a")
    net.send_behind(sock, data)
    assert hears_nothing(sock)
    assert net.proxy.counts("a") == before
    net.proxy.set("a", CLEAR)
    assert receive_all(sock) == data


def test_a_partition_of_one_direction_leaves_the_other(net):
    heard = queue.Queue()

    def talk(sock):
        sock.sendall(b"from above")
        heard.put(receive(sock, 10))
        sock.sendall(b"more")
        heard.put(receive(sock, 4))

    port = net.route("a", talk)
    sock = net.dial(port)
    assert receive(sock, 10) == b"from above"
    net.proxy.set("a", Weather(down=BLOCKED))
    sock.sendall(b"from below")
    assert heard.get(timeout=WAIT_S) == b"from below"
    assert hears_nothing(sock)
    net.proxy.set("a", Weather(up=BLOCKED))
    assert receive(sock, 4) == b"more"
    sock.sendall(b"kept")
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.3)
    net.proxy.set("a", CLEAR)
    assert heard.get(timeout=WAIT_S) == b"kept"


@pytest.mark.parametrize("weather", [Weather(up=BLOCKED), Weather(down=BLOCKED)])
def test_a_new_connection_in_a_partition_is_accepted_and_nothing_passes(net, weather):
    callers = queue.Queue()

    def greet(sock):
        sock.sendall(b"welcome")
        callers.put(receive_all(sock))

    port = net.route("a", greet)
    net.proxy.set("a", weather)
    impatient, patient = net.dial(port), net.dial(port)
    impatient.close()  # so it never calls
    while net.proxy.counts("a").connections < 2:
        pass
    net.send_behind(patient, b"patient")
    assert hears_nothing(patient) and callers.empty()
    net.proxy.set("a", CLEAR)
    assert receive(patient, 7) == b"welcome"
    assert callers.get(timeout=WAIT_S) == b"patient"


def test_a_reset_does_not_pass_a_partition(net):
    sinks = Sinks()
    sock = net.dial(net.route("a", sinks))
    sock.sendall(b"x")
    while not net.proxy.counts("a").bytes_up:
        pass
    net.proxy.set("a", Weather(BLOCKED, BLOCKED))
    hang_up(sock)
    with pytest.raises(queue.Empty):
        sinks.ends.get(timeout=0.3)
    net.proxy.set("a", CLEAR)
    assert sinks.ends.get(timeout=WAIT_S) == (b"x", "reset")


# ----------------------------------------------------------------------------------------------------------- rate


def test_a_saturated_route_lets_small_messages_pass_between(net):
    bulk_bytes = 0

    def count(sock):
        nonlocal bulk_bytes
        if sock.recv(1) == b"e":
            echo(sock)
        while more := sock.recv(64 * KIB):
            bulk_bytes += len(more)

    port = net.route("a", count)
    bulk, small, message = net.dial(port), net.dial(port), bytes(1400)  # as good as a turn's worth
    bulk.sendall(b"b")
    small.sendall(b"e")
    net.proxy.set("a", Weather(up=Lane(rate_bps=1.6e6)))
    net.send_behind(bulk, bytes(64 * MIB))
    while not bulk_bytes:  # so the bulk connection's queue in the proxy, of 256 KiB, fills
        round_trip(small, message)
    for _ in range(10):
        before = bulk_bytes
        round_trip(small, message)
        assert bulk_bytes - before < 100 * KIB
    net.proxy.reset("a")


# --------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("lane", [Lane(), Lane(rate_bps=4e6)])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_corrupt_flips_one_bit_of_the_stream(net, direction, lane):
    sock, data = net.dial(net.route("a")), noise(256 * KIB)
    round_trip(sock)
    net.proxy.set("a", Weather(lane, lane))
    assert net.proxy.corrupt("a", direction)
    assert net.proxy.counts("a").corrupted == 0
    net.send_behind(sock, data)
    assert flipped(data, receive_all(sock)) == 1
    assert net.proxy.counts("a").corrupted == 1


def test_what_counts_as_corrupted_was_delivered(net):
    received = queue.Queue()

    def sip(sock):  # so that the proxy can often send only a part
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * KIB)
        received.put(b"".join(iter(lambda: sock.recv(4 * KIB), b"")))

    sock, data = net.dial(net.route("a", sip)), noise(4 * MIB)
    for _ in range(30):
        assert net.proxy.corrupt("a", "up")
    net.send_behind(sock, data)
    assert flipped(data, received.get(timeout=WAIT_S)) == net.proxy.counts("a").corrupted == 30


def flipped(sent, received):
    assert len(sent) == len(received)
    return (int.from_bytes(sent) ^ int.from_bytes(received)).bit_count()


def test_truncate_delivers_a_strict_prefix_and_then_the_connection_dies(net):
    sinks, data = Sinks(), noise(1000)
    sock = net.dial(net.route("a", sinks))
    assert net.proxy.truncate("a", "up")
    sock.sendall(data)
    assert dies(sock)
    received, end = sinks.ends.get(timeout=WAIT_S)
    assert end == "reset" and len(received) < len(data) and data.startswith(received)
    assert net.proxy.counts("a").truncated == 1


def test_truncate_down(net):
    port = net.route("a", lambda sock: (sock.recv(1), sock.sendall(noise(1000)), sock.recv(1)))
    sock = net.dial(port)
    assert net.proxy.truncate("a", "down")
    sock.sendall(b"x")
    received = bytearray()
    with pytest.raises(ConnectionResetError):
        while more := sock.recv(1000):
            received += more
    assert len(received) < 1000 and noise(1000).startswith(received)


def test_reset_kills_every_connection_of_one_route_and_none_of_another(net):
    a, b = net.route("a"), net.route("b")
    doomed, spared = [net.dial(a) for _ in range(3)], net.dial(b)
    for sock in [*doomed, spared]:
        round_trip(sock)
    assert net.proxy.reset("a") == 3
    assert all(dies(sock) for sock in doomed)
    round_trip(spared)
    round_trip(net.dial(a))
    assert (net.proxy.counts("a").resets, net.proxy.counts("b").resets) == (3, 0)
    assert net.proxy.counts("a").connections == 4


def test_without_a_connection_there_is_nothing_to_damage(net):
    port = net.route("a")
    assert not net.proxy.corrupt("a", "up") and not net.proxy.truncate("a", "down") and net.proxy.reset("a") == 0
    round_trip(net.dial(port), noise(1000))


def test_close_leaves_no_thread_and_no_connection():
    with contextlib.ExitStack() as stack, Proxy() as proxy:
        port = proxy.add("a", "127.0.0.1", Upstream(stack, echo).port)
        sock = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        with sock:
            round_trip(sock)
            proxy.close()
            assert dies(sock)
        assert not [thread for thread in threading.enumerate() if thread.name == "skerry-proxy"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with pytest.raises(AssertionError, match="closed"):
            proxy.counts("a")


# ------------------------------------------------------------------------------------------------- all of it at once


def test_any_weather_on_sound_routes_loses_and_reorders_nothing(net):
    dice = random.Random(1)
    ports = {name: net.route(name) for name in ("fern", "moss", "doomed", "clear")}
    streams = [Stream(net.dial(ports[name]), seed) for seed, name in enumerate(["fern", "fern", "moss", "moss"])]
    clock = net.dial(ports["clear"])
    for _ in range(200):
        name = dice.choice(["fern", "moss", "doomed"])
        match dice.randrange(6) if name == "doomed" else 0:
            case 0 | 1:
                net.proxy.set(name, Weather(lane(dice), lane(dice)))
            case 2:
                with contextlib.suppress(ConnectionResetError):
                    net.dial(ports[name]).sendall(b"lost")
            case 3:
                net.proxy.reset(name)
            case 4:
                net.proxy.corrupt(name, dice.choice(["up", "down"]))
            case 5:
                net.proxy.truncate(name, dice.choice(["up", "down"]))
        for stream in streams:
            stream.go.release()
        round_trip(clock)
    assert net.proxy.counts("fern").bytes_down  # some of it passed in bad weather
    for name in ports:
        net.proxy.set(name, CLEAR)
    for stream in streams:
        assert receive_all(stream.sock) == stream.data


def lane(dice):
    return Lane(dice.choice([0, 0, 0.001, 0.02]), dice.choice([0, 0, 4e6, 1e8]), dice.random() < 0.3)


class Stream:
    """Sends one piece of its data for each release of `go`, then ends."""

    def __init__(self, sock, seed):
        self.sock, self.go = sock, threading.Semaphore(0)
        dice = random.Random(seed)
        self._pieces = [dice.randbytes(dice.choice([1, 100, 20_000])) for _ in range(200)]
        self.data = b"".join(self._pieces)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        for piece in self._pieces:
            self.go.acquire(timeout=WAIT_S)
            self.sock.sendall(piece)
        self.sock.shutdown(socket.SHUT_WR)


# ------------------------------------------------------------------------------------------------------ the real wire


def expect(inbox, kind):
    event = inbox.get(timeout=WAIT_S)
    assert isinstance(event, kind), event
    return event


def test_a_corrupt_payload_costs_the_peer_which_dials_again(net):
    at_syncer, at_learner, payload = Inbox(), Inbox(), noise(4 * MIB)
    message = sample(Contribution, to_tokens=len(payload))
    server = net.own(Server("127.0.0.1", 0, b"token", at_syncer, lambda m: m.to_tokens))
    port = net.proxy.add("learner", "127.0.0.1", server.port)
    client = net.own(Client("127.0.0.1", port, b"token", at_learner, lambda m: m.version, jitter=lambda: 0.0))
    first = expect(at_learner, Opened).peer
    expect(at_syncer, Opened)
    client.send(first, message, payload)
    assert expect(at_syncer, Received).payload == payload

    net.proxy.set("learner", Weather(up=Lane(rate_bps=16e6)))  # slow enough to strike in the midst of a chunk
    before = net.proxy.counts("learner").bytes_up
    client.send(first, message, payload)
    while net.proxy.counts("learner").bytes_up < before + 64 * KIB:
        pass
    assert net.proxy.corrupt("learner", "up")
    assert "checksum" in expect(at_syncer, Lost).reason
    assert net.proxy.counts("learner").corrupted == 1
    assert expect(at_learner, Lost).peer == first

    net.proxy.set("learner", CLEAR)
    second = expect(at_learner, Opened).peer
    at_server = expect(at_syncer, Opened).peer
    client.send(second, message, payload)
    assert expect(at_syncer, Received).payload == payload
    server.send(at_server, sample(Publication, version=len(payload)), payload)
    assert expect(at_learner, Received).payload == payload
    assert net.proxy.counts("learner").connections == 4


def test_control_flows_while_bulk_saturates_a_narrow_link(net):
    """Payloads both ways take many times the silence that is allowed; nobody is declared dead, reports go through."""
    limits = {"heartbeat_s": 0.1, "timeout_s": 0.5}
    at_syncer, at_learner, payload = Inbox(), Inbox(), noise(500 * KIB)
    server = net.own(Server("127.0.0.1", 0, None, at_syncer, lambda m: m.to_tokens, **limits))
    port = net.proxy.add("learner", "127.0.0.1", server.port)
    client = net.own(Client("127.0.0.1", port, None, at_learner, lambda m: m.version, **limits))
    learner, syncer = expect(at_learner, Opened).peer, expect(at_syncer, Opened).peer
    lane = Lane(rate_bps=2e6, delay_s=0.05)
    net.proxy.set("learner", Weather(lane, lane))
    client.send(learner, sample(Contribution, to_tokens=len(payload)), payload)
    server.send(syncer, sample(Publication, version=len(payload)), payload)

    arrived = {"up": 0, "down": 0}
    for number in itertools.count(1):
        client.send(learner, sample(Report, number=number))
        server.send(syncer, sample(Pull, fragment=number))
        up, down = expect(at_syncer, Received).message, expect(at_learner, Received).message
        if isinstance(up, Contribution) or isinstance(down, Publication):
            break
        assert (up.number, down.fragment) == (number, number)
        arrived["up"] += 1
        arrived["down"] += 1
    assert min(arrived.values()) > 3, "each a round trip of control messages within one payload"
