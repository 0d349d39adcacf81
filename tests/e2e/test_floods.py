"""Floods against a real syncer process: it lives, what it keeps for a peer is small, and a learner's work goes on."""

import contextlib
import resource
import socket
import subprocess
from pathlib import Path

import pytest

from e2e.processes import WAIT_S, Puppet, Syncer, command, until
from skerry.core.messages import FULL, PROTOCOL, Ask, FragmentPosition, Hello, Report, Welcome
from skerry.wire import frames
from skerry.wire.frames import Attached, Delivery, Denied, Parser, Proof, encode, learner_dialect
from skerry.wire.handshake import HANDSHAKE
from skerry.wire.quotas import SPARE_PEERS

MIB = 1 << 20
LEARNERS = 2  # of the run, as `processes.OPTIONS` says
PATIENCE_S = 2.0  # longer than a syncer that reads at all lets a socket stay full


@pytest.fixture
def syncer(tmp_path):
    with Syncer(tmp_path) as started:
        yield started


@pytest.fixture
def net():
    with contextlib.ExitStack() as stack:
        yield stack


def dial(net, port):
    """A connection that is let in, and what it was told."""
    sock = net.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
    parser = Parser(learner_dialect(lambda message: 0))
    heard(sock, parser)
    sock.sendall(encode(Proof(HANDSHAKE, bytes(32), b"")))
    answer = heard(sock, parser)
    parser.legal = frames.CONTROL_LINE
    return sock, parser, answer


def heard(sock, parser):
    while True:
        count = sock.recv_into(parser.buffer())
        assert count, "it hung up"
        if (item := parser.received(count)) is not None:
            return item


def pour(sock, data, bytes_max):
    """Send without end and read nothing; how much was taken until it was held back or hung up on."""
    sock.settimeout(PATIENCE_S)
    sent = 0
    with contextlib.suppress(TimeoutError, ConnectionError):
        while sent < bytes_max:
            sent += sock.send(data)
    return sent


def memory_bytes(process):
    line = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) * 1024


def test_questions_whose_answers_are_not_read_are_soon_not_answered(syncer, net):
    before = memory_bytes(syncer.process)
    sock, _, _ = dial(net, syncer.port)
    pour(sock, encode(Ask()) * 100, 64 * MIB)
    until(lambda: "asks again before it has read" in str(syncer.status.get("turned_away")), "the end of it")
    assert memory_bytes(syncer.process) - before < 64 * MIB
    with Puppet(syncer.port) as puppet:
        assert puppet.merge_once() == 1


def test_a_learner_that_reports_without_end_is_held_back_and_others_merge(syncer, net):
    with Puppet(syncer.port) as puppet:
        first = puppet.merge_once()
        sock, parser, _ = dial(net, syncer.port)
        sock.sendall(encode(Hello(PROTOCOL, "flood", "p", 0, b"", puppet.layout.digest)))
        welcome = heard(sock, parser)
        assert isinstance(welcome, Delivery) and isinstance(welcome.message, Welcome)
        positions = (FragmentPosition(FULL, 0, 0, 0),) * len(puppet.fragments)
        reports = [Report("flood", 1, number, 0, 0, 0.1, "training", positions) for number in range(1, 1000)]
        limit = 64 * MIB
        assert pour(sock, b"".join(map(encode, reports)), limit) < limit, "it was read for ever"
        assert puppet.merge_once() > first or puppet.merge_once() > first
    assert syncer.process.poll() is None


class FewFiles(Syncer):
    """A syncer that the system gives few descriptors."""

    FILES = 128

    @staticmethod
    def command(*words):
        return ["prlimit", f"--nofile={FewFiles.FILES}:{FewFiles.FILES}", *command(*words)]


def has_prlimit():
    with contextlib.suppress(OSError):
        return subprocess.run(["prlimit", "--version"], capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.skipif(not has_prlimit(), reason="util-linux's prlimit is what limits the syncer's descriptors here")
def test_however_many_connect_there_are_descriptors_for_the_store_and_the_rest_are_told_that_it_is_full(tmp_path, net):
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 3 * FewFiles.FILES
    with FewFiles(tmp_path) as syncer, Puppet(syncer.port) as puppet:
        assert puppet.merge_once() == 1
        answers = []
        for _ in range(2 * FewFiles.FILES):
            with contextlib.suppress(AssertionError, OSError):
                answers.append(dial(net, syncer.port)[2])
        full = [answer for answer in answers if isinstance(answer, Denied)]
        assert full and not any(answer.final for answer in full) and full[0].reason.startswith("full: ")
        idle = [socket.create_connection(("127.0.0.1", syncer.port), WAIT_S) for _ in range(2 * FewFiles.FILES)]
        for sock in idle:
            net.enter_context(sock)
        assert puppet.merge_once() >= 1 and syncer.process.poll() is None
        assert "cannot accept" not in syncer.said


def test_connections_that_say_no_hello_do_not_keep_a_learner_out(syncer, net):
    """More than there is room for, and they stay: the first of them makes way for who says what it is."""
    answers = [dial(net, syncer.port)[2] for _ in range(2 * LEARNERS + SPARE_PEERS + 10)]
    assert all(isinstance(answer, Attached) or not answer.final for answer in answers)
    with Puppet(syncer.port) as puppet:
        assert puppet.merge_once() == 1
