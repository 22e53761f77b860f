"""Network namespaces that need no cleanup: each is a file descriptor of this process, without a name.

The kernel keeps a namespace, with its links, addresses and filters, while a process is inside or a descriptor is open.
Ours are closed when this process ends, even by SIGKILL. (``ip netns add`` would leave a name in /run/netns.)

Needs Linux and root.
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
"""Timeout of a call of ip, tc or nft. Guess: they take 5 ms; times on a busy machine would settle it."""
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "nsenter": "util-linux"}
"""Programs that are used, with their Debian packages."""
_SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
"""Search path for root's tools, which root's own PATH may lack (su without -)."""


def check_support() -> None:
    """Raise DeviceError with a remedy if this machine cannot make network namespaces."""
    remedy = "Or take --stage local: the same peers on the loopback, without rates, routers and partitions."
    if sys.platform != "linux":
        raise DeviceError(f"Network namespaces need Linux, and this is {sys.platform}.", remedy)
    if os.geteuid() != 0:
        how = 'Run it with sudo and its full path: sudo "$(command -v p2ptrain)" testnet'
        raise DeviceError("Network namespaces need root.", f"{how} …. {remedy}")
    missing = {tool: package for tool, package in TOOLS.items() if shutil.which(tool, path=_SEARCH_PATH) is None}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        raise DeviceError(f"Not installed: {', '.join(missing)}.", f"Type: apt-get install {packages}. {remedy}")
    try:
        Namespace("probe").close()
    except OSError as error:
        raise DeviceError(
            f"This machine cannot make network namespaces: {error.strerror}.",
            f"If this is a container, start it with --privileged. {remedy}",
        ) from error


def tool(name: str) -> str:
    """Return the absolute path of one of TOOLS."""
    found = shutil.which(name, path=_SEARCH_PATH)
    if found is None:
        raise FileNotFoundError(name)
    return found


class Namespace:
    """New network namespace, which contains only a loopback that is down."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._descriptor = _in_a_thread(_fresh)

    @property
    def path(self) -> str:
        """Argument for ``ip … netns`` and ``nsenter --net=``, in any process that sees this one."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` (an absolute path and arguments) in here, with the same process
        id.
        """
        return [tool("nsenter"), f"--net={self.path}", "--", *command]

    def run(self, name: str, *arguments: str, given: str = "") -> str:
        """Run one of TOOLS in here and return its output. Raises RuntimeError with its error output if it fails."""
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
        """Run several ``ip`` commands in one call."""
        self.run("ip", "-batch", "-", given="\n".join([*lines, ""]))

    def forward(self) -> None:
        """Forward packets between links, as routers do."""
        self.call(lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))

    def call(self, function: Callable[[], T]) -> T:
        """Call the function in a thread inside; sockets that it makes stay in the namespace."""

        def entered() -> T:
            _checked(_libc().setns(self._descriptor, CLONE_NEWNET))
            return function()

        return _in_a_thread(entered)

    def close(self) -> None:
        """Close the descriptor. May be called twice. Processes inside keep the namespace alive until they end."""
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
    """Call a function in a new thread and return its result. A thread can enter another namespace alone."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again in the calling thread
            errors.append(error)

    thread = threading.Thread(target=body, name="namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
