"""Programs that keep the computer busy, as users' other programs do: ``python -m lab.busy compute|messages``.

``compute`` never leaves its core. ``messages`` is two processes that wake each other a thousand times a second and
compute for a moment each time, as network programs and p2pd do: a scheduler prefers those to programs that compute.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

BURST_S = 0.0005
"""Computing per message. With ``PAUSE_S`` a pair takes half a core if it gets one."""
PAUSE_S = 0.0005

KINDS = ("compute", "messages")


def compute(seconds: float = float("inf")) -> None:
    """Compute for that long."""
    until, data = time.monotonic() + seconds, b""
    while time.monotonic() < until:
        data = hashlib.sha256(data).digest()


def answer(link: Connection, other_end: Connection) -> None:
    """Answer each message after a burst of computing, until the other side is gone."""
    other_end.close()  # inherited: while it is open here, the link does not end with the other process
    try:
        while True:
            message = link.recv_bytes()
            compute(BURST_S)
            link.send_bytes(message)
    except (EOFError, OSError):
        return


def converse() -> None:
    """Send messages to a child and wait for its answers."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=answer, args=(theirs, ours), daemon=True)
    child.start()
    theirs.close()
    while True:
        ours.send_bytes(bytes(1000))
        ours.recv_bytes()
        compute(BURST_S)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    compute() if sys.argv[1] == "compute" else converse()
