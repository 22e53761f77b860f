"""Waiting for a direct connection, with a fake p2pd in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest
import virtual_time

from p2ptrain.base.ids import PeerId
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.relay.upgrade import AGAIN_S, WAIT_S, Upgrades
from p2ptrain.swarm.deadlines import REPLY_BOUNDS_S

PEER, OTHER = PeerId("12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"), PeerId("12D3KooWother")
DIRECT = FarEnd(PEER, "/ip4/46.10.1.2/tcp/1")
CIRCUIT = FarEnd(PEER, f"/ip4/45.67.89.1/tcp/1/p2p/{PEER}/p2p-circuit")
NOISE = FarEnd(OTHER, "/ip4/46.10.1.9/tcp/1")


def waits(
    *ends: tuple[float, list[FarEnd]], hopeful: bool = True, times: int = 1, between_s: float = 0.0
) -> list[float]:
    """Return how long each wait took, with a p2pd whose connections become ``ends`` at those times."""
    found: list[float] = []

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        began = clock()

        class Daemon:
            async def connections(self) -> list[FarEnd]:
                return [NOISE, *[held for at, held in ends if began + at <= clock()][-1]]

        upgrades = Upgrades(cast(Any, Daemon()), lambda: hopeful)
        for _ in range(times):
            asked = clock()
            await upgrades.wait(PEER)
            found.append(clock() - asked)
            await asyncio.sleep(between_s)

    virtual_time.run(main())
    return found


def test_a_direct_connection_and_none_at_all_cost_nothing() -> None:
    assert waits((0.0, [CIRCUIT, DIRECT])) == [0.0]
    assert waits((0.0, [])) == [0.0]


def test_a_circuit_is_waited_for_until_it_is_upgraded() -> None:
    [took_s] = waits((0.0, [CIRCUIT]), (0.7, [CIRCUIT, DIRECT]))
    assert 0.7 <= took_s < 1.0


def test_a_circuit_that_ends_was_not_upgraded() -> None:
    first, second = waits((0.0, [CIRCUIT]), (0.7, []), (3.0, [CIRCUIT]), times=2, between_s=1.6)
    assert first >= WAIT_S
    assert second == 0.0  # within the pause after a wait in vain


def test_one_that_is_not_upgraded_is_waited_for_once_in_a_while() -> None:
    first, *others = waits((0.0, [CIRCUIT]), times=3)
    assert WAIT_S <= first < WAIT_S + 0.5
    assert others == [0.0, 0.0]
    again, longest = AGAIN_S
    assert min(waits((0.0, [CIRCUIT]), times=2, between_s=again + 1)) >= WAIT_S
    assert waits((0.0, [CIRCUIT]), times=3, between_s=again + 1)[2] == 0.0  # the pauses grow
    assert min(waits((0.0, [CIRCUIT]), times=9, between_s=longest + 1)) >= WAIT_S


def test_a_fresh_circuit_is_made_once_the_pause_after_a_wait_in_vain_is_over() -> None:
    closed: list[float] = []

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        ends = [CIRCUIT]

        class Daemon:
            async def connections(self) -> list[FarEnd]:
                return ends

            async def disconnect(self, peer: PeerId) -> None:
                closed.append(clock())

        upgrades = Upgrades(cast(Any, Daemon()), lambda: True)
        await upgrades.renew(PEER)
        await upgrades.wait(PEER)
        await upgrades.renew(PEER)
        assert closed == []
        await asyncio.sleep(AGAIN_S[0] + 1)
        await upgrades.renew(PEER)
        assert len(closed) == 1
        ends[:] = [DIRECT]
        await upgrades.renew(PEER)
        assert len(closed) == 1

    virtual_time.run(main())


def test_the_wait_and_an_answer_fit_into_the_shortest_deadline_for_an_answer() -> None:
    assert REPLY_BOUNDS_S[0] >= WAIT_S + 0.5


def test_a_wait_that_a_deadline_ends_is_not_repeated_by_the_next_attempt() -> None:
    async def main() -> list[float]:
        clock, took = asyncio.get_running_loop().time, []

        class Daemon:
            async def connections(self) -> list[FarEnd]:
                return [CIRCUIT]

        upgrades = Upgrades(cast(Any, Daemon()), lambda: True)
        for _ in range(2):
            asked = clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.7):
                    await upgrades.wait(PEER)
            took.append(clock() - asked)
        return took

    assert virtual_time.run(main()) == [pytest.approx(0.7), 0.0]


def test_without_hope_nobody_waits() -> None:
    assert waits((0.0, [CIRCUIT]), hopeful=False) == [0.0]
