"""Cell: processes that end together with their starter, at once and in every case, and leave nothing behind.

A process may die by SIGKILL while its children are stopped (SIGSTOP) and cannot receive any other signal. The first
process of a cell is therefore the init of its own PID namespace: when it ends, the kernel kills everything in the cell,
stopped processes and grandchildren included. The init ends when its guard ends (parent-death signal), and the guard
ends when we do. Inside, /proc shows only the cell, and temporary files, including sockets, are in a file system in
memory that is unmounted with the cell.

::

    starter ── guard ── init of the cell ── everything else

The guard forwards SIGTERM and ends with the init's status. Needs Linux and root.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from p2ptrain.base.errors import DeviceError

PLACES = ("/mnt", "/media", "/srv", "/opt")
"""Candidates for a cell's temporary directory: they exist on every system and are often empty (Filesystem Hierarchy
Standard 3.0, chapter 3). The path must be short because a socket's path is limited to 108 bytes."""

REFUSED = 125
"""Exit status if this machine does not allow a cell; standard error says why."""

_GUARD = r"""
import ctypes, json, os, select, signal, sys
NEWNS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x8000000, 0x20000000, 0x40000000  # linux/sched.h
NOSUID, NODEV, NOEXEC, REC, PRIVATE = 2, 4, 8, 16384, 1 << 18  # linux/mount.h
libc = ctypes.CDLL(None, use_errno=True)

def checked(result, what):
    if result != 0:
        print("%s: %s" % (what, os.strerror(ctypes.get_errno())), file=sys.stderr)
        sys.exit(125)  # REFUSED

os.setsid()
libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("our parent is gone")
sockets, environment, command = sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
checked(libc.unshare(NEWPID | NEWNET | NEWNS | NEWIPC), "unshare")
here, there = os.pipe()
child = os.fork()
if child == 0:
    os.close(there)
    libc.prctl(1, signal.SIGKILL)
    if select.select([here], [], [], 0)[0]:  # closed: the guard has already ended
        os._exit(1)
    checked(libc.mount(b"none", b"/", None, REC | PRIVATE, None), "mount /")
    checked(libc.mount(b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC, None), "mount /proc")
    checked(libc.mount(b"tmpfs", sockets.encode(), b"tmpfs", NOSUID | NODEV, b"mode=700"), "mount " + sockets)
    os.environ.update(environment, TMPDIR=sockets)
    os.execv(command[0], command)  # SIGTERM stays blocked until the command handles it
signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(status if status >= 0 else 128 - status)
"""


def cell_command(command: Sequence[str], **environment: str) -> list[str]:
    """Return the command that runs ``command`` (an absolute path and arguments) as the init of a cell, with these
    variables.

    The command starts with SIGTERM blocked, because an init without a handler would miss it: call ``unblock_sigterm``
    once there is a handler. The thread that starts the cell must live as long as the cell, as with ``launched``.
    """
    place = empty_directory(PLACES)
    return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), place, json.dumps(environment), *command]


def run_in_cell(command: Sequence[str], grace_s: float, **environment: str) -> int:
    """Run ``command`` in a cell to its end and return its status.

    Meanwhile SIGTERM interrupts this process as Ctrl+C does. After an interrupt the cell has ``grace_s`` seconds to
    end.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        inside = subprocess.Popen(cell_command(command, **environment), stdin=subprocess.DEVNULL)
        try:
            return inside.wait()
        except BaseException:
            inside.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    inside.wait(grace_s)
            finally:
                inside.kill()
                inside.wait()
            raise
    finally:
        signal.signal(signal.SIGTERM, before)


def empty_directory(places: Sequence[str]) -> str:
    """Return the first of these that is an empty directory, so that the mount hides no file. Raises DeviceError without
    one.
    """
    for place in map(Path, places):
        if place.is_dir() and not any(place.iterdir()):
            return str(place)
    raise DeviceError(
        f"A testnet in namespaces needs one empty directory for temporary files: {', '.join(places)}.",
        "Create or empty one of them; nothing is written to it.",
    )


def unblock_sigterm() -> None:
    """Unblock SIGTERM in the init of a cell once it has a handler; a signal that came earlier is delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
