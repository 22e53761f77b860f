"""A cell: processes that end together with their starter, at once and without exception, and leave nothing behind.

A process may die by SIGKILL while its children are frozen (SIGSTOP) and cannot even be told. So the first process of a
cell is the init of a PID namespace of its own: when it ends, the kernel kills all that is in the cell, frozen or not,
grandchildren too. It ends when its guard ends (parent-death signal), and the guard when we do. Inside, /proc shows the
cell alone, and temporary files, sockets among them, lie in memory: mounted for the cell and gone with it.

::

    starter ── guard ── init of the cell ── everything else

The guard passes SIGTERM on and ends with the init's status. Linux only, and root only.
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
"""Where a cell's temporary files may lie: directories that every system has and that are often empty (Filesystem
Hierarchy Standard 3.0, chapter 3). The path must be short: a socket's may have 108 bytes."""

REFUSED = 125
"""The exit status of a cell that this machine does not let us make; its standard error says why."""

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
    if select.select([here], [], [], 0)[0]:  # closed: the guard was gone before
        os._exit(1)
    checked(libc.mount(b"none", b"/", None, REC | PRIVATE, None), "mount /")
    checked(libc.mount(b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC, None), "mount /proc")
    checked(libc.mount(b"tmpfs", sockets.encode(), b"tmpfs", NOSUID | NODEV, b"mode=700"), "mount " + sockets)
    os.environ.update(environment, TMPDIR=sockets)
    os.execv(command[0], command)  # SIGTERM stays blocked until the command is ready for it
signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(status if status >= 0 else 128 - status)
"""


def in_a_cell(command: Sequence[str], **environment: str) -> list[str]:
    """The command that runs ``command`` (first an absolute path) as the init of a cell, with these variables set.

    It starts with SIGTERM blocked, which an init without a handler would miss: ``hear_sigterm`` when there is one.
    Whoever starts it must live as long as the cell shall: the thread that does counts, as with ``launched``.
    """
    place = place_for_sockets(PLACES)
    return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), place, json.dumps(environment), *command]


def run_in_a_cell(command: Sequence[str], grace_s: float, **environment: str) -> int:
    """Run ``command`` in a cell to its end; its status.

    While it runs, SIGTERM interrupts us as Ctrl+C does. When we are interrupted, it has ``grace_s`` seconds to end.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        inside = subprocess.Popen(in_a_cell(command, **environment), stdin=subprocess.DEVNULL)
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


def place_for_sockets(places: Sequence[str]) -> str:
    """The first of them that is an empty directory, so that nothing is hidden in the cell. DeviceError without one."""
    for place in map(Path, places):
        if place.is_dir() and not any(place.iterdir()):
            return str(place)
    raise DeviceError(
        f"Temporary files of a testnet in namespaces need an empty directory among {', '.join(places)}.",
        "Make one of them; nothing will be written to it.",
    )


def hear_sigterm() -> None:
    """Call it in the init of a cell when SIGTERM has a handler: what came before comes now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
