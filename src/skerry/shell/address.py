"""How a syncer is named on a command line, and where its shared token lies."""

from __future__ import annotations

from pathlib import Path

from skerry.wire.transport import WireError

PORT = 7077


def parse_address(address: str) -> tuple[str, int]:
    """ "skerry://host:port", "host:port", "[::1]:port" or "host"; the port is 7077 if it is not given."""
    text = address.removeprefix("skerry://").rstrip("/")
    host, _, port = text.rpartition(":") if not text.endswith("]") and ":" in text else (text, "", "")
    if not (host or port) or (port and not port.isascii()) or (port and not port.isdigit()):
        raise WireError(f"{address!r} is no address of a syncer: write host:port")
    return host.strip("[]"), int(port or PORT)


def read_token(file: str | Path) -> bytes:
    """The shared secret: the file's content without surrounding white space."""
    try:
        return Path(file).read_bytes().strip()
    except OSError as error:
        raise WireError(f"{file}: the token cannot be read ({error.strerror})") from None
