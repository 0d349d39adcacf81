"""How a syncer is named by whoever dials it, and where its shared token lies."""

from __future__ import annotations

from pathlib import Path

from skerry.errors import WireError

PORT = 7077


def parse_address(address: str) -> tuple[str, int]:
    """ "skerry://host:port", "host:port", "[::1]:port" or "host"; the port is 7077 if it is not given."""
    text = address.removeprefix("skerry://").rstrip("/")
    host, _, port = text.rpartition(":") if not text.endswith("]") and ":" in text else (text, "", "")
    is_port = not port or (port.isascii() and port.isdigit())
    is_host = ":" not in host or (host.startswith("[") and host.endswith("]"))
    if not (host or port) or not is_port or not is_host:
        raise WireError(f"{address!r} is no address of a syncer: write host:port")
    return host.strip("[]"), int(port or PORT)


def parse_addresses(text: str) -> tuple[tuple[str, int], ...]:
    """One address of a syncer, or several with commas between them."""
    return tuple(parse_address(each.strip()) for each in text.split(","))


def read_token(file: str | Path) -> bytes:
    """The shared secret: the file's content without surrounding white space."""
    try:
        return Path(file).read_bytes().strip()
    except OSError as error:
        raise WireError(
            f"{file}: the token cannot be read ({error.strerror}); check the path and its permissions"
        ) from None
