"""Figures of peers on several devices, and the acts that hit their processes."""

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
from lab.breakage import Breakages, kill_leader, ranks, runs
from lab.scenario import RealGroup
from lab.script import Act, ActKind, ScriptedPeer
from lab.team_figures import team_figures
from p2ptrain.base.errors import DeviceError


def artifacts(name: str, *notes: dict[str, Any]) -> Artifacts:
    peer = ScriptedPeer(name, "group", RealGroup(name="group", count=1, step_s=1.0), name)
    return Artifacts(peer, f"id of {name}", notes, None)


def note(time: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "kind": kind, **fields}


def test_a_recovery_lasts_until_the_next_step_without_imports() -> None:
    failed, replaced = note(10.0, "rank failed"), note(19.0, "ranks replaced", importing_s=5.0)
    team = artifacts("team", note(9.0, "progress"), failed, replaced, note(21.0, "progress"), note(30.0, "progress"))
    plain = artifacts("plain", note(12.0, "lost", peer="id of team"), note(13.0, "lost", peer="another"))
    found = team_figures(team, [team, plain])
    assert (found["ranks_failed"], found["ranks_replaced"], found["recovery_s"]) == (1, 1, 6.0)
    assert found["lost_by_others"] == 1
    assert team_figures(plain, [team, plain])["recovery_s"] is None
    assert team_figures(artifacts("team", failed, replaced), [])["recovery_s"] == math.inf


LEADER = """
import subprocess, sys
rank = "import sys; print(flush=True); {} # peer"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
process = subprocess.Popen([sys.executable, "-c", rank, "peer.team.rank"], **pipes)
process.stdout.readline()
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["sys.stdin.read()", "import time; time.sleep(60)"], ids=["obedient", "stubborn"])
def leader(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A leader with one rank, which ends with it or not."""
    command = [sys.executable, "-c", LEADER.replace("{}", request.param)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        left = [psutil.Process(each) for each in ranks(process.pid)]
        yield process
        process.kill()
        for each in left:
            if each.is_running():
                each.kill()


def test_a_killed_leader_takes_its_ranks_along_or_that_is_an_error(
    leader: subprocess.Popen[bytes], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.breakage.ORPHANS_S", 1.0)
    (rank,) = ranks(leader.pid)
    if "stubborn" in request.node.name:
        with pytest.raises(DeviceError, match=f"did not end by themselves: {rank}"):
            kill_leader("home-1", leader.pid)
    else:
        kill_leader("home-1", leader.pid)
    assert leader.wait(10) == -signal.SIGKILL
    until = time.monotonic() + 10
    while psutil.pid_exists(rank) and runs(psutil.Process(rank)):
        assert time.monotonic() < until, "the rank lives"
        time.sleep(0.01)


def test_a_rank_is_frozen_and_killed_and_a_plain_peer_has_none(leader: subprocess.Popen[bytes]) -> None:
    (rank,) = ranks(leader.pid)
    Breakages().perform(Act(1.0, ActKind.FREEZE_RANK, "home-1"), leader.pid)
    until = time.monotonic() + 10
    while psutil.Process(rank).status() != psutil.STATUS_STOPPED and time.monotonic() < until:
        time.sleep(0.01)
    assert psutil.Process(rank).status() == psutil.STATUS_STOPPED
    Breakages().perform(Act(1.0, ActKind.LOSE_RANK, "home-1"), leader.pid)
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as plain,
        pytest.raises(DeviceError, match="no process of a second device"),
    ):
        Breakages().perform(Act(1.0, ActKind.LOSE_RANK, "home-1"), plain.pid)
