"""One socket: when it wakes whoever watches it."""

import contextlib
import select
import socket
import time

import pytest

from skerry.core.messages import Contribution
from skerry.wire import connection as connection_module
from skerry.wire.connection import SMALL_BYTES, Connection, Meter
from skerry.wire.frames import BULK_LINE, CHUNK_BYTES, Parser, encode_bulk, syncer_dialect
from skerry.wire.peer import NEVER
from wire.samples import sample

WAIT_S = 60
PAYLOAD = bytes(range(256)) * (2 * CHUNK_BYTES // 256)
STREAM = b"".join(b"".join(frame) for frame in encode_bulk(1, sample(Contribution), memoryview(PAYLOAD)))


@pytest.fixture
def line(monkeypatch):
    """A socket, and a connection that reads what is sent on it; it comes quickly, however long this machine takes."""
    monkeypatch.setattr(connection_module, "WAKE_S", WAIT_S)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        far = stack.enter_context(socket.create_connection(listener.getsockname()))
        near, _ = listener.accept()
        parser = Parser(syncer_dialect(lambda message: len(PAYLOAD)))
        parser.legal = BULK_LINE
        connection = Connection(near, "far", parser, Meter(), memoryview(bytearray(SMALL_BYTES)), NEVER)
        stack.callback(connection.close)
        yield far, connection


def is_ready(connection, timeout_s):
    return bool(select.select([connection.sock], [], [], timeout_s)[0])


def read(connection):
    assert is_ready(connection, WAIT_S)
    return list(connection.read(lambda: True))


def read_all(connection, far, data):
    """What is complete once all of it was read, by who is woken for it."""
    far.setblocking(False)
    items = []
    while not items or data:
        with contextlib.suppress(BlockingIOError):
            data = data[far.send(data) :] if data else data
        if is_ready(connection, 0.001):
            items += connection.read(lambda: True)
        connection.hurry(time.monotonic() - 0.05)
    return items


def begun(line):
    """Much has come at once, and much more must."""
    far, connection = line
    far.sendall(STREAM[: 4 * SMALL_BYTES])
    while connection.bytes_in < 4 * SMALL_BYTES:
        connection.hurry(NEVER)
        assert read(connection) == []
    return far, connection


def test_a_socket_does_not_wake_for_a_little_of_what_must_come(line):
    far, connection = begun(line)
    far.sendall(STREAM[4 * SMALL_BYTES :][:100])
    assert not is_ready(connection, 0.05)
    (item,) = read_all(connection, far, STREAM[4 * SMALL_BYTES + 100 :])
    assert item.payload == PAYLOAD


def test_a_little_is_read_once_no_more_has_come_for_a_while(line):
    far, connection = begun(line)
    far.sendall(STREAM[4 * SMALL_BYTES :][:100])
    connection.hurry(connection.heard)
    assert not is_ready(connection, 0.0)
    connection.hurry(NEVER)
    assert read(connection) == []
    assert connection.bytes_in == 4 * SMALL_BYTES + 100


def test_the_end_wakes_whatever_was_to_come(line):
    far, connection = begun(line)
    far.shutdown(socket.SHUT_WR)
    assert read(connection) == []
    assert connection.ended


def test_behind_the_last_byte_one_more_wakes(line):
    far, connection = begun(line)
    (item,) = read_all(connection, far, STREAM[4 * SMALL_BYTES :])
    assert item.payload == PAYLOAD
    far.sendall(STREAM[:1])
    assert read(connection) == []
    assert connection.bytes_in == len(STREAM) + 1
