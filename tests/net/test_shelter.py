"""How others reach us: verdicts, candidates, and what is announced. Pure."""

from __future__ import annotations

from random import Random
from typing import cast

import pytest

from p2ptrain.ids import PeerId
from p2ptrain.net import address
from p2ptrain.net.allowance import Allowance, origin
from p2ptrain.net.node import Node
from p2ptrain.net.reach import Dialed, Sight
from p2ptrain.net.shelter import MAX_OWN, Candidate, Shelter, announced, best_place, candidates, clock_off, verdict
from p2ptrain.telemetry import MemoryLog

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


def sight(dialed: Dialed, place: str = PUBLIC) -> Sight:
    return Sight(place, dialed, "", 0.0)


@pytest.mark.parametrize(
    ("sights", "found"),
    [
        ([], None),
        ([sight(Dialed.DECLINED)], None),
        ([sight(Dialed.YES)], True),
        ([sight(Dialed.NO)], False),
        ([sight(Dialed.YES), sight(Dialed.DECLINED)], True),
        ([sight(Dialed.YES), sight(Dialed.NO)], False),  # no majority: a circuit too many costs little
        ([sight(Dialed.YES), sight(Dialed.YES), sight(Dialed.NO)], True),
        ([sight(Dialed.YES, PRIVATE)], True),
        ([sight(Dialed.YES, PRIVATE), sight(Dialed.YES, PRIVATE), sight(Dialed.NO)], False),  # neighbours do not count
    ],
)
def test_a_majority_of_those_who_speak_for_the_internet_decides(sights: list[Sight], found: bool | None) -> None:
    assert verdict(sights) is found


def told(clock: float) -> Sight:
    return Sight(PUBLIC, Dialed.DECLINED, "", clock)


def test_the_others_median_tells_how_far_off_our_clock_is() -> None:
    assert clock_off([], 1000.0) is None
    assert clock_off([told(1000.0), told(990.0), told(-9e9)], 1000.0) == 10.0  # one of three may lie
    assert clock_off([told(1000.0), told(-9e9)], 1001.0) == 1.0  # or of two


def test_a_wrong_clock_is_told_once_and_when_it_is_right_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 5000.0)
    log = MemoryLog()
    shelter = Shelter(cast(Node, None), log)
    for clocks in ([5020.0], [], [8600.0, 8600.0], [8600.0], [5000.0], [5000.0]):
        shelter._mind_the_clock([told(each) for each in clocks])
    assert list(log.notes) == [
        ("wrong clock", {"off_s": -3600.0, "nodes": 2}),
        ("right clock", {"off_s": 0.0, "nodes": 1}),
    ]


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


def test_we_are_no_relay_of_our_own() -> None:
    assert candidates({HIDDEN: [address.through(ME, PUBLIC)]}, [], ME, Random(0)) == []


def test_of_each_candidate_a_few_addresses_are_kept() -> None:
    circuits = [address.through(RELAY, f"/ip4/8.8.8.8/tcp/{port}") for port in range(1, 9)]
    [found] = candidates({HIDDEN: circuits}, [], ME, Random(0))
    assert len(found.addresses) == MAX_OWN


def test_the_address_that_most_can_dial_is_announced_of_a_relay() -> None:
    assert best_place([PRIVATE, PUBLIC]) == PUBLIC
    assert best_place([PRIVATE]) == PRIVATE


def test_what_is_announced() -> None:
    circuit = address.through(RELAY, PUBLIC)
    seen = "/ip4/9.9.9.9/tcp/5"
    assert announced([PUBLIC, PRIVATE], [], [], None, False) == (PUBLIC, PRIVATE)
    assert announced([PRIVATE], [seen], [], True, False) == (seen, PRIVATE)
    # Public addresses of ours that nobody can dial go; neighbours still use the private ones.
    assert announced([PUBLIC, PRIVATE], [], [circuit], False, False) == (circuit, PRIVATE)
    assert announced([PUBLIC], [], [circuit], False, True) == (PUBLIC, circuit)  # the owner's word


def test_an_allowance_is_bounded_overall_and_for_each() -> None:
    allowance = Allowance(overall=3, each=2, window_s=60.0)
    assert [allowance.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert [allowance.take(who, 1.0) for who in "bc"] == [True, False]
    assert allowance.take("c", 60.0)  # the first two are over
    assert [allowance.take("c", 60.5), allowance.take("a", 60.5)] == [True, False]  # b's of second 1 still counts
    assert allowance.take("a", 61.0)


def test_a_house_is_one_origin() -> None:
    assert origin("/ip4/8.8.8.8/tcp/5") == origin("/ip4/8.8.8.8/tcp/6") != origin("/ip4/8.8.8.9/tcp/5")
    assert origin("/ip6/2001:db8::1/tcp/5") == origin("/ip6/2001:db8::ffff:1/tcp/5")
    assert origin("/ip6/2001:db8::1/tcp/5") != origin("/ip6/2001:db8:0:1::1/tcp/5")
