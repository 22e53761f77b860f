"""Trainers of a small language model for tests, in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from p2ptrain.base.telemetry import MemoryLog
from peer.training.plan import TrainerPlan
from peer.training.remote_task import RemoteTask

PATIENCE_S = 120.0


@contextmanager
def started(
    plan: TrainerPlan, log: MemoryLog | None = None, command: Sequence[str] | None = None
) -> Iterator[RemoteTask]:
    task = RemoteTask(plan, 64, log or MemoryLog(), lambda: False, command)
    try:
        task.start()
        yield task
    finally:
        task.close()


def wait_for_return(task: RemoteTask) -> None:
    until = time.monotonic() + PATIENCE_S
    while not task.is_ready:
        assert time.monotonic() < until
        time.sleep(0.02)


def step_on(task: RemoteTask) -> None:
    while True:
        task.inner_step(0.0)
