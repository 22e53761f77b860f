"""Hole punching of a node that nobody can dial: what p2pd needs for it, and since when circuits are used.

p2pd punches holes by itself (libp2p specification: relay/DCUtR): the side that is dialed through a circuit asks the
other to dial at the same instant. It begins once it knows its public address, which mirrors name
(``net.relay.mirror``), and upgrades only circuits made since. Such a node therefore takes no reservation and dials
no circuit until then, or until it is clear that no hole can be punched.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from p2ptrain.net import address, interfaces
from p2ptrain.net.node import Node
from p2ptrain.net.relay.mirror import Mirrors, can_mirror
from p2ptrain.net.relay.verdicts import mapped_places

PUNCHING_S = 10.0
"""Longest wait until a node reports our address, and until p2pd punches holes: .5 s were measured, 5 s at a load of
20."""


class HolePunching:
    """Hole punching of one node; nothing to do if its p2pd does not punch holes. ``close`` ends the mirrors."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._mirrors = Mirrors(node.port, _outward_host()) if node.daemon.punches and can_mirror() else None
        self._began_at = time.monotonic()
        self._has_observer = False

    @property
    def is_active(self) -> bool:
        """Whether p2pd punches holes; without mirrors, as on macOS, it does once four nodes have seen our address."""
        return self._node.daemon.punches if self._mirrors is None else self._mirrors.is_punching.is_set()

    @property
    def needs_observer(self) -> bool:
        """Whether p2pd is to punch holes and nobody has reported our address yet."""
        return self._mirrors is not None and not self._has_observer

    def show(self, places: Sequence[str]) -> None:
        """Have the mirrors name our public addresses.

        Args:
            places: the addresses from which nodes saw our connections come. p2pd dials from its listening port, so they
                show how the router maps it. IPv6 addresses are our own, as few routers translate them.
        """
        if self._mirrors is None or not places:
            return
        self._has_observer = True
        own_ipv6 = [each for each in self._node.addresses if "/ip6/" in each and address.is_public(each)]
        named = [*mapped_places(places), *own_ipv6[:1]]
        self._mirrors.show(dict.fromkeys(named))

    async def ready(self) -> bool:
        """Wait until p2pd punches holes, if it will; return whether circuits may be used."""
        daemon, mirrors = self._node.daemon, self._mirrors
        if daemon.dials_circuits:
            return True
        if mirrors is not None and mirrors.places:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PUNCHING_S):
                    await mirrors.is_punching.wait()
        elif self.needs_observer and time.monotonic() - self._began_at < PUNCHING_S:
            return False
        daemon.dials_circuits = True
        return True

    async def close(self) -> None:
        if self._mirrors is not None:
            await self._mirrors.close()


def _outward_host() -> str:
    """Return the IPv4 address from which this machine's connections to the internet come; loopback without a route."""
    return next((address.host_of(each) for each in interfaces.way_out() if "/ip4/" in each), "127.0.0.1")
