"""Manifest service over the network in memory: a newcomer gets a manifest, and no peer gets a hundred."""

from __future__ import annotations

import asyncio

import pytest
import virtual_time
from memory_network import MemoryNetwork

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.net.manifest_service import EACH, OVERALL, WINDOW_S, ask, manifest_handler

HOST, RUN = PeerId("host"), RunId("ab" * 32)


def test_who_asks_too_often_is_not_answered_for_a_while_and_others_are() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency=0.001)
        handler = manifest_handler(RUN, b"signed", asyncio.get_running_loop().time)
        await network.transport(HOST).listen(handler)

        async def served(who: str) -> bool:
            try:
                return await ask(network.transport(PeerId(who)), HOST, (), RUN) == b"signed"
            except NetworkError:
                return False

        assert [await served("greedy") for _ in range(2 * EACH)] == [True] * EACH + [False] * EACH
        assert sum([await served(f"one of many {number}") for number in range(2 * OVERALL)]) == OVERALL - EACH
        await asyncio.sleep(WINDOW_S)
        assert await served("greedy")

    virtual_time.run(main())


def test_a_manifest_too_long_for_a_frame_is_a_fault_of_ours() -> None:
    with pytest.raises(ValueError, match="expected a manifest of at most"):
        manifest_handler(RUN, bytes(10**6))
