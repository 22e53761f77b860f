"""Which of the addresses that strangers announce we dial.

A presence record is a stranger's word, and everybody dials what it says. It shall not lead a whole swarm to machines
that have nothing to do with it, nor any peer to the programs of its own machine. So of others' addresses we dial those
of the internet; those of private networks only while we are in one ourselves (neighbours at home); a name by what it
stands for; and a few of them at once. What our owner named, a bootstrap above all, is dialed as it stands, and in a
swarm on one machine so is everything.

This holds for what we ask p2pd to dial. What it hears from other nodes by itself (libp2p's identify, its own DHT) does
not pass here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from p2ptrain.net import address

MOST_AT_ONCE = 4
"""Addresses of one peer that are dialed at once. A guess: two circuits and two in its own network; a record has room
for eight."""
RESOLVE_DEADLINE_S = 4.0
"""For a host name; a fifth of a dial (``links.Limits``). A guess: 50 ms are usual."""

_FAMILIES = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The IP addresses of a host name; of which family, or ``AF_UNSPEC``. Raises OSError and ValueError."""


async def resolve(host: str, family: int) -> list[str]:
    """``Resolve`` by the operating system."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    return [str(place[0]) for *_, place in found]


class DialPolicy:
    """What one node dials of what others announce.

    Args:
        local: the swarm is on this machine alone: everything.
    """

    def __init__(self, local: bool = False, resolve: Resolve = resolve) -> None:
        self._local = local
        self._resolve = resolve
        self._named: set[str] = set()
        self._has_neighbours = False

    def trust(self, addresses: Iterable[str], local: bool = False) -> None:
        """Our owner named these, with or without ``/p2p/``; ``local``: and said that the swarm is on this machine."""
        self._named.update(map(_place, addresses))
        self._local = self._local or local

    def stand_at(self, own: Iterable[str]) -> None:
        """This machine's addresses now: whether it is in a private network."""
        self._has_neighbours = any(map(is_private, address.announceable(own)))

    async def chosen(self, addresses: Sequence[str]) -> list[str]:
        """Those that we dial, as p2pd takes them, best first as before. No deadline but that of names."""
        found: list[str] = []
        left = MOST_AT_ONCE
        for each in filter(address.is_dialable, addresses):
            if self._local or _place(each) in self._named:
                found.append(each)
            elif left > 0:
                fresh = [*filter(self._may_be_dialed, await self._by_number(each))][:left]
                found += fresh
                left -= max(len(fresh), address.is_name(each))  # a name that is looked up in vain costs time too
        return found

    def _may_be_dialed(self, each: str) -> bool:
        host = address.ip_of(each)
        if host is None or host.is_multicast:
            return False
        return host.is_global or (self._has_neighbours and is_private(each))

    async def _by_number(self, each: str) -> list[str]:
        """The address itself, or those that its host name stands for: p2pd would not look at them."""
        if not address.is_name(each):
            return [each]
        _, kind, host, *rest = each.split("/")
        try:
            async with asyncio.timeout(RESOLVE_DEADLINE_S):
                numbers = await self._resolve(host, _FAMILIES.get(kind, socket.AF_UNSPEC))
        except (OSError, ValueError):  # TimeoutError is an OSError
            return []
        kinds = ((f"ip{6 if ':' in number else 4}", number) for number in numbers)
        return ["/".join(("", *both, *rest)) for both in kinds]


def is_private(each: str) -> bool:
    """Whether an address is one of a private network, neither this machine's own nor of the internet."""
    host = address.ip_of(each)
    if host is None or host.is_global or host.is_loopback or host.is_unspecified:
        return False
    return not (host.is_link_local or host.is_multicast or host.is_reserved)


def _place(each: str) -> str:
    """What is dialed first: without the peer, and without what a relay leads to."""
    return each.partition("/p2p/")[0]
