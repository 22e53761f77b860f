"""The whole command with real peers behind routers in namespaces, and what remains if it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from peer.testnet import testnet as command
from sim.errors import ScenarioError

SCENARIOS = Path(__file__).parent.parent / "scenarios"
COMMAND = [str(Path(sys.executable).parent / "p2ptrain"), "testnet"]

root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def acted_out(out: Path, environment: dict[str, str], *changes: str) -> dict[str, Any]:
    """Run ``routers`` with these changes and return its report; assert that it kept its limits."""
    arguments = ["--scenario", str(SCENARIOS / "routers.toml"), "--stage", "namespaces", "--out", str(out)]
    arguments += [word for change in changes for word in ("--set", change)]
    done = subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert report["passed"]
    assert report["limits"]
    assert all(limit["kept"] for limit in report["limits"].values())
    assert "11.0." in (out / "bootstrap" / "join-link.txt").read_text()
    return report


@pytest.mark.lab
@root
@pytest.mark.net
def test_a_swarm_behind_routers_survives_the_death_of_its_only_public_peer(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """A short scenario with limits, like those of make lab."""
    report = acted_out(
        tmp_path / "out",
        environment,
        "run.seconds=9",
        *("peers.public.leaves_at_s=3", "peers.public.leaves=killed"),
        *("peers.public.returns_after_s=1", "peers.public.returns=resumed"),
        "limits={}",
        "limits.restarts={at_least = 1, at_most = 1}",
        *("limits.missed_acts.at_most=0", "limits.offences.at_most=0"),
        "limits.stayed.at_least=3",
    )
    assert report["figures"]["left_processes"] == report["figures"]["left_namespaces"] == 0
    assert report["figures"]["peers"]["public-1"]["exits"] == ["is killed", 0]
    home = report["figures"]["peers"]["home-1"]
    # The time until the public peer returns depends on the machine; make lab has limits.
    assert home["exchanges_afterwards"]


@root
@pytest.mark.net
@pytest.mark.lab
def test_two_peers_behind_routers_exchange_through_circuits(tmp_path: Path, environment: dict[str, str]) -> None:
    acted_out(tmp_path / "out", environment)
    other = json.loads((tmp_path / "out" / "home-2" / "summary.json").read_text())["id"]
    between = exchanges(tmp_path / "out" / "home-1", other)
    assert between
    assert all("relay" in each for each in between)  # routers let nothing in


def exchanges(home: Path, partner: str) -> list[dict[str, Any]]:
    notes = [json.loads(line) for line in (home / "events.jsonl").read_text().splitlines()]
    return [note for note in notes if note["kind"] == "exchanged" and note["peer"] == partner]


Running = tuple[subprocess.Popen[bytes], list[psutil.Process]]


@pytest.fixture
def running(tmp_path: Path, environment: dict[str, str]) -> Iterator[Running]:
    """Start a testnet in namespaces; yield once the bootstrap and a peer have their p2pd, with all processes."""
    out = tmp_path / "out"
    arguments = ["--scenario", str(SCENARIOS / "slow_line.toml"), "--stage", "namespaces", "--out", str(out)]
    arguments += ["--set", "peers.good.count=1"]
    said = tmp_path / "said"
    with said.open("wb") as output:
        process = subprocess.Popen([*COMMAND, *arguments], env=environment, stdout=output, stderr=output)
    try:
        top = psutil.Process(process.pid)
        while [_name(each) for each in top.children(recursive=True)].count("p2pd") < 2:
            assert process.poll() is None, f"the testnet ended:\n{said.read_text()}"
            time.sleep(0.05)
        yield process, top.children(recursive=True)
    finally:
        process.kill()
        process.wait()


@root
@pytest.mark.net
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.lab), signal.SIGKILL])
def test_a_stopped_testnet_leaves_nothing(running: Running, number: signal.Signals) -> None:
    process, inside = running
    namespaces = {link for each in inside if (link := _target(Path(f"/proc/{each.pid}/ns/net")))}
    assert Path("/proc/self/ns/net").readlink() not in namespaces
    assert len(namespaces) >= 4  # the backbone, the bootstrap, the peers
    process.send_signal(number)
    assert process.wait(60) == (-signal.SIGKILL if number is signal.SIGKILL else 130)
    assert psutil.wait_procs(inside, timeout=30)[1] == []
    there = {link for each in Path("/proc").glob("[0-9]*/ns/net") if (link := _target(each))}
    assert not namespaces & there


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:  # some are short-lived
        return ""


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:  # it has just ended
        return None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--scenario", "x.toml", "--peers", "3", "--seed", "4"],
            "--peers, --seed cannot be used with --scenario",
        ),
        (["--stage", "local"], "--stage needs --scenario"),
        (["--set", "run.seed=3"], "--set needs --scenario"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_a_folder_without_scenarios_is_an_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--scenario", str(tmp_path)])
    assert isinstance(done.exception, ScenarioError)
    assert "contains no scenario" in done.exception.problem


def test_a_scenario_for_namespaces_is_refused_on_the_loopback(tmp_path: Path) -> None:
    arguments = ["--scenario", str(SCENARIOS / "partition.toml"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(command, arguments)
    assert isinstance(done.exception, ScenarioError)
    assert done.exception.problem == "partitions: stage local has one loopback for all peers; take --stage namespaces"
    assert not (tmp_path / "out").exists()
