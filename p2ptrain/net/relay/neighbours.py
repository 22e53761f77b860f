"""Neighbours: peers behind the same router connect over their private network, which few routers lead back into.

Presence records on the internet hold no private addresses. Instead each peer tells them to the nodes of the join link,
which see its public address anyway, and get those of the peers that share it: the same IPv4 address, or the same IPv6
/64. Behind a provider's NAT these may be strangers. Addresses are only tried, since p2pd checks which peer answers.

Sources: the same idea serves local candidates in ICE (RFC 8445, section 5.1.1.1), with a server in place of offers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random
from typing import Any

from p2ptrain.base.backoff import Backoffs, backoff
from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, key_of
from p2ptrain.net import address
from p2ptrain.net.node import Node, slower_in_a_crowd
from p2ptrain.net.p2pd.dialing import is_private
from p2ptrain.net.rate_limiter import origin

ROUND_S = 60.0
"""Interval between requests to a node; a newcomer asks at once, and finds those that came before."""
HURRY_S = 2.0
"""First interval until a node has answered, which doubles; a peer takes some seconds until it first exchanges."""
LIFETIME_S = 600.0
"""How long a node remembers a peer that does not ask again: one lost request may be in it, in a large swarm, too."""
DIAL_S = 10.0
"""Timeout to connect to a neighbour: a home network answers at once, or a firewall never."""
AGAIN_S = (120.0, 3600.0)
"""First and longest backoff after a circuit was closed in vain, by peer; it doubles. Behind a provider's NAT neighbours
may be in different networks, and each attempt ends the exchanges on the circuit."""
MAX_EACH = 4
"""Addresses of one peer: of two networks by IPv4 and IPv6."""
MAX_TRIED = 2
"""Addresses of a neighbour that are dialed before its announced ones, if the one that answers is not known."""
MAX_TOLD = 16
"""Neighbours in one answer: several times the peers of a home."""
MAX_REMEMBERED = 8192
"""Peers that a node remembers, those of the latest networks, and of each network one more than it tells: 16 MB."""
MAX_ADDRESS_CHARS = 64
"""Longest address of a neighbour; an IPv6 address with its port has at most 54."""


_Network = BoundedDict[PeerId, tuple[tuple[str, ...], float]]
"""Peers of one network: their addresses there, and until when they are remembered."""


class Neighbourhoods:
    """Peers that asked a node lately, by where their requests came from.

    Args:
        clock: monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._networks: BoundedDict[str, _Network] = BoundedDict(MAX_REMEMBERED)
        self._count = 0  # peers in all networks

    def meet(self, peer: PeerId, place: str, addresses: Sequence[str]) -> list[list[Any]]:
        """Remember a peer whose request came from ``place``, and return its neighbours: lists of peer and addresses.

        Requests through a relay or from a private network get none.
        """
        if not address.is_public(place) or address.relay_of(place) is not None:
            return []
        where, now = origin(place), self._clock()
        network: _Network = self._networks.pop(where, BoundedDict(1 + MAX_TOLD))
        self._count -= len(network)
        network[peer] = near(addresses, place), now + LIFETIME_S
        self._count += len(network)
        while self._count > MAX_REMEMBERED:
            self._count -= len(self._networks.pop(next(iter(self._networks))))
        self._networks[where] = network
        return [
            [other, list(places)]
            for other, (places, until) in reversed(network.items())
            if until > now and other != peer and places
        ]


def near(addresses: Iterable[str], place: str) -> tuple[str, ...]:
    """Return those of a peer's addresses that its neighbours may dial: private, or in the IPv6 network of ``place``."""
    there = origin(place)
    short = (each for each in addresses if len(each) <= MAX_ADDRESS_CHARS)
    kept = (each for each in short if address.is_dialable(each) and address.relay_of(each) is None)
    return tuple(each for each in kept if is_private(each) or ("/ip6/" in each and origin(each) == there))[:MAX_EACH]


def decoded(answer: list[Any]) -> dict[PeerId, tuple[str, ...]]:
    """Return the neighbours in a node's answer. Raises RemoteError if it is malformed."""
    found = {}
    for entry in answer:
        match entry:
            case [str(peer), [*places]] if key_of(peer) is not None and all(type(each) is str for each in places):
                usable = [each for each in places if address.is_dialable(each) and address.relay_of(each) is None]
                found[PeerId(peer)] = tuple(usable[:MAX_EACH])
            case other:
                raise RemoteError(f"expected a neighbour, got {str(other)[:80]}")
    return dict(list(found.items())[:MAX_TOLD])


class NeighbourFinder:
    """Asks the nodes of the join link for neighbours, and connects to them. ``run`` ends by cancellation.

    Args:
        ask: asks a node, with its addresses and ours. Raises NetworkError and RemoteError.
    """

    def __init__(
        self,
        node: Node,
        ask: Callable[[PeerId, Sequence[str], Sequence[str]], Awaitable[list[Any]]],
        random: Random | None = None,
    ) -> None:
        self._node = node
        self._ask = ask
        self._random = random or Random()
        self._in_vain: Backoffs[PeerId] = Backoffs(AGAIN_S, MAX_REMEMBERED)
        self._met: BoundedDict[PeerId, tuple[tuple[str, ...], float]] = BoundedDict(4 * MAX_TOLD)
        """Neighbours' addresses that we have used, and until when they are remembered, on the loop's clock."""

    async def run(self) -> None:
        pauses_s, clock = backoff(HURRY_S, ROUND_S), asyncio.get_running_loop().time
        while self._node.alive:
            answers = await asyncio.gather(*map(self._neighbours_at, self._node.bootstraps))
            found = {peer: places for answer in answers for peer, places in (answer or {}).items()}
            found.pop(self._node.peer_id, None)
            met = await asyncio.gather(*(self._meet(*each) for each in found.items()))
            for peer, places in filter(None, met):
                self._met[peer] = places, clock() + LIFETIME_S
            if any(answer is not None for answer in answers):  # else they stay: the nodes may be gone for long
                self._node.neighbours = {peer: places for peer, (places, until) in self._met.items() if until > clock()}
                pauses_s, pause_s = backoff(HURRY_S, ROUND_S), ROUND_S
            else:
                pause_s = next(pauses_s)
            pause_s = slower_in_a_crowd(pause_s, len(self._node.known))
            await asyncio.sleep(pause_s * self._random.uniform(0.75, 1.25))

    async def _neighbours_at(self, bootstrap: PeerId) -> dict[PeerId, tuple[str, ...]] | None:
        own = self._node.addresses[:MAX_EACH] if self._node.port else ()
        try:
            return decoded(await self._ask(bootstrap, self._node.known.get(bootstrap, ()), own))
        except (NetworkError, RemoteError):  # among others: an older version
            return None

    async def _meet(self, peer: PeerId, places: Sequence[str]) -> tuple[PeerId, tuple[str, ...]] | None:
        """Connect to a neighbour directly; return it and where it is, or None if it is not there."""
        daemon, clock = self._node.daemon, asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(DIAL_S):
                ends = await self._ends(peer)
                if ends and all(map(address.relay_of, ends)):
                    # One of the two does it, as both would end what they share.
                    if self._node.peer_id < peer or clock() < self._in_vain.until(peer):
                        return None
                    self._in_vain.fail(peer, clock())
                    await daemon.disconnect(peer)  # p2pd opens no second connection
                    ends = []
                if not ends:
                    await daemon.connect(peer, places)
                    ends = await self._ends(peer)
        except (NetworkError, TimeoutError):
            return None
        self._in_vain.forget(peer)
        return peer, tuple([each for each in places if each in ends] or places)[:MAX_TRIED]

    async def _ends(self, peer: PeerId) -> list[str]:
        """Return the other ends of our connections with a peer."""
        return [each.place for each in await self._node.daemon.connections() if each.peer == peer]
