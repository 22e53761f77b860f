"""Peers that only neighbours can dial, or that were offline: whether and how soon they take reservations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, cast

import pytest
import virtual_time
from test_reachability import BOOTSTRAP, HIDDEN, OTHER, PRIVATE, PUBLIC, RELAY, FakeNode, sight

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.net import address
from p2ptrain.net.relay import reachability
from p2ptrain.net.relay.dial_back import DialOutcome, ReachabilityReport
from p2ptrain.net.relay.reachability import (
    HURRY_S,
    OF_LINK_S,
    ROUND_S,
    VERDICT_S,
    ReachabilityManager,
)
from p2ptrain.net.relay.verdicts import speaks_for_the_internet

NEIGHBOUR = "/ip4/192.168.1.3/tcp/5"
ROUND = 1.25 * ROUND_S + 1.0
Play = Callable[[Callable[[ReachabilityManager], Coroutine[Any, Any, None]]], None]


class World:
    """Reports about a node, and the relays that accept it."""

    def __init__(self) -> None:
        self.node = FakeNode(PRIVATE)
        self.reports: dict[PeerId, ReachabilityReport] = {}
        self.is_down = False

    async def look(self, node: object, peer: PeerId, addresses: Sequence[str], port: int) -> ReachabilityReport:
        if peer not in self.reports:
            raise NetworkError("it does not answer")
        return self.reports[peer]

    async def reserve(self, daemon: object, relay: PeerId, addresses: Sequence[str], redial: bool) -> None:
        if self.is_down:
            raise NetworkError("it cannot be dialed")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(reachability, "look", world.look)
    monkeypatch.setattr(reachability, "reserve", world.reserve)
    monkeypatch.setattr(reachability.time, "monotonic", lambda: asyncio.get_running_loop().time())
    return world


@pytest.fixture
def during(world: World) -> Play:
    """Play a scene while a reachability manager runs, in virtual time."""

    def play(scene: Callable[[ReachabilityManager], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            here = ReachabilityManager(cast(Any, world.node), MemoryLog(), random=Random(0))
            task = asyncio.create_task(here.run())
            await asyncio.sleep(0.0)
            await scene(here)
            world.node.alive = False
            await task

        virtual_time.run(main())

    return play


def test_who_can_say_what_the_internet_sees() -> None:
    assert not speaks_for_the_internet([sight(DialOutcome.YES, PRIVATE), sight(DialOutcome.DECLINED, PUBLIC)])
    assert speaks_for_the_internet([sight(DialOutcome.YES, PRIVATE), sight(DialOutcome.NO, PUBLIC)])
    assert not speaks_for_the_internet([])


def test_who_is_seen_by_a_neighbour_alone_takes_places_for_the_others(world: World, during: Play) -> None:
    """Check a router without hairpin NAT: the neighbour's report does not hold for the internet."""
    world.node.known, world.node.bootstraps = {OTHER: (NEIGHBOUR,), BOOTSTRAP: (PUBLIC,)}, (BOOTSTRAP,)
    world.reports = {OTHER: sight(DialOutcome.YES, PRIVATE), BOOTSTRAP: sight(DialOutcome.DECLINED, PUBLIC)}

    async def scene(here: ReachabilityManager) -> None:
        await asyncio.sleep(ROUND)
        assert here.reachable is True
        assert address.through(BOOTSTRAP, PUBLIC) in here.addresses
        assert PRIVATE not in here.addresses  # a node on the internet sees us
        world.reports[BOOTSTRAP] = sight(DialOutcome.YES, PUBLIC)
        await asyncio.sleep(VERDICT_S + ROUND)
        assert not here._held
        assert here.addresses == ("/ip4/8.8.8.8/tcp/5",)

    during(scene)


def test_a_circuit_tells_of_others_outside(world: World, during: Play) -> None:
    world.node.known, world.node.bootstraps = {OTHER: (NEIGHBOUR,), HIDDEN: (address.through(RELAY, PUBLIC),)}, ()
    world.reports = {OTHER: sight(DialOutcome.YES, PRIVATE)}

    async def scene(here: ReachabilityManager) -> None:
        await asyncio.sleep(ROUND)
        assert RELAY in here._held

    during(scene)


def test_a_swarm_in_one_network_needs_no_relays(world: World, during: Play) -> None:
    world.node.known, world.node.bootstraps = {OTHER: (NEIGHBOUR,), BOOTSTRAP: (NEIGHBOUR,)}, (BOOTSTRAP,)
    world.reports = dict.fromkeys((OTHER, BOOTSTRAP), sight(DialOutcome.YES, PRIVATE))

    async def scene(here: ReachabilityManager) -> None:
        await asyncio.sleep(2 * VERDICT_S)
        assert here.reachable is True
        assert not here._held
        assert here.addresses == (PRIVATE,)

    during(scene)


@pytest.mark.parametrize("back", ["elsewhere", "in company"])
def test_who_was_cut_off_asks_every_relay_again(world: World, during: Play, back: str) -> None:
    """Check the return of our connection: while it is down every relay fails, with a backoff of up to half an hour."""
    world.node.known, world.node.bootstraps = {RELAY: (PUBLIC,), OTHER: (PUBLIC,)}, ()
    world.node.has_company, world.node.addresses = back != "in company", []
    world.is_down = True

    async def scene(here: ReachabilityManager) -> None:
        here.verdicts = {4: False}
        await asyncio.sleep(3600.0)
        world.is_down = False
        if back == "elsewhere":
            world.node.addresses = [PRIVATE]
        else:
            world.node.has_company = True
        await asyncio.sleep(2 * HURRY_S)
        assert set(here._held) == {RELAY, OTHER}

    during(scene)


def test_the_relay_that_the_link_leads_through_is_asked_again_soon(world: World, during: Play) -> None:
    """Check a link made by a peer that cannot be dialed: it names no other node than the relay."""
    world.node.known, world.node.bootstraps = {HIDDEN: (address.through(RELAY, PUBLIC),)}, (HIDDEN,)
    world.is_down = True

    async def scene(here: ReachabilityManager) -> None:
        here.verdicts = {4: False}
        await asyncio.sleep(3600.0)
        world.is_down = False
        await asyncio.sleep(OF_LINK_S[1] + 2 * HURRY_S)
        assert list(here._held) == [RELAY]

    during(scene)
