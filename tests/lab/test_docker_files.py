"""Files of docker/, without an engine: how a container starts, and what is installed."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DOCKER = Path(__file__).parent.parent.parent / "docker"
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$ASKED"
"""
PYTHON = """#!/bin/sh
echo "python3 $*" >> "$ASKED"
[ "$3" = "${FAILS:-}" ] && exit 1
if [ "$3" = init ]; then mkdir "$4" && touch "$4/manifest.toml"; fi
"""


class Machine:
    """Folder in place of /, with fake tools that record their calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked = root / "asked"
        for name in ("bin", "data", "swarm", "venv"):
            (root / name).mkdir()

    def tool(self, name: str, text: str = STAND_IN) -> None:
        path = self.root / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        text = (DOCKER / script).read_text()
        for place in ("/data", "/swarm", "/venv"):
            text = text.replace(place, str(self.root / place[1:]))
        (self.root / script).write_text(text)
        path = f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["sh", str(self.root / script), *arguments],
            env={"PATH": path, "ASKED": str(self.asked), **environment},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def said(self) -> list[str]:
        return self.asked.read_text().splitlines() if self.asked.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine on which this process is an ordinary user."""
    made = Machine(tmp_path)
    made.tool("python3", PYTHON)
    made.tool("id", "#!/bin/sh\necho 10001\n")
    made.tool("sleep", "#!/bin/sh\nexit 1\n")  # any wait ends with an error
    return made


def test_a_new_run_ends_where_it_is_told_to(machine: Machine) -> None:
    """Check that a variable sets the length of a new run and leaves an existing run as it is."""
    run = machine.root / "data" / "run"
    manifest = run.with_name("run.toml")
    manifest.write_text('[run]\nname = "demo"\ntokens = 1_200_000\n')
    machine.tool("python3", PYTHON.replace('touch "$4/manifest.toml"', f'cp {manifest} "$4/manifest.toml"'))
    machine.run("entry.sh", "bootstrap", TOKENS="30_000_000")
    assert (run / "manifest.toml").read_text() == '[run]\nname = "demo"\ntokens = 30_000_000\n'
    machine.run("entry.sh", "bootstrap", TOKENS="5")
    assert "tokens = 30_000_000\n" in (run / "manifest.toml").read_text()


def test_a_bootstrap_has_its_run_as_a_whole_or_not_at_all(machine: Machine) -> None:
    link, run = machine.root / "swarm" / "join-link.txt", machine.root / "data" / "run"
    link.write_text("of last time")
    assert machine.run("entry.sh", "bootstrap", FAILS="sign").returncode == 1
    assert not run.exists()
    assert not link.exists()  # removed before anything else happens
    assert machine.run("entry.sh", "bootstrap").returncode == 0
    assert (run / "manifest.toml").exists()
    begins = f"python3 -m p2ptrain.cli bootstrap {run} --listen /ip4/0.0.0.0/tcp/31337"
    assert machine.said[-1] == begins
    machine.asked.unlink()
    machine.run("entry.sh", "bootstrap", "--page", "80")
    assert machine.said == [f"{begins} --page 80"]


@pytest.mark.parametrize("way", ["PORT", "--listen", "--listen="])
def test_health_is_asked_where_the_bootstrap_listens(machine: Machine, way: str) -> None:
    """Check health at the address that a variable or an option sets."""
    (machine.root / "data" / "run").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        where = f"/ip4/0.0.0.0/tcp/{port}"
        options = {"PORT": [], "--listen": ["--listen", where], "--listen=": [f"--listen={where}"]}[way]
        machine.run("entry.sh", "bootstrap", *options, PORT=str(port) if way == "PORT" else "1")
        assert machine.said[-1].count("--listen") == 1
        assert machine.said[-1].endswith(where)
        machine.tool("python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        assert machine.run("health.sh").returncode == 1  # nobody could join
        (machine.root / "swarm" / "join-link.txt").touch()
        assert machine.run("health.sh").returncode == 0
    assert machine.run("health.sh").returncode == 1


def test_a_peer_takes_the_link_that_is_nearest_and_goes_on_without_one(machine: Machine) -> None:
    """Check that only a new peer waits for a link: a peer with a home already knows its run and its bootstraps."""
    home, link = machine.root / "data" / "peer", machine.root / "swarm" / "join-link.txt"
    begins, ends = "python3 -m p2ptrain.cli peer ", f"--home {home} --nickname fox --share"

    def asked(**environment: str) -> list[str]:
        machine.asked.unlink(missing_ok=True)
        machine.run("entry.sh", "peer", "--share", NICKNAME="fox", **environment)
        return machine.said

    assert asked() == []  # it waits, and the failing sleep ends it
    home.mkdir()
    (home / "manifest.signed").touch()
    assert asked() == [begins + ends]
    assert asked(LINK="") == [begins + ends]
    link.write_text("p2ptrain://swarm\n")
    assert asked() == [f"{begins}p2ptrain://swarm {ends}"]
    assert asked(LINK="p2ptrain://own") == [f"{begins}p2ptrain://own {ends}"]


def test_rates_that_cannot_be_set_are_refused(machine: Machine) -> None:
    done = machine.run("entry.sh", "peer", LINK="p2ptrain://x", DOWN_MBIT="10")
    assert done.returncode == 2
    assert "starts as root" in done.stderr
    assert machine.said == []


def test_rates_are_set_by_root_who_then_steps_down(machine: Machine) -> None:
    machine.tool("id", "#!/bin/sh\necho 0\n")
    machine.tool("sh", f'#!/bin/sh\necho "sh $*" >> "{machine.asked}"\n')
    machine.tool("setpriv", '#!/bin/sh\necho "${UP_MBIT:-}${DOWN_MBIT:-} as a user at home in $HOME" >> "$ASKED"\n')
    path = machine.root / "entry.sh"
    path.write_text((DOCKER / "entry.sh").read_text())
    environment = {"PATH": f"{machine.root / 'bin'}:{os.environ['PATH']}", "ASKED": str(machine.asked), "UP_MBIT": "2"}
    subprocess.run(["/bin/sh", str(path), "peer"], env=environment, check=True, timeout=60)
    assert machine.said == ["sh /usr/local/bin/p2ptrain-line 2   ", " as a user at home in /data"]


@pytest.mark.parametrize("value", ["10M", "0,5", ".", "1;reboot", "-3"])
@pytest.mark.parametrize("place", range(4))
def test_what_is_no_number_narrows_no_line(machine: Machine, value: str, place: int) -> None:
    """Check values that are not numbers: awk would read "10M" as 10 and "abc" as 0, without an error."""
    for each in ("tc", "nft"):
        machine.tool(each)
    arguments = ["", "", "", ""]
    arguments[place] = value
    done = machine.run("line.sh", *arguments)
    assert done.returncode == 2
    assert f"got '{value}'." in done.stderr
    assert ("UP_MBIT", "DOWN_MBIT", "DELAY_MS", "LOSS_PERCENT")[place] in done.stderr
    assert not machine.asked.exists()


@pytest.mark.parametrize(("tool", "module"), [("tc", "sch_tbf"), ("nft", "nft_limit")])
def test_a_line_that_the_kernel_cannot_narrow_is_told(machine: Machine, tool: str, module: str) -> None:
    for each in ("tc", "nft"):
        machine.tool(each, "#!/bin/sh\n")
    assert machine.run("line.sh", "2", "10").returncode == 0
    machine.tool(tool, "#!/bin/sh\necho 'not supported' >&2\nexit 2\n")
    done = machine.run("line.sh", "2", "10")
    assert done.returncode == 1
    assert module in done.stderr.splitlines()[1]


def test_packets_are_late_and_lost_where_the_kernel_has_netem(machine: Machine) -> None:
    machine.tool("tc")
    assert machine.run("line.sh", "2", "", "30", "0.5").returncode == 0
    bucket = "tbf rate 2mbit burst 64kb latency 300ms"
    netem = "tc qdisc replace dev eth0 root handle 1: netem limit 100000 delay 30ms loss 0.5%"
    assert machine.said == [netem, f"tc qdisc replace dev eth0 parent 1:1 handle 2: {bucket}"]
    machine.asked.unlink()
    machine.tool("tc", STAND_IN + 'case "$*" in *netem*) exit 2 ;; esac\n')
    done = machine.run("line.sh", "2", "", "30")
    assert done.returncode == 0
    assert machine.said[-1] == f"tc qdisc replace dev eth0 root {bucket}"
    assert "no netem" in done.stderr


def test_a_laboratorys_line_loses_both_ways_or_is_none(machine: Machine) -> None:
    """Check that a link loses packets in both directions, or that the start fails."""
    machine.tool("tc")
    machine.tool("nft", '#!/bin/sh\ncat >> "$ASKED"\n')
    assert machine.run("line.sh", "", "20", "40", "0.5", "both", DEVICE="lo").returncode == 0
    assert machine.said[0] == "tc qdisc replace dev lo root handle 1: netem limit 100000 delay 40ms loss 0.5%"
    rules = [line.strip() for line in machine.said if "iifname" in line]
    assert rules == [
        'iifname "lo" numgen random mod 1000000 < 5000 drop',
        'iifname "lo" limit rate over 2500000 bytes/second burst 256 kbytes drop',
    ]
    machine.asked.unlink()
    assert machine.run("line.sh", "", "", "40", "0", "both").returncode == 0
    assert len(machine.said) == 1  # no loss, so no rule
    for tool, module in (("nft", "nft_numgen"), ("tc", "sch_netem")):
        machine.tool(tool, "#!/bin/sh\necho 'not supported' >&2\nexit 2\n")
        done = machine.run("line.sh", "", "", "40", "0.5", "both")
        assert done.returncode == 1
        assert done.stderr.startswith("not supported\n")
        assert module in done.stderr


ADDRESSES = """#!/bin/sh
[ "$*" = "-o -4 address show to 10.231.77.2/32" ] && echo '7: eth1@if8    inet 10.231.77.2/24 scope global eth1'
exit 0
"""


def test_a_router_without_rules_ends(machine: Machine) -> None:
    """Check that a router that cannot set its rules ends, rather than letting everything in."""
    machine.tool("ip", ADDRESSES)
    machine.tool("nft", '#!/bin/sh\ncat > "$ASKED"\n')
    machine.tool("sleep", "#!/bin/sh\n")
    assert "forwarding connections from eth1" in machine.run("router.sh", ROUTER="10.231.77.2").stdout
    rules = " ".join(" ".join(machine.said).split())
    assert 'oifname != { "lo", "eth1" } masquerade' in rules
    assert 'policy drop; ct state established,related accept iifname "eth1" accept }' in rules
    machine.tool("nft", "#!/bin/sh\nexit 1\n")
    done = machine.run("router.sh", ROUTER="10.231.77.2")
    assert done.returncode == 1
    assert "modprobe" in done.stderr


def test_a_router_and_who_is_behind_it_come_back_while_nobody_else_is_there(machine: Machine) -> None:
    """Check that both scripts start from the one address that they get, and resolve no name."""
    machine.tool("getent", "#!/bin/sh\nexit 2\n")
    machine.tool("ip", ADDRESSES)
    machine.tool("nft", "#!/bin/sh\n")
    assert "dropping new connections from outside" in machine.run("router.sh", ROUTER="10.231.77.2").stdout
    machine.tool("ip")
    machine.tool("sh", "#!/bin/sh\n")  # the program that it becomes
    path = machine.root / "behind-router.sh"
    path.write_text((DOCKER / "behind-router.sh").read_text())
    environment = {"PATH": str(machine.root / "bin"), "ASKED": str(machine.asked), "ROUTER": "10.231.77.2"}
    environment["PATH"] += f"{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["/bin/sh", str(path)], env=environment, check=True, timeout=60)
    assert machine.said == ["ip route replace default via 10.231.77.2"]


def test_what_is_installed_can_read_every_corpus_and_serve_a_page() -> None:
    """Check the list of dependencies, which a script inside the script makes, on the real setup.cfg."""
    script = (DOCKER / "install-needs.sh").read_text().partition("<<'LIST'\n")[2].partition("\nLIST\n")[0]
    done = subprocess.run(
        [sys.executable, "-"], input=script, cwd=DOCKER.parent, capture_output=True, text=True, timeout=60, check=True
    )
    needs = done.stdout.split()
    assert {"hivemind", "torch", "transformers", "pyarrow", "aiohttp"} <= set(needs)
    assert "pytest" not in needs


def test_everything_that_is_installed_is_pinned() -> None:
    """Check transitive dependencies too, as far as they are installed here: without a pin, a build may take a new
    version."""
    pinned = {re.split("[=;]", line)[0] for line in (DOCKER.parent / "constraints.txt").read_text().splitlines()}
    setup = configparser.ConfigParser()
    setup.read(DOCKER.parent / "setup.cfg")
    extras = setup["options.extras_require"]
    listed = [setup["options"]["install_requires"], extras["data"], extras["page"]]
    waiting = [Requirement(line) for each in listed for line in each.split("\n") if line.strip()]
    needs = dict[str, Requirement]()
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        if name in needs or name.startswith(("cuda-", "nvidia-", "triton")):  # the images' torch has no CUDA
            continue
        needs[name] = need
        with contextlib.suppress(metadata.PackageNotFoundError):
            further = map(Requirement, metadata.requires(name) or [])
            asked = [{"extra": extra} for extra in ("", *need.extras)]
            waiting += [each for each in further if each.marker is None or any(map(each.marker.evaluate, asked))]
    assert sorted(set(needs) - {canonicalize_name(each) for each in pinned}) == []
    assert "setuptools" in needs


@pytest.mark.parametrize("script", sorted(DOCKER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_can_be_read(script: Path) -> None:
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0


def test_commands_of_the_image_can_be_read() -> None:
    text = re.sub(r"^ *#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    commands = re.findall(r"^RUN (.*)$", text, flags=re.MULTILINE)
    assert len(commands) > 3
    for command in commands:
        assert subprocess.run(["sh", "-n", "-c", command], check=False).returncode == 0, command


def test_all_that_an_image_is_built_of_is_sent_to_the_engine() -> None:
    """Check .dockerignore, which excludes everything that it does not name."""
    text = (DOCKER / "Dockerfile").read_text()
    sources = [
        word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, flags=re.MULTILINE) for word in line.split()
    ]
    ignore = (DOCKER.parent / ".dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    assert all((DOCKER.parent / each).exists() for each in sources)
    assert sorted({f"!{each.partition('/')[0]}" for each in sources} - set(ignore)) == []
