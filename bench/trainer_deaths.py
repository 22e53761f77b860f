"""Seconds that a killed trainer costs: from SIGKILL to the end of the next inner step.

One process, and two ranks that are two stages, of which the second one is killed; both eager, with the demo's model.
The first pause before another start, ``base.backoff.PAUSE_S``, is in it.

    python -m bench.trainer_deaths        as JSON
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from p2ptrain.base.errors import TrainerAwayError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.manifest import create_run, sign_run
from p2ptrain.net.identity import Identity
from p2ptrain.tokens.opened import user_store
from peer.home import Home
from peer.training.plan import TrainerPlan
from peer.training.remote_task import RemoteTask

STEPS = 5
"""Inner steps before the end."""
PRESET = "demo"


def measure() -> dict[str, float]:
    """Return the seconds of one process and of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        home.path.mkdir()
        create_run(Path(folder) / "run", PRESET, {"outer.recipe": "local", "outer.exchanges_per_step": 0})
        home.save_manifest(sign_run(Path(folder) / "run").signed)
        return {"killed trainer": seconds_lost(home, 1), "killed rank": seconds_lost(home, 2)}


def seconds_lost(home: Home, ranks: int) -> float:
    plan = TrainerPlan(
        home=str(home.path),
        peer=Identity.load_or_create(home.identity).peer_id,
        devices=("cpu",) * ranks,
        stages=ranks,
        threads=1,
        activation_bytes=10**9,
        most_sequences=16,
        store=str(user_store().directory),
        index=None,
        weights=None,
        begins=True,
        tried_tokens=512,
        tried_s=60.0,
        compile="off",
        memory_bytes=None,
    )
    task = RemoteTask(plan, 1, MemoryLog(), lambda: False)
    try:
        task.start()
        for _ in range(STEPS):
            task.inner_step(0.0)
        killed_at = time.perf_counter()
        os.kill(_last_rank(task), signal.SIGKILL)
        is_away = False
        while True:
            try:
                task.inner_step(0.0)
            except TrainerAwayError:
                is_away = True
                time.sleep(0.01)
            else:
                if is_away:
                    return round(time.perf_counter() - killed_at, 1)
    finally:
        task.close()


def _last_rank(task: RemoteTask) -> int:
    assert task.pid is not None
    children = psutil.Process(task.pid).children(recursive=True)
    ranks = [each for each in children if "peer.training.language_trainer" in each.cmdline()]
    return ranks[-1].pid if ranks else task.pid


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
