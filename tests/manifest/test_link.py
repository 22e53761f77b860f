"""Join links as people damage them when they copy them."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.base.errors import JoinLinkError
from p2ptrain.base.ids import RunId
from p2ptrain.manifest import JoinLink
from p2ptrain.manifest.link import check_address, is_peer_id

few = settings(max_examples=50)
RUN = RunId(hashlib.sha256(b"a run").hexdigest())
ED25519 = "12D3KooWSHj3RRbBjD15g6wekV8y3mm57Pobmps2g2WJm6F67Lay"
RSA = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{ED25519}"
GOOD_ADDRESSES = [
    ADDRESS,
    f"/ip4/127.0.0.1/tcp/1/p2p/{RSA}",
    f"/ip6/2001:db8::1/tcp/65535/p2p/{ED25519}",
    f"/dns/example.org/tcp/443/p2p/{ED25519}",
    f"/dns4/a-b.example.org/tcp/443/p2p/{ED25519}",
    f"/dns6/example.org/tcp/443/p2p/{ED25519}",
    f"/ip4/203.0.113.7/tcp/31337/p2p/{RSA}/p2p-circuit/p2p/{ED25519}",
]


def problem(text: str) -> str:
    with pytest.raises(JoinLinkError) as caught:
        JoinLink.parse(text)
    assert caught.value.problem.isprintable()
    assert len(caught.value.problem) < 400
    return caught.value.problem


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
def test_addresses_that_can_be_dialled(address: str) -> None:
    check_address(address)


@few
@given(st.lists(st.sampled_from(GOOD_ADDRESSES), min_size=1, max_size=16))
def test_round_trip(addresses: list[str]) -> None:
    link = JoinLink(RUN, tuple(addresses))
    assert JoinLink.parse(str(link)) == link
    assert JoinLink.parse(f"  {link}\n") == link


def test_the_written_form() -> None:
    assert str(JoinLink(RUN, (ADDRESS, ADDRESS))) == f"p2ptrain://{RUN}@{ADDRESS},{ADDRESS}"


LINK = f"p2ptrain://{RUN}@{ADDRESS}"


@few
@given(st.integers(0, len(LINK) - 1))
def test_a_link_cut_anywhere_is_refused(length: int) -> None:
    assert problem(LINK[:length])


TWO = f"{LINK},/ip4/203.0.113.8/tcp/31337/p2p/{RSA}/p2p-circuit/p2p/{ED25519}#aW52-aXRl_"


def wrapped(text: str, width: int, join: str) -> str:
    return join.join(text[at : at + width] for at in range(0, len(text), width))


@pytest.mark.parametrize("link", [LINK, TWO])
@pytest.mark.parametrize(
    "damage",
    [
        "'{}'",
        '"{}"',
        "<{}>",
        "`{}`",
        "({}).",
        "\u201c{}\u201d,",
        "\u00ab {} \u00bb",
        "p2ptrain peer '{}' --local",
        "$ p2ptrain peer {} --local\n",
        "[join] p2ptrain peer '{}'",
        "Hi, please join:\n\n{}\n\nThanks",
        "> > p2ptrain peer '{}'\n> >\n> > Thanks",
        "{}<{}>",
    ],
)
def test_what_surrounds_a_link_is_ignored(link: str, damage: str) -> None:
    assert str(JoinLink.parse(damage.format(*[link] * damage.count("{}")))) == link


@pytest.mark.parametrize("link", [LINK, TWO])
@pytest.mark.parametrize(
    "join", ["\n", "\r\n", " ", "\n    ", "\n> ", "\n>> ", "=\n", "=\r\n", "= ", "\u200b", "\u00a0"]
)
@pytest.mark.parametrize("width", [1, 7, 40, 76])
def test_a_link_that_a_mail_program_broke(link: str, join: str, width: int) -> None:
    begin, rest = link[:11], link[11:]
    broken = begin + wrapped(rest, width, join)
    assert str(JoinLink.parse(broken)) == link
    assert str(JoinLink.parse(f"> p2ptrain peer '{broken}'\n")) == link


def test_words_after_a_link_are_no_part_of_it() -> None:
    assert str(JoinLink.parse(f"{LINK} see you there\nAnna")) == LINK
    assert str(JoinLink.parse(f"{LINK}\n{TWO}")) == LINK
    assert str(JoinLink.parse(f"Open {LINK}, and wait.")) == LINK


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"'{LINK[:-3]}'", "was the link cut off"),
        (f"p2ptrain peer {LINK[:30]} --local", "seems cut off: its run id has 19 of 64 digits"),
        (f"{LINK},\n/ip4/203.0.113.8/tcp/31337/p2p/{RSA[:-1]}", "is not a peer id"),
        (f"{LINK}\n,/ip4/203.0.113.8/tcp/31337/p2p/{RSA[:-1]}", "is not a peer id"),
        ("p2ptrain peer", "begins with p2ptrain://, but this is 'p2ptrain peer'"),
        (" " * 20_000 + LINK, "at most 4,096"),
        (LINK[: len("p2ptrain://") + 20], "seems cut off: its run id has 20 of 64 digits"),
        (f"p2ptrain://5f0c…@{ADDRESS}", "is shortened"),
        (f"{LINK[:40]}...", "is shortened"),
        (LINK[: LINK.index("@")], "seems cut off: no address follows"),
        (LINK[: LINK.index("@") + 1], "seems cut off: no address follows"),
        (LINK[: LINK.index("/p2p/")], "is cut off or damaged"),
        (LINK[:-3], "was the link cut off"),
        (LINK + ",", "an address is empty"),
        ("", "begins with p2ptrain://"),
        (f"http://{RUN}@{ADDRESS}", "begins with p2ptrain://"),
        (f"p2ptrain:/{RUN}@{ADDRESS}", "begins with p2ptrain://"),
        (f"p2ptrain://{RUN.upper()}@{ADDRESS}", "64 digits 0-9 a-f"),
        (f"p2ptrain://{RUN}0@{ADDRESS}", "64 digits 0-9 a-f"),
        ("p2ptrain://" + "\x1b[2J" * 20 + f"@{ADDRESS}", "64 digits 0-9 a-f"),
        (f"p2ptrain://{RUN}@{','.join([ADDRESS] * 17)}", "17 addresses, but at most 16"),
        (LINK + "x" * 5000, "at most 4,096"),
    ],
)
def test_each_way_of_breaking_a_link_has_its_message(text: str, said: str) -> None:
    assert said in problem(text)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (ADDRESS[1:], "cut off or damaged"),
        (ADDRESS.replace("203.0.113.7", "203.0.113.777"), "'203.0.113.777' is not a valid ip4 host"),
        (ADDRESS.replace("203.0.113.7", "2001:db8::1"), "'2001:db8::1' is not a valid ip4 host"),
        (f"/ip6/fe80::1%eth0/tcp/1/p2p/{ED25519}", "is not a valid ip6 host"),
        (f"/dns4/ex ample.org/tcp/1/p2p/{ED25519}", "is not a valid dns4 host"),
        (f"/dns4/{'a' * 64}/tcp/1/p2p/{ED25519}", "is not a valid dns4 host"),
        (f"/dns4/-a.org/tcp/1/p2p/{ED25519}", "is not a valid dns4 host"),
        (f"/unix/tmp/tcp/1/p2p/{ED25519}", "cut off or damaged"),
        (f"/ip4/1.2.3.4/udp/1/p2p/{ED25519}", "cut off or damaged"),
        (ADDRESS.replace("31337", "0"), "cut off or damaged"),
        (ADDRESS.replace("31337", "65536"), "65536 is not a port"),
        (ADDRESS.replace("31337", "\N{ARABIC-INDIC DIGIT ONE}"), "cut off or damaged"),
        (ADDRESS.replace("/p2p/", "/ipfs/"), "cut off or damaged"),
        (ADDRESS[:-1] + "0", "is not a peer id"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{RSA}/p2p-circuit", "cut off or damaged"),
        (f"{ADDRESS}/p2p-circuit/p2p/{RSA}/p2p-circuit", "cut off or damaged"),
        (f"{ADDRESS}/", "cut off or damaged"),
    ],
)
def test_each_way_of_breaking_an_address_has_its_message(address: str, said: str) -> None:
    with pytest.raises(JoinLinkError) as caught:
        check_address(address)
    assert said in caught.value.problem


@few
@given(st.text(max_size=200))
def test_any_text_is_a_link_or_refused(text: str) -> None:
    assert problem(text)
    assert problem(f"p2ptrain://{RUN}@{text}")
    assert problem(f"p2ptrain://{RUN}@/ip4/{text}")


@pytest.mark.parametrize("identifier", ["", "1", "0OIl", ED25519[:-1], ED25519 + "a", "1" * 64, "z" * 64, "z" * 5000])
def test_what_is_no_peer_id(identifier: str) -> None:
    assert not is_peer_id(identifier)


def test_peer_ids_agree_with_a_reference_encoder() -> None:
    base58 = pytest.importorskip("base58")
    for seed in range(20):
        digest = hashlib.sha256(bytes([seed])).digest()
        assert is_peer_id(base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + digest).decode())
        assert is_peer_id(base58.b58encode(b"\x12\x20" + digest).decode())
        assert not is_peer_id(base58.b58encode(b"\x12\x20" + digest[:-1]).decode())
        assert not is_peer_id(base58.b58encode(b"\x13\x20" + digest).decode())
