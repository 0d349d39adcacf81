"""How the ranks of an island meet, while anybody can connect."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.processes import WAIT_S
from skerry.adapters import ranks
from skerry.adapters.ranks import CALL_BYTES, CALLERS_MAX, LENGTH_BYTES, Card, Report, _dialled, _listening, _received

SECRETS = (b"first secret ...", b"second secret ..")


@pytest.fixture
def door():
    with _listening(CALLERS_MAX + 8) as server:
        yield server, Card(("127.0.0.1",), server.getsockname()[1], SECRETS)


def calls(card, *said):
    """Somebody who connects, and says at most this."""
    sock = socket.create_connection(("127.0.0.1", card.port), timeout=WAIT_S)
    sock.sendall(b"".join(said))
    return sock


def met(server, card, count):
    """The speaker's lines and the followers', once each has heard the other."""
    with ThreadPoolExecutor(count) as pool:
        dialling = [pool.submit(_dialled, card, rank) for rank in range(1, count + 1)]
        lines = _received(server, card, count)
        followers = [each.result() for each in dialling]
    for line, follower in zip(lines, followers, strict=True):
        follower.say(Report(tokens=line.rank))
    assert [line.hear(WAIT_S).tokens for line in lines] == list(range(1, count + 1))
    for line in [*lines, *followers]:
        line.close()


def test_ranks_meet_however_many_strangers_are_silent(door):
    server, card = door
    silent = [calls(card) for _ in range(4)]
    silent += [calls(card, SECRETS[0][:5]), calls(card, b"no secret", bytes(CALL_BYTES))]
    met(server, card, 2)
    for sock in silent:
        with sock:
            assert ends(sock), "none of them stays"


def test_of_more_callers_than_may_wait_the_longest_silent_goes(door, monkeypatch):
    server, card = door
    monkeypatch.setattr(ranks, "CALLERS_MAX", 3)
    silent = [calls(card) for _ in range(9)]
    met(server, card, 2)
    for sock in silent:
        sock.close()


def ends(sock):
    """Whether the other side hung up; also where it had not read what was said."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_follower_that_did_not_wait_for_its_answer_does_not_count(door):
    """It gave up, and calls again."""
    server, card = door
    calls(card, SECRETS[0], (1).to_bytes(LENGTH_BYTES, "little")).close()
    met(server, card, 1)


def test_ranks_that_do_not_come_are_counted(door, monkeypatch):
    server, card = door
    monkeypatch.setattr(ranks, "MEET_S_MAX", 0.05)
    with calls(card), pytest.raises(ranks.IslandError, match=r"1 of 1 other ranks .* did not come within 0\.05 s"):
        _received(server, card, 1)
