"""A peer that trains nothing before the file ``go`` exists beside its home, while its network runs.

Peers whose processes start seconds apart then share their run from its first token: otherwise the first one may train
a small run alone. Takes the arguments of ``python -m peer``, with ``--home``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from p2ptrain.cli import run_command
from p2ptrain.host.loop import Signals, train
from peer import app
from peer.cli import peer

GO = Path(sys.argv[sys.argv.index("--home") + 1]).parent / "go" if "--home" in sys.argv else Path()


def train_from_go(learner: Any, signals: Signals, *arguments: Any) -> None:
    while not GO.exists() and not signals.stop.is_set():
        time.sleep(0.01)
    train(learner, signals, *arguments)


def hold() -> None:
    """Make this process's trainer wait for the file."""
    app.train = train_from_go


if __name__ == "__main__":
    hold()
    run_command(peer, name="together")
