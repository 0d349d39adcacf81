"""How a syncer is named, and where the shared token lies."""

import pytest

from skerry.errors import WireError
from skerry.shell.address import PORT, is_loopback, parse_address, parse_addresses


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


@pytest.mark.parametrize("text", [",", "a:1,", ",a:1", "a:1, ,b:2"])
def test_a_comma_with_nothing_beside_it_is_refused_with_the_whole_text(text):
    with pytest.raises(WireError) as refusal:
        parse_addresses(text)
    assert str(refusal.value).startswith(f"{text!r} has a comma with no address of a syncer beside it: ")


@pytest.mark.parametrize("address", ["localhost:99999", "[::1]:65536", "host:0", "skerry://host:" + "9" * 5000])
def test_a_port_that_is_none_is_refused_before_anybody_dials(address):
    with pytest.raises(WireError, match=r"is no address of a syncer: its port must be from 1 to 65535$") as refusal:
        parse_addresses(f"localhost:65535,{address}")
    assert len(str(refusal.value)) < 200


def test_a_file_that_says_the_address_is_one_address_whatever_it_is_called():
    assert parse_addresses("@/runs/a, b:c/address") == (("@/runs/a, b:c/address", PORT),)
    assert not is_loopback("@/runs/address"), "it may lead to another machine, where keys are needed"
