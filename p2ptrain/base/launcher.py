"""Children that outlive no one.

A child starts in a session of its own, so that Ctrl+C in the terminal reaches us and not it: we end things in order. On
Linux it gets SIGTERM when we die, also by SIGKILL (parent-death signal, prctl(2); the parent whose death counts is the
*thread* that started it).
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
        sys.exit("our parent is gone")
os.environ.update(json.loads(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""


def launched(*command: str, **environment: str) -> list[str]:
    """The command that runs ``command`` (first an absolute path) as such a child, with these variables set."""
    return [sys.executable, "-I", "-S", "-c", _SCRIPT, str(os.getpid()), json.dumps(environment), *command]
