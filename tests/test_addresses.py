"""Whom an address stands for, to a syncer and to a page."""

import pytest

from skerry.addresses import place_of


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("[::ffff:10.0.0.1]", "10.0.0.1"),
        ("[2001:db8:1:2:3:4:5:6]", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("no address", "no address"),
    ],
)
def test_an_address_stands_for_who_was_given_it(host, place):
    assert place_of(host) == place
