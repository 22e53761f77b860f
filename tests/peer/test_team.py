"""A peer on several devices, ``--devices cpu,cpu``: real processes in a real swarm."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from swarm import ENDLESS, Program, Swarm, until

from p2ptrain import checkpoint

pytestmark = pytest.mark.net

LAYERS = {"outer.cut": "layers", "outer.fragments": 3, "model.config.num_hidden_layers": 2}


def ranks_of(peer: Program) -> list[psutil.Process]:
    """Return the processes of a team's other ranks."""
    children = psutil.Process(peer.process.pid).children()
    return until("a rank", lambda: [each for each in children if "peer.team.rank" in each.cmdline()])


def trains(peer: Program) -> None:
    """Wait for the end of an outer step."""
    until("an outer step", lambda: [each for each in peer.events("progress") if each["step"]])


def test_a_team_trains_in_a_swarm_beside_a_plain_peer_and_exports() -> None:
    with Swarm(**LAYERS, **{"run.tokens": 60_000}) as swarm:
        swarm.bootstrap()
        team, plain = swarm.peer("team", "--devices", "cpu,cpu"), swarm.peer("plain")
        assert team.wait_for("started")["device"] == "cpu + cpu"
        ranks = ranks_of(team)
        assert team.end() == 0, team.output
        assert plain.end() == 0, plain.output
        assert team.events("exchanged")
        assert "Traceback" not in team.output
        found = checkpoint.load_latest(team.home / "checkpoints").checkpoint
        assert found is not None
        assert found.state["ended"]
        assert not [each for each in ranks if each.is_running()]


def test_ctrl_c_saves_and_ends_all_ranks_and_a_single_process_goes_on() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu")
        trains(team)
        ranks = ranks_of(team)
        team.interrupt()
        assert team.end() == 0, team.output
        assert "Traceback" not in team.output
        assert not [each for each in ranks if each.is_running()]
        alone = swarm.peer("team", "--device", "cpu", link=None)
        assert alone.wait_for("resumed")["step"] > 0
        assert alone.terminate() == 0


def test_no_rank_outlives_a_killed_leader() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu")
        trains(team)
        (rank,) = ranks_of(team)
        team.kill()
        rank.wait(10)


@pytest.mark.parametrize("how", [signal.SIGKILL])
def test_after_a_rank_died_the_peer_leaves_once_and_goes_on_with_a_new_one(how: signal.Signals) -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        team, plain = swarm.peer("team", "--devices", "cpu,cpu"), swarm.peer("plain")
        team.wait_for("exchanged", 2)
        (rank,) = ranks_of(team)
        os.kill(rank.pid, how)
        failed = team.wait_for("rank failed")
        assert f"process {rank.pid}" in failed["why"]
        team.wait_for("ranks replaced")
        team.wait_for_more("exchanged", 3)
        assert [team.terminate(), plain.terminate()] == [0, 0], team.output
