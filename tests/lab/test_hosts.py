"""Hosts in namespaces: which can reach which, and that nothing is left. Most tests need root."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from lab import hosts, namespaces
from lab.cell import cell_command, empty_directory
from lab.hosts import Access, Network
from lab.moves import change_network
from lab.routers import RouterKind
from lab.script import ActKind
from p2ptrain.base.errors import DeviceError

root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's")

SERVER = """
import socket
server = socket.create_server(("0.0.0.0", 7777))
print("up", flush=True)
while True:
    link, (host, port) = server.accept()
    link.sendall(host.encode())
    link.close()
"""
CLIENT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 7777), float(sys.argv[2])) as link:
        print(link.recv(99).decode())
except OSError:
    print("unreachable")
"""


def asked(network: Network, name: str, address: str, patience_s: float = 15.0) -> str:
    """Return the address that a server sees of the host, or "unreachable". Resends lost packets."""
    command = network.hosts[name].inside(sys.executable, "-c", CLIENT, address, str(patience_s))
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def serving(network: Network, name: str) -> subprocess.Popen[str]:
    command = network.hosts[name].inside(sys.executable, "-c", SERVER)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@root
@pytest.mark.net
def test_reachability_of_hosts() -> None:
    with Network() as network:
        servers = []
        try:
            network.add("plain")
            network.add("slow", Access(delay_s=0.05, loss=0.01, up_mbit_s=1, down_mbit_s=2))
            network.add("home", Access(router=True))
            network.add("far home", Access(router=True, delay_s=0.02, up_mbit_s=5))
            public = {name: host.public for name, host in network.hosts.items()}
            servers = [serving(network, name) for name in ("plain", "slow", "home")]
            assert network.hosts["home"].address == "192.168.1.2"
            assert "rate 1Mbit" in network.hosts["slow"].namespace.run("tc", "qdisc", "show", "dev", "wan0")

            assert asked(network, "plain", public["slow"]) == public["plain"]
            assert asked(network, "slow", public["plain"]) == public["slow"]
            assert asked(network, "home", public["plain"]) == public["home"]  # masqueraded
            assert asked(network, "far home", public["slow"]) == public["far home"]
            assert asked(network, "plain", public["home"], 1.0) == "unreachable"  # no inbound connections
            assert asked(network, "plain", "192.168.1.2", 1.0) == "unreachable"
            assert asked(network, "plain", "8.8.8.8", 1.0) == "unreachable"  # no route to the internet

            network.partition(1, [["plain", "home"], ["slow"]])
            assert asked(network, "home", public["slow"], 1.0) == "unreachable"
            assert asked(network, "home", public["plain"]) == public["home"]
            # In neither group of the partition.
            assert asked(network, "far home", public["slow"]) == public["far home"]
            network.heal(1)
            assert asked(network, "home", public["slow"]) == public["home"]

            network.cut("slow")
            assert asked(network, "far home", public["slow"], 1.0) == "unreachable"
            network.cut("slow", False)
            assert asked(network, "far home", public["slow"]) == public["far home"]
        finally:
            for server in servers:
                server.kill()
                server.communicate()
    assert not [each for each in psutil.Process().children(recursive=True) if "line.py" in " ".join(each.cmdline())]


FROZEN = """
import os, pathlib, signal, subprocess, sys, time
from lab.hosts import Access, Network
from lab.moves import change_network
from lab.routers import RouterKind
from lab.script import ActKind
network = Network()
host = network.add("a", Access(delay_s=0.01))
pathlib.Path(os.environ["TMPDIR"], "debris").touch()
child = subprocess.Popen(host.inside(sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"),
                         stdout=subprocess.PIPE)
child.stdout.readline()
os.kill(child.pid, signal.SIGSTOP)
os.waitpid(child.pid, os.WUNTRACED)  # until it has stopped: the signal alone only asks for that
print("ready", flush=True)
time.sleep(float(os.environ["NAP"]))
"""
STARTER = """
import subprocess, sys
from lab.cell import cell_command
sys.exit(subprocess.run(cell_command([sys.executable, "-c", sys.argv[1]], NAP="600")).returncode)
"""


@root
@pytest.mark.net
def test_nothing_survives_a_killed_starter_not_even_stopped_processes() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, FROZEN], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    assert starter.stdout.readline() == "ready\n"
    cell = psutil.Process(starter.pid).children(recursive=True)
    assert len(cell) == 4  # guard, init, the line, the frozen one
    namespaces_of_cell = {Path(f"/proc/{each.pid}/ns/net").readlink() for each in cell[1:]}
    assert psutil.STATUS_STOPPED in {each.status() for each in cell}
    starter.kill()
    starter.communicate()
    assert psutil.wait_procs(cell, timeout=30)[1] == []
    there = {link for each in Path("/proc").glob("[0-9]*/ns/net") if (link := _read(each)) is not None}
    assert not namespaces_of_cell & there
    assert not list(Path(empty_directory(("/mnt", "/media", "/srv", "/opt"))).iterdir())


def _read(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:  # it has just ended
        return None


@root
@pytest.mark.net
def test_a_cell_ends_with_the_status_of_its_init_and_sees_only_itself() -> None:
    script = textwrap.dedent("""
        import os, pathlib, sys
        others = [each.name for each in pathlib.Path("/proc").iterdir() if each.name.isdigit()]
        print(os.getpid(), others, os.listdir(os.environ["TMPDIR"]))
        sys.exit(7)
    """)
    done = subprocess.run(
        cell_command([sys.executable, "-c", script]), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == "1 ['1'] []\n"


def test_a_machine_without_support_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str) -> None:
        raise RuntimeError("tc qdisc add: Error: Specified qdisc kind is unknown.\n")

    monkeypatch.setattr(hosts, "Namespace", refuses)
    with pytest.raises(DeviceError, match="kind is unknown") as caught:
        hosts.check_network_support()
    assert "--stage local" in caught.value.remedy


def test_temporary_files_need_an_empty_directory(tmp_path: Path) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    (full / "something").mkdir(parents=True)
    empty.mkdir()
    assert empty_directory([str(tmp_path / "missing"), str(full), str(empty)]) == str(empty)
    with pytest.raises(DeviceError, match="needs one empty directory"):
        empty_directory([str(full)])


def test_missing_tools_are_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DeviceError, match="root") as caught:
        namespaces.check_support()
    assert "sudo" in caught.value.remedy
    assert "--stage local" in caught.value.remedy
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "_SEARCH_PATH", "/nowhere")
    with pytest.raises(DeviceError, match="Not installed: ip, tc, nft, nsenter") as caught:
        namespaces.check_support()
    assert "apt-get install iproute2 nftables util-linux" in caught.value.remedy


LOOK = """
import socket, sys
ports = []
for place in sys.argv[2:]:
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        link.bind(("0.0.0.0", int(sys.argv[1])))
        link.settimeout(15)
        link.connect((place, 7777))
        ports.append(link.recv(99).decode())
print(" ".join(ports))
"""
PORTS = SERVER.replace("host.encode()", "str(port).encode()")


@root
@pytest.mark.net
@pytest.mark.parametrize(
    ("kind", "keeps", "one_for_all"),
    [("keep", True, True), ("other", False, True), ("firewall", True, True), ("symmetric", False, False)],
)
def test_kinds_of_routers_map_ports_as_they_say(kind: RouterKind, keeps: bool, one_for_all: bool) -> None:
    with Network() as network:
        servers = []
        try:
            for name in ("one", "two"):
                network.add(name)
                command = network.hosts[name].inside(sys.executable, "-c", PORTS)
                servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                assert servers[-1].stdout is not None
                assert servers[-1].stdout.readline() == "up\n"
            home = network.add("home", Access(router=kind))
            places = [network.hosts[name].public for name in ("one", "two")]
            command = home.inside(sys.executable, "-c", LOOK, "40123", *places)
            seen = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
            assert (seen[0] == "40123") is keeps
            assert (len(set(seen)) == 1) is one_for_all
        finally:
            for each in servers:
                each.kill()
                each.wait()
                assert each.stdout is not None
                each.stdout.close()


@root
@pytest.mark.net
def test_networks_of_hosts_change() -> None:
    with Network() as network:
        servers = []
        try:
            network.add("server")
            public, private = network.add("public"), network.add("private", Access(router=True))
            servers.append(serving(network, "server"))
            there = network.hosts["server"].public
            before = public.public, private.public

            change_network(network, "public", ActKind.READDRESS)
            change_network(network, "private", ActKind.READDRESS)
            assert public.public != before[0]
            assert asked(network, "public", there) == public.public
            assert private.address == "192.168.1.52"
            assert asked(network, "private", there) == private.public == before[1]

            change_network(network, "private", ActKind.UNROUTE)
            assert asked(network, "private", there, 1.0) == "unreachable"
            change_network(network, "private", ActKind.REROUTE)
            assert asked(network, "private", there) == private.public

            change_network(network, "private", ActKind.RENUMBER)
            change_network(network, "private", ActKind.RENUMBER)
            assert asked(network, "private", there) == private.public != before[1]

            change_network(network, "private", ActKind.MOVE)
            change_network(network, "public", ActKind.MOVE)
            assert private.address == public.address == "192.168.43.2"
            assert asked(network, "private", there) == private.public != before[1]
            assert asked(network, "public", there) == public.public
            network.cut("private")
            assert asked(network, "private", there, 1.0) == "unreachable"
        finally:
            for each in servers:
                each.kill()
                each.communicate()


@root
@pytest.mark.net
def test_a_router_forgets_connections() -> None:
    """A router that keeps ports recreates the mapping of what its host sends, but lets nothing else in."""
    with Network() as network:
        network.add("server")
        home = network.add("home", Access(router=True))
        server = serving(network, "server")
        try:
            assert asked(network, "home", network.hosts["server"].public) == home.public
            table = "/proc/thread-self/net/nf_conntrack"
            assert home.router is not None
            if not home.router.call(Path(table).exists):
                pytest.skip("this kernel does not list connections")
            assert home.router.call(Path(table).read_text)
            change_network(network, "home", ActKind.FORGET)
            assert not home.router.call(Path(table).read_text)
        finally:
            server.kill()
            server.communicate()
