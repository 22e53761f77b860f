"""Which relays a peer takes: peers that relay before further bootstraps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import base58
import pytest
import virtual_time

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.net import address
from p2ptrain.net.relay import reachability
from p2ptrain.net.relay.candidates import Candidate, candidates, in_line
from p2ptrain.net.relay.dial_back import DialOutcome, ReachabilityReport
from p2ptrain.net.relay.reachability import FULL_S, WANTED, ReachabilityManager
from p2ptrain.net.relay.relay import RelayFullError

PUBLIC = "/ip4/8.8.8.8/tcp/5"


def peer(number: int) -> PeerId:
    return PeerId(base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + number.to_bytes(32, "big")).decode())


LINK = [peer(1), peer(2)]
VOLUNTEERS = [peer(number) for number in range(10, 20)]
STRANGERS = [peer(number) for number in range(50, 60)]
KNOWN = {
    **dict.fromkeys([*LINK, *VOLUNTEERS, *STRANGERS], (PUBLIC,)),
    peer(90): tuple(address.through(each, PUBLIC) for each in VOLUNTEERS),
}


class Relays:
    """Relays with limits, as ``ReachabilityManager`` sees them."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken: Counter[PeerId] = Counter()
        self.asked: Counter[PeerId] = Counter()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def look(*_: object) -> ReachabilityReport:
            return ReachabilityReport(PUBLIC, DialOutcome.NO, "", 0.0)

        async def reserve(daemon: Any, relay: PeerId, addresses: Sequence[str], redial: bool) -> None:
            self.asked[relay] += 1
            if relay not in (*LINK, *VOLUNTEERS):
                raise NetworkError("not a relay")
            if relay in daemon.places:
                return
            if self.taken[relay] >= self.places:
                raise RelayFullError("full")
            daemon.places.add(relay)
            self.taken[relay] += 1

        monkeypatch.setattr(reachability, "look", look)
        monkeypatch.setattr(reachability, "reserve", reserve)
        monkeypatch.setattr(reachability.time, "monotonic", lambda: asyncio.get_running_loop().time())


class FakeNode:
    """A node that nobody can dial."""

    def __init__(self, number: int) -> None:
        self.alive = True
        self.addresses = ("/ip4/192.168.1.2/tcp/5",)
        self.known, self.bootstraps, self.peer_id, self.port = KNOWN, LINK, peer(number), 5
        self.mapped_port, self.has_company = 0, True
        self.daemon = SimpleNamespace(punches=False, dials_circuits=True, places=set())

    async def look_at_itself(self) -> None:
        pass


def managers(count: int) -> list[tuple[ReachabilityManager, FakeNode]]:
    nodes = [FakeNode(1000 + number) for number in range(count)]
    return [(ReachabilityManager(cast(Any, each), MemoryLog(), random=Random(n)), each) for n, each in enumerate(nodes)]


def test_one_place_is_at_the_link_and_others_are_at_peers_that_relay() -> None:
    found = candidates(KNOWN, LINK, peer(99), Random(0))

    def wanted(held: Sequence[PeerId]) -> set[PeerId]:
        return {each.peer for each in in_line(found, LINK, held)}

    assert wanted([]) == set(LINK)
    assert wanted(LINK[:1]) == set(VOLUNTEERS)
    assert wanted([LINK[0], *VOLUNTEERS]) == {LINK[1]}
    assert wanted([*LINK, *VOLUNTEERS]) == set(STRANGERS)
    assert in_line([Candidate(peer(1), (PUBLIC,))], [], [peer(1)]) == []


def test_peers_that_relay_share_the_places_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a hundred peers with two places each, ten volunteers and two bootstraps."""
    relays = Relays(places=64)
    relays.install(monkeypatch)

    async def main() -> None:
        peers = managers(100)
        tasks = [asyncio.create_task(each.run()) for each, _ in peers]
        await asyncio.sleep(60.0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for manager, _ in peers:
            assert len(manager._held) == WANTED
            assert len(set(LINK) & set(manager._held)) == 1

    virtual_time.run(main())
    assert sum(relays.taken[each] for each in VOLUNTEERS) == 100
    assert max(relays.taken[each] for each in VOLUNTEERS) <= 20  # 17 on average
    assert max(relays.taken[each] for each in LINK) <= 60


def test_a_full_bootstrap_is_left_in_peace_by_those_that_have_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    relays = Relays(places=64)
    relays.taken = Counter(dict.fromkeys(LINK, 64))
    relays.install(monkeypatch)

    async def main() -> None:
        [(manager, _)] = managers(1)
        task = asyncio.create_task(manager.run())
        await asyncio.sleep(FULL_S / 2)
        assert len(manager._held) == WANTED
        before = {each: relays.asked[each] for each in LINK}
        await asyncio.sleep(FULL_S * 2)
        assert all(relays.asked[each] - before[each] <= 3 for each in LINK)
        relays.taken = Counter()
        await asyncio.sleep(FULL_S * 1.5)
        assert set(LINK) & set(manager._held)
        task.cancel()
        await asyncio.wait([task])

    virtual_time.run(main())
