"""Multiaddresses: binary form, choice and printable form."""

import contextlib
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from p2ptrain.base.ids import PeerId, multihash
from p2ptrain.net import address, interfaces

PEER = PeerId("12D3KooWEjsyWGBHNsPbf2CDHKsRoeEPPfkU1UBYGNuQiHnLb6sG")
RAW_PEER = multihash(PEER)


@pytest.mark.parametrize(
    ("text", "binary"),
    [
        ("/ip4/203.0.113.7/tcp/31337", "04cb007107067a69"),
        ("/ip6/::1/tcp/80", "29" + "00" * 15 + "01" + "060050"),
        ("/dns4/a.example/tcp/1", "3609" + b"a.example".hex() + "060001"),
    ],
)
def test_the_binary_form_is_go_libp2ps(text, binary):
    assert address.packed(text).hex() == binary


def test_a_peer_is_written_as_its_bare_multihash():
    assert RAW_PEER is not None
    host, peer = "04cb007107067a69", "a50326" + RAW_PEER.hex()
    direct = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
    assert address.packed(direct).hex() == host + peer
    assert address.packed(direct + "/p2p-circuit").hex() == host + peer + "a202"
    assert address.packed(direct + f"/p2p-circuit/p2p/{PEER}").hex() == host + peer + "a202" + peer


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/203.0.113.7/tcp/31337",
        "/ip6/2001:db8::1/tcp/80",
        "/dns4/a.example/tcp/1",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}/p2p-circuit",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
    ],
)
def test_the_binary_form_is_read_back(text):
    assert address.unpacked(address.packed(text)) == text
    for length in range(len(address.packed(text)) - 1):
        with contextlib.suppress(ValueError):  # some prefixes are addresses themselves
            assert address.is_dialable(address.unpacked(address.packed(text)[:length]))


@settings(max_examples=200)
@given(some.binary(max_size=80))
def test_any_bytes_are_an_address_or_a_value_error(raw):
    with contextlib.suppress(ValueError):
        assert address.is_dialable(address.unpacked(raw))


def test_a_circuit_names_its_relay():
    circuit = address.through(PEER, "/ip4/8.8.8.8/tcp/5")
    assert circuit == f"/ip4/8.8.8.8/tcp/5/p2p/{PEER}/p2p-circuit"
    assert address.relay_of(circuit) == address.relay_of(f"{circuit}/p2p/{PEER}") == PEER
    assert address.relay_of(f"/ip4/8.8.8.8/tcp/5/p2p/{PEER}") is None
    assert address.relay_of("") is None


def test_what_the_internet_can_dial():
    assert address.is_public("/ip4/8.8.8.8/tcp/5")
    assert address.is_public("/dns/a.example/tcp/5")
    for each in ("/ip4/192.168.1.2/tcp/5", "/ip4/100.64.0.1/tcp/5", "/ip4/127.0.0.1/tcp/5", "/ip6/fe80::1/tcp/5", ""):
        assert not address.is_public(each)
    assert address.is_public("/ip6/::ffff:8.8.8.8/tcp/5")
    assert not address.is_public("/ip6/::ffff:127.0.0.1/tcp/5")


@pytest.mark.parametrize("text", ["/ip4/zzz/tcp/1", "/ip6//tcp/1", "/ip4", "/unix/tmp/x", "/ip4/1.2.3.4.5/tcp/1", "é"])
def test_of_a_strangers_nonsense_nothing_is_thought_and_nothing_breaks(text):
    """Check that records with any printable text as addresses are classified without an error."""
    assert not address.is_public(text)
    assert not address.is_loopback(text)
    assert not address.is_name(text)
    assert address.ip_of(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:31337",
        "/ip4/256.0.0.1/tcp/1",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/-1",
        "/ip4/1.2.3.4/udp/1",
        "/ip4/1.2.3.4/tcp/1/quic",
        "/ip4/1.2.3.4/tcp/1/p2p/nobody",
        "/ip4/1.2.3.4/tcp/1/p2p",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/p2p/{PEER}",
        "/unix/tmp/x",
        "/dns4/a b/tcp/1",
    ],
)
def test_other_forms_are_not_dialed(text):
    assert not address.is_dialable(text)


@settings(max_examples=50)
@given(some.text("/ip4.06tcpdns:-é%1", max_size=40))
def test_any_text_is_dialable_or_not(text):
    for judge in (address.is_dialable, address.is_public, address.is_loopback, address.is_name):
        assert judge(text) in (True, False)


def test_the_peer_is_split_off_and_put_on():
    place = "/ip4/1.2.3.4/tcp/5"
    assert address.split_peer(f"{place}/p2p/{PEER}") == (place, PEER)
    assert address.split_peer(place) == (place, None)
    relayed = f"{place}/p2p/{PEER}/p2p-circuit"
    assert address.split_peer(relayed) == (relayed, None)
    assert address.with_peer(place, PEER) == address.with_peer(f"{place}/p2p/{PEER}", PEER) == f"{place}/p2p/{PEER}"


def test_addresses_for_people():
    assert address.host_port(f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}") == "1.2.3.4:5"
    assert address.host_port("/ip6/::1/tcp/5") == "[::1]:5"
    assert address.host_port("odd") == "odd"
    assert address.multiaddress("1.2.3.4", 5) == "/ip4/1.2.3.4/tcp/5"
    assert address.multiaddress("::1", 5) == "/ip6/::1/tcp/5"
    assert address.multiaddress("a.example", 5) == "/dns/a.example/tcp/5"


OWN = [
    "/ip4/127.0.0.1/tcp/5",
    "/ip4/172.17.0.1/tcp/5",
    "/ip4/172.19.0.1/tcp/5",
    "/ip4/192.168.1.2/tcp/5",
    "/ip4/169.254.0.9/tcp/5",
    "/ip4/0.0.0.0/tcp/5",
    "/ip6/::1/tcp/5",
    "/ip6/fe80::1/tcp/5",
    "/ip4/8.8.4.4/tcp/0",
    "/ip4/8.8.8.8/tcp/5",
]


def test_only_addresses_that_others_can_use_are_announced():
    found = interfaces.announceable(OWN, bridges=["172.19.0.1"])
    assert found == ["/ip4/8.8.8.8/tcp/5", "/ip4/192.168.1.2/tcp/5"]


def test_a_local_swarm_uses_loopback_first():
    assert interfaces.announceable(OWN, local=True, bridges=[])[0] == "/ip4/127.0.0.1/tcp/5"


def test_inside_a_container_its_own_address_counts():
    inside = ["/ip4/127.0.0.1/tcp/5", "/ip4/172.17.0.2/tcp/5"]
    assert interfaces.announceable(inside, bridges=[]) == ["/ip4/172.17.0.2/tcp/5"]


def test_nothing_is_printed_rather_than_loopback():
    assert interfaces.announceable(["/ip4/127.0.0.1/tcp/5"]) == []
    assert interfaces.announceable(["/ip4/127.0.0.1/tcp/5"], local=True) == ["/ip4/127.0.0.1/tcp/5"]


def test_the_way_out_is_an_address_of_this_machine_or_none():
    for each in interfaces.way_out():
        assert address.is_dialable(each)
        assert not address.is_loopback(each)


def test_loopback_is_known():
    assert address.is_loopback("/ip4/127.0.0.1/tcp/0")
    assert address.is_loopback("/ip6/::1/tcp/0")
    assert address.is_loopback("/ip6/::ffff:127.0.0.1/tcp/0")
    assert not address.is_loopback("/ip4/0.0.0.0/tcp/0")
    assert not address.is_loopback("/dns/localhost/tcp/0")


RELAYED = f"/ip4/8.8.8.8/tcp/5/p2p/{PEER}/p2p-circuit"


@pytest.mark.parametrize(
    ("addresses", "way"),
    [
        ([], "dials out"),
        (["/ip4/8.8.8.8/tcp/5"], "direct"),
        ([RELAYED], "relayed"),
        ([RELAYED, "/ip4/8.8.8.8/tcp/5"], "direct"),
        ([RELAYED, "/ip4/192.168.1.2/tcp/5"], "relayed"),  # its private address is for its neighbours
        (["/ip4/192.168.1.2/tcp/5"], "direct"),
    ],
)
def test_how_others_come_to_a_peer(addresses: list[str], way: str) -> None:
    assert address.way_to(addresses) == way


def test_one_free_port_is_taken_for_both_families() -> None:
    both = interfaces.with_one_port(address.listening(0))
    ports = {address.port_of([each]) for each in both}
    assert len(both) == 2
    assert len(ports) == 1
    assert 0 not in ports
    assert interfaces.with_one_port(["/ip4/127.0.0.1/tcp/0"]) == ("/ip4/127.0.0.1/tcp/0",)
    assert address.port_of(interfaces.with_one_port(["/ip4/127.0.0.1/tcp/0"], needs_number=True)) > 0
    assert interfaces.with_one_port(["/ip4/10.0.0.1/tcp/7", "/ip6/::/tcp/0"]) == (
        "/ip4/10.0.0.1/tcp/7",
        "/ip6/::/tcp/0",
    )


def test_a_port_is_taken_by_family() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert interfaces.is_taken(f"/ip4/127.0.0.1/tcp/{port}")
        assert not interfaces.is_taken(f"/ip6/::/tcp/{port}")


def test_addresses_that_soon_end_are_not_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "26001900000000000000000000000007 02 40 00 00     eth0\n"
        "26001900000000000000000000000008 02 40 00 01     eth0\n"
        "26001900000000000000000000000009 02 40 00 20     eth0\n"
    )
    fleeting = interfaces.fleeting_addresses(table)
    assert fleeting == {"2600:1900::8", "2600:1900::9"}
    assert interfaces.fleeting_addresses(tmp_path / "none") == set()
    monkeypatch.setattr(interfaces, "fleeting_addresses", lambda: fleeting)
    own = [f"/ip6/2600:1900::{number}/tcp/7" for number in (8, 9, 7)]
    assert interfaces.announceable(own) == [own[2]]
    assert interfaces.announceable(own[:2]) == own[:2]  # better than none


@pytest.mark.parametrize(
    ("place", "family"),
    [
        ("/ip4/8.8.8.8/tcp/7", 4),
        ("/ip6/2600:1900::7/tcp/7", 6),
        ("/ip6/::ffff:8.8.8.8/tcp/7", 4),
        ("/dns4/example.org/tcp/7", 4),
        ("/dns6/example.org/tcp/7", 6),
        ("/dns/example.org/tcp/7", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_the_family_of_an_address(place: str, family: int | None) -> None:
    assert address.family_of(place) == family
