"""Deadlines and throttles: a peer with a low cap is slow, not dead. In virtual time, over throttled links in
memory.

The first deadline assumes 1 Mbit/s. At a lower rate the first exchanges miss it, patience doubles, and after the
first success both sides know the seconds per byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from member import H, Member, more_exchanges
from memory_network import MemoryLink, MemoryNetwork, MemoryTransport
from virtual_time import run as run_in_virtual_time

from p2ptrain.base.ids import PeerId
from p2ptrain.framing import FrameKind
from p2ptrain.net.throttle import MIN_RATE, Throttles
from p2ptrain.ports import Link
from p2ptrain.swarm.deadlines import FIRST_RATE, MAX_PATIENCE
from p2ptrain.swarm.events import LeaveRequested

PARAMETERS = 1 << 18
"""Number of parameters: a payload of 1 MiB takes 8 s at 1 Mbit/s, 34 s at the lowest cap."""


class CappedLink(Link):
    """A link in memory that is throttled as ``net.links.StreamLink`` is."""

    def __init__(self, link: Link, rates: Throttles) -> None:
        self.peer = link.peer
        self._link, self._rates = link, rates

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        wait_s = self._rates.up.book(len(body))
        await self._rates.up.wait(wait_s if kind == FrameKind.CHUNK else 0.0)
        await self._link.send(kind, body)

    async def receive(self) -> tuple[int, bytes]:
        kind, body = await self._link.receive()
        wait_s = self._rates.down.book(len(body))
        await self._rates.down.wait(wait_s if kind == FrameKind.CHUNK else 0.0)
        return kind, body

    async def close(self) -> None:
        await self._link.close()


class CappedTransport:
    def __init__(self, transport: MemoryTransport, rates: Throttles) -> None:
        self._transport, self._rates = transport, rates

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> Link:
        return CappedLink(await self._transport.open(peer, addresses), self._rates)

    async def listen(self, handler: Callable[[Link], Awaitable[None]]) -> None:
        async def welcome(link: MemoryLink) -> None:
            await handler(CappedLink(link, self._rates))

        await self._transport.listen(welcome)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize(("rate", "misses"), [(2 * FIRST_RATE, 0), (MIN_RATE, 4)])
def test_a_capped_peer_exchanges_after_few_misses_and_then_without_any(
    direction: str, rate: float, misses: int
) -> None:
    failed: list[int] = []

    async def stage() -> None:
        network, rates = MemoryNetwork(latency=0.01), Throttles(asyncio.get_running_loop().time)
        (rates.up if direction == "up" else rates.down).rate = rate
        birch = Member(network, "birch", parameters=PARAMETERS)
        amber = Member(
            network, "amber", parameters=PARAMETERS, wrap=lambda transport: CappedTransport(transport, rates)
        )
        amber.pace_s = birch.pace_s = 120 / H  # an outer step takes at least as long as an exchange
        lives = [asyncio.create_task(each.live()) for each in (amber, birch)]
        await more_exchanges(amber, 3, patience_s=7200)
        failed.extend(each.counted().exchanges_failed for each in (amber, birch))
        await more_exchanges(amber, 10, patience_s=7200)
        failed.extend(each.counted().exchanges_failed for each in (amber, birch))
        amber.pace_s = birch.pace_s = 0.1
        for each in (amber, birch):
            each.participation.post(LeaveRequested())
        await asyncio.gather(*lives)

    run_in_virtual_time(stage())
    assert max(failed[:2]) <= misses
    assert failed[2:] == failed[:2]


def test_patience_reaches_the_lowest_cap() -> None:
    """Check the lowest cap, also shared by four exchanges."""
    assert MAX_PATIENCE * MIN_RATE >= 4 * FIRST_RATE
