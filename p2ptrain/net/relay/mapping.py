"""The router's mapping of this node's port, as other nodes see it. Pure.

A connection that leaves from the listening port shows which public address and port the router maps that port to. A
router that uses one port for all destinations lets holes be punched; one with another port for each destination
(symmetric NAT, RFC 5389) does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from p2ptrain.net import address


def mapped_places(places: Iterable[str]) -> tuple[str, ...]:
    """Return the public addresses, at most one per family, on which most observers agree.

    Without a majority there is none: the observers see different ports, or some of them lie.

    Args:
        places: the multiaddresses from which each observer saw a connection come; circuits do not count.
    """
    seen: dict[int, Counter[str]] = {}
    for place in direct(places):
        host = address.ip_of(place)
        assert host is not None  # as is_public found one
        seen.setdefault(host.version, Counter())[place] += 1
    leading = [(*counts.most_common(1)[0], counts.total()) for counts in seen.values()]
    return tuple(place for place, times, of in leading if 2 * times > of)


def is_symmetric(places: Iterable[str]) -> bool:
    """Return whether observers saw IPv4 connections from different ports, and most of them agree on none."""
    ports = [place for place in direct(places) if "/ip4/" in place]
    return len(set(ports)) > 1 and not mapped_places(ports)


def direct(places: Iterable[str]) -> list[str]:
    """Return the places of direct connections from a public IP address."""
    found = [each for each in places if address.ip_of(each) is not None and address.is_public(each)]
    return [address.split_peer(each)[0] for each in found if address.relay_of(each) is None]
