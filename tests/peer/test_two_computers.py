"""A trainer with ranks on two computers of one owner: a node's launcher, and ``p2ptrain rank``, both on loopback."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from swarm import Swarm
from test_remote_task import trained
from trainers import PATIENCE_S, started, step_on, wait_for_return

from p2ptrain import checkpoint
from p2ptrain.base.errors import TrainerAwayError, UserError
from p2ptrain.base.telemetry import MemoryLog
from peer.training import trainer_supervisor
from peer.training.plan import TrainerPlan
from peer.training.remote_task import RemoteTask

pytestmark = pytest.mark.net

CLI = (sys.executable, "-c", "from p2ptrain.cli import main; main()")


@pytest.fixture
def at() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Other:
    """The other computer: ``p2ptrain rank`` in a home of its own."""

    def __init__(self, at: str, folder: Path, *words: str) -> None:
        self._log = folder / "rank.log"
        command = (*CLI, "rank", "--leader", at, "--device", "cpu", "--home", str(folder / "rank"), *words)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while text not in self.output:
            assert time.monotonic() < until, self.output
            time.sleep(0.05)

    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if "peer.training.language_trainer" in each.cmdline()]

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)


@contextmanager
def other(at: str, folder: Path, *words: str) -> Iterator[Other]:
    found = Other(at, folder, *words)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.send_signal(signal.SIGTERM)
        found.end()
        assert "Traceback" not in found.output


def over_two(plan: TrainerPlan, at: str, stages: int = 2) -> TrainerPlan:
    return plan.model_copy(update={"devices": ("cpu", "auto"), "stages": stages, "at": at, "others": 1})


@pytest.mark.parametrize("stages", [2, 1])
def test_two_computers_compute_what_one_process_does_up_to_rounding(plan, at, tmp_path, stages, in_own_process):
    alone = trained(plan)
    with other(at, tmp_path) as second:
        losses, theta, state, held_out = trained(over_two(plan, at, stages))
        second.wait_for("[team] the leader has stopped")
    assert losses == pytest.approx(alone[0], rel=1e-5)
    assert held_out == pytest.approx(alone[3], rel=1e-5)
    assert (theta - alone[1]).norm() < 1e-4 * alone[1].norm()
    for name, tensor in alone[2].items():
        assert (state[name] - tensor).double().norm() <= 1e-3 * tensor.double().norm()


def test_displacements_reach_both_computers_and_the_runs_end_ends_the_other(plan, at, tmp_path, in_own_process):
    with other(at, tmp_path) as second, started(over_two(plan, at)) as task:
        listening = {
            each.laddr.ip
            for process in (psutil.Process(task.pid), psutil.Process(second.process.pid))
            for one in (process, *process.children(recursive=True))
            for each in one.net_connections("tcp")
            if each.status == "LISTEN"
        }
        assert listening == {"127.0.0.1"}
        assert not task.shares
        before, third = task.theta.clone(), len(task.theta) // 3
        for piece in (slice(0, third), slice(third, 3 * third)):
            task.add(piece, torch.ones(piece.stop - piece.start))
        task.store()
        assert torch.equal(task.theta[: 3 * third], before[: 3 * third] + 1)
        task.has_ended = lambda: True
        task.close()
        assert second.end() == 0
        assert "the run has ended" in second.output


def test_a_rank_that_is_killed_on_the_other_computer_returns_and_so_does_a_leader(
    plan, at, tmp_path, in_own_process, monkeypatch
):
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.01, 0.01))
    losses, log = trained(plan)[0], MemoryLog()
    with other(at, tmp_path) as second, started(over_two(plan, at), log) as task:
        assert task.inner_step(0.0).loss == pytest.approx(losses[0], rel=1e-5)
        task.store(moments=True)
        for victim in (lambda: second.ranks()[0], lambda: psutil.Process(task.pid)):
            victim().kill()
            with pytest.raises(TrainerAwayError):
                step_on(task)
            wait_for_return(task)
            assert task.inner_step(256.0).loss == pytest.approx(losses[1], rel=0.02)  # of the weights last stored
    assert log.kinds().count("waiting for ranks") == 3
    assert log.kinds().count("trainer died") == 2


def test_a_computer_that_falls_silent_is_lost_and_returns(plan, at, tmp_path, in_own_process, monkeypatch):
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.01, 0.01))
    with other(at, tmp_path) as second, started(over_two(plan, at)) as task:
        silent = psutil.Process(second.process.pid).children(recursive=True)
        for each in silent:
            each.suspend()
        with pytest.raises(TrainerAwayError):
            step_on(task)
        for each in silent:
            each.resume()
        wait_for_return(task)
        assert math.isfinite(task.inner_step(0.0).loss)


def test_no_rank_outlives_its_command(plan, at, tmp_path, in_own_process):
    with other(at, tmp_path) as second, started(over_two(plan, at)):
        (rank,) = second.ranks()
        second.process.kill()
        assert rank.wait(PATIENCE_S) is not None or not rank.is_running()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--number", "2"), "The team has 2 computers, so that none has the number 2."),
        (("--device", "cuda:7"), "Device cuda:7 was requested"),
    ],
)
def test_a_computer_that_cannot_take_part_says_why(plan, at, tmp_path, in_own_process, words, says):
    task = RemoteTask(over_two(plan, at), 64, MemoryLog(), lambda: False)

    def start() -> None:
        with suppress(TrainerAwayError, UserError):
            task.start()

    starting = threading.Thread(target=start)
    starting.start()
    try:
        with other(at, tmp_path, *words) as second:
            assert second.end() == 2
            assert says in second.output
    finally:
        task.close()
        starting.join(PATIENCE_S)
        assert not starting.is_alive()


def test_two_computers_train_in_a_swarm_beside_a_plain_peer_to_the_end(at) -> None:
    with Swarm(**{"run.tokens": 300_000, "model.config.num_hidden_layers": 2}) as swarm:
        swarm.bootstrap()
        words = ("--device", "cpu", "--team", "2", "--at", at)
        leader = swarm.peer("leader", *words)
        leader.wait_for("waiting for ranks")
        assert "nothing between them is encrypted" in leader.output
        leader.interrupt()
        assert leader.end() == 0, leader.output
        leader = swarm.peer("leader", *words)
        command = ("rank", "--leader", at, "--device", "cpu", "--home", str(swarm.root / "rank"))
        second = swarm.program(swarm.root / "rank", *CLI[1:], *command)
        assert leader.wait_for("started")["device"] == "cpu + cpu"
        plain = swarm.peer("plain")
        assert [leader.end(), plain.end(), second.end()] == [0, 0, 0], leader.output + second.output
        assert leader.events("exchanged")
        assert second.events("team ended")
        assert "Traceback" not in leader.output + second.output
        found = checkpoint.load_latest(leader.home / "checkpoints").checkpoint
        assert found is not None
        assert found.state["ended"]
