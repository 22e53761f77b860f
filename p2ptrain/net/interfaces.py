"""This machine's addresses, read from its network interfaces rather than from p2pd, which names the announced ones."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

from p2ptrain.net import address

_ROUTES = Path("/proc/net/route")  # proc(5)


def default_gateways(table: Path = _ROUTES) -> set[str] | None:
    """Return the IPv4 addresses of the routers to the internet; None where they are unknown, as on macOS."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return None
    # Addresses are hexadecimal, in this machine's byte order.
    gateways = {int(row[2], 16) for row in rows if int(row[1], 16) == int(row[7], 16) == 0}
    return {str(ipaddress.IPv4Address(each.to_bytes(4, sys.byteorder))) for each in gateways if each}


def listening(listen: Iterable[str], hosts: Iterable[str] | None = None) -> list[str]:
    """Return the multiaddresses at which a node with these listen addresses accepts connections.

    An unspecified host (``0.0.0.0``, ``::``) stands for all addresses of its family, link-local ones excepted.

    Args:
        listen: multiaddresses with their ports.
        hosts: IP addresses of this machine; None: ask the operating system.
    """
    own = [ipaddress.ip_address(each) for each in (interface_hosts() if hosts is None else hosts)]
    found = []
    for each in listen:
        host = address.ip_of(each)
        if host is None or not host.is_unspecified:
            found.append(each)
            continue
        port = address.port_of([each])
        alike = [mine for mine in own if mine.version == host.version and not mine.is_link_local]
        found += [address.multiaddress(str(mine), port) for mine in alike]
    return list(dict.fromkeys(found))


def unreachable_from_afar(places: Iterable[str]) -> list[str]:
    """Return those of a node's own addresses that nobody on the internet dials: private ones, or else loopback."""
    places = list(places)
    near = [each for each in address.announceable(places) if not address.is_public(each)]
    return near or [address.multiaddress("127.0.0.1", address.port_of(places))]


def interface_hosts() -> list[str]:
    """Return the IP addresses of all interfaces that are up."""
    return [host for _, host in interface_addresses()]


def interface_addresses() -> list[tuple[str, str]]:
    """Return the names of all interfaces that are up, each with one of its IP addresses."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [(name, each.address.partition("%")[0]) for name in up for each in psutil.net_if_addrs().get(name, ())]
    return [(name, host) for name, host in found if address.ip_of(f"/ip{6 if ':' in host else 4}/{host}") is not None]
