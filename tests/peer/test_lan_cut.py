"""A team of two computers in two network namespaces whose link is cut and heals. Needs root."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from swarm import ENDLESS, Program, Swarm, until
from test_lan_team import CLI, HASTY, LAYERS

from lab.namespaces import Namespace, check_support

pytestmark = [
    pytest.mark.lab,
    pytest.mark.net,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's"),
]

HEARD_S = 1.0
"""Time in which a partner hears that the peer leaves."""
LEADER, RANK, PUBLIC, PORT = "192.168.77.1", "192.168.77.2", "11.7.7.1", 7007


class Lan:
    """Two namespaces with a link between them; the first also has a public address."""

    def __init__(self) -> None:
        self.first, self.second = Namespace("first"), Namespace("second")
        self.first.ip(
            [
                "link set lo up",
                f"link add lan0 type veth peer name lan0 netns {self.second.path}",
                f"address add {LEADER}/24 dev lan0",
                "link set lan0 up",
                "link add wan0 type veth peer name wan1",
                f"address add {PUBLIC}/24 dev wan0",
                "link set wan0 up",
            ]
        )
        self.second.ip(["link set lo up", f"address add {RANK}/24 dev lan0", "link set lan0 up"])

    def cut(self, is_cut: bool) -> None:
        """Take the link down, without the end of any connection, or up again."""
        self.second.ip([f"link set lan0 {'down' if is_cut else 'up'}"])

    def listening(self, where: Namespace) -> set[str]:
        """Return the addresses where programs listen for TCP connections."""
        command = where.inside("/usr/bin/ss" if Path("/usr/bin/ss").exists() else "/bin/ss", "-ltnH")
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return {re.sub(r":\d+$", "", line.split()[3]) for line in output.splitlines()}

    def close(self) -> None:
        self.first.close()
        self.second.close()


class OnTwoComputers(Swarm):
    """A swarm in the first namespace, with a rank in the second."""

    def __init__(self, lan: Lan, **changes: object) -> None:
        super().__init__(**changes)
        self.lan = lan

    def _start(self, home: Path, *arguments: str) -> Program:
        where = self.lan.second if home.name == "rank" else self.lan.first
        program = Program(home, where.inside(sys.executable, *arguments), self.environment)
        self.programs.append(program)
        return program


@contextmanager
def lan() -> Iterator[Lan]:
    made = Lan()
    try:
        yield made
    finally:
        made.close()


def test_a_cut_lan_is_a_state_and_training_goes_on_once_it_heals() -> None:
    check_support()
    with lan() as link, OnTwoComputers(link, **LAYERS, **ENDLESS) as swarm:
        swarm.bootstrap()
        words = ("--device", "cpu", "--team", "2", "--at", LEADER)
        first = swarm.peer("leader", *words, script=HASTY)
        first.wait_for("waiting for ranks")
        home, key = swarm.root / "rank", str(first.home / "team.key")
        second = swarm.program(
            home, *CLI, "rank", "--leader", LEADER, "--key-file", key, "--device", "cpu", "--home", str(home)
        )
        plain = swarm.peer("plain")
        first.wait_for("exchanged", 1)
        assert link.listening(link.first) == {"127.0.0.1", LEADER}
        assert link.listening(link.second) == {RANK}
        link.cut(True)
        failed = first.wait_for("rank failed")
        assert failed["device"] == "Rank 1 on another computer"
        left = first.wait_for("rank left")
        second.wait_for("waiting for the leader")
        until("no rank process", lambda: not psutil.Process(second.process.pid).children(recursive=True))
        assert first.process.poll() is None
        link.cut(False)
        first.wait_for("ranks replaced")
        first.wait_for_more("exchanged")
        assert len(plain.events("refused", peer=first.peer_id, why="leaving")) <= 1
        waits = [each for each in plain.events("failed", peer=first.peer_id) if each["why"].startswith("no answer")]
        assert not [each for each in waits if each["time"] - each["seconds"] > left["time"] + HEARD_S]
        first.interrupt()
        assert first.end() == 0, first.output
        second.wait_for_more("waiting for the leader")
        assert [plain.terminate(), second.terminate()] == [0, 0], second.output
        assert "Traceback" not in first.output + second.output
        command = [sys.executable, *CLI, "export", str(first.home), str(swarm.root / "model")]
        done = subprocess.run(command, env=swarm.environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
