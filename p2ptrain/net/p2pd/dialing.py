"""Dial policy: which of the addresses that other peers announce are dialed.

All peers dial the addresses in a presence record, which its issuer may forge. The policy keeps a forged record from
directing a whole swarm at unrelated machines, or a peer at programs on its own machine: public addresses are dialed,
private ones only if this machine is in a private network itself. Addresses that the owner named, and any in a swarm on
one machine, are always dialed. Addresses of a family that this machine lacks (IPv4, IPv6) are left out, and what last
led to a peer comes first. Host names are resolved here, because p2pd cannot send UDP (``base.udp_filter``).

The policy covers only dials that p2ptrain requests, not addresses that p2pd learns by itself (libp2p's identify, its
own DHT).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId
from p2ptrain.net import address, interfaces

MAX_AT_ONCE = 4
"""Addresses of one peer that are dialed at once, of at most eight in a record. Guess: count the addresses that were
needed to reach a peer; two circuits and two local ones should do."""
RESOLVE_DEADLINE_S = 4.0
"""Timeout of a host name lookup; a fifth of a dial (``links.Limits``). Guess: measure lookups; 50 ms are usual."""

UNRESOLVED = "cannot be resolved on this computer (DNS)"
"""What is said of a host name without an IP address."""

MAX_REMEMBERED = 1024
"""Peers whose last address is remembered, the latest."""

_FAMILIES = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Function from host name and address family (or ``AF_UNSPEC``) to IP addresses. Raises OSError and ValueError."""


async def resolve(host: str, family: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    return [str(place[0]) for *_, place in found]


class DialPolicy:
    """The announced addresses that one node may dial: every address with ``local``, in a swarm on one machine."""

    def __init__(self, local: bool = False, resolve: Resolve = resolve) -> None:
        self._local = local
        self._resolve = resolve
        self._named: set[str] = set()
        self._has_neighbours = False
        self._families: set[int | None] = set()  # by which this machine can dial; empty if unknown
        self._worked: BoundedDict[PeerId, str] = BoundedDict(MAX_REMEMBERED)
        self._unresolved: BoundedDict[str, None] = BoundedDict(MAX_REMEMBERED)  # host names, by their last lookup

    def trust(self, addresses: Iterable[str], local: bool = False) -> None:
        """Dial these addresses always because the owner named them; with ``local`` every address."""
        self._named.update(map(_place, addresses))
        self._local = self._local or local

    def stand_at(self, own: Iterable[str]) -> None:
        """Set this machine's current addresses, which show whether it is in a private network, and its families."""
        usable = interfaces.announceable(own)
        self._has_neighbours = any(map(is_private, usable))
        self._families = set(map(address.family_of, usable))

    def worked(self, peer: PeerId, place: str) -> None:
        """Remember the direct address at which a peer was reached."""
        self._worked[peer] = place

    def unresolved(self, addresses: Iterable[str]) -> str:
        """Return why none of these addresses could be dialed, if their names have no IP address; otherwise nothing."""
        hosts = [address.host_of(each) for each in addresses]
        return f"{', '.join(hosts)} {UNRESOLVED}" if hosts and all(host in self._unresolved for host in hosts) else ""

    async def chosen(self, addresses: Sequence[str], peer: PeerId | None = None) -> list[str]:
        """Return a peer's addresses to dial, in the given order except for the one that worked, and in p2pd's form.

        The only deadline is that of lookups.
        """
        found: list[str] = []
        left = MAX_AT_ONCE
        known = self._worked.get(peer) if peer is not None else None
        for each in sorted(filter(address.is_dialable, addresses), key=lambda each: each != known):
            if self._local or _place(each) in self._named:
                found += (await self._by_number(each))[:MAX_AT_ONCE]
            elif left > 0:
                fresh = [*filter(self._may_be_dialed, await self._by_number(each))][:left]
                found += fresh
                left -= max(len(fresh), address.is_name(each))  # a failed lookup costs time, too
        return found

    def _may_be_dialed(self, each: str) -> bool:
        host = address.ip_of(each)
        if host is None or host.is_multicast or (self._families and host.version not in self._families):
            return False
        return address.is_on_internet(host) or (self._has_neighbours and is_private(each))

    async def _by_number(self, each: str) -> list[str]:
        """Return the address itself, or those that its host name resolves to."""
        if not address.is_name(each):
            return [each]
        _, kind, host, *rest = each.split("/")
        try:
            async with asyncio.timeout(RESOLVE_DEADLINE_S):
                numbers = await self._resolve(host, _FAMILIES.get(kind, socket.AF_UNSPEC))
        except (OSError, ValueError):  # TimeoutError is an OSError
            self._unresolved[host] = None
            return []
        self._unresolved.pop(host, None)
        kinds = ((f"ip{6 if ':' in number else 4}", number) for number in numbers)
        return ["/".join(("", *both, *rest)) for both in kinds]


def is_private(each: str) -> bool:
    """Return whether an address belongs to a private network; loopback and public addresses do not."""
    host = address.ip_of(each)
    if host is None or host.is_global or host.is_loopback or host.is_unspecified:
        return False
    return not (host.is_link_local or host.is_multicast or host.is_reserved)


def _place(each: str) -> str:
    """Return the transport address of the first hop, without peer id and circuit."""
    return each.partition("/p2p/")[0]
