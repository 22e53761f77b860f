"""A peer that calls too often is turned down before a byte of its conversations is read, and others are not."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from p2ptrain.ids import PeerId
from p2ptrain.net import virtual_time
from p2ptrain.net.links import Limits, P2PTransport
from p2ptrain.net.node import Node
from p2ptrain.net.rate_limiter import PER_PEER
from p2ptrain.net.rates import Rates


def test_a_flood_of_short_conversations_is_turned_down_and_one_caller_is_not() -> None:
    async def main() -> dict[str, int]:
        transport = P2PTransport(cast(Node, None), limits=Limits(inbound=1000))
        served = {"liar": 0, "amber": 0}

        async def call(who: str) -> None:
            """What ``_serve`` does with a stream once it knows whose it is."""
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            transport._inbound[task] = None
            try:
                served[who] += transport._admit(PeerId(who))
            finally:
                del transport._inbound[task]

        for second in range(60):
            for who, times in (("liar", 100), ("amber", 1)):
                for _ in range(times):
                    await asyncio.create_task(call(who))
            await asyncio.sleep(1.0)
            assert len(transport._inbound) == 0, second
        return served

    served = virtual_time.run(main())
    assert served["amber"] == 60
    assert served["liar"] <= PER_PEER.burst + 60 * PER_PEER.per_s


def admitted(transport: P2PTransport, times: int) -> int:
    """Of so many calls at once by one peer."""

    async def main() -> int:
        async def call() -> bool:
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            transport._inbound[task] = None
            try:
                return transport._admit(PeerId("amber"))
            finally:
                del transport._inbound[task]

        return sum([await asyncio.create_task(call()) for _ in range(times)])

    return virtual_time.run(main())


@pytest.mark.parametrize("is_gift", [True, False])
def test_whether_the_owner_gives_turns_nobody_down_here(is_gift: bool) -> None:
    """Each service knows what it withholds; an exchange withholds nothing."""
    rates = Rates()
    rates.gives = False
    transport = P2PTransport(cast(Node, None), limits=Limits(inbound=1000), rates=rates, is_gift=is_gift)
    assert admitted(transport, 100) == PER_PEER.burst
