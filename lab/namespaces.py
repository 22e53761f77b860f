"""Network namespaces that nobody has to clean up: each is a file descriptor of ours, without any name.

The kernel keeps a namespace, with its links, addresses and filters, while a process is inside or a descriptor is open.
Ours close when we end, however we end, SIGKILL included. (``ip netns add`` would leave a name in /run/netns behind.)

Linux only, and root only.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from p2ptrain.base.errors import DeviceError

T = TypeVar("T")

CLONE_NEWNET = 0x40000000  # linux/sched.h
COMMAND_DEADLINE_S = 20.0
"""For one call of ip, tc or nft. A guess: they take 5 ms here."""
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "nsenter": "util-linux"}
"""What we call, and the Debian packages that have it."""
_PLACES = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
"""Where root's tools are, also when root's PATH does not say so (su without -)."""


def check_means() -> None:
    """Raises DeviceError where this machine cannot make namespaces, with what would help."""
    remedy = "Or take --stage local: the same peers on the loopback, without rates, routers and partitions."
    if sys.platform != "linux":
        raise DeviceError(f"Network namespaces are Linux's, and this is {sys.platform}.", remedy)
    if os.geteuid() != 0:
        how = 'Start it with sudo, by its path: sudo "$(command -v p2ptrain)" testnet'
        raise DeviceError("Making network namespaces is root's to do.", f"{how} …. {remedy}")
    missing = {tool: package for tool, package in TOOLS.items() if shutil.which(tool, path=_PLACES) is None}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        raise DeviceError(f"Not installed: {', '.join(missing)}.", f"Type: apt-get install {packages}. {remedy}")
    try:
        Namespace("probe").close()
    except OSError as error:
        raise DeviceError(
            f"This machine makes no network namespaces: {error.strerror}.",
            f"In a container, start that with --privileged. {remedy}",
        ) from error


def tool(name: str) -> str:
    """The absolute path of one of TOOLS."""
    found = shutil.which(name, path=_PLACES)
    if found is None:
        raise FileNotFoundError(name)
    return found


class Namespace:
    """A fresh network namespace: nothing in it but a loopback that is down. ``close`` lets go of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._descriptor = _in_a_thread(_fresh)

    @property
    def path(self) -> str:
        """What ``ip … netns`` and ``nsenter --net=`` take, from any process that sees us."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def inside(self, *command: str) -> list[str]:
        """The command that runs ``command`` (first an absolute path) in here; it replaces itself, so the pid is one."""
        return [tool("nsenter"), f"--net={self.path}", "--", *command]

    def run(self, name: str, *arguments: str, given: str = "") -> str:
        """Run one of TOOLS in here and return what it prints. RuntimeError with its own words when it fails."""
        done = subprocess.run(
            self.inside(tool(name), *arguments),
            input=given,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {name} {' '.join(arguments)}: {done.stderr.strip()}\n{given}")
        return done.stdout

    def ip(self, lines: Sequence[str]) -> None:
        """Several ``ip`` commands at once."""
        self.run("ip", "-batch", "-", given="\n".join([*lines, ""]))

    def forward(self) -> None:
        """Pass packets on from one link to another, as routers do."""
        self.call(lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))

    def call(self, function: Callable[[], T]) -> T:
        """Call the function in a thread that is in here: sockets that it makes stay here."""

        def entered() -> T:
            _checked(_libc().setns(self._descriptor, CLONE_NEWNET))
            return function()

        return _in_a_thread(entered)

    def close(self) -> None:
        """Safe to call twice. What runs inside keeps the namespace alive until it ends."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _fresh() -> int:
    _checked(_libc().unshare(CLONE_NEWNET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_a_thread(function: Callable[[], T]) -> T:
    """Its result. A thread has a network namespace of its own to change; it ends with the thread."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=body, name="namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
