"""Figures of peers whose trainers died, and the acts that hit their processes."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from lab.artifacts import Artifacts
from lab.breakage import Breakages, kill_node, ranks, runs
from lab.scenario import RealGroup
from lab.script import Act, ActKind, ScriptedPeer
from lab.trainer_figures import trainer_figures
from p2ptrain.base.errors import DeviceError


def artifacts(name: str, *notes: dict[str, Any]) -> Artifacts:
    peer = ScriptedPeer(name, "group", RealGroup(name="group", count=1, step_s=1.0), name)
    return Artifacts(peer, f"id of {name}", notes, None)


def note(time: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "kind": kind, **fields}


def test_a_recovery_lasts_until_the_next_progress() -> None:
    died, returned = note(10.0, "trainer died"), note(19.0, "trainer returned")
    one = artifacts("one", note(9.0, "progress"), died, returned, note(21.0, "progress"), note(30.0, "progress"))
    plain = artifacts("plain", note(12.0, "lost", peer="id of one"), note(13.0, "lost", peer="another"))
    found = trainer_figures(one, [one, plain])
    assert (found["trainers_died"], found["trainers_returned"], found["recovery_s"]) == (1, 1, 11.0)
    assert found["lost_by_others"] == 1
    assert trainer_figures(plain, [one, plain])["recovery_s"] is None
    assert trainer_figures(artifacts("one", died, returned), [])["recovery_s"] == math.inf


NODE = """
import subprocess, sys
rank = "import sys; print(flush=True); {} # peer"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
command = [sys.executable, "-c", rank, "peer.training.language_trainer"]
processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
for process in processes:
    process.stdout.readline()
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["sys.stdin.read()", "import time; time.sleep(60)"], ids=["obedient", "stubborn"])
def node(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A node whose trainer has two ranks, which end with it or not."""
    command = [sys.executable, "-c", NODE.replace("{}", request.param)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        left = [psutil.Process(each) for each in ranks(process.pid)]
        yield process
        process.kill()
        for each in left:
            if each.is_running():
                each.kill()


def test_a_killed_node_takes_its_ranks_along_or_that_is_an_error(
    node: subprocess.Popen[bytes], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.breakage.ORPHANS_S", 1.0)
    first, second = ranks(node.pid)
    if "stubborn" in request.node.name:
        with pytest.raises(DeviceError, match=f"did not end by themselves: {first}, {second}"):
            kill_node("home-1", node.pid)
    else:
        kill_node("home-1", node.pid)
    assert node.wait(10) == -signal.SIGKILL
    until = time.monotonic() + 10
    while any(psutil.pid_exists(rank) and runs(psutil.Process(rank)) for rank in (first, second)):
        assert time.monotonic() < until, "a rank lives"
        time.sleep(0.01)


def test_a_rank_is_frozen_and_killed_and_a_plain_peer_has_none(node: subprocess.Popen[bytes]) -> None:
    _, rank = ranks(node.pid)
    Breakages().perform(Act(1.0, ActKind.FREEZE_RANK, "home-1"), node.pid)
    until = time.monotonic() + 10
    while psutil.Process(rank).status() != psutil.STATUS_STOPPED and time.monotonic() < until:
        time.sleep(0.01)
    assert psutil.Process(rank).status() == psutil.STATUS_STOPPED
    Breakages().perform(Act(1.0, ActKind.LOSE_RANK, "home-1"), node.pid)
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as plain,
        pytest.raises(DeviceError, match="no process of a second device"),
    ):
        Breakages().perform(Act(1.0, ActKind.LOSE_RANK, "home-1"), plain.pid)
