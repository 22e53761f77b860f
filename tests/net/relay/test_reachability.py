"""Reachability without I/O: verdicts, candidates, and the announced addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import base58
import pytest
import virtual_time

from p2ptrain.base.clock import WallClock
from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.net import address
from p2ptrain.net.rate_limiter import SlidingWindowLimit, origin
from p2ptrain.net.relay import reachability
from p2ptrain.net.relay.candidates import MAX_ADDRESSES_EACH, PROBERS, Candidate, candidates, probers
from p2ptrain.net.relay.dial_back import DialOutcome, ReachabilityReport
from p2ptrain.net.relay.reachability import ReachabilityManager
from p2ptrain.net.relay.verdicts import announced, best_places, clock_off, places_seen, verdict, verdicts
from p2ptrain.wire import MAX_ADDRESS_CHARS

ME, RELAY, BOOTSTRAP, OTHER, HIDDEN = map(
    PeerId,
    (
        "12D3KooWEjsyWGBHNsPbf2CDHKsRoeEPPfkU1UBYGNuQiHnLb6sG",
        "12D3KooWGr9NbThXK1Qf5LqAJAYxngoYbQXcisPpMSsW72V1tfbX",
        "12D3KooWF3oCrpQYDKnfzk7tXj8DNU8ih3D8LA8SitytUWZetEQ9",
        "12D3KooWRhj3DPxxZ77T7ExobgwJWVzEYPTG5msRiKn8qdL7iLav",
        "12D3KooWDV74LdQSQYg6LLM6MnyFucSWQuCaMhnSghVbnrSDr1WK",
    ),
)
PUBLIC, PRIVATE = "/ip4/8.8.8.8/tcp/5", "/ip4/192.168.1.2/tcp/5"
PUBLIC_6 = "/ip6/2600:1900::7/tcp/5"
CIRCUIT = address.through(RELAY, PUBLIC)


def sight(dialed: DialOutcome, place: str = PUBLIC) -> ReachabilityReport:
    return ReachabilityReport(place, dialed, "", 0.0)


@pytest.mark.parametrize(
    ("reports", "found"),
    [
        ([], None),
        ([sight(DialOutcome.DECLINED)], None),
        ([sight(DialOutcome.YES)], True),
        ([sight(DialOutcome.NO)], False),
        ([sight(DialOutcome.YES), sight(DialOutcome.DECLINED)], True),
        ([sight(DialOutcome.YES), sight(DialOutcome.NO)], False),  # no majority: an unneeded circuit costs little
        ([sight(DialOutcome.YES), sight(DialOutcome.YES), sight(DialOutcome.NO)], True),
        ([sight(DialOutcome.YES, PRIVATE)], True),
        (
            [sight(DialOutcome.YES, PRIVATE), sight(DialOutcome.YES, PRIVATE), sight(DialOutcome.NO)],
            False,
        ),  # neighbours do not count
    ],
)
def test_a_majority_of_those_who_speak_for_the_internet_decides(
    reports: list[ReachabilityReport], found: bool | None
) -> None:
    assert verdict(reports) is found


def yes(*hosts: str) -> list[ReachabilityReport]:
    return [sight(DialOutcome.YES, address.multiaddress(host, 9)) for host in hosts]


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        (["8.8.8.8"], ["8.8.8.8"]),  # one bootstrap and no other report
        (["8.8.8.8", "8.8.8.8", "9.9.9.9"], ["8.8.8.8"]),
        (["8.8.8.8", "9.9.9.9"], []),  # one of the two reports is false
        (["8.8.8.8", "192.168.1.2", "2606:4700::1"], ["8.8.8.8", "192.168.1.2", "2606:4700::1"]),
        (["2606:4700::1", "2606:4700:0::1"], ["2606:4700::1"]),
        (["127.0.0.1"], []),
        (["172.17.0.1"], []),
        (["0.0.0.0"], []),
        (["169.254.1.1"], []),
        (["fe80::1%eth0"], []),
        (["2606:4700::1%a,b"], []),
        (["example.org"], []),
    ],
)
def test_we_are_where_most_who_dialed_us_found_us_and_where_others_may_dial(hosts: list[str], found: list[str]) -> None:
    assert list(places_seen(yes(*hosts), {4: 31337, 6: 31337})) == [address.multiaddress(host, 31337) for host in found]


def test_who_did_not_find_us_does_not_say_where_we_are() -> None:
    assert places_seen([sight(DialOutcome.NO), sight(DialOutcome.DECLINED)], {4: 31337}) == ()


def test_a_node_open_by_ipv6_takes_places_for_those_who_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a closed IPv4 router and open IPv6: our connections use IPv6, and a second p2pd asks by IPv4."""
    node, log, second = FakeNode(PUBLIC_6, PRIVATE), MemoryLog(), []
    node.known = {OTHER: (PUBLIC, "/ip6/2600:1900::9/tcp/5")}

    async def look(*_: object) -> ReachabilityReport:
        return sight(DialOutcome.YES, "/ip6/2600:1900::7/tcp/4000")

    async def look_by(family: int, node: object, probers: Sequence[Candidate], port: int) -> list[ReachabilityReport]:
        second.append((family, port))
        return [sight(DialOutcome.NO)]

    async def reserve(*_: object, redial: bool) -> None:
        pass

    monkeypatch.setattr(reachability, "look", look)
    monkeypatch.setattr(reachability, "look_by", look_by)
    monkeypatch.setattr(reachability, "reserve", reserve)

    async def main() -> None:
        here = ReachabilityManager(cast(Any, node), log, random=Random(0))
        task = asyncio.create_task(here.run())
        await asyncio.sleep(60.0)
        assert second == [(4, 5)]
        assert here.verdicts == {4: False, 6: True}
        circuits = {address.through(OTHER, each) for each in node.known[OTHER]}
        assert here.addresses[0] == PUBLIC_6
        assert set(here.addresses[1:]) == circuits
        node.known = {OTHER: ("/ip6/2600:1900::9/tcp/5",)}
        await asyncio.sleep(60.0)
        assert here.addresses == (PUBLIC_6,)
        node.alive = False
        await task

    virtual_time.run(main())
    assert [fields for kind, fields in log.notes if kind == "reachable"] == [
        {"where": "[2600:1900::7]:5", "relays": False}
    ]


def test_a_neighbour_that_connects_by_a_private_ipv6_address_finds_the_port_of_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, log = FakeNode(PRIVATE, "/ip6/fd00::2/tcp/5"), MemoryLog()

    async def look(*_: object) -> ReachabilityReport:
        return sight(DialOutcome.YES, "/ip6/fd00::2/tcp/4000")

    async def look_by(*_: object) -> list[ReachabilityReport]:
        return []

    async def reserve(*_: object, redial: bool) -> None:
        pass

    monkeypatch.setattr(reachability, "look", look)
    monkeypatch.setattr(reachability, "look_by", look_by)
    monkeypatch.setattr(reachability, "reserve", reserve)

    async def main() -> None:
        here = ReachabilityManager(cast(Any, node), log, random=Random(0))
        task = asyncio.create_task(here.run())
        await asyncio.sleep(60.0)
        node.alive = False
        await task

    virtual_time.run(main())
    assert [fields["where"] for kind, fields in log.notes if kind == "reachable"] == ["[fd00::2]:5"]


def test_an_address_with_a_zone_is_none_that_anybody_takes() -> None:
    assert not address.is_dialable("/ip6/2606:4700::1%a,b/tcp/9")
    assert address.is_dialable("/ip6/2606:4700::1/tcp/9")


def told(clock: float) -> ReachabilityReport:
    return ReachabilityReport(PUBLIC, DialOutcome.DECLINED, "", clock)


def test_the_others_median_tells_how_far_off_our_clock_is() -> None:
    assert clock_off([], 1000.0) is None
    assert clock_off([told(1000.0), told(990.0), told(-9e9)], 1000.0) == 10.0  # one of three may be false
    assert clock_off([told(1000.0), told(-9e9)], 1001.0) == 1.0  # or one of two


def test_a_wrong_clock_is_told_once_and_when_it_is_right_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "wall", WallClock(lambda: 5000.0, lambda: 0.0))
    log = MemoryLog()
    here = ReachabilityManager(cast(Any, FakeNode()), log)
    for clocks in ([5020.0], [], [8600.0, 8600.0], [8600.0], [5000.0], [5000.0]):
        here._mind_the_clock([told(each) for each in clocks])
    assert list(log.notes) == [
        ("wrong clock", {"off_s": -3600.0, "nodes": 2}),
        ("right clock", {"off_s": 0.0, "nodes": 1}),
    ]


@pytest.mark.parametrize("is_right", [False, True])
def test_others_tell_at_once_which_time_is_right_after_a_jump(monkeypatch: pytest.MonkeyPatch, is_right: bool) -> None:
    """Check a clock that others contradict, and a wrong one that is corrected; one note tells the owner."""
    node, log, asked, system = FakeNode("/ip4/8.8.4.4/tcp/5"), MemoryLog(), [], [5000.0]

    async def look(node: FakeNode, peer: PeerId, addresses: Sequence[str], port: int = 0) -> ReachabilityReport:
        asked.append(port)
        clock = 5000.0 + 86_400.0 * is_right
        return ReachabilityReport(PUBLIC, DialOutcome.YES if port else DialOutcome.DECLINED, "", clock)

    monkeypatch.setattr(reachability, "look", look)
    monkeypatch.setattr(reachability, "wall", clock := WallClock(lambda: system[0], lambda: 0.0))

    async def main() -> None:
        here = ReachabilityManager(cast(Any, node), log, random=Random(0))
        task = asyncio.create_task(here.run())
        await asyncio.sleep(5.0)
        system[0] += 86_400.0
        here.refresh()
        await asyncio.sleep(0.1)
        assert clock() == (system[0] if is_right else 5000.0)
        await asyncio.sleep(300.0)
        assert asked[:3] == [5, 0, 5]
        node.alive = False
        here.refresh()
        await task

    virtual_time.run(main())
    told = [(kind, fields) for kind, fields in log.notes if "clock" in kind]
    jumped = ("clock jumped", {"by_s": 86_400.0, "is_right": is_right, "nodes": 1})
    wrong = ("wrong clock", {"off_s": -86_400.0, "nodes": 1})
    assert told == ([wrong, jumped, ("right clock", {"off_s": 0.0, "nodes": 1})] if is_right else [jumped])


def test_relays_come_first_and_whoever_is_behind_one_does_not_come() -> None:
    known = {
        ME: [PUBLIC],
        OTHER: ["/ip4/9.9.9.9/tcp/1"],
        HIDDEN: [address.through(RELAY, PUBLIC), PRIVATE],
        BOOTSTRAP: ["/ip4/9.9.9.9/tcp/2"],
    }
    for seed in range(20):
        found = candidates(known, [BOOTSTRAP], ME, Random(seed))
        assert {each.peer for each in found[:2]} == {RELAY, BOOTSTRAP}
        assert found[2:] == [Candidate(OTHER, ("/ip4/9.9.9.9/tcp/1",))]
        assert Candidate(RELAY, (PUBLIC,)) in found


def test_who_has_circuits_is_dialed_as_a_relay_where_others_have_circuits_through_it() -> None:
    """Check a peer with circuits: it is a public relay only if it is named as one; a firewall may close its address."""
    hidden = {HIDDEN: [address.through(RELAY, PUBLIC), "/ip4/9.9.9.9/tcp/1"]}
    found = {each.peer: each for each in candidates(hidden, [], ME, Random(0))}
    assert found == {RELAY: Candidate(RELAY, (PUBLIC,)), HIDDEN: Candidate(HIDDEN, ("/ip4/9.9.9.9/tcp/1",), True)}
    [known] = [each for each in candidates(hidden, [HIDDEN], ME, Random(0)) if each.peer == HIDDEN]
    assert not known.is_relayed
    named = hidden | {OTHER: [address.through(HIDDEN, PRIVATE)]}
    [known] = [each for each in candidates(named, [], ME, Random(0)) if each.peer == HIDDEN]
    assert known == Candidate(HIDDEN, ("/ip4/9.9.9.9/tcp/1", PRIVATE))


def test_we_are_no_relay_of_our_own() -> None:
    assert candidates({HIDDEN: [address.through(ME, PUBLIC)]}, [], ME, Random(0)) == []


def test_a_crowd_that_names_one_relay_does_not_put_it_before_the_links_own() -> None:
    crowd = {PeerId(f"{HIDDEN}{number}"): [address.through(RELAY, PUBLIC)] for number in range(50)}
    known = {BOOTSTRAP: ["/ip4/9.9.9.9/tcp/1"], **crowd}
    for seed in range(20):
        assert [each.peer for each in candidates(known, [BOOTSTRAP], ME, Random(seed))] == [BOOTSTRAP, RELAY]


def test_who_is_named_a_relay_is_no_likelier_a_witness() -> None:
    """Check two relays that one stranger's circuits name, among forty honest nodes and one bootstrap."""
    crowd = [PeerId(base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + bytes([n] * 32)).decode()) for n in range(42)]
    liars = crowd[:2]
    known = {peer: [PUBLIC] for peer in crowd[2:]}
    known |= {HIDDEN: [address.through(liar, PUBLIC) for liar in liars], BOOTSTRAP: [PUBLIC]}
    drawn = [
        [each.peer for each in probers(candidates(known, [BOOTSTRAP], ME, random), [BOOTSTRAP], random)]
        for random in map(Random, range(300))
    ]
    assert all(len(each) == len(set(each)) == PROBERS and each[0] == BOOTSTRAP for each in drawn)
    assert sum(set(liars) <= set(each) for each in drawn) < 10  # 300 * 2 of 42 * 1 of 41: one or none


def test_what_a_relay_says_of_itself_is_not_mended_by_strangers() -> None:
    known = {BOOTSTRAP: [PRIVATE], HIDDEN: [address.through(BOOTSTRAP, PUBLIC)]}
    assert candidates(known, [BOOTSTRAP], ME, Random(0)) == [Candidate(BOOTSTRAP, (PRIVATE,))]


def test_of_each_candidate_a_few_addresses_are_kept() -> None:
    circuits = [address.through(RELAY, f"/ip4/8.8.8.8/tcp/{port}") for port in range(1, 9)]
    [found] = candidates({HIDDEN: circuits}, [], ME, Random(0))
    assert len(found.addresses) == MAX_ADDRESSES_EACH


MALFORMED = ["/ip4/zzz/tcp/1", "/ip6/x/tcp/1", "/ip4/9.9.9.9/tcp/99999", "nonsense", "/ip4/9.9.9.9/tcp/1/p2p/nobody"]
LONG = f"/dns4/{'.'.join(['a' * 45] * 5)}/tcp/31337"


@pytest.mark.parametrize("spoiled", [*MALFORMED, LONG])
def test_a_strangers_nonsense_does_not_spoil_our_own_record(spoiled: str) -> None:
    """Check invalid addresses of a relay, announced by itself or others: its valid one stays."""
    named_by_others = f"{spoiled}/p2p/{RELAY}/p2p-circuit"
    for known in ({RELAY: [PUBLIC, spoiled]}, {RELAY: [spoiled, PUBLIC]}, {RELAY: [PUBLIC], HIDDEN: [named_by_others]}):
        [found] = candidates(known, [], ME, Random(0))
        assert found == Candidate(RELAY, (PUBLIC,))
        assert best_places(found.addresses) == [PUBLIC]
    assert candidates({RELAY: [spoiled]}, [], ME, Random(0)) == []
    assert candidates({HIDDEN: [named_by_others]}, [], ME, Random(0)) == []
    assert candidates({HIDDEN: [f"{PUBLIC}/p2p/nobody/p2p-circuit"]}, [], ME, Random(0)) == []


def test_a_relay_whose_circuit_no_record_holds_is_none() -> None:
    assert len(LONG) < MAX_ADDRESS_CHARS < len(address.through(RELAY, LONG))
    assert address.is_dialable(LONG)


class FakeNode:
    """A node that moves from one network to another."""

    def __init__(self, *addresses: str) -> None:
        self.alive = True
        self.addresses: Sequence[str] = addresses
        self.known, self.bootstraps, self.peer_id, self.port = {OTHER: (PUBLIC,)}, (OTHER,), ME, 5
        self.mapped_port = 0
        self.daemon = SimpleNamespace(punches=False, dials_circuits=True)
        self.has_company = True
        self.looks = 0

    async def look_at_itself(self) -> None:
        self.looks += 1


def test_another_network_is_noticed_with_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    node, log, asked, told = FakeNode("/ip4/8.8.4.4/tcp/5"), MemoryLog(), [], []

    async def look(node: FakeNode, peer: PeerId, addresses: Sequence[str], port: int) -> ReachabilityReport:
        if port:
            asked.append(asyncio.get_running_loop().time())
        at_home = node.addresses == [PRIVATE]
        return ReachabilityReport(
            "/ip4/9.9.9.9/tcp/1", DialOutcome.NO if at_home else DialOutcome.YES, "nobody answers", 1e9
        )

    async def reserve(*_: object, redial: bool) -> None:
        pass

    monkeypatch.setattr(reachability, "look", look)
    monkeypatch.setattr(reachability, "reserve", reserve)

    async def main() -> None:
        async def on_change() -> None:
            told.append(here.addresses)

        here = ReachabilityManager(cast(Any, node), log, on_change=on_change, random=Random(0))
        task = asyncio.create_task(here.run())
        await asyncio.sleep(100.0)
        assert len(asked) == 1
        assert here.reachable is True
        moved_at = asyncio.get_running_loop().time()
        node.addresses = [PRIVATE]
        await asyncio.sleep(20.0)
        assert len(asked) == 2
        assert asked[-1] - moved_at < 1.25 * reachability.ROUND_S
        assert here.reachable is False
        assert told[-1] == (address.through(OTHER, PUBLIC),)
        node.addresses = [PRIVATE]
        await asyncio.sleep(100.0)
        assert len(asked) == 2
        node.alive = False
        await task

    virtual_time.run(main())
    assert [kind for kind, _ in log.notes if kind != "wrong clock"] == ["reachable", "unreachable", "relayed"]


def test_another_public_address_of_the_router_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a forwarded port at a router that gets another public address, while this machine keeps its own."""
    node, public, asked = FakeNode(PRIVATE), ["9.9.9.9"], []

    async def look(node: FakeNode, peer: PeerId, addresses: Sequence[str], port: int) -> ReachabilityReport:
        asked.append(port)
        place = address.multiaddress(public[0], 1)
        return ReachabilityReport(place, DialOutcome.YES if port else DialOutcome.DECLINED, "", 1e9)

    monkeypatch.setattr(reachability, "look", look)

    async def main() -> None:
        here = ReachabilityManager(cast(Any, node), MemoryLog(), random=Random(0))
        task = asyncio.create_task(here.run())
        await asyncio.sleep(300.0)
        assert here.addresses == ("/ip4/9.9.9.9/tcp/5",)
        assert asked[0] == 5
        assert 3 <= asked.count(0) == len(asked) - 1 <= 5
        public[0] = "8.8.8.8"
        await asyncio.sleep(reachability.PLACE_S + 1.25 * reachability.ROUND_S)
        assert here.addresses == ("/ip4/8.8.8.8/tcp/5",)
        assert asked.count(5) == 2
        node.alive = False
        await task

    virtual_time.run(main())


def test_one_node_alone_cannot_discard_what_is_known_of_our_address(monkeypatch: pytest.MonkeyPatch) -> None:
    third = PeerId("12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN")
    node, dialed, liars = FakeNode(PRIVATE), [], [OTHER]
    node.known = {**node.known, third: ("/ip4/45.67.89.2/tcp/5",)}

    async def look(node: FakeNode, peer: PeerId, addresses: Sequence[str], port: int) -> ReachabilityReport:
        if port:
            dialed.append(peer)
        is_false = not port and peer in liars
        place = address.multiaddress("8.8.8.8" if is_false else "9.9.9.9", 1)
        return ReachabilityReport(place, DialOutcome.YES if port else DialOutcome.DECLINED, "", 1e9)

    monkeypatch.setattr(reachability, "look", look)

    async def main() -> None:
        here = ReachabilityManager(cast(Any, node), MemoryLog(), random=Random(0))
        task = asyncio.create_task(here.run())
        await asyncio.sleep(1000.0)
        asked = len(dialed)
        assert asked <= 3
        liars.append(third)  # now both, so it is the truth
        await asyncio.sleep(2 * reachability.PLACE_S + 1.25 * reachability.ROUND_S)
        assert len(dialed) > asked
        node.alive = False
        await task

    virtual_time.run(main())


def test_a_mapped_port_is_dialed_and_announced_at_the_address_that_others_see(monkeypatch: pytest.MonkeyPatch) -> None:
    node, asked = FakeNode(PRIVATE), []

    async def look(node: FakeNode, peer: PeerId, addresses: Sequence[str], port: int) -> ReachabilityReport:
        asked.append(port)
        return ReachabilityReport(
            "/ip4/9.9.9.9/tcp/1", DialOutcome.YES if port == 7777 else DialOutcome.NO, "nobody answers", 1e9
        )

    async def reserve(*_: object, redial: bool) -> None:
        pass

    monkeypatch.setattr(reachability, "look", look)
    monkeypatch.setattr(reachability, "reserve", reserve)

    async def main() -> None:
        here = ReachabilityManager(cast(Any, node), MemoryLog(), random=Random(0))
        task = asyncio.create_task(here.run())
        await asyncio.sleep(1.0)
        assert here.reachable is False
        node.mapped_port = 7777
        await asyncio.sleep(20.0)
        assert here.reachable is True
        assert here.addresses == ("/ip4/9.9.9.9/tcp/7777",)
        assert asked == [node.port, 7777]
        node.alive = False
        await task

    virtual_time.run(main())


def test_a_node_that_is_to_be_replaced_and_loses_its_network_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that it does not ask without pause while nobody answers, and is replaced by the next verdict."""
    node, is_cut = FakeNode(PRIVATE), [False]

    async def port_mapping_tried() -> None:
        if not is_cut[0]:
            node.addresses, is_cut[0] = ["/ip4/192.168.7.7/tcp/5"], True

    async def look_at_itself() -> None:
        node.looks += 1
        assert node.looks < 100

    async def look(*_: object) -> ReachabilityReport:
        if is_cut[0]:
            raise NetworkError("no route")
        return sight(DialOutcome.NO)

    async def reserve(*_: object, redial: bool) -> None:
        raise NetworkError("no route")

    monkeypatch.setattr(node, "port_mapping_tried", port_mapping_tried, raising=False)
    monkeypatch.setattr(node, "look_at_itself", look_at_itself)
    monkeypatch.setattr(reachability, "look", look)
    monkeypatch.setattr(reachability, "reserve", reserve)

    async def main() -> None:
        here = ReachabilityManager(cast(Any, node), MemoryLog(), may_punch=True, random=Random(0))
        task = asyncio.create_task(here.run())
        await asyncio.sleep(60.0)
        assert not task.done()
        assert node.looks > 10
        monkeypatch.setattr(reachability, "look", returned)
        await asyncio.sleep(5.0)
        assert task.done()
        assert here.is_misplaced

    async def returned(*_: object) -> ReachabilityReport:
        return sight(DialOutcome.NO)

    virtual_time.run(main())


def test_a_place_at_the_links_relay_takes_a_strangers_as_soon_as_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a reservation at the link's relay replaces a stranger's: all strangers may be one adversary."""
    node, down = FakeNode(PRIVATE), {BOOTSTRAP}
    node.known, node.bootstraps = dict.fromkeys((OTHER, RELAY, HIDDEN, BOOTSTRAP), (PUBLIC,)), (BOOTSTRAP,)

    async def look(*_: object) -> ReachabilityReport:
        return sight(DialOutcome.NO)

    async def reserve(daemon: object, relay: PeerId, addresses: Sequence[str], redial: bool) -> None:
        if relay in down:
            raise NetworkError("no place is free")

    monkeypatch.setattr(reachability, "look", look)
    monkeypatch.setattr(reachability, "reserve", reserve)
    monkeypatch.setattr(reachability, "REFUSED_S", (0.0, 0.0))
    monkeypatch.setattr(reachability, "OF_LINK_S", (0.0, 0.0))

    async def main() -> None:
        here = ReachabilityManager(cast(Any, node), MemoryLog(), random=Random(0))
        task = asyncio.create_task(here.run())
        await asyncio.sleep(100.0)
        assert len(here._held) == reachability.WANTED
        assert BOOTSTRAP not in here._held
        down.clear()
        await asyncio.sleep(2 * reachability.ROUND_S)
        assert len(here._held) == reachability.WANTED
        assert BOOTSTRAP in here._held
        node.alive = False
        await task

    virtual_time.run(main())


@pytest.mark.parametrize("away_s", [300.0, 1200.0, 3600.0])
def test_the_links_one_relay_is_asked_again_soon_after_it_was_away(
    monkeypatch: pytest.MonkeyPatch, away_s: float
) -> None:
    """Check that the link's only relay is retried soon: peers that cannot be dialed meet nowhere else."""
    node = FakeNode(PRIVATE)
    node.known, node.bootstraps = {BOOTSTRAP: (PUBLIC,)}, (BOOTSTRAP,)

    async def look(*_: object) -> ReachabilityReport:
        return sight(DialOutcome.NO)

    async def reserve(daemon: object, relay: PeerId, addresses: Sequence[str], redial: bool) -> None:
        if asyncio.get_running_loop().time() < away_s:
            raise NetworkError("it cannot be dialed")

    monkeypatch.setattr(reachability, "look", look)
    monkeypatch.setattr(reachability, "reserve", reserve)
    monkeypatch.setattr(reachability.time, "monotonic", lambda: asyncio.get_running_loop().time())

    async def main() -> None:
        here = ReachabilityManager(cast(Any, node), MemoryLog(), random=Random(0))
        task = asyncio.create_task(here.run())
        await asyncio.sleep(away_s + reachability.OF_LINK_S[1] + reachability.HURRY_S + 1.0)
        assert list(here._held) == [BOOTSTRAP]
        node.alive = False
        await task

    virtual_time.run(main())


def test_the_address_that_most_can_dial_is_announced_of_a_relay() -> None:
    assert best_places([PRIVATE, PUBLIC]) == [PUBLIC]
    assert best_places([PRIVATE]) == [PRIVATE]
    assert best_places([PRIVATE, PUBLIC_6, PUBLIC]) == [PUBLIC_6, PUBLIC]


def test_what_is_announced() -> None:
    circuit = address.through(RELAY, PUBLIC)
    seen = "/ip4/9.9.9.9/tcp/5"
    assert announced([PUBLIC, PRIVATE], [], [], {}) == (PUBLIC, PRIVATE)
    assert announced([PRIVATE], [seen], [], {4: True}, shared=()) == (seen,)
    assert announced([PRIVATE], [PRIVATE], [circuit], {4: True}) == (circuit, PRIVATE)  # only neighbours were asked
    # Public addresses of ours that failed are dropped.
    assert announced([PUBLIC, PRIVATE], [], [circuit], {4: False}) == (circuit, PRIVATE)
    assert announced([PUBLIC, PRIVATE], [], [circuit], {4: False}, shared=()) == (circuit,)


@pytest.mark.parametrize(
    ("found", "circuits", "told"),
    [
        ({4: False, 6: True}, True, (PUBLIC_6, CIRCUIT)),
        ({4: True, 6: False}, False, (PUBLIC,)),
        ({4: False, 6: False}, True, (CIRCUIT,)),
        ({4: True, 6: True}, False, (PUBLIC_6, PUBLIC)),
        ({4: False}, True, (PUBLIC_6, CIRCUIT)),
        ({6: True}, False, (PUBLIC_6, PUBLIC)),
    ],
)
def test_an_open_family_is_announced_beside_a_closed_one(
    found: dict[int, bool], circuits: bool, told: tuple[str, ...]
) -> None:
    own = [PUBLIC_6, PUBLIC, PRIVATE]
    assert announced(own, [], [CIRCUIT] if circuits else [], found, shared=()) == told


def test_each_family_has_a_verdict_of_its_own() -> None:
    reports = [sight(DialOutcome.YES, PUBLIC_6), sight(DialOutcome.NO), sight(DialOutcome.NO, PRIVATE)]
    assert verdicts(reports) == {4: False, 6: True}
    assert verdicts([sight(DialOutcome.DECLINED, PUBLIC_6)]) == {}
    assert verdicts([sight(DialOutcome.YES, "")]) == {4: True}


def test_an_allowance_is_bounded_overall_and_for_each() -> None:
    allowance = SlidingWindowLimit(overall=3, each=2, window_s=60.0)
    assert [allowance.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert [allowance.take(who, 1.0) for who in "bc"] == [True, False]
    assert allowance.take("c", 60.0)  # the first two have expired
    assert [allowance.take("c", 60.5), allowance.take("a", 60.5)] == [True, False]  # b's of second 1 still counts
    assert allowance.take("a", 61.0)


def test_many_names_of_one_origin_leave_half_to_others() -> None:
    allowance = SlidingWindowLimit(overall=6, each=2, window_s=60.0)
    taken = [allowance.take(f"name {number}", 0.0, "8.8.8.8") for number in range(10)]
    assert taken == [True] * 3 + [False] * 7
    assert allowance.take("guest", 0.0, "9.9.9.9")
    # All from this machine.
    assert [allowance.take(f"here {number}", 0.0) for number in range(3)] == [True, True, False]


def test_a_house_is_one_origin() -> None:
    assert origin("/ip4/8.8.8.8/tcp/5") == origin("/ip4/8.8.8.8/tcp/6") != origin("/ip4/8.8.8.9/tcp/5")
    assert origin("/ip6/2001:db8::1/tcp/5") == origin("/ip6/2001:db8::ffff:1/tcp/5")
    assert origin("/ip6/2001:db8::1/tcp/5") != origin("/ip6/2001:db8:0:1::1/tcp/5")
    assert origin("/ip6/::ffff:8.8.8.8/tcp/5") == origin("/ip4/8.8.8.8/tcp/5")
