"""Suspended machines: all processes of a peer are stopped (SIGSTOP), and resumed even if this process dies meanwhile.

A stopped process does not notice that its parent died. A helper therefore stops the processes and resumes them when our
end of a pipe closes, which the kernel does in every case.
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
        held.append(os.pidfd_open(pid))  # a process id may be reused; a pidfd is not
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


class SuspendedProcesses:
    """Processes that are stopped until ``end``."""

    def __init__(self, pids: Sequence[int]) -> None:
        command = [sys.executable, "-I", "-S", "-c", _HOLD, *map(str, pids)]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._holder.stdout is not None  # stdout=PIPE
        self._holder.stdout.readline()

    def end(self) -> None:
        """Resume them. May be called twice."""
        self._holder.communicate()


def process_tree(pid: int) -> list[int]:
    """Return a process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and (parent := _parent(place)) is not None:
            children.setdefault(parent, []).append(int(place.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def processes_with(name: str, value: str) -> list[int]:
    """Return live processes other than this one with this value of an environment variable."""
    wanted = f"{name}={value}".encode()
    found = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            if wanted in (place / "environ").read_bytes().split(b"\0"):  # empty for a zombie
                found.append(int(place.name))
        except OSError:  # the process has ended or belongs to another user
            continue
    return found


def _parent(place: Path) -> int | None:
    try:
        # The command in parentheses may hold anything; the parent is the second word after it.
        return int((place / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
