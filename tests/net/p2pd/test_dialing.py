"""Announced addresses that are dialed."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop
import virtual_time

from p2ptrain.base.ids import PeerId
from p2ptrain.net import address
from p2ptrain.net.p2pd.dialing import MAX_AT_ONCE, DialPolicy, resolve

RELAY = PeerId("12D3KooWGr9NbThXK1Qf5LqAJAYxngoYbQXcisPpMSsW72V1tfbX")
PUBLIC, HOME, LOOPBACK = "/ip4/8.8.8.8/tcp/5", "/ip4/192.168.1.1/tcp/80", "/ip4/127.0.0.1/tcp/6379"
NOBODYS = [
    LOOPBACK,
    "/ip4/127.9.9.9/tcp/1",
    "/ip4/0.0.0.0/tcp/1",
    "/ip4/169.254.169.254/tcp/80",
    "/ip4/224.0.0.1/tcp/1",
    "/ip4/255.255.255.255/tcp/1",
    "/ip4/240.0.0.1/tcp/1",
    "/ip6/::1/tcp/1",
    "/ip6/::/tcp/1",
    "/ip6/fe80::1/tcp/1",
    "/ip6/ff02::1/tcp/1",
    "/ip6/::ffff:127.0.0.1/tcp/1",
    "/ip6/::ffff:169.254.169.254/tcp/80",
    "/ip4/zzz/tcp/1",
    "nonsense",
    address.through(RELAY, LOOPBACK),
]
PRIVATE = [HOME, *(f"/{each}/tcp/1" for each in ("ip4/10.1.2.3", "ip4/172.16.0.9", "ip4/100.64.0.1", "ip6/fd00::1"))]


def chosen(caution: DialPolicy, *addresses: str) -> list[str]:
    return virtual_time.run(caution.chosen(addresses))


@pytest.mark.parametrize("place", NOBODYS)
@pytest.mark.parametrize("own", [PUBLIC, "/ip4/192.168.1.2/tcp/5"])
def test_no_stranger_leads_us_to_our_own_machine_or_to_nobody(place: str, own: str) -> None:
    caution = DialPolicy()
    caution.stand_at([own, LOOPBACK])
    assert chosen(caution, place, PUBLIC) == [PUBLIC]


@pytest.mark.parametrize("place", PRIVATE)
def test_private_addresses_are_for_those_who_have_neighbours(place: str) -> None:
    caution = DialPolicy()
    assert chosen(caution, place) == []  # our own addresses are not known yet
    caution.stand_at(["/ip4/11.0.0.1/tcp/5", "/ip6/2600:1900::7/tcp/5", LOOPBACK])
    assert chosen(caution, place, PUBLIC) == [PUBLIC]
    caution.stand_at(["/ip4/192.168.1.2/tcp/5", "/ip6/2600:1900::7/tcp/5", LOOPBACK])
    assert chosen(caution, place, PUBLIC) == [place, PUBLIC]
    caution.stand_at(["/ip4/11.0.0.1/tcp/5"])  # the computer moved to another network
    assert chosen(caution, place) == []


def test_a_few_are_dialed_at_once_the_best_first() -> None:
    many = [f"/ip4/8.8.8.8/tcp/{port}" for port in range(1, 9)]
    assert chosen(DialPolicy(), LOOPBACK, *many) == many[:MAX_AT_ONCE]


def test_what_our_owner_named_is_dialed_as_it_stands() -> None:
    """Check addresses from our owner: a bootstrap at the other end of a tunnel, and the circuits through it."""

    async def look_up(host: str, family: int) -> list[str]:
        return {"boot.example": ["10.0.0.7"]}[host]

    caution = DialPolicy(resolve=look_up)
    caution.trust([f"{LOOPBACK}/p2p/{RELAY}", "/dns4/boot.example/tcp/5"])
    circuit = address.through(RELAY, LOOPBACK)
    named = (LOOPBACK, f"{LOOPBACK}/p2p/{RELAY}", circuit)
    found = chosen(caution, *named, "/dns4/boot.example/tcp/5", HOME, PUBLIC)
    assert found == [*named, "/ip4/10.0.0.7/tcp/5", PUBLIC]  # p2pd cannot resolve names


def test_a_swarm_on_one_machine_is_dialed_as_it_stands() -> None:
    many = [f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, 9)]
    late = DialPolicy()
    late.trust([], local=True)
    for caution in (DialPolicy(local=True), late):
        assert chosen(caution, *many) == many


def test_a_name_is_dialed_by_what_it_stands_for() -> None:
    asked: list[tuple[str, int]] = []
    book = {"good.example": ["8.8.8.8", "2001:4860::8"], "evil.example": ["127.0.0.1", "::1", "10.0.0.1"]}

    async def look_up(host: str, family: int) -> list[str]:
        asked.append((host, family))
        if host == "slow.example":
            await asyncio.sleep(3600.0)
        if host not in book:
            raise OSError("no such name")
        return book[host]

    caution = DialPolicy(resolve=look_up)
    circuit = address.through(RELAY, "/dns4/good.example/tcp/7")
    both = ["/ip4/8.8.8.8/tcp/7", "/ip6/2001:4860::8/tcp/7"]
    assert chosen(caution, circuit) == [address.through(RELAY, each) for each in both]
    assert chosen(caution, "/dns/good.example/tcp/7", "/dns/evil.example/tcp/7", "/dns6/none.example/tcp/7") == both
    assert chosen(caution, "/dns4/slow.example/tcp/7", PUBLIC) == [PUBLIC]
    assert asked[:2] == [("good.example", socket.AF_INET), ("good.example", socket.AF_UNSPEC)]
    before = len(asked)
    many = [f"/ip4/8.8.8.8/tcp/{port}" for port in range(1, 5)]
    assert chosen(caution, *many, "/dns/good.example/tcp/7") == many
    assert len(asked) == before  # no useless name lookups
    assert chosen(caution, *(f"/dns/{number}.example/tcp/7" for number in range(8)), PUBLIC) == []
    assert len(asked) == before + MAX_AT_ONCE


def test_the_systems_names_are_looked_up() -> None:
    assert set(asyncio.run(resolve("localhost", socket.AF_UNSPEC))) <= {"127.0.0.1", "::1"}
    caution = DialPolicy()
    caution.stand_at(["/ip4/192.168.1.2/tcp/5"])
    for run in (asyncio.run, uvloop.run):
        assert run(caution.chosen(["/dns/localhost/tcp/6379", f"/dns4/{'a' * 200}/tcp/1"])) == []


def test_addresses_of_a_family_that_this_machine_lacks_take_no_place() -> None:
    caution = DialPolicy()
    caution.stand_at(["/ip4/192.168.1.7/tcp/1", "/ip6/::1/tcp/1", "/ip6/fe80::1/tcp/1"])
    sixes = [f"/ip6/2600:1900::{number}/tcp/1" for number in range(1, 8)]
    assert chosen(caution, *sixes, PUBLIC) == [PUBLIC]
    caution.stand_at(["/ip6/2600:1900::7/tcp/1"])
    assert chosen(caution, PUBLIC, sixes[0]) == [sixes[0]]


def test_what_worked_is_dialed_first() -> None:
    caution = DialPolicy()
    places = [f"/ip4/8.8.8.{number}/tcp/1" for number in range(6)]
    caution.worked(RELAY, places[5])
    assert virtual_time.run(caution.chosen(places, RELAY)) == [places[5], *places[:3]]
    assert chosen(caution, *places) == places[:4]


def test_a_name_without_an_address_is_told_until_it_has_one() -> None:
    numbers: list[str] = []

    async def resolve(host: str, family: int) -> list[str]:
        if not numbers:
            raise socket.gaierror(-2, "Name or service not known")
        return numbers

    async def main() -> None:
        policy, place = DialPolicy(local=True, resolve=resolve), "/dns4/none.example/tcp/31337"
        assert await policy.chosen([place]) == []
        assert policy.unresolved([place]) == "none.example cannot be resolved on this computer (DNS)"
        assert policy.unresolved([place, "/ip4/46.10.1.2/tcp/5"]) == policy.unresolved([]) == ""
        numbers.append("46.10.1.2")
        assert await policy.chosen([place]) == ["/ip4/46.10.1.2/tcp/31337"]
        assert policy.unresolved([place]) == ""

    asyncio.run(main())
