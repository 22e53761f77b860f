"""Upgrades of circuits to direct connections, which p2pd makes by itself (libp2p specification: relay/DCUtR).

A stream stays on the connection on which it was opened. A bulk transfer therefore waits a moment for the direct
connection, and uses the circuit if none comes: behind a router with another port for each destination none ever does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId
from p2ptrain.net.p2pd.daemon import Daemon

WAIT_S = 3.0
"""Longest wait for a direct connection; p2pd needs two to three round trips. Guess: measure upgrades between homes."""
POLL_S = 0.1
"""Interval of the question which connections p2pd has. Guess: measure its cost with hundreds of connections."""
AGAIN_S = 600.0
"""Time after a wait in vain until the next one with the same peer. Guess: measure how often a later attempt works."""
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
        self._in_vain: BoundedDict[PeerId, float] = BoundedDict(MAX_REMEMBERED)  # loop's clock

    async def wait(self, peer: PeerId) -> None:
        """Wait for a direct connection if the peer is connected by circuits alone. Raises NetworkError."""
        if await self._is_direct(peer) or not self._is_hopeful():
            return
        clock = asyncio.get_running_loop().time
        if clock() - self._in_vain.get(peer, -AGAIN_S) < AGAIN_S:
            return
        until = clock() + WAIT_S
        while clock() < until:
            await asyncio.sleep(POLL_S)
            if await self._is_direct(peer):
                self._in_vain.pop(peer, None)
                return
        self._in_vain[peer] = clock()

    async def _is_direct(self, peer: PeerId) -> bool:
        """Return whether a connection to the peer is direct, or there is none."""
        ends = [each for each in await self._daemon.connections() if each.peer == peer]
        return not ends or any(each.relay is None for each in ends)
