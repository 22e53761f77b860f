"""Messages of the bootstrap to its owner, without I/O."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.messages import (
    MAX_NAMED,
    check_beside,
    doing,
    join_lines,
    link_addresses,
    living,
    name,
    news,
    status_line,
)
from p2ptrain.base.errors import JoinLinkError, UserError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.manifest import JoinLink
from p2ptrain.swarm.messages import PeerState, Presence

RUN = RunId("ab" * 32)
ID = "12D3KooWPKW6a218aXBfTyERGQHu5bituwTmktMG1Wjqemw5Z91h"
LOOPBACK, PRIVATE, PUBLIC = "/ip4/127.0.0.1/tcp/31337", "/ip4/192.168.1.7/tcp/31337", "/ip4/8.8.8.8/tcp/31337"
PUBLIC_6 = "/ip6/2600:1900::7/tcp/31337"


def record(peer: str = "peerabcdef", state: PeerState = PeerState.TRAINING, nickname: str = "fox") -> Presence:
    return Presence(PeerId(peer), RUN, (PUBLIC,), state, 12, 340.0, True, nickname, 1.7e9, 60.0)


def link(*addresses: str) -> JoinLink:
    return JoinLink(RUN, tuple(f"{each}/p2p/{ID}" for each in addresses))


@pytest.mark.parametrize(
    ("own", "announced", "local", "chosen"),
    [
        ([LOOPBACK, PRIVATE], [], False, (PRIVATE,)),
        ([LOOPBACK, PRIVATE, PUBLIC], [], False, (PUBLIC,)),
        ([LOOPBACK, PRIVATE], [], True, (LOOPBACK,)),
        ([PRIVATE], [PUBLIC, "/dns/example.org/tcp/1"], False, (PUBLIC, "/dns/example.org/tcp/1")),
        ([PRIVATE], [LOOPBACK, PUBLIC], False, (PUBLIC,)),
        ([PRIVATE, PUBLIC, PUBLIC_6], [], False, (PUBLIC, PUBLIC_6)),
        ([PRIVATE, PUBLIC_6], [], False, (PUBLIC_6, PRIVATE)),
        ([PRIVATE, "/ip6/fd00::7/tcp/31337"], [], False, (PRIVATE,)),
    ],
)
def test_the_link_holds_what_others_can_use(own, announced, local, chosen) -> None:
    assert link_addresses(own, announced, local) == chosen


@pytest.mark.parametrize(("own", "announced"), [([LOOPBACK], []), ([], []), ([PRIVATE], [LOOPBACK])])
def test_loopback_is_never_printed_unless_local(own, announced) -> None:
    with pytest.raises(UserError, match="No other machine can reach") as caught:
        link_addresses(own, announced, local=False)
    assert "--announce" in caught.value.remedy
    assert "--local" in caught.value.remedy


OTHER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
HERE, THERE, OTHERS = f"{PUBLIC}/p2p/{ID}", f"/ip4/9.9.9.9/tcp/31337/p2p/{ID}", f"/ip4/9.9.9.9/tcp/31337/p2p/{OTHER}"


@pytest.mark.parametrize("named", [[OTHERS], [OTHERS, HERE]])
def test_another_bootstraps_link_may_name_us_where_we_are(named) -> None:
    check_beside(JoinLink(RUN, tuple(named)), PeerId(ID), [HERE], Path("run/bootstrap"))


@pytest.mark.parametrize("named", [[THERE], [THERE, OTHERS], [OTHERS, HERE, THERE], [HERE]])
def test_a_copied_identity_is_refused(named) -> None:
    with pytest.raises(JoinLinkError, match="names this one itself") as caught:
        check_beside(JoinLink(RUN, tuple(named)), PeerId(ID), [HERE], Path("run/bootstrap"))
    assert ID[-6:] in caught.value.problem
    assert "delete run/bootstrap" in caught.value.remedy


def test_a_public_address_needs_no_advice() -> None:
    assert join_lines(link(PUBLIC), local=False) == [f"p2ptrain peer '{link(PUBLIC)}'"]


def test_who_lacks_ipv6_cannot_use_a_public_ipv6_address() -> None:
    _, why = join_lines(link(PUBLIC_6, PRIVATE), local=False)
    assert why.startswith("Computers without IPv6 cannot join from the internet. To let others in")
    assert len(join_lines(link(PUBLIC_6, PUBLIC), local=False)) == 1


def test_a_private_address_says_how_to_be_reached() -> None:
    command, advice = join_lines(link(PRIVATE), local=False)
    assert command == f"p2ptrain peer '{link(PRIVATE)}'"
    assert "your own network only" in advice
    assert "--announce /ip4/PUBLIC_IP/tcp/31337" in advice


def test_in_a_container_it_is_the_port_that_is_published() -> None:
    """Check the advice in a container, publish the port: no router is involved, and the address is the engine's."""
    _, advice = join_lines(link(PRIVATE), local=False, contained=True)
    assert "(-p 31337:31337)" in advice
    assert "--announce /ip4/THAT_COMPUTERS_IP/tcp/31337" in advice
    assert "router" not in advice
    assert join_lines(link(PUBLIC), local=False, contained=True) == [f"p2ptrain peer '{link(PUBLIC)}'"]


def test_a_local_link_is_joined_locally() -> None:
    assert join_lines(link(LOOPBACK), local=True)[0].endswith("' --local")


def test_peers_come_change_and_go() -> None:
    fox, owl = record("peer-fox"), record("peer-owl", nickname="owl")
    before = living([fox])
    assert news(before, living([fox, owl]), 1000) == ["owl (er-owl) came: training, step 12, 34 %"]
    finishing = replace(fox, state=PeerState.FINISHING, step=20, progress=1024.0)
    assert news(before, living([finishing]), 1000) == ["fox (er-fox) is finishing, step 20, 100 %"]
    assert news(before, living([replace(fox, step=13)]), 1000) == []
    assert news(before, living([replace(fox, state=PeerState.LEAVING)]), 1000) == ["fox (er-fox) left"]


def test_the_status_line_is_bounded() -> None:
    crowd = [record(f"peer-{number:06}") for number in range(MAX_NAMED + 5)]
    line = status_line(living(crowd), 1000)
    assert line.startswith(f"{MAX_NAMED + 5} here: ")
    assert line.count("training") == MAX_NAMED
    assert line.endswith("5 more")
    assert "nobody" in status_line({}, 1000)
    sample = status_line(living(crowd), 1000, size=900)
    assert sample.startswith("about 900 here, among them: ")
    assert sample.count("training") == MAX_NAMED


def test_a_nickname_cannot_steer_the_terminal() -> None:
    assert name(record(nickname="\x1b[31mevil\n\u202e")) == "[31mevil (abcdef)"
    assert name(record(nickname=" ")) == "abcdef"
    assert doing(record(), 1000) == "training, step 12, 34 %"
