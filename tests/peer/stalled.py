"""A peer whose second generation of ranks never trains. Takes the arguments of ``python -m peer``.

The variable ``STALLS`` names what its ranks do: nothing (``silent``), or report that they are ready and then nothing
(``ready``).
"""

from __future__ import annotations

import os
import sys

from p2ptrain.cli import run_command
from peer.cli import peer
from peer.team import processes

READY = """print('{"kind":"ready"}', flush=True);""" if os.environ["STALLS"] == "ready" else ""
PROGRAM = f"import time; {READY} time.sleep(900)"

launched = processes.launched
started: list[tuple[str, ...]] = []


def stalling(*command: str) -> list[str]:
    started.append(command)
    return [sys.executable, "-c", PROGRAM] if len(started) > 1 else launched(*command)


if __name__ == "__main__":
    processes.launched = stalling
    run_command(peer, name="stalled")
