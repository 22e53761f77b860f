"""A peer that reaches no node says what it tried, keeps trying, and can be stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm import Swarm, nowhere

from p2ptrain.net.identity import Identity

pytestmark = pytest.mark.net


def test_an_unreachable_bootstrap() -> None:
    with nowhere() as swarm:
        peer = swarm.peer("anna")
        tried = peer.wait_for("no manifest", 1)  # twice, so it keeps trying
        assert tried["where"] in swarm.link.replace("/tcp/", ":")
        peer.wait_for("waiting")
        assert "[join] no manifest from " in peer.output
        assert all("connection refused" in each["why"] for each in peer.events("no manifest"))
        assert "Check that the bootstrap is running" in peer.output

        assert peer.terminate() == 0, peer.output
        assert "Traceback" not in peer.output
        assert "[stop]" in peer.output
        assert swarm.processes() == []
        assert swarm.socket_folders() == []


def test_another_node_answers_where_the_link_leads(tmp_path: Path) -> None:
    """Check an old or edited link: the other node at the address is reported, also after repeated dials."""
    with Swarm() as swarm:
        swarm.bootstrap()
        _, _, bootstrap = swarm.link.rpartition("/p2p/")
        somebody = Identity.load_or_create(tmp_path / "somebody.key").peer_id
        peer = swarm.peer("anna", link=swarm.link.replace(bootstrap, somebody))
        waits = peer.wait_for("waiting", 1)
        assert "the node that answers there is not the one that the link names" in waits["why"], peer.output
        assert all("peer id mismatch" in each["why"] for each in peer.events("no manifest"))
        assert "Ask the person who gave you the link for a new one" in peer.output
        assert peer.terminate() == 0, peer.output
