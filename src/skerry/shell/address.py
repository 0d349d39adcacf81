"""How a syncer is named by whoever dials it."""

from __future__ import annotations

import ipaddress
import socket

from skerry.errors import WireError
from skerry.wire.connection import is_file

PORT = 7077
PORT_MAX = 65535


def parse_address(address: str) -> tuple[str, int]:
    """ "skerry://host:port", "host:port", "[::1]:port" or "host"; the port is 7077 if it is not given."""
    text = address.removeprefix("skerry://").rstrip("/")
    host, _, port = text.rpartition(":") if not text.endswith("]") and ":" in text else (text, "", "")
    is_port = not port or (port.isascii() and port.isdigit())
    is_host = ":" not in host or (host.startswith("[") and host.endswith("]"))
    if not (host or port) or not is_port or not is_host:
        raise WireError(f"{address!r} is no address of a syncer: write host:port")
    if port and not (len(port) <= 5 and 1 <= int(port) <= PORT_MAX):
        raise WireError(f"{address!r:.80} is no address of a syncer: its port must be from 1 to {PORT_MAX}")
    return host.strip("[]"), int(port or PORT)


def parse_addresses(text: str) -> tuple[tuple[str, int], ...]:
    """One address of a syncer, or several with commas between them; or "@" and a file that says where it is now.

    The file is read at each dialling, so that a syncer may come up elsewhere: its learners find it, and lose nothing.
    """
    if is_file(text):
        return ((text, PORT),)
    addresses = [each.strip() for each in text.split(",")]
    if len(addresses) > 1 and "" in addresses:
        raise WireError(f"{text!r:.200} has a comma with no address of a syncer beside it: write host:port,host:port")
    return tuple(map(parse_address, addresses))


def is_loopback(host: str) -> bool:
    """Whether who listens there can be reached from this machine alone; a host that leads nowhere can be from none."""
    if is_file(host):
        return False
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
