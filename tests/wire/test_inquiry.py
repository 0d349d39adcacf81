"""Asking for the status over real sockets: who is told, how soon, and what is said when nobody answers."""

import contextlib
import socket
import threading

import pytest

from skerry.core.messages import PROTOCOL, Status
from skerry.errors import NoAnswer
from skerry.wire.frames import Attached, Challenge, Denied, encode
from skerry.wire.handshake import HANDSHAKE
from skerry.wire.inquiry import ask_status
from skerry.wire.server import Server
from skerry.wire.transport import Inbox, Opened
from wire.certificates import learner_tls, syncer_tls

RECORD = b'{"run":"here"}'


@pytest.fixture(params=["plain", "tls"])
def tls(request):
    """What the syncer has, and who asks it."""
    return (syncer_tls(), learner_tls()) if request.param == "tls" else (None, None)


@pytest.fixture
def server(tls):
    """Makes servers, the last argument being how many events their node leaves unread before its inbox is full."""
    with contextlib.ExitStack() as stack:

        def make(token=None, bound=100, record=RECORD):
            made = Server("127.0.0.1", 0, token, Inbox(bound), lambda message: 0, tls=tls[0])
            stack.callback(made.close)
            if record:
                made.show(record)
            return made

        yield make


@pytest.fixture
def impostor():
    """Something that listens, says this, and hangs up once it is said something, if it is to."""
    with contextlib.ExitStack() as stack:

        def make(*words, hangs_up=True):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve():
                with contextlib.suppress(OSError):
                    sock = stack.enter_context(listener.accept()[0])
                    for word in words:
                        sock.sendall(word)
                        sock.recv(1 << 16)
                    if hangs_up:
                        sock.close()

            threading.Thread(target=serve, daemon=True).start()
            return listener.getsockname()[1]

        yield make


@pytest.fixture
def ask(tls):
    return lambda port, token=None: ask_status("127.0.0.1", port, token, tls=tls[1])


def refusal(port, token=None, **options):
    with pytest.raises(NoAnswer) as error:
        ask_status("127.0.0.1", port, token, **options)
    line = str(error.value)
    assert line.startswith(f"127.0.0.1:{port}: ") and line.isprintable()
    return line


@pytest.mark.parametrize("token", [None, b"right"])
def test_who_holds_the_token_is_told(server, ask, token):
    status = ask(server(token).port, token)
    assert status.record == RECORD and 0 <= status.age_s < 60


def test_a_status_of_any_size_is_told(server, ask):
    assert ask(server(record=RECORD * 100_000).port).record == RECORD * 100_000


def test_it_comes_however_much_the_node_has_left_unread(server, ask):
    made = server(bound=1)
    made._inbox.put(Opened(0, "somebody"))
    for _ in range(3):
        assert ask(made.port).record == RECORD
    assert made._inbox.get_nowait() == Opened(0, "somebody") and made._inbox.empty()  # no peer came of it


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [(b"right", b"wrong", "wrong token"), (b"right", None, "requires a token"), (None, b"right", "has no token")],
)
def test_who_does_not_hold_it_is_told_that(server, tls, theirs, ours, says):
    line = refusal(server(theirs).port, ours, tls=tls[1])
    assert says in line and "here" not in line and "right" not in line


def test_a_syncer_that_does_not_hold_it_is_not_believed(impostor):
    challenge, attached = encode(Challenge(HANDSHAKE, bytes(32), True, PROTOCOL)), encode(Attached(bytes(16), b"?"))
    assert "does not hold the token" in refusal(impostor(challenge, attached + encode(Status(RECORD, 0.0))), b"right")


def test_one_that_has_none_yet_says_so(server, tls):
    assert "no status yet: it is starting" in refusal(server(record=b"").port, tls=tls[1])


def test_one_that_does_not_know_the_question_is_too_old(impostor):
    port = impostor(
        encode(Challenge(HANDSHAKE, bytes(32), False, PROTOCOL)), encode(Denied("no such message", final=False))
    )
    assert "too old to be asked for its status: upgrade it" in refusal(port)


def test_what_is_no_syncer_is_called_that(impostor):
    assert "no syncer that can be understood (not a Skerry frame" in refusal(impostor(b"SSH-2.0-OpenSSH_9.6\r\n"))
    assert "no syncer that can be understood (it hung up" in refusal(impostor())
    assert "no answer within 0.2 s" in refusal(impostor(hangs_up=False), within_s=0.2)


def test_nobody_there(impostor):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "connection refused: check the address" in refusal(port)
