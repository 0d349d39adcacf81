"""How a syncer is named, and where the shared token lies."""

import pytest

from skerry.errors import WireError
from skerry.shell.address import PORT, parse_address, read_token


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("skerry://syncer.example:7000", "syncer.example", 7000),
        ("skerry://syncer.example:7000/", "syncer.example", 7000),
        ("10.0.0.1:7000", "10.0.0.1", 7000),
        ("localhost", "localhost", PORT),
        ("skerry://localhost", "localhost", PORT),
        ("[::1]:7000", "::1", 7000),
        ("skerry://[fe80::1]:7000", "fe80::1", 7000),
        ("[::1]", "::1", PORT),
    ],
)
def test_addresses(address, host, port):
    assert parse_address(address) == (host, port)


@pytest.mark.parametrize(
    "address", ["", "skerry://", ":", "::1", "host:port", "host:-1", "host:7_0", "http://host:80", "a:b:7", "[::1:7"]
)
def test_an_address_that_is_none_is_refused_in_one_line(address):
    with pytest.raises(WireError, match="write host:port") as refusal:
        parse_address(address)
    assert "\n" not in str(refusal.value)


def test_a_token_is_the_files_content_without_white_space_around_it(tmp_path):
    (tmp_path / "token").write_bytes(b"\n  se cret\n\n")
    assert read_token(tmp_path / "token") == read_token(str(tmp_path / "token")) == b"se cret"


def test_a_token_that_cannot_be_read_is_refused_with_its_path(tmp_path):
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(WireError) as refusal:
            read_token(path)
        said = str(refusal.value)
        assert said.startswith(f"{path}: the token cannot be read ({why}") and "; check" in said and "\n" not in said
