"""A peer that begins as ``together`` does, and reads no held-out text for its final loss before HOME/read exists.

Takes the arguments of ``python -m peer``, with ``--home``.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import together

from p2ptrain.cli import run_command
from p2ptrain.ports import GoesOn, HeldOutLoss
from peer.cli import peer
from peer.training.remote_task import RemoteTask

MARK = Path(sys.argv[sys.argv.index("--home") + 1]) / "read"
PATIENCE_S = 240.0
read = RemoteTask.held_out_loss


def read_late(task: RemoteTask, most_tokens: int, patience_s: float, goes_on: GoesOn) -> HeldOutLoss:
    deadline = time.monotonic() + PATIENCE_S
    while patience_s == math.inf and not MARK.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return read(task, most_tokens, patience_s, goes_on)


if __name__ == "__main__":
    RemoteTask.held_out_loss = read_late
    together.hold()
    run_command(peer, name="slow_reader")
