"""A peer that finds nobody says what it tried, keeps trying, and can be stopped."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from swarm import Swarm

from p2ptrain.manifest import JoinLink

pytestmark = pytest.mark.net
STRANGER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture
def nowhere() -> Iterator[Swarm]:
    """A run whose link leads to a closed port."""
    with Swarm() as swarm, socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        port = reserved.getsockname()[1]
        swarm.link = str(JoinLink(swarm.signed.run_id, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER}",)))
        yield swarm


def test_an_unreachable_bootstrap(nowhere: Swarm) -> None:
    peer = nowhere.peer("anna")
    tried = peer.wait_for("no manifest", 1)  # twice: it goes on trying
    assert tried["where"] in nowhere.link.replace("/tcp/", ":")
    peer.wait_for("waiting")
    assert "[join] no manifest from " in peer.output
    assert "Is the bootstrap running, the address right" in peer.output

    assert peer.terminate() == 0, peer.output
    assert "Traceback" not in peer.output
    assert "[stop]" in peer.output
    assert nowhere.processes() == []
    assert nowhere.socket_folders() == []
