"""A trainer with ranks on two computers of one owner: a node's launcher, and ``p2ptrain rank``, both on loopback."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from test_remote_task import PATIENCE_S, in_own_process, plan, trained

from peer.training.plan import TrainerPlan

__all__ = ["in_own_process", "plan"]
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
        assert found.end() is not None
        assert "Traceback" not in found.output


def over_two(plan: TrainerPlan, at: str, stages: int) -> TrainerPlan:
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
