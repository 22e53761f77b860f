"""A team on several computers, ``--team 2 --at HOST`` and ``p2ptrain rank``: real processes in a real swarm."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from swarm import ENDLESS, Program, Swarm, until

from p2ptrain import checkpoint

pytestmark = pytest.mark.net

LAYERS = {"outer.cut": "layers", "outer.fragments": 3, "model.config.num_hidden_layers": 2}
HASTY = Path(__file__).with_name("hasty.py")
CLI = ("-c", "from p2ptrain.cli import main; main()")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def leader(swarm: Swarm, port: int, name: str = "leader", link: str | None = "", team: int = 2) -> Program:
    return swarm.peer(name, "--device", "cpu", "--team", str(team), "--at", f"127.0.0.1:{port}", link=link)


def rank(swarm: Swarm, port: int, key: Path, name: str = "rank") -> Program:
    home = swarm.root / name
    words = ["--leader", f"127.0.0.1:{port}", "--key-file", str(key), "--device", "cpu", "--home", str(home)]
    return swarm.program(home, *CLI, "rank", *words)


def pair(swarm: Swarm) -> tuple[int, Program, Program]:
    """Return a port, a leader there, and a rank of another home that has joined it."""
    port = free_port()
    first = leader(swarm, port)
    first.wait_for("waiting for ranks")
    return port, first, rank(swarm, port, first.home / "team.key")


def trains(peer: Program) -> None:
    count = len(peer.events("progress"))
    until("progress", lambda: [each for each in peer.events("progress")[count:] if each["step"]])


def rank_processes(program: Program) -> list[psutil.Process]:
    children = psutil.Process(program.process.pid).children(recursive=True)
    return [each for each in children if "peer.team.rank" in each.cmdline()]


def state_of(path: Path) -> dict[str, object]:
    return dict(json.loads((path / "state.json").read_text()))


def exported(swarm: Swarm, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *CLI, "export", str(home), str(swarm.root / "model")]
    return subprocess.run(command, env=swarm.environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.lab
def test_a_team_of_two_computers_trains_beside_a_plain_peer_and_exports() -> None:
    with Swarm(**LAYERS, **{"run.tokens": 200_000}) as swarm:
        swarm.bootstrap()
        _, first, second = pair(swarm)
        assert first.events("waiting for ranks")[0]["ranks"] == 1
        key = (first.home / "team.key").read_text().strip()
        assert (first.home / "team.key").stat().st_mode & 0o777 == 0o600
        assert key in first.output
        assert key not in (first.home / "events.jsonl").read_text()
        assert first.wait_for("started")["device"].startswith("cpu + cpu of ")
        plain = swarm.peer("plain")
        listening = {
            each.laddr.ip
            for each in psutil.Process(first.process.pid).net_connections("tcp")
            if each.status == "LISTEN"
        }
        assert listening == {"127.0.0.1"}
        assert [first.end(), plain.end(), second.end()] == [0, 0, 0], first.output + second.output
        assert first.events("exchanged")
        assert second.events("team ended")
        assert "Traceback" not in first.output + second.output
        done = exported(swarm, first.home)
        assert done.returncode == 0, done.stderr
        ours, theirs = (checkpoint.checkpoints_in(each.home / "checkpoints") for each in (first, second))
        assert max(ours) == max(theirs)
        parts = [state_of(each[max(each)])["part"] for each in (ours, theirs)]
        assert parts[0]["end"] == parts[1]["begin"]
        assert parts[1]["end"] == parts[1]["total"]
        whole = checkpoint.load_latest(first.home / "whole").checkpoint
        assert whole is not None
        assert whole.tensors.length("slow") == parts[1]["total"]
        assert whole.state["ended"]


@pytest.mark.lab
def test_a_killed_rank_returns_and_training_goes_on_from_a_common_step() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        port, first, second = pair(swarm)
        trains(first)
        first.interrupt()
        assert first.end() == 0, first.output
        saved = max(checkpoint.checkpoints_in(first.home / "checkpoints"))
        assert saved in checkpoint.checkpoints_in(second.home / "checkpoints")
        until("the rank to wait", lambda: second.events("waiting for the leader"))
        assert not rank_processes(second)
        first = leader(swarm, port, link=None)
        assert first.wait_for("resumed")["step"] == saved
        assert key_lines(first) == 0
        trains(first)
        second.process.kill()
        second.end()
        failed = first.wait_for("rank failed")
        assert failed["device"] == "Rank 1 on another computer"
        first.wait_for("waiting for ranks")
        again = rank(swarm, port, first.home / "team.key")
        assert first.wait_for("ranks replaced")["step"] >= saved
        trains(first)
        first.process.kill()
        first.end()
        again.wait_for("waiting for the leader")
        until("no rank process", lambda: not rank_processes(again))
        assert again.terminate() == 0, again.output
        assert "Traceback" not in first.output + again.output


def key_lines(program: Program) -> int:
    return program.output.count("key of this team")


@pytest.mark.lab
def test_strangers_and_surplus_ranks_are_one_line_each_and_training_goes_on() -> None:
    with Swarm(**LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        port, first, _ = pair(swarm)
        trains(first)
        wrong = swarm.root / "wrong.key"
        wrong.write_text("00" * 32)
        stranger = rank(swarm, port, wrong, "stranger")
        assert stranger.end() == 2
        assert "This key is not the team's" in stranger.output
        assert first.wait_for("rank refused")["why"] == "it has another key"
        surplus = rank(swarm, port, first.home / "team.key", "surplus")
        assert "All 1 places" in surplus.wait_for("waiting for the leader")["why"]
        assert first.wait_for("rank refused", 1)["why"].startswith("All 1 places")
        assert surplus.terminate() == 0
        second_leader = leader(swarm, port, "second", None if not swarm.link else "")
        assert second_leader.end() == 2
        assert f"cannot listen on 127.0.0.1:{port}" in second_leader.output
        trains(first)
        assert not first.events("rank failed")
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 0, first.output
        for each in (first, stranger, surplus, second_leader):
            assert "Traceback" not in each.output


BAD_OPTIONS = [
    (["--team", "2"], "--team and --at belong together"),
    (["--team", "2", "--at", "0.0.0.0"], "not an address of a private network"),
    (["--team", "2", "--at", "8.8.8.8"], "not an address of a private network"),
    (["--team", "2", "--at", "10.255.254.253"], "This computer has no address 10.255.254.253"),
    (["--devices", "cpu,cpu", "--team", "2", "--at", "127.0.0.1"], "leaves no place for another computer"),
    (["--team", "3", "--at", "127.0.0.1"], "2 layers, too few for a team of 3 devices"),
]


@pytest.mark.lab
def test_bad_options_of_a_leader_are_one_error() -> None:
    with Swarm(**LAYERS) as swarm:
        swarm.bootstrap()
        for number, (words, says) in enumerate(BAD_OPTIONS):
            peer = swarm.peer(f"leader-{number}", *words)
            assert peer.end() == 2, peer.output
            assert says in peer.output
            assert "Traceback" not in peer.output
