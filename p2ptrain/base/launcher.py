"""Command line for child processes that never outlive their parent.

A child starts in its own session, so Ctrl+C in the terminal reaches only the parent, which shuts down in order. On
Linux the child gets SIGTERM when its parent dies, even by SIGKILL (parent-death signal, prctl(2); the parent whose
death counts is the *thread* that started the child). A child may also be started without the right to create UDP
sockets (``base.udp_filter``).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from p2ptrain.base import udp_filter

AUTOGROUP, AUTOGROUP_TRIES, AUTOGROUP_S = Path("/proc/self/autogroup"), 5, 0.15
"""File of this session's priority, and tries to write it, as Linux takes one such change each .1 s (sched(7))."""
WATCH_S = 0.5
"""Seconds between two looks of ``end_with_parent``."""

_SCRIPT = """
import json, os, sys
os.setsid()
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG survives the exec
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent process has ended")
    program = bytes.fromhex(sys.argv[3])
    if program:
        class Fprog(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]
        libc = ctypes.CDLL(None, use_errno=True)
        fprog = ctypes.byref(Fprog(len(program) // 8, program))
        # PR_SET_NO_NEW_PRIVS, without which only root may filter; PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, fprog, 0, 0):
            sys.exit("no seccomp filter: " + os.strerror(ctypes.get_errno()))
os.environ.update(json.loads(sys.argv[2]))
os.execv(sys.argv[4], sys.argv[4:])
"""


def launched(*command: str, udp: bool = True, **environment: str) -> list[str]:
    """Return the command that runs ``command`` (first an absolute path) as such a child with these variables set.

    Without ``udp`` the child cannot create UDP sockets, except where ``udp_filter.unavailable`` says why not.
    """
    is_filtered = not udp and not udp_filter.unavailable()
    program = (is_filtered and udp_filter.program(platform.machine())) or b""
    child = (str(os.getpid()), json.dumps(environment), program.hex())
    return [sys.executable, "-I", "-S", "-c", _SCRIPT, *child, *command]


def lower_priority(niceness: int) -> None:
    """Let this process, which leads its session, yield to its parent by so many steps of nice(2).

    Where Linux groups processes by session, nice(2) counts within one alone (autogroups, sched(7)).
    """
    os.nice(niceness)
    for _ in range(AUTOGROUP_TRIES):
        try:
            with AUTOGROUP.open("r+", encoding="ascii") as file:
                file.write(str(os.nice(0)))
            return
        except BlockingIOError:
            time.sleep(AUTOGROUP_S)
        except OSError:  # not Linux, or there are none
            return


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End a child at once, with all that descend from it, whatever their sessions, and wait for it. Any thread."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.poll() is None:
            child = psutil.Process(process.pid)
            child.suspend()  # it starts nothing more
            for each in (child, *child.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
    process.wait()


def end_with_parent(parent: int) -> None:
    """End this process soon after its parent, by a thread: for programs that another one than ``launched`` starts.

    Args:
        parent: its process, as it was when it started this one; it may have ended since.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
