"""What becomes of trainers whose node is stopped, or dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.net

STOPPED_S = 6.0
"""Longer than ``lasting_node`` waits for a sign of life."""
PATIENCE_S = 120.0


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_node_goes_on_after_a_stop_and_takes_its_trainer_with_it_when_it_is_killed(plan, tmp_path, ranks):
    file = tmp_path / "plan.json"
    file.write_text(plan.model_copy(update={"devices": ("cpu",) * ranks, "stages": ranks}).model_dump_json())
    script = Path(__file__).parent / "lasting_node.py"
    with subprocess.Popen([sys.executable, str(script), str(file)], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        assert float(node.stdout.readline()) > 0
        children = psutil.Process(node.pid).children(recursive=True)
        assert len(children) == (1 if ranks == 1 else 3)
        os.kill(node.pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(node.pid, signal.SIGCONT)
        for _ in range(200):  # more than were on their way
            assert float(node.stdout.readline()) > 0
        assert psutil.Process(node.pid).children(recursive=True) == children
        node.kill()
    until = time.monotonic() + PATIENCE_S
    while any(map(lives, children)):
        assert time.monotonic() < until
        time.sleep(0.05)
