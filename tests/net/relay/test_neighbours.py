"""Neighbours: which peers a node introduces to each other, and how they meet."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import virtual_time
from test_reachability import BOOTSTRAP, CIRCUIT, HIDDEN, ME, OTHER, PRIVATE, PUBLIC, PUBLIC_6, RELAY

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.net.node import slower_in_a_crowd
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.relay import neighbours
from p2ptrain.net.relay.neighbours import NeighbourFinder, Neighbourhoods, decoded, near

HOME, NEXT_DOOR = "/ip4/8.8.8.8/tcp/41", "/ip4/8.8.4.4/tcp/42"
PLACE = "/ip4/192.168.1.3/tcp/31337"


def test_who_shares_a_public_address_is_a_neighbour_for_a_while() -> None:
    now = [0.0]
    met = Neighbourhoods(lambda: now[0])
    assert met.meet(OTHER, HOME, [PLACE]) == []
    assert met.meet(RELAY, NEXT_DOOR, [PRIVATE]) == []
    assert met.meet(ME, HOME, [PRIVATE]) == [[OTHER, [PLACE]]]
    assert met.meet(OTHER, HOME, [PLACE]) == [[ME, [PRIVATE]]]
    now[0] += neighbours.LIFETIME_S
    assert met.meet(ME, HOME, [PRIVATE]) == []


@pytest.mark.parametrize("place", [CIRCUIT, PRIVATE, "", "/ip4/127.0.0.1/tcp/5"])
def test_who_comes_through_a_relay_or_from_a_private_network_has_no_neighbours(place: str) -> None:
    met = Neighbourhoods()
    met.meet(OTHER, place, [PLACE])
    assert met.meet(ME, place, [PRIVATE]) == []


def test_a_node_remembers_few_peers_and_tells_fewer() -> None:
    met = Neighbourhoods()
    for number in range(100):
        met.meet(PeerId(str(number)), HOME, [PLACE])
    told = met.meet(ME, HOME, [])
    assert len(told) == neighbours.MAX_TOLD
    assert told[0][0] == "99"
    for number in range(10 + neighbours.MAX_REMEMBERED):
        met.meet(OTHER, f"/ip4/9.9.{number // 250}.{number % 250}/tcp/1", [PLACE])
    assert len(met._networks) == neighbours.MAX_REMEMBERED
    assert met.meet(ME, HOME, []) == []


def size_of(table: object) -> int:
    """Return the bytes of a table of strings, tuples and dicts with all that is in it."""
    parts = [*table.keys(), *table.values()] if isinstance(table, dict) else table if isinstance(table, tuple) else []
    return sys.getsizeof(table) + sum(map(size_of, parts))


@pytest.mark.parametrize("together", [1, 1 + neighbours.MAX_TOLD], ids=["one a network", "full networks"])
def test_all_that_strangers_tell_a_node_takes_16_megabytes(together: int) -> None:
    met = Neighbourhoods()
    for number in range(neighbours.MAX_REMEMBERED + 100):
        places = [f"/ip6/fd00:1001:1002:1003:1004:1005:1006:{number:04x}/tcp/{60_000 + each}" for each in range(4)]
        met.meet(PeerId(f"{number:052}"), f"/ip6/2a00:{number // together:x}::1/tcp/1", places)
    assert met._count == sum(map(len, met._networks.values()))
    assert neighbours.MAX_REMEMBERED - together < met._count <= neighbours.MAX_REMEMBERED
    assert all(len(places) == neighbours.MAX_EACH for net in met._networks.values() for places, _ in net.values())
    assert size_of(met._networks) < 16e6
    assert near([places[0] + "/p2p/" + "1" * 60], "") == ()


def test_an_unanswered_request_is_repeated_ever_less_often() -> None:
    """Check that peers of a large swarm do not keep an overloaded bootstrap overloaded."""
    asked: list[float] = []
    node = SimpleNamespace(alive=True, peer_id=ME, port=5, addresses=(), bootstraps=(BOOTSTRAP,), known={})

    async def ask(*_: object) -> list[Any]:
        asked.append(asyncio.get_running_loop().time())
        raise NetworkError("it is busy")

    async def main() -> None:
        task = asyncio.create_task(NeighbourFinder(cast(Any, node), ask, Random(0)).run())
        await asyncio.sleep(600.0)
        task.cancel()

    virtual_time.run(main())
    assert len(asked) < 20
    assert asked[1] < 2 * neighbours.HURRY_S


@pytest.mark.parametrize(("known", "times"), [(10, 1.0), (64, 1.0), (256, 4.0)])
def test_in_a_crowd_the_links_nodes_are_asked_less_often(known: int, times: float) -> None:
    assert slower_in_a_crowd(60.0, known) == 60.0 * times


def test_a_neighbour_is_in_the_private_network_or_in_the_same_ipv6_network() -> None:
    own = [PUBLIC, PRIVATE, PUBLIC_6, "/ip6/2600:1901::7/tcp/5", "/ip6/fd00::7/tcp/5", "nonsense", CIRCUIT]
    assert near(own, HOME) == (PRIVATE, "/ip6/fd00::7/tcp/5")
    assert near(own, "/ip6/2600:1900::99/tcp/5") == (PRIVATE, PUBLIC_6, "/ip6/fd00::7/tcp/5")
    assert near(["/ip4/127.0.0.1/tcp/22", "/ip4/169.254.1.1/tcp/22"], HOME) == ()
    assert len(near([f"/ip4/10.0.0.{number}/tcp/5" for number in range(9)], HOME)) == neighbours.MAX_EACH


@pytest.mark.parametrize("answer", [[1], [["nobody", [PRIVATE]]], [[OTHER, [1]]], [[OTHER]], [[OTHER, PRIVATE]]])
def test_a_malformed_answer_is_refused(answer: list[Any]) -> None:
    with pytest.raises(RemoteError):
        decoded(answer)


def test_a_neighbours_circuits_and_nonsense_are_left_out() -> None:
    assert decoded([[OTHER, [CIRCUIT, "nonsense", PLACE]]]) == {OTHER: (PLACE,)}


class Home:
    """A p2pd and its connections."""

    def __init__(self, ends: Sequence[FarEnd] = (), is_cut: bool = False) -> None:
        self.ends, self.is_cut = list(ends), is_cut
        self.done: list[str] = []

    async def connections(self) -> list[FarEnd]:
        return self.ends

    async def disconnect(self, peer: PeerId) -> None:
        self.done.append("disconnect")
        self.ends.clear()

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self.done.append("connect")
        if self.is_cut:
            raise NetworkError("nobody answers")
        self.ends.append(FarEnd(peer, addresses[-1]))


@pytest.mark.parametrize(
    ("ends", "other", "done", "met"),
    [
        ([], HIDDEN, ["connect"], (PLACE,)),
        ([FarEnd(HIDDEN, CIRCUIT)], HIDDEN, ["disconnect", "connect"], (PLACE,)),
        ([FarEnd(OTHER, CIRCUIT)], OTHER, [], None),  # the other one has the larger id
        ([FarEnd(HIDDEN, "/ip4/192.168.1.3/tcp/50000")], HIDDEN, [], (PRIVATE, PLACE)),  # it has dialed us
    ],
)
def test_neighbours_get_one_direct_connection(
    ends: Sequence[FarEnd], other: PeerId, done: Sequence[str], met: tuple[str, ...] | None
) -> None:
    home = Home(ends)
    found, asked = run(home, other)
    assert home.done == done
    assert found == ({other: met} if met else {})
    assert asked == [(BOOTSTRAP, (PRIVATE,))]


def test_a_neighbour_that_does_not_answer_is_none() -> None:
    home = Home(is_cut=True)
    assert run(home, HIDDEN)[0] == {}
    assert home.done == ["connect"]


def test_neighbours_are_remembered_while_no_node_answers() -> None:
    """Check an only bootstrap that stops: two peers of one home still find each other."""
    found, asked = run(Home(), HIDDEN, seconds=3600.0, answers=1)
    assert found == {HIDDEN: (PLACE,)}
    assert len(asked) > 10


def test_a_neighbour_that_is_no_longer_named_is_forgotten() -> None:
    assert run(Home(), HIDDEN, seconds=neighbours.LIFETIME_S - 100.0, named=1)[0] == {HIDDEN: (PLACE,)}
    assert run(Home(), HIDDEN, seconds=neighbours.LIFETIME_S + 200.0, named=1)[0] == {}


def test_a_circuit_to_a_neighbour_in_another_network_is_closed_ever_less_often() -> None:
    """Check that peers of different homes behind one provider's NAT keep the circuit on which they exchange."""

    class Elsewhere(Home):
        async def connections(self) -> list[FarEnd]:
            return [FarEnd(HIDDEN, CIRCUIT)]  # dialed again by the next exchange

    home = Elsewhere(is_cut=True)
    found, asked = run(home, HIDDEN, seconds=3600.0)
    assert found == {}
    assert len(asked) > 40
    assert 2 <= home.done.count("disconnect") <= 6


def run(
    home: Home,
    other: PeerId,
    seconds: float = neighbours.ROUND_S / 2,
    answers: float = math.inf,
    named: float = math.inf,
) -> tuple[dict[PeerId, tuple[str, ...]], list[Any]]:
    """Run a finder, by default for one round; return the neighbours that it found, and what it asked.

    Args:
        answers: number of requests that the node answers.
        named: number of answers that name the neighbour.
    """
    node = SimpleNamespace(
        alive=True, peer_id=ME, port=5, addresses=(PRIVATE,), bootstraps=(BOOTSTRAP,), known={}, daemon=home
    )
    node.neighbours = {}
    asked = []

    async def ask(peer: PeerId, addresses: Sequence[str], own: Sequence[str]) -> list[Any]:
        asked.append((peer, own))
        if len(asked) > answers:
            raise NetworkError("it is down")
        return [*([[other, [PRIVATE, PLACE]]] if len(asked) <= named else []), [ME, [PRIVATE]]]

    async def main() -> None:
        task = asyncio.create_task(NeighbourFinder(cast(Any, node), ask, Random(0)).run())
        await asyncio.sleep(seconds)
        task.cancel()

    virtual_time.run(main())
    return node.neighbours, asked
