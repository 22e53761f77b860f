"""A peer on several devices, ``--devices cpu,cpu``: real processes in a real swarm."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from swarm import ENDLESS, Program, Swarm, until

from p2ptrain import checkpoint
from p2ptrain.net.start_options import START_FILE

pytestmark = pytest.mark.net

LAYERS = {"model.config.num_hidden_layers": 2}


def ranks_of(peer: Program, count: int) -> list[psutil.Process]:
    """Return the processes of a peer's trainer, one a device."""

    def found() -> list[psutil.Process]:
        there = psutil.Process(peer.process.pid).children(recursive=True)
        ranks = [each for each in there if "peer.training.language_trainer" in each.cmdline()]
        return ranks if len(ranks) == count else []

    return until("the ranks", found)


def trains(peer: Program) -> None:
    """Wait for the end of an outer step."""
    steps = len(peer.events("progress"))
    until("an outer step", lambda: [each for each in peer.events("progress")[steps:] if each["step"]])


def test_it_trains_in_a_swarm_beside_a_plain_peer_to_the_end() -> None:
    with Swarm(**LAYERS, **{"run.tokens": 500_000}) as swarm:
        swarm.bootstrap()
        several = swarm.peer("several", "--devices", "cpu,cpu")
        assert several.wait_for("started")["device"] == "cpu + cpu"
        plain = swarm.peer("plain")  # starts sooner, and would train the whole run meanwhile
        ranks = ranks_of(several, 2)
        assert several.end() == 0, several.output
        assert plain.end() == 0, plain.output
        assert several.events("exchanged")
        assert "Traceback" not in several.output
        found = checkpoint.load_latest(several.home / "checkpoints").checkpoint
        assert found is not None
        assert found.state["ended"]
        assert not [each for each in ranks if each.is_running()]


@pytest.mark.lab
@pytest.mark.parametrize(
    ("devices", "stages", "name"),
    [(2, 1, "cpu + cpu (2 replicas of 1 stage)"), (4, 2, "cpu + cpu + cpu + cpu (2 replicas of 2 stages)")],
)
def test_replicas_train_lose_a_rank_save_at_a_stop_and_one_process_goes_on(devices, stages, name) -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        several = swarm.peer("several", "--devices", ",".join(["cpu"] * devices), "--stages", str(stages))
        assert several.wait_for("started")["device"] == name
        trains(several)
        ranks_of(several, devices)[-1].kill()
        several.wait_for("trainer returned")
        trains(several)
        ranks = ranks_of(several, devices)
        for each in ranks:
            each.terminate()  # as a service manager does to all processes
        several.interrupt()
        assert several.end() == 0, several.output
        assert len(several.events("trainer died")) == 1
        assert "Traceback" not in several.output
        assert not [each for each in ranks if each.is_running()]
        alone = swarm.peer("several", "--device", "cpu", link=None)
        assert alone.wait_for("resumed")["step"] > 0
        trains(alone)
        assert alone.terminate() == 0


def test_no_rank_outlives_a_killed_node() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        several = swarm.peer("several", "--devices", "cpu,cpu")
        trains(several)
        ranks = ranks_of(several, 2)
        several.kill()
        for each in ranks:
            each.wait(10)


@pytest.mark.parametrize(
    ("devices", "changes", "says"),
    [
        ("cpu,cuda:7", {}, "cuda:7"),
        ("cpu,cpu,cpu --stages 3", {}, "2 layers, too few for 3 stages"),
        ("cpu,cpu,cpu --stages 2", {}, "2 stages do not divide 3 devices"),
        ("cpu --stages 2", {}, "2 stages do not divide 1 device"),
        ("cpu,cpu", {"training.sequences_per_step": 1}, "Use at most 1."),
        ("cpu,auto", {}, "Name each device"),
    ],
)
def test_devices_that_cannot_train_the_run_are_one_error(devices: str, changes: dict[str, Any], says: str) -> None:
    with Swarm(**LAYERS, **changes) as swarm:
        swarm.bootstrap()
        several = swarm.peer("several", "--devices", *devices.split())
        assert several.end() == 2, several.output
        assert says in several.output
        assert "Traceback" not in several.output
        assert not (several.home / START_FILE).exists()
