"""This machine's addresses: those of its network interfaces, and which of them others can use."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from p2ptrain.base.errors import UserError
from p2ptrain.net import address

_ROUTES = Path("/proc/net/route")  # proc(5)
_DOCKER_DEFAULT = ipaddress.ip_network("172.17.0.0/16")
_BRIDGES = ("docker", "br-", "virbr", "veth", "podman", "cni", "lxcbr", "lxdbr")
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # Linux; one line each: address, index, prefix, scope, flags, name
_FLEETING = 0x01 | 0x08 | 0x20 | 0x40  # linux/if_addr.h: temporary, duplicate, deprecated, tentative
_FAR = (("8.8.8.8", socket.AF_INET), ("2001:4860:4860::8888", socket.AF_INET6))  # on the internet; nothing is sent
_PORT_TRIES = 20


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
    near = [each for each in announceable(places) if not address.is_public(each)]
    return near or [address.multiaddress("127.0.0.1", address.port_of(places))]


def interface_hosts() -> list[str]:
    """Return the IP addresses of all interfaces that are up."""
    return [host for _, host in interface_addresses()]


def interface_addresses() -> list[tuple[str, str]]:
    """Return the names of all interfaces that are up, each with one of its IP addresses."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [(name, each.address.partition("%")[0]) for name in up for each in psutil.net_if_addrs().get(name, ())]
    return [(name, host) for name, host in found if address.ip_of(f"/ip{6 if ':' in host else 4}/{host}") is not None]


def with_one_port(listen: Sequence[str], needs_number: bool = False) -> tuple[str, ...]:
    """Return listening addresses whose ports 0, if several, are replaced by one port that is free for each of them.

    Args:
        needs_number: whether to replace a single port 0, too.

    Raises UserError if none is found. Another program may still take the port before it is used.
    """
    free = [each for each in listen if address.host_port(each).endswith(":0")]
    if not free or (len(free) == 1 and not needs_number):
        return tuple(listen)
    for _ in range(_PORT_TRIES):
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        found = {each: address.multiaddress(address.host_of(each), port) for each in free}
        if not any(map(is_taken, found.values())):
            return tuple(found.get(each, each) for each in listen)
    raise UserError("No TCP port is free.", "Choose an address and a port with --listen.")


def is_taken(place: str) -> bool:
    """Return whether another program listens at this address of ours; False also if it cannot be tested."""
    host, port = address.host_of(place), address.port_of([place])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections may linger
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
    except (OSError, ValueError) as error:  # among others: the kernel has no IPv6
        return getattr(error, "errno", None) == errno.EADDRINUSE
    return False


def announceable(addresses: Iterable[str], local: bool = False, bridges: Iterable[str] | None = None) -> list[str]:
    """Return those of a node's own addresses that others can use, public ones first.

    Loopback, unspecified and link-local addresses, port 0 and bridges to this machine's containers are left out.
    Docker's default range counts only if there is nothing else, because then the node itself is in a container.
    An IPv6 address that soon ends, as privacy extensions make (RFC 8981), counts only if no lasting one is known.

    Args:
        addresses: addresses that the node listens on.
        local: whether the swarm runs on this machine alone; then loopback addresses count and come first.
        bridges: IP addresses of bridges to containers and virtual machines; None: ask the operating system.
    """
    bridge_hosts = set(bridge_addresses() if bridges is None else bridges)
    ranked: list[tuple[int, str]] = []
    for each in dict.fromkeys(addresses):
        rank = _rank(each, local, bridge_hosts)
        if rank is not None:
            ranked.append((rank, each))
    best = sorted(ranked, key=lambda entry: entry[0])
    fleeting = fleeting_addresses()
    lasting = [entry for entry in best if address.host_of(entry[1]) not in fleeting]
    if any(address.family_of(each) == 6 and address.is_public(each) for _, each in lasting):
        best = lasting
    return [each for rank, each in best if rank < 3] or [each for _, each in best]


def is_of_use(place: str) -> bool:
    """Return whether other machines may be able to dial the address: public, or in a private network that is shared."""
    return _rank(place, False, set(bridge_addresses())) in (1, 2)


def way_out() -> list[str]:
    """Return this machine's source addresses towards the internet, at most one per family, and send nothing.

    The port is meaningless. IPv4 comes first.
    """
    found = []
    for far, family in _FAR:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 53))
                found.append(address.multiaddress(probe.getsockname()[0], 53))
        except OSError:  # no route, or no such family
            continue
    return found


def fleeting_addresses(table: Path = _IPV6_ADDRESSES) -> set[str]:
    """Return this machine's IPv6 addresses that soon end or cannot be used yet (empty except on Linux)."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
    except OSError:
        return set()
    return {str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if int(row[4], 16) & _FLEETING}


def bridge_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine's container and virtual-machine bridges."""
    found = []
    for name, addresses in psutil.net_if_addrs().items():  # also of a bridge without containers, which is not up
        if name.startswith(_BRIDGES):
            found += [each.address for each in addresses if each.family == socket.AF_INET]
    return found


def _rank(place: str, local: bool, bridges: set[str]) -> int | None:
    """Rank an address: 0 loopback if ``local``, 1 public or a name, 2 private, 3 Docker's range, None unusable."""
    parts = place.split("/")
    if not address.is_dialable(place) or parts[4] == "0":
        return None
    if parts[1] not in ("ip4", "ip6"):
        return 1
    host = ipaddress.ip_address(parts[2])
    if host.is_loopback:
        return 0 if local else None
    if host.is_unspecified or host.is_link_local or host.is_multicast or parts[2] in bridges:
        return None
    if host in _DOCKER_DEFAULT:
        return 3
    return 1 if address.is_on_internet(host) else 2
