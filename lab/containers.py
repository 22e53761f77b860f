"""Stage ``docker``: each peer and bootstrap in a container on one bridge network, from the images of docker/.

The processes started here are clients (``docker run`` in the foreground): they forward SIGTERM and end with their
container's status. Containers are killed, suspended and throttled by name. Homes are folders of OUT, mounted at the
same path, so that artifacts are read as on the other stages.

``Containers.close`` removes all containers with its mark, and the network. If this process is killed, the next testnet
in the same OUT removes them (``sweep_folder``); clients end with this process, and usually their containers with them.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab import stages
from lab.scenario import BOOTSTRAP, RealGroup
from lab.script import ActKind, Script
from lab.second_computer import SecondComputer
from lab.stages import own_latency
from p2ptrain.base.errors import DeviceError, HomeError
from p2ptrain.page.listen_address import LOOPBACK
from peer.owner.settings import COMPILE_VARIABLE
from peer.testnet.processes import Wrap

LABEL = "p2ptrain.testnet"
"""Label of all containers and networks of one testnet; the value is its mark."""
FOLDER_LABEL = "p2ptrain.testnet.out"
"""Label of the same containers and networks; the value is the folder that they write to, by which the next testnet
there finds them."""
COMMAND_DEADLINE_S = 60.0
"""Timeout of a docker command. Guess: it answers within a second; times on a busy machine would settle it."""
IMAGES = {"bootstrap": "p2ptrain-testnet-bootstrap", "peer": "p2ptrain-testnet-peer"}
"""Image names, distinct from ``p2ptrain-peer`` in the documentation, which may contain CUDA."""
SOURCE = Path(__file__).parent.parent
"""Clone from which images are built."""
LINE = "/usr/local/bin/p2ptrain-line"
"""Path of docker/line.sh in the images."""
PROBE_S = 20.0
"""Time for a container to try what its kernel supports. Guess: less than a second; times on a busy machine would settle
it."""
START_S = 30.0
"""Time for a container to run. Guess: one second; times on a busy machine would settle it."""
BUILD_VARIABLE = "P2PTRAIN_DOCKER_BUILD"
"""Variable with further options of ``docker build``, in shell syntax."""


@dataclass(slots=True)
class Containers:
    """Stage ``docker``. ``mark`` distinguishes our containers from others."""

    script: Script
    out: Path
    mark: str
    page_port: str = ""
    """Port of this computer at which the first bootstrap shows the swarm; empty for no page."""
    arguments: Sequence[str] = ()
    _names: dict[str, str] = field(default_factory=dict)
    """Current container name by peer."""
    _count: int = 0
    _owner: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._owner = owner(docker("info", "--format", "{{.SecurityOptions}}", check=False))
        docker("network", "create", *self._labels, self._network)

    @property
    def _labels(self) -> list[str]:
        return ["--label", f"{LABEL}={self.mark}", "--label", f"{FOLDER_LABEL}={self.out.absolute()}"]

    @property
    def _network(self) -> str:
        return f"p2ptrain-{self.mark[:12]}"

    @property
    def page(self) -> Sequence[str]:
        return ["--page", f"0.0.0.0:{self.page_port}"] if self.page_port else ()

    def _published(self, who: str) -> list[str]:
        """Return options that publish the page. The token is not on the command line, which every user of this
        computer can read.
        """
        if who != BOOTSTRAP or not self.page_port:
            return []
        port = f"{LOOPBACK}:{self.page_port}:{self.page_port}"
        return ["--publish", port, "--env", stages.TOKEN, "--env", f"{stages.HOSTS}={stages.OWN_NAMES}"]

    def inside(self, host: str, who: str) -> Wrap:
        self._count += 1
        name = self._names[who] = f"{self._network}-{self._count}"
        image = IMAGES["bootstrap" if who in self.script.bootstraps else "peer"]
        settings = next((peer.settings for peer in self.script.peers if peer.name == who), None)
        shaped = ["--cap-add", "NET_ADMIN"] if line_of(settings) else []

        def contained(*command: str) -> list[str]:
            _, *rest = command  # drop the path of our Python; images have their own
            options = [
                *("--rm", "--init", "--pull", "never", "--name", name, "--hostname", name, "--network", self._network),
                *(*self._labels, *self._owner, "--workdir", "/tmp", "--no-healthcheck"),
                *("--mount", f"type=bind,source={self.out.absolute()},target={self.out.absolute()}"),
                *("--env", f"{COMPILE_VARIABLE}=off"),
                *("--env", "OMP_NUM_THREADS=1", "--env", "XDG_CACHE_HOME=/tmp/cache", "--env", "HOME=/tmp"),
                *("--stop-timeout", "60", "--entrypoint", "python3"),
                *(*shaped, *self._published(who)),
            ]
            return [executable(), "run", *options, image, *rest]

        return contained

    def kill(self, who: str, pid: int) -> None:
        docker("kill", self._names[who])

    def suspend(self, who: str, pid: int) -> SuspendedContainer:
        return SuspendedContainer(self._names[who])

    def second(self, host: str) -> SecondComputer:
        raise AssertionError("plan.check refuses a second computer here")

    def change_network(self, host: str, kind: ActKind) -> None:
        raise AssertionError("plan.check refuses networks that change here")

    def cut_link(self, host: str, is_cut: bool) -> None:
        """Do nothing: a suspended container answers nothing, and its link is not cut."""

    def line_bytes(self, host: str) -> int | None:
        return None

    def limit(self, host: str, cores: float | None) -> None:
        """Do nothing: ``plan.check`` refuses limits here."""

    def partition(self, key: str) -> None:
        raise AssertionError("plan.check refuses partitions here")

    heal = partition

    def started(self, who: str, settings: RealGroup | None) -> None:
        """Set up the container's link as soon as it runs (docker/line.sh). Raises DeviceError if that fails."""
        line = line_of(settings)
        if not line:
            return
        name = self._names[who]
        if not self._runs(name):
            raise DeviceError(
                f"The container of {who} did not start within {START_S:.0f} s, so its link could not be set up.",
                f"See {self.out / who / 'output.log'}; on a busy machine try again.",
            )
        docker("exec", "--user", "root", name, "sh", LINE, *line)

    def _runs(self, name: str) -> bool:
        """Wait until the container runs; return whether it does within START_S. Docker has no call that waits for a
        start.
        """
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if docker("inspect", "--format", "{{.State.Running}}", name, check=False).strip() == "true":
                return True
            time.sleep(0.2)
        return False

    def count_left(self) -> int:
        """Return the number of our containers that still exist."""
        return len(docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}={self.mark}").split())

    def close(self) -> None:
        _sweep(f"label={LABEL}={self.mark}")


@dataclass(slots=True)
class SuspendedContainer:
    """Suspended container: all its processes but init are stopped by signals, since not every engine can freeze
    containers.
    """

    name: str
    _over: bool = False

    def __post_init__(self) -> None:
        docker("exec", self.name, "sh", "-c", "kill -STOP -1")

    def end(self) -> None:
        """Resume the container. May be called twice. Raises DeviceError if it stays suspended."""
        if not self._over:
            docker("exec", self.name, "sh", "-c", "kill -CONT -1")
            self._over = True


def owner(security: str) -> list[str]:
    """Return options of ``docker run`` by which homes belong to our user.

    Args:
        security: the engine's security options.
    """
    options = ["--security-opt", "label=disable"] if "name=selinux" in security else []  # OUT has no SELinux label
    if "name=rootless" in security:  # root in its containers is our user
        return [*options, "--user", "0:0"]
    own = ["--user", f"{os.getuid()}:{os.getgid()}"]
    return [*options, *own, "--userns", "host"] if "name=userns" in security else [*options, *own]


def line_of(settings: RealGroup | None) -> list[str]:
    """Return the arguments of docker/line.sh for a peer's link; empty if it needs none. Pure."""
    if settings is None:
        return []
    rates = ["" if rate is None else f"{rate:.15g}" for rate in (settings.up_mbit_s, settings.down_mbit_s)]
    late_s, lost = own_latency(settings), settings.packet_loss
    if late_s or lost:  # netem delays only outgoing packets: twice the delay makes round trips correct
        return [*rates, f"{2000 * late_s:g}", f"{100 * lost:g}", "both"]
    return rates if any(rates) else []


def sweep_folder(out: Path) -> None:
    """Remove what a killed testnet left. Call it only while holding the folder's lock."""
    _sweep(f"label={FOLDER_LABEL}={out.absolute()}")


def _sweep(mine: str) -> None:
    """Remove containers, then networks, that match a filter; a network in use cannot be removed."""
    if left := docker("ps", "--all", "--quiet", "--filter", mine).split():
        docker("rm", "--force", "--volumes", *left, check=False)  # some may be removing themselves at the same time
    if networks := docker("network", "ls", "--quiet", "--filter", mine).split():
        docker("network", "rm", *networks, check=False)


_VERSION_FAILED = "docker version failed: "


def check_engine() -> None:
    """Raise DeviceError with a remedy if no Docker engine answers."""
    if shutil.which("docker") is None:
        raise DeviceError("The command docker is not installed.", "Install Docker (docs.docker.com/engine/install).")
    try:
        docker("version", "--format", "{{.Server.Version}}")
    except DeviceError as error:
        if not error.problem.startswith(_VERSION_FAILED):  # a timeout, which has its own message
            raise
        if "permission denied" in error.problem.lower():
            raise DeviceError(
                "The Docker engine does not let this user in.",
                "Type: sudo usermod -aG docker $USER; then log in again. Or run this command with sudo.",
            ) from None
        raise DeviceError(
            f"No Docker engine answers: {error.problem.removeprefix(_VERSION_FAILED)}",
            "Start it: sudo systemctl start docker.",
        ) from None


def check_folder(out: Path) -> None:
    """Raise HomeError if containers cannot mount this folder: ``--mount`` takes fields of a CSV line."""
    if any(mark in str(out.absolute()) for mark in ',"\n'):
        raise HomeError(
            f"{out} cannot be mounted in a container: its path contains a comma, a double quote or a line break.",
            "Choose another folder with --out.",
        )


def build() -> None:
    """Build both images from this clone; the engine's output goes to ours. Raises DeviceError."""
    arguments = shlex.split(os.environ.get(BUILD_VARIABLE, ""))
    if not (SOURCE / "docker" / "Dockerfile").exists():
        raise DeviceError(f"{SOURCE / 'docker' / 'Dockerfile'} does not exist.", "Run this from a clone of p2ptrain.")
    for target, image in IMAGES.items():
        command = [executable(), "build", "--file", str(SOURCE / "docker" / "Dockerfile"), "--target", target]
        done = subprocess.run([*command, "--tag", image, *arguments, str(SOURCE)], check=False)
        if done.returncode:
            raise DeviceError(
                f"The image {image} could not be built; the engine's output is above.",
                f"The usual cause is a missing network in containers: try {BUILD_VARIABLE}='--network host'."
                ' For others see docs/DOCKER.md, "Usual causes".',
            )


def executable() -> str:
    """Return the path of docker. Raises FileNotFoundError without it."""
    found = shutil.which("docker")
    if found is None:
        raise FileNotFoundError("docker")
    return found


def docker(*arguments: str, check: bool = True) -> str:
    """Run a docker command and return its output. Raises DeviceError if it times out, or fails and ``check`` is
    set.
    """
    try:
        done = subprocess.run(
            [executable(), *arguments], check=False, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"The Docker engine did not answer within {COMMAND_DEADLINE_S:.0f} s (docker {arguments[0]}).",
            "Restart it: sudo systemctl restart docker.",
        ) from None
    if check and done.returncode:
        raise DeviceError(
            f"docker {arguments[0]} failed: {' '.join(done.stderr.split())}",
            'This is the engine\'s message; docs/DOCKER.md, "Usual causes", explains the most frequent ones.',
        )
    return done.stdout


@functools.cache
def has_netem(run: Callable[..., str] = docker) -> bool:
    """Return whether a container's link can have delay and loss. Tried once, on the loopback of a container.

    Args:
        run: as ``docker``. Needs the image of a peer.
    """
    attempt = f'DEVICE=lo timeout {PROBE_S:.0f} sh {LINE} "" "" 1 1 both >&2 && echo yes || echo no'
    options = ["--rm", "--pull", "never", "--network", "none", "--user", "root", "--cap-add", "NET_ADMIN"]
    return run("run", *options, "--entrypoint", "sh", IMAGES["peer"], "-c", attempt).strip() == "yes"
