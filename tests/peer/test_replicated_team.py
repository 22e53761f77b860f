"""A peer that trains replicas of its stages on several devices: real processes in a real swarm."""

from __future__ import annotations

import psutil
import pytest
from swarm import ENDLESS, Program, Swarm, until

from p2ptrain import checkpoint

pytestmark = pytest.mark.net

LAYERS = {"outer.cut": "layers", "outer.fragments": 3, "model.config.num_hidden_layers": 2}


def ranks_of(peer: Program, count: int) -> list[psutil.Process]:
    """Return the processes of a team's other ranks, in order."""
    return until("the ranks", lambda: found if len(found := _ranks(peer)) == count else [])


def _ranks(peer: Program) -> list[psutil.Process]:
    children = psutil.Process(peer.process.pid).children()
    found = [each for each in children if "peer.team.rank" in each.cmdline()]
    return sorted(found, key=lambda each: int(each.cmdline()[-1]))


def trains(peer: Program) -> None:
    """Wait for the end of an outer step."""
    steps = len(peer.events("progress"))
    until("an outer step", lambda: [each for each in peer.events("progress")[steps:] if each["step"]])


@pytest.mark.lab  # a minute and a half; tests/train and tests/team have replicas in real processes
def test_two_replicas_of_two_stages_train_in_a_swarm_and_end_together() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        team, plain = swarm.peer("team", "--devices", "cpu,cpu,cpu,cpu", "--stages", "2"), swarm.peer("plain")
        assert team.wait_for("started")["device"] == "cpu + cpu + cpu + cpu (2 replicas of 2 stages)"
        ranks = ranks_of(team, 3)
        team.wait_for("exchanged", 2)
        trains(team)
        assert [team.terminate(), plain.terminate()] == [0, 0], team.output
        assert "Traceback" not in team.output
        found = checkpoint.load_latest(team.home / "checkpoints").checkpoint
        assert found is not None
        assert len(list(found.path.glob("*.safetensors"))) == 2, "the first replica's ranks alone save"
        assert not [each for each in ranks if each.is_running()]


@pytest.mark.lab
def test_a_run_cut_within_layers_trains_on_two_replicas_survives_a_dead_one_and_resumes_elsewhere() -> None:
    with Swarm(**ENDLESS) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu")
        assert team.wait_for("started")["device"] == "cpu + cpu (2 replicas of 1 stage)"
        trains(team)
        (rank,) = ranks_of(team, 1)
        rank.kill()
        assert team.wait_for("rank failed")["device"] == "The device cpu of rank 1"
        team.wait_for("ranks replaced")
        trains(team)
        team.interrupt()
        assert team.end() == 0, team.output
        assert "Traceback" not in team.output
        alone = swarm.peer("team", "--device", "cpu", link=None)
        assert alone.wait_for("resumed")["step"] > 0
        trains(alone)
        assert alone.terminate() == 0
