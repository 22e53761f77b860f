"""Peers with IPv6, and two peers in one home, in network namespaces. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from swarm import ENDLESS, Program, until
from test_behind_routers import FarFlung

from lab.hosts import Access, Network
from lab.namespaces import check_support
from p2ptrain.net import address
from peer.home import Home

pytestmark = [
    pytest.mark.net,
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's"),
]


@pytest.fixture
def network() -> Iterator[Network]:
    check_support()
    with Network() as network:
        yield network


def own(program: Program) -> list[str]:
    """Return the addresses that a peer announced last."""
    return [address.split_peer(each)[0] for each in Home(program.home).load_addresses().own]


def direct(one: Program, two: Program) -> list[dict[str, Any]]:
    """Return the exchanges of one peer with another without a relay."""
    return [each for each in one.events("exchanged", peer=two.peer_id) if not each.get("relay")]


def test_a_swarm_without_ipv4(network: Network) -> None:
    for name in ("bootstrap", "alice", "bob"):
        network.add(name, Access(ipv4=False, ipv6="open"))
    with FarFlung(network, **ENDLESS) as swarm:
        swarm.bootstrap()
        assert "/ip6/2600:11:1::2/tcp/31337/p2p/" in swarm.link
        alice, bob = swarm.peer("alice"), swarm.peer("bob")
        alice.wait_for("reachable")
        alice.wait_for("exchanged", peer=bob.peer_id)
        assert not alice.events("relayed")
        assert [address.host_of(each) for each in own(alice)] == ["2600:11:2::2"]


def test_a_peer_open_by_one_family_announces_that_and_circuits_for_those_who_lack_it(network: Network) -> None:
    """Check IPv6 behind a firewall beside open IPv4, open IPv6 behind an IPv4 router, and a peer without IPv6."""
    network.add("bootstrap", Access(ipv6="open"))
    network.add("firewalled", Access(ipv6="firewall"))
    network.add("open6", Access(router=True, ipv6="open"))
    network.add("only4", Access(router=True))
    with FarFlung(network, **ENDLESS) as swarm:
        swarm.bootstrap()
        assert {"/ip4/11.0.1.2/tcp/31337", "/ip6/2600:11:1::2/tcp/31337"} == {
            address.split_peer(each)[0] for each in swarm.link.partition("@")[2].split(",")
        }
        firewalled, open6, only4 = (swarm.peer(name) for name in ("firewalled", "open6", "only4"))
        for each in firewalled, open6:
            each.wait_for("reachable")
        open6.wait_for("relayed")
        only4.wait_for("unreachable")
        open6.wait_for("exchanged", peer=firewalled.peer_id)
        open6.wait_for("exchanged", peer=only4.peer_id)
        assert {address.host_of(each) for each in own(firewalled)} == {"11.0.2.2"}
        first, *others = own(open6)
        assert address.host_of(first) == "2600:12:3::2"
        assert others
        assert all(map(address.relay_of, others))
        assert all(map(address.relay_of, own(only4)))  # no private address
        network.add("new", Access(router=True, ipv6="open"))
        _, found = swarm.doctor("new")
        assert "[2600:12:5::2]:31337; by IPv4 only a relay" in found["reach"]["found"], found


def test_two_peers_in_one_home_meet_at_their_private_addresses(network: Network) -> None:
    """Check a router that leads nobody back in by its public address; a third peer is in another home."""
    network.add("bootstrap")
    for name in ("alice", "bob"):
        network.add(name, Access(router=True, home="one"))
    network.add("carol", Access(router=True))
    with FarFlung(network, **ENDLESS) as swarm:
        swarm.bootstrap()
        alice, bob, carol = (swarm.peer(name) for name in ("alice", "bob", "carol"))
        for each, other in (alice, bob), (bob, alice):
            until("direct exchanges", lambda one=each, two=other: len(direct(one, two)) >= 3)
        alice.wait_for("exchanged", peer=carol.peer_id)
        assert alice.events("exchanged", peer=carol.peer_id)[-1]["relay"]
        for each in alice, bob, carol:
            assert all(map(address.relay_of, own(each)))
