"""Command line for child processes that never outlive their parent.

A child starts in its own session, so Ctrl+C in the terminal reaches only the parent, which shuts down in order. On
Linux the child gets SIGTERM when its parent dies, even by SIGKILL (parent-death signal, prctl(2); the parent whose
death counts is the *thread* that started the child).
"""

from __future__ import annotations

import json
import os
import sys

_SCRIPT = """
import json, os, sys
os.setsid()
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG survives the exec
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent process has ended")
os.environ.update(json.loads(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""


def launched(*command: str, **environment: str) -> list[str]:
    """Return the command that runs ``command`` (first an absolute path) as such a child with these variables set."""
    return [sys.executable, "-I", "-S", "-c", _SCRIPT, str(os.getpid()), json.dumps(environment), *command]
