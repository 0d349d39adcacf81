"""Whose a connection from this machine is, as the system tells: Linux knows the user of every socket.

The system is asked for one connection by its two addresses (netlink, sock_diag), which costs the same however many
there are and asks nothing of whoever dialled. Where it does not tell, which is seen once at the start, nobody is a
stranger.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

ROOT = 0
SOCK_DIAG, SOCK_DIAG_BY_FAMILY, REQUEST = 4, 20, 1  # the system's numbers (linux/netlink.h, linux/sock_diag.h)
ESTABLISHED, LISTENING = 1, 10
HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, number, port
QUESTION = struct.Struct(
    "=BBBxI"
)  # inet_diag_req_v2: family, protocol, extensions, states; then the socket's addresses
PORTS = struct.Struct(">HH")
ANY_INTERFACE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # and whatever cookie it has
STATE_AT, OWNER_AT = HEADER.size + 1, HEADER.size + 64  # in the answer, inet_diag_msg
ADDRESS_BYTES = 16
ANSWER_BYTES_MAX = 4096


class Neighbours:
    """Of one listening socket, for one thread."""

    def __init__(self, listener: socket.socket) -> None:
        self._system: socket.socket | None = None
        try:
            self._system = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, SOCK_DIAG)
            self._system.setblocking(False)  # it answers before the question's call returns
        except (OSError, AttributeError):
            return
        nobody = ("::" if listener.family == socket.AF_INET6 else "0.0.0.0", 0)
        if self._found(listener.family, listener.getsockname(), nobody, LISTENING) is None:
            self.close()

    def is_strange(self, connection: socket.socket) -> bool:
        """Another user than this process's, or root, dialled it, or whoever did has hung up; False if nobody tells.

        A socket that nobody holds any more may count as root's, so only one that is in use is believed.
        """
        return self._system is not None and self.user_of(connection) not in (ROOT, os.geteuid())

    def user_of(self, connection: socket.socket) -> int | None:
        """Who dialled it and has not hung up, if that was on this machine and the system tells."""
        if self._system is None:
            return None
        try:
            ends = connection.getpeername(), connection.getsockname()
        except OSError:
            return None
        return self._found(connection.family, *ends, ESTABLISHED)

    def _found(self, family: int, here: Any, there: Any, state: int) -> int | None:
        """The user of the socket between these addresses, if there is one in this state."""
        assert self._system is not None
        ends = b"".join(socket.inet_pton(family, each[0]).ljust(ADDRESS_BYTES, b"\0") for each in (here, there))
        body = QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + PORTS.pack(here[1], there[1]) + ends
        body += ANY_INTERFACE
        try:
            self._system.send(HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, REQUEST, 0, 0) + body)
            answer = self._system.recv(ANSWER_BYTES_MAX)
        except OSError:
            return None
        if len(answer) < OWNER_AT + 4 or HEADER.unpack_from(answer)[1] != SOCK_DIAG_BY_FAMILY:
            return None
        owner: int = struct.unpack_from("=I", answer, OWNER_AT)[0]
        return owner if answer[STATE_AT] == state else None

    def close(self) -> None:
        if self._system is not None:
            self._system.close()
            self._system = None
