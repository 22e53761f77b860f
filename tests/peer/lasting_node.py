"""A node that trains until it is ended and says each step's loss: ``lasting_node.py FILE``, with a trainer's plan."""

from __future__ import annotations

import sys
from pathlib import Path

from p2ptrain.base.errors import TrainerAwayError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.trainer import process
from peer.training.plan import TrainerPlan
from peer.training.remote_task import RemoteTask

if __name__ == "__main__":
    plan = TrainerPlan.model_validate_json(Path(sys.argv[1]).read_text())
    task = RemoteTask(plan, 64, MemoryLog(), lambda: False)
    task.start()
    process.LISTENING_S = 0.3
    while True:
        try:
            sys.stdout.write(f"{task.inner_step(0.0).loss}\n")
            sys.stdout.flush()
        except TrainerAwayError as away:
            sys.exit(f"the trainer died: {away.__cause__}")
