"""A peer on several devices, ``--devices cpu,cpu``: real processes in a real swarm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from swarm import ENDLESS, Program, Swarm, until

from p2ptrain import checkpoint
from p2ptrain.checkpoint import checkpoints_in

pytestmark = pytest.mark.net

HASTY = Path(__file__).with_name("hasty.py")
"""Script of a peer whose collectives have a short timeout."""

STALLED = Path(__file__).with_name("stalled.py")
"""Script of a peer whose ranks never start again."""
FORGETFUL = Path(__file__).with_name("forgetful.py")
"""Script of a peer that notes what is left of an old rank."""
LOST_CARD = Path(__file__).with_name("lost_card.py")
"""Script of a peer whose leader's card fails."""

LAYERS = {"outer.cut": "layers", "outer.fragments": 3, "model.config.num_hidden_layers": 2}


def ranks_of(peer: Program) -> list[psutil.Process]:
    """Return the processes of a team's other ranks."""
    leader = psutil.Process(peer.process.pid)
    return until("a rank", lambda: [each for each in leader.children() if "peer.team.rank" in each.cmdline()])


def sleepers_of(peer: Program) -> list[psutil.Process]:
    """Return the processes of a stalled peer's ranks that do nothing."""
    return [
        each for each in psutil.Process(peer.process.pid).children() if "time.sleep(900)" in " ".join(each.cmdline())
    ]


def trains(peer: Program) -> None:
    """Wait for the end of an outer step."""
    until("an outer step", lambda: [each for each in peer.events("progress") if each["step"]])


def test_a_team_trains_in_a_swarm_beside_a_plain_peer_and_exports() -> None:
    with Swarm(**LAYERS, **{"run.tokens": 500_000}) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu")
        assert team.wait_for("started")["device"] == "cpu + cpu"
        plain = swarm.peer("plain")  # starts sooner than a team, and would train the whole run meanwhile
        ranks = ranks_of(team)
        assert team.end() == 0, team.output
        assert plain.end() == 0, plain.output
        assert team.events("exchanged")
        assert "Traceback" not in team.output
        found = checkpoint.load_latest(team.home / "checkpoints").checkpoint
        assert found is not None
        assert found.state["ended"]
        assert not [each for each in ranks if each.is_running()]


@pytest.mark.lab
def test_ctrl_c_saves_and_ends_all_ranks_and_a_single_process_goes_on() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu")
        trains(team)
        ranks = ranks_of(team)
        for each in ranks:
            each.terminate()  # as a service manager does to all processes
        team.interrupt()
        assert team.end() == 0, team.output
        assert "Traceback" not in team.output
        assert not team.events("rank failed")
        assert not [each for each in ranks if each.is_running()]
        alone = swarm.peer("team", "--device", "cpu", link=None)
        assert alone.wait_for("resumed")["step"] > 0
        assert alone.terminate() == 0


@pytest.mark.lab
def test_a_team_resumes_and_replaced_ranks_resume_the_checkpoint() -> None:
    with Swarm(**LAYERS, **ENDLESS, **{"outer.recipe": "swarm"}) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu")
        trains(team)
        team.interrupt()
        assert team.end() == 0, team.output
        found = checkpoint.load_latest(team.home / "checkpoints").checkpoint
        assert found is not None
        saved = found.state["step"]
        team = swarm.peer("team", "--devices", "cpu,cpu", link=None)
        assert team.wait_for("resumed")["step"] == saved
        trains(team)
        (rank,) = ranks_of(team)
        rank.kill()
        assert team.wait_for("ranks replaced")["step"] >= saved
        steps = len(team.events("progress"))
        until("training", lambda: len(team.events("progress")) > steps)
        assert len(team.events("rank failed")) == 1
        assert team.terminate() == 0, team.output
        assert "Traceback" not in team.output


def test_no_rank_outlives_a_killed_leader_and_no_folder_is_left() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        bootstrap = swarm.bootstrap()
        own = len(swarm.socket_folders())
        team = swarm.peer("team", "--devices", "cpu,cpu")
        trains(team)
        (rank,) = ranks_of(team)
        assert len(swarm.socket_folders()) == own + 2
        team.kill()
        rank.wait(10)
        assert len(swarm.socket_folders()) == own
        assert bootstrap.process.poll() is None


@pytest.mark.lab
def test_a_teams_model_is_exported_and_continues_a_text_while_it_trains_and_after_a_kill() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu")
        trains(team)
        team.interrupt()
        assert team.end() == 0, team.output
        team = swarm.peer("team", "--devices", "cpu,cpu", link=None)
        team.wait_for_more("progress", 2)

        def call(*words: str) -> str:
            command = [sys.executable, "-m", "p2ptrain.cli", *words]
            done = subprocess.run(command, env=swarm.environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout

        call("export", str(team.home), str(swarm.root / "while"))
        said = call("generate", str(team.home), "To be", "--tokens", "20")
        assert said.startswith("To be")
        assert "device    cpu + cpu" in call("status", str(team.home))
        team.kill()
        call("export", str(team.home), str(swarm.root / "after"))
        weights = [(swarm.root / each / "model.safetensors").read_bytes() for each in ("while", "after")]
        assert weights[0] == weights[1], "no checkpoint was due meanwhile"
        assert call("generate", str(team.home), "To be", "--tokens", "20") == said
        swarm.programs.remove(team)


@pytest.mark.lab
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_after_a_rank_failed_the_peer_leaves_once_and_goes_on_with_a_new_one(how: signal.Signals) -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        team, plain = swarm.peer("team", "--devices", "cpu,cpu", script=HASTY), swarm.peer("plain")
        team.wait_for("exchanged", 2)
        (rank,) = ranks_of(team)
        os.kill(rank.pid, how)
        failed = team.wait_for("rank failed")
        assert f"process {rank.pid}" in failed["why"]
        assert failed["device"].startswith("The device cpu of rank 1")
        replaced = team.wait_for("ranks replaced")
        assert not rank.is_running()
        caught_up = team.wait_for_more("caught up")
        assert caught_up["time"] - replaced["time"] < 30
        team.wait_for_more("exchanged", 3)
        assert len(plain.events("refused", peer=team.peer_id, why="leaving")) <= 1
        assert [team.terminate(), plain.terminate()] == [0, 0], team.output
        assert "Traceback" not in team.output


@pytest.mark.lab
def test_the_third_death_within_an_hour_ends_the_peer_with_the_devices_name() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu")
        for count in range(3):
            until(
                "training",
                lambda count=count: (
                    len(team.events("first inner step")) and len(team.events("ranks replaced")) == count
                ),
            )
            (rank,) = ranks_of(team)
            rank.kill()
            team.wait_for("rank failed", count)
        assert team.end() == 2, team.output
        assert "The device cpu of rank 1 failed 3 times within an hour" in team.output
        assert "Traceback" not in team.output
        swarm.programs.remove(team)


@pytest.mark.lab
@pytest.mark.parametrize("stalls", ["silent", "ready"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_ranks_start_again_ends_the_peer_soon_and_names_what_is_kept(how, stalls) -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.environment["STALLS"] = stalls
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu", script=STALLED)
        trains(team)
        kept = max(checkpoints_in(team.home / "checkpoints"), default=None)
        (rank,) = ranks_of(team)
        rank.kill()
        team.wait_for("rank failed")
        (rank,) = until("the next rank", lambda: [each for each in sleepers_of(team) if each.pid != rank.pid])
        time.sleep(1.0)  # so that the leader waits for it
        team.process.send_signal(how)
        assert team.end() == 0, team.output
        assert not rank.is_running()
        assert team.wait_for("checkpoint kept")["step"] == kept
        assert (
            "no checkpoint had been saved" in team.output if kept is None else f"step {kept:,} is kept" in team.output
        )
        assert "Traceback" not in team.output


@pytest.mark.lab
def test_a_leader_that_loses_its_card_ends_with_one_error_and_so_do_its_ranks() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu", script=LOST_CARD)
        (rank,) = ranks_of(team)
        failed = time.monotonic() if team.wait_for("first inner step") else 0.0
        assert team.end() == 2, team.output
        assert time.monotonic() - failed < 30
        assert "The device cpu failed: CUDA error: an illegal memory access was encountered." in team.output
        assert "Traceback" not in team.output
        assert not rank.is_running()
        swarm.programs.remove(team)


@pytest.mark.lab
def test_nothing_is_left_of_a_rank_when_the_next_one_is_built() -> None:
    with Swarm(**LAYERS, **ENDLESS, **{"outer.recipe": "swarm"}) as swarm:
        swarm.bootstrap()
        team, plain = swarm.peer("team", "--devices", "cpu,cpu", script=FORGETFUL), swarm.peer("plain")
        team.wait_for("exchanged", 2)
        ranks_of(team)[0].kill()
        team.wait_for("ranks replaced")
        assert [each["parts"] for each in team.events("left of the old rank")] == [[]]
        assert [team.terminate(), plain.terminate()] == [0, 0], team.output


@pytest.mark.parametrize(
    ("devices", "changes", "says"),
    [
        ("cpu,cuda:7", LAYERS, "cuda:7"),
        ("cpu,cpu,cpu --stages 3", LAYERS, "2 layers, too few for 3 stages"),
        ("cpu,cpu,cpu --stages 2", LAYERS, "2 stages do not divide 3 devices"),
        ("cpu --stages 2", LAYERS, "2 stages do not divide 1 device"),
        ("cpu,cpu --stages 2", {**LAYERS, "outer.cut": "even"}, "(outer.cut is 'even'), too few for 2 stages"),
        ("cpu,cpu", {**LAYERS, "training.sequences_per_step": 1}, "Use at most 1."),
        ("cpu,auto", LAYERS, "Name each device"),
    ],
)
def test_devices_that_cannot_train_the_run_are_one_error(devices, changes, says) -> None:
    with Swarm(**changes) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", *devices.split())
        assert team.end() == 2, team.output
        assert says in team.output
        assert "Traceback" not in team.output


def test_a_team_without_a_compiler_says_so_once_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PTRAIN_COMPILE", "on")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        team = swarm.peer("team", "--devices", "cpu,cpu")
        until("notes of both ranks", lambda: len(team.events("not compiled")) == 2)
        missing = "there is no C++ compiler; p2ptrain doctor says how to install one"
        assert sorted(each["why"] for each in team.events("not compiled")) == [f"rank 1: {missing}", missing]
        assert team.terminate() == 0
        assert "Traceback" not in team.output
