"""Addresses of the network: whom one stands for, where each has its share of places and of patience."""

from __future__ import annotations

import ipaddress


def place_of(host: str) -> str:
    """Whom an address stands for: an IPv4 address itself, an IPv6 one its /64, which is what one customer is given."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)


def is_of_this_machine(host: str) -> bool:
    """Only a process of this machine can have this address."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
