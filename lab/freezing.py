"""Machines that sleep: all processes of a peer stopped (SIGSTOP), and woken again also when we die meanwhile.

A stopped process does not hear that its parent died. So a helper stops it, holds it, and wakes it when our end of a
pipe closes, which the kernel does for us whatever happens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_HOLD = r"""
import os, signal, sys
held = []
for pid in map(int, sys.argv[1:]):
    try:
        held.append(os.pidfd_open(pid))  # a number may be somebody else's when we wake it; this may not
        signal.pidfd_send_signal(held[-1], signal.SIGSTOP)
    except ProcessLookupError:
        pass
print("held", flush=True)
sys.stdin.read()
for each in held:
    try:
        signal.pidfd_send_signal(each, signal.SIGCONT)
    except ProcessLookupError:
        pass
"""


class Suspend:
    """Processes that are stopped until ``end``."""

    def __init__(self, pids: Sequence[int]) -> None:
        command = [sys.executable, "-I", "-S", "-c", _HOLD, *map(str, pids)]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._holder.stdout is not None  # asked for
        self._holder.stdout.readline()

    def end(self) -> None:
        """Wake them. Safe to call twice."""
        self._holder.communicate()


def family(pid: int) -> list[int]:
    """A process and all below it, parents first."""
    children: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and (parent := _parent(place)) is not None:
            children.setdefault(parent, []).append(int(place.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def marked(name: str, value: str) -> list[int]:
    """Processes, ourselves and the dead not counted, that have this environment variable with this value."""
    wanted = f"{name}={value}".encode()
    found = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            if wanted in (place / "environ").read_bytes().split(b"\0"):  # a zombie's is empty
                found.append(int(place.name))
        except OSError:  # just gone, or another user's
            continue
    return found


def _parent(place: Path) -> int | None:
    try:
        # The command in parentheses may hold anything; the parent is the second word after it.
        return int((place / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
