"""A peer that finds nobody says what it tried, keeps trying, and can be stopped."""

from __future__ import annotations

import pytest
from swarm import nowhere

pytestmark = pytest.mark.net


def test_an_unreachable_bootstrap() -> None:
    with nowhere() as swarm:
        peer = swarm.peer("anna")
        tried = peer.wait_for("no manifest", 1)  # twice: it goes on trying
        assert tried["where"] in swarm.link.replace("/tcp/", ":")
        peer.wait_for("waiting")
        assert "[join] no manifest from " in peer.output
        assert "Is the bootstrap running, the address right" in peer.output

        assert peer.terminate() == 0, peer.output
        assert "Traceback" not in peer.output
        assert "[stop]" in peer.output
        assert swarm.processes() == []
        assert swarm.socket_folders() == []
