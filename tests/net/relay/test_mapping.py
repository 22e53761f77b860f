"""The router's mapping, from what observers see."""

from __future__ import annotations

from p2ptrain.net.relay.verdicts import is_symmetric, mapped_places

HERE, THERE, ELSEWHERE = (f"/ip4/46.10.1.2/tcp/{port}" for port in (1, 2, 3))
IPV6 = "/ip6/2a01:a::2/tcp/1"
RELAY = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
CIRCUIT = f"{HERE}/p2p/{RELAY}/p2p-circuit"


def test_the_place_that_most_observers_see_is_the_mapping() -> None:
    assert mapped_places([HERE]) == (HERE,)
    assert mapped_places([HERE, HERE, THERE]) == (HERE,)  # one of them lies
    assert mapped_places([HERE, IPV6]) == (HERE, IPV6)  # families are counted apart
    assert not any(map(is_symmetric, ([], [HERE], [HERE, HERE], [HERE, HERE, THERE], [HERE, IPV6])))


def test_observers_that_see_different_ports_show_a_symmetric_router() -> None:
    for places in ([HERE, THERE], [HERE, THERE, ELSEWHERE]):
        assert mapped_places(places) == ()
        assert is_symmetric(places)


def test_circuits_and_private_places_say_nothing() -> None:
    for place in (CIRCUIT, "/ip4/192.168.1.2/tcp/1", "/ip4/127.0.0.1/tcp/1", "", "nonsense", "/dns4/a.example/tcp/1"):
        assert mapped_places([place]) == ()
        assert mapped_places([HERE, place]) == (HERE,)
