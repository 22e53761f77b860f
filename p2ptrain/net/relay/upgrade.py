"""Upgrades of circuits to direct connections, which p2pd makes by itself (libp2p specification: relay/DCUtR).

A stream stays on the connection on which it was opened. A bulk transfer therefore waits a moment for the direct
connection, and uses the circuit if none comes: behind a router with another port for each destination none ever does.
p2pd tries only when it makes a circuit, so after a while a later transfer makes a fresh one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.base.backoff import Backoffs
from p2ptrain.base.ids import PeerId
from p2ptrain.net.p2pd.daemon import Daemon

WAIT_S = 1.5
"""Longest wait for a direct connection: p2pd needs two to three round trips, .2 to .9 s at 40 ms (measured). The wait
and the answer must fit into the shortest deadline for an answer, 2 s (``swarm.deadlines``), or no exchange takes place
by a circuit that is never upgraded."""
POLL_S = 0.1
"""Interval of the question which connections p2pd has, which takes a millisecond (measured)."""
AGAIN_S = (2.0, 3600.0)
"""First and longest backoff after a wait in vain, by peer; it doubles. A fresh circuit costs a second (measured). The
first is short: on busy machines up to 2 of 15 pairs that can punch holes fail at first (measured)."""
MAX_REMEMBERED = 1024
"""Most peers with which a wait was in vain."""


class Upgrades:
    """Waits for direct connections of one p2pd.

    Args:
        is_hopeful: returns whether circuits may be upgraded: p2pd punches holes, or others can dial this node.
    """

    def __init__(self, daemon: Daemon, is_hopeful: Callable[[], bool]) -> None:
        self._daemon = daemon
        self._is_hopeful = is_hopeful
        self._in_vain: Backoffs[PeerId] = Backoffs(AGAIN_S, MAX_REMEMBERED)

    async def renew(self, peer: PeerId) -> None:
        """Close the circuits to a peer if the next one may be upgraded. Raises NetworkError.

        Streams on them end: call it only while no transfer uses them.
        """
        has_failed = 0.0 <= self._in_vain.until(peer) <= asyncio.get_running_loop().time()
        is_due = has_failed and self._is_hopeful()
        if is_due and await self._has_circuits_alone(peer):
            await self._daemon.disconnect(peer)

    async def wait(self, peer: PeerId) -> None:
        """Wait for a direct connection if the peer is connected by circuits alone. Raises NetworkError."""
        if not self._is_hopeful() or not await self._has_circuits_alone(peer):
            return
        clock = asyncio.get_running_loop().time
        if clock() < self._in_vain.until(peer):
            return
        until, is_direct = clock() + WAIT_S, False
        try:
            while clock() < until and not is_direct:
                await asyncio.sleep(POLL_S)
                is_direct = any(relay is None for relay in await self._relays(peer))
        finally:  # also if the caller's deadline ends the wait: the next attempt then does not wait
            if is_direct:
                self._in_vain.forget(peer)
            else:
                self._in_vain.fail(peer, clock())

    async def _has_circuits_alone(self, peer: PeerId) -> bool:
        """Return whether the peer is connected, and by no direct connection."""
        relays = await self._relays(peer)
        return bool(relays) and None not in relays

    async def _relays(self, peer: PeerId) -> list[PeerId | None]:
        """Return the relay of each connection with the peer; None: a direct one."""
        return [each.relay for each in await self._daemon.connections() if each.peer == peer]
