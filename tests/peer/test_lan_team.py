"""A team on several computers, ``--team 2 --at HOST`` and ``p2ptrain rank``: real processes in a real swarm."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from swarm import Program, Swarm

pytestmark = pytest.mark.net

LAYERS = {"outer.cut": "layers", "outer.fragments": 3, "model.config.num_hidden_layers": 2}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def leader(swarm: Swarm, port: int, name: str = "leader", link: str | None = "") -> Program:
    return swarm.peer(name, "--device", "cpu", "--team", "2", "--at", f"127.0.0.1:{port}", link=link)


def rank(swarm: Swarm, port: int, key: Path, name: str = "rank") -> Program:
    home = swarm.root / name
    words = ["--leader", f"127.0.0.1:{port}", "--key-file", str(key), "--device", "cpu", "--home", str(home)]
    return swarm.program(home, "-c", "from p2ptrain.cli import main; main()", "rank", *words)


def test_a_team_of_two_computers_trains_beside_a_plain_peer_and_exports() -> None:
    with Swarm(**LAYERS, **{"run.tokens": 60_000}) as swarm:
        swarm.bootstrap()
        port = free_port()
        first = leader(swarm, port)
        waiting = first.wait_for("waiting for ranks")
        assert waiting["ranks"] == 1
        plain = swarm.peer("plain")
        second = rank(swarm, port, first.home / "team.key")
        assert first.wait_for("started")["device"].startswith("cpu + cpu of ")
        assert first.end() == 0, first.output
        assert plain.end() == 0, plain.output
        assert second.end() == 0, second.output
        assert first.events("exchanged")
        assert "Traceback" not in first.output + second.output
