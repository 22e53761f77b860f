"""Peers behind routers that accept no inbound connections, in network namespaces. Most tests need root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from swarm import ENDLESS, Program, Swarm, until

from lab.hosts import Access, Network
from lab.namespaces import check_support
from lab.routers import RouterKind
from p2ptrain.net.address import relay_of
from peer.home import Home

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's"),
]

BEHIND_A_ROUTER = Access(router="keep")
BEHIND_AN_UNFIT_ROUTER = Access(router="symmetric")
"""Behind a router that uses another port for each destination, so that no hole can be punched."""


class FarFlung(Swarm):
    """A swarm in which every process has a host of its own, of the same name."""

    def __init__(self, network: Network, **changes: Any) -> None:
        super().__init__(**changes)
        self.network = network

    def bootstrap(self) -> Program:
        home = self.root / "bootstrap"
        program = self._start(home, "-m", "bootstrap", str(self.root / "run"), "--home", str(home))
        place = home / "join-link.txt"
        self.link = until("the join link", lambda: place.exists() and place.read_text().strip())
        return program

    def peer(self, name: str, *arguments: str, link: str | None = "", script: Path | None = None) -> Program:
        home = self.root / name
        return self._start(home, "-m", "peer", self.link, "--home", str(home), "--nickname", name, *arguments)

    def doctor(self, name: str) -> tuple[int, dict[str, dict[str, str]]]:
        """Return the doctor's exit status on that host, and its findings by check."""
        command = [sys.executable, "-m", "p2ptrain.cli", "doctor", self.link, "--home", str(self.root / name), "--json"]
        inside = self.network.hosts[name].inside(*command)
        done = subprocess.run(inside, env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.stderr == ""
        return done.returncode, {each["check"]: each for each in json.loads(done.stdout)["findings"]}

    def _start(self, home: Path, *arguments: str) -> Program:
        command = self.network.hosts[home.name].inside(sys.executable, *arguments)
        program = Program(home, command, self.environment)
        self.programs.append(program)
        return program


@pytest.mark.lab
def test_two_peers_behind_routers_exchange_through_one_relay_and_take_another_when_it_dies() -> None:
    check_support()
    with Network() as network:
        for name in ("bootstrap", "volunteer"):
            network.add(name)
        for name in ("alice", "bob"):
            network.add(name, BEHIND_AN_UNFIT_ROUTER)
        with FarFlung(network, **ENDLESS) as swarm:
            bootstrap = swarm.bootstrap()
            alice, bob = swarm.peer("alice"), swarm.peer("bob")
            alice.wait_for("relayed")
            alice.wait_for("exchanged", peer=bob.peer_id)
            assert alice.events("exchanged", peer=bob.peer_id)[-1]["relay"]
            assert "(relayed by " in alice.output
            assert "forward TCP port" in alice.output
            until("a link through the relay", lambda: any(map(relay_of, Home(alice.home).load_addresses().own)))

            volunteer = swarm.peer("volunteer", "--relay")
            volunteer.wait_for("reachable")
            for each in (alice, bob):
                each.wait_for("relayed", peer=volunteer.peer_id)
                each.wait_for("exchanged", peer=volunteer.peer_id)  # directly, or by a circuit if the other side dialed
            bootstrap.kill()
            for each in (alice, bob):
                each.wait_for("relay lost")
            alice.wait_for_more("exchanged", more=3, peer=bob.peer_id, relay=volunteer.peer_id)


@pytest.mark.parametrize(
    ("one", "other"), [("keep", "other"), pytest.param("firewall", "keep_reset", marks=pytest.mark.lab)]
)
def test_two_peers_behind_routers_exchange_directly(one: RouterKind, other: RouterKind) -> None:
    """Check lines of 10 ms: a router that rejects the other's first packet needs both at once."""
    check_support()
    with Network() as network:
        network.add("bootstrap")
        network.add("alice", Access(router=one, delay_s=0.01))
        network.add("bob", Access(router=other, delay_s=0.01))
        with FarFlung(network, **ENDLESS) as swarm:
            swarm.bootstrap()
            alice, bob = swarm.peer("alice", "-v"), swarm.peer("bob")
            for each, partner in ((alice, bob), (bob, alice)):
                each.wait_for("punching")
                each.wait_for("exchanged", peer=partner.peer_id, punched=True)
            alice.wait_for_more("exchanged", more=5, peer=bob.peer_id, punched=True)
            assert "(direct, through both routers)" in alice.output
            assert not alice.events("p2pd died")
            assert Home(alice.home).load_addresses().unreachable  # the next start punches at once
            alice.terminate()
            alice = swarm.peer("alice")
            alice.wait_for("exchanged", peer=bob.peer_id, punched=True)
            assert not alice.events("punching")


def test_whoever_does_not_want_to_be_known_exchanges_through_the_relay() -> None:
    check_support()
    with Network() as network:
        network.add("bootstrap")
        for name in ("alice", "bob"):
            network.add(name, BEHIND_A_ROUTER)
        with FarFlung(network, **ENDLESS) as swarm:
            swarm.bootstrap()
            home = swarm.root / "alice"
            home.mkdir()
            (home / "settings.toml").write_text("punch = false\n")
            alice, bob = swarm.peer("alice"), swarm.peer("bob")
            alice.wait_for("exchanged", peer=bob.peer_id)
            bob.wait_for("punching")
            alice.wait_for_more("exchanged", more=3, peer=bob.peer_id)
            assert all(note.get("relay") for note in alice.events("exchanged", peer=bob.peer_id))
            assert not alice.events("punching")


def test_the_doctor_says_on_which_side_of_a_router_it_is_and_how_to_be_reached() -> None:
    check_support()
    with Network() as network:
        network.add("bootstrap")
        network.add("plain")
        network.add("home", BEHIND_A_ROUTER)
        with FarFlung(network) as swarm:
            swarm.bootstrap()
            status, found = swarm.doctor("plain")
            assert (status, found["reach"]["state"], found["router"]["state"]) == (0, "ok", "ok"), found
            assert found["reach"]["found"] == "others can dial this machine at 11.0.2.2:31337"
            status, found = swarm.doctor("home")
            assert (status, found["reach"]["state"]) == (0, "note"), found  # reachable through the bootstrap's relay
            assert "Forward TCP port 31337 on your router to 192.168.1.2" in found["reach"]["fix"]
            assert found["router"]["found"].startswith("others see 11.0.3.2, the address of a router")
            assert "it uses one port for all destinations" in found["router"]["found"]
            assert {found[check]["state"] for check in ("link", "clock", "memory")} == {"ok"}
            assert not list((swarm.root / "home").glob("*"))
