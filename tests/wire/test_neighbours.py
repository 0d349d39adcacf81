"""Who may join a syncer that asks for neither token nor key: its own user and root, where the system tells."""

import contextlib
import multiprocessing
import os
import secrets
import socket
import struct
import sys

import pytest

from e2e.processes import Puppet, Syncer, secret
from skerry.core.messages import PROTOCOL
from skerry.wire import frames, handshake, quotas
from skerry.wire.frames import NONCE_BYTES, Attached, Denied, Parser
from skerry.wire.handshake import Credentials
from skerry.wire.neighbours import Neighbours
from skerry.wire.quotas import Quotas
from skerry.wire.repeats import Repeats
from skerry.wire.server import Server
from skerry.wire.transport import Inbox

SOMEBODY = 4242
ROOM = Quotas(peers_max=3, strangers_max=16, connections_max=100, payloads_burst=1000, payload_bytes_burst=1e9)
TOKEN = "0123456789abcdef0123456789abcdef"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose a connection is"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


def heard(sock, parser):
    while True:
        count = sock.recv_into(parser.buffer()[:4096])
        assert count, "it hung up"
        if (item := parser.received(count)) is not None:
            return item


def dialled(port, kind, token):
    """What a syncer answers to who would join, or asks for the status."""
    mine, nonce = Credentials(token, PROTOCOL, secrets.token_hex(4)), secrets.token_bytes(NONCE_BYTES)
    parser = Parser(frames.learner_dialect(lambda message: 0))
    with socket.socket() as sock:
        sock.settimeout(60)
        sock.connect(("127.0.0.1", port))
        challenge = heard(sock, parser)
        says = handshake.answer(mine, nonce, challenge, b"") if kind == "join" else None
        sock.sendall(frames.encode(says or handshake.inquiry(mine, nonce, challenge)))
        return heard(sock, parser)


def left(port, count):
    """How many of so many connections were hung up on without a word; of the others nothing comes."""
    silent = 0
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port), 60) as sock, contextlib.suppress(ConnectionError):
            silent += not sock.recv(1)
    return silent


def be_somebody(pipe):
    os.setgroups([])
    os.setgid(SOMEBODY)
    os.setuid(SOMEBODY)
    with contextlib.suppress(EOFError):
        while True:
            port, kind, what = pipe.recv()
            pipe.send(left(port, what) if kind == "leave" else dialled(port, kind, what))


@pytest.fixture
def somebody():
    """Dials as another user of this machine; what it was told. Forked, for it may not be able to read our Python."""
    processes = multiprocessing.get_context("fork")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=be_somebody, args=(theirs,), daemon=True)
    process.start()
    theirs.close()

    def told(port, kind="join", what=None):
        ours.send((port, kind, what))
        assert ours.poll(60), "no answer"
        return ours.recv()

    yield told
    process.terminate()
    process.join(60)


def test_another_user_joins_no_run_of_a_syncer_without_token_and_keys_and_its_own_user_does(somebody, tmp_path):
    with Syncer(tmp_path) as syncer:
        for kind in ("join", "status"):
            told = somebody(syncer.port, kind)
            assert isinstance(told, Denied) and "--token-file or --keys" in told.reason
            assert told.final == (kind == "status")  # who trains may find it started again with a token
        assert "refused: with neither token nor keys only" in syncer.said
        with Puppet(syncer.port) as puppet:
            assert puppet.merge_once()


def test_another_user_has_one_row_under_however_many_names_it_is_turned_away(somebody):
    turned_away = Repeats()
    server = Server("127.0.0.1", 0, None, Inbox(), lambda message: 0, turned_away=turned_away)
    try:
        for _ in range(3):
            assert isinstance(somebody(server.port), Denied)
        (row,) = turned_away.rows(0.0)
        assert row["who"] == "3 connections from 1 address" and row["why"].startswith("with neither token nor keys")
    finally:
        server.close()


def test_another_user_that_has_the_token_joins(somebody, tmp_path):
    with Syncer(tmp_path, "--token-file", secret(tmp_path / "token", TOKEN)) as syncer:
        assert isinstance(somebody(syncer.port, what=TOKEN.encode()), Attached)


def test_what_another_user_dials_for_nothing_is_not_held_against_this_ones_learners(somebody, monkeypatch):
    monkeypatch.setattr(quotas, "FAILURES_PER_S", 1e-6)  # so whoever is kept out is for as long as this takes
    server = Server("127.0.0.1", 0, TOKEN.encode(), Inbox(), lambda message: 0, quotas=ROOM)
    try:
        assert somebody(server.port, "leave", 2 * int(quotas.FAILURES_BURST)), "it is not let in any more"
        assert isinstance(dialled(server.port, "join", TOKEN.encode()), Attached)
    finally:
        server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_has_hung_up_is_nobody_we_know(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener, contextlib.ExitStack() as stack:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        listener.listen()
        neighbours = Neighbours(listener)
        stack.callback(neighbours.close)
        for lingers in (False, True):
            dialler = stack.enter_context(socket.socket(family))
            dialler.connect(listener.getsockname())
            accepted = stack.enter_context(listener.accept()[0])
            assert not neighbours.is_strange(accepted)
            if lingers:  # it leaves with a reset instead of in order
                dialler.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            dialler.close()
            assert neighbours.is_strange(accepted)
