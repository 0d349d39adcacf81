"""A rolling upgrade: learner and syncer of different protocols, as real processes, until both speak the same again."""

import logging
import os
import signal
import sys

import msgspec
import pytest

from e2e.processes import WAIT_S, Syncer, until
from e2e.test_lost_commits import Island
from skerry.core.messages import PROTOCOL, Hello, Refused
from skerry.wire.client import Client
from skerry.wire.transport import Inbox, Lost, Opened, Received

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NEXT = PROTOCOL + 1
AS_NEXT = """
import sys
import skerry.core.messages
skerry.core.messages.PROTOCOL = int(sys.argv[1])
from skerry.cli import main
main(sys.argv[2:])
"""
DIFFERS = f"the syncer speaks protocol {NEXT} and the learner {PROTOCOL}: upgrade the older"


class NextSyncer(Syncer):
    """A syncer whose build speaks the next protocol."""

    @staticmethod
    def command(*words):
        return [sys.executable, "-c", AS_NEXT, str(NEXT), *map(str, words)]


def end(syncer):
    syncer.signal(signal.SIGTERM)
    assert syncer.wait() == 0, syncer.said


def test_a_learner_dials_on_until_it_finds_a_syncer_that_speaks_its_protocol(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with NextSyncer(tmp_path) as first, Island(first.port) as island:
        port, training = first.port, island.shell.training
        until(lambda: training.trouble == DIFFERS, "the learner to hear why it cannot join")
        end(first)

        with Syncer(tmp_path, "--port", port) as todays:
            until(lambda: todays.status["merges"] > 2, "merges of a learner that has joined")
            assert training.is_linked
            end(todays)
            merges = todays.status["merges"]

        with NextSyncer(tmp_path, "--port", port) as nexts:
            until(lambda: training.trouble == DIFFERS, "the learner to hear why it is not taken in again")
            island.keeps_stepping()
            assert nexts.status["learners"].get("island", {"state": "away"})["state"] == "away"
            end(nexts)
        assert caplog.messages.count(f"not taken in, training goes on: {DIFFERS}") == 1

        with Syncer(tmp_path, "--port", port) as again:
            until(lambda: again.status["merges"] > merges + 2, "merges once it is back")
            assert again.status["learners"]["island"]["life"] == 1
            island.keeps_stepping()


def test_a_build_that_does_not_look_who_it_speaks_to_is_told_so_that_it_dials_again(tmp_path):
    """As those of 0.2 are: they pass the handshake, say hello, and know one word that is not for good."""
    with NextSyncer(tmp_path) as syncer:
        for _ in range(3):
            inbox = Inbox()
            client = Client("127.0.0.1", syncer.port, None, inbox, lambda message: 0, protocol=NEXT)
            try:
                peer = inbox.get(timeout=WAIT_S)
                assert isinstance(peer, Opened)
                client.send(peer.peer, Hello(PROTOCOL, "old", os.urandom(8).hex(), 0, msgspec.json.encode([]), "?"))
                refused = inbox.get(timeout=WAIT_S)
                assert refused == Received(peer.peer, Refused(DIFFERS, "ahead"), None) and not refused.message.is_final
                assert isinstance(inbox.get(timeout=WAIT_S), Lost)
                assert isinstance(inbox.get(timeout=WAIT_S), Opened), "it dials again"
            finally:
                client.close()
        assert syncer.said.count(f"refused old, which will come again: {DIFFERS}") == 1
