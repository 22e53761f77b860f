"""A peer that begins as ``together`` does, and reads no held-out text for its final loss before HOME/read exists.

Takes the arguments of ``python -m peer``, with ``--home``.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import together

from p2ptrain.cli import run_command
from p2ptrain.train import inner
from p2ptrain.train.evaluate import HeldOutLoss, validation_loss
from peer.cli import peer

MARK = Path(sys.argv[sys.argv.index("--home") + 1]) / "read"
PATIENCE_S = 240.0


def read(*arguments: Any, **others: Any) -> HeldOutLoss:
    patience_s, deadline = arguments[4], time.monotonic() + PATIENCE_S
    while patience_s == math.inf and not MARK.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return validation_loss(*arguments, **others)


if __name__ == "__main__":
    inner.validation_loss = read
    together.hold()
    run_command(peer, name="slow_reader")
