"""What a session's record makes of what the trainer measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.telemetry import MemoryLog
from peer.record import STEPS_REMEMBERED, Record


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Its learner made no inner step yet."""
    monkeypatch.setattr(Record, "_save_if_due", lambda self: None)
    learner = SimpleNamespace(
        tokens=0, progress=0.0, step=0, loss=2.0, blocked_s=0.0, longest_blocked_s=0.0, inner_step_s=0.0
    )
    learner.is_waiting = learner.ended = False
    parts: dict[str, Any] = dict.fromkeys(
        ("home", "checkpoints", "me", "run", "nickname", "corpus", "placement", "tokens_per_peer"), 1
    )
    task = SimpleNamespace(coverage=0.0)
    return Record(**cast(Any, {**parts, "learner": learner, "task": task, "notebook": MemoryLog()}))


def steps(record: Record, *seconds: float) -> None:
    for each in seconds:
        cast(Any, record.learner).inner_step_s = each
        record.inner_step_done()


def test_the_longest_stall_is_told_in_median_inner_steps_but_the_first(record: Record) -> None:
    steps(record, 9.0, 0.2, 0.1, 0.2, 0.3)
    cast(Any, record.learner).longest_blocked_s = 0.5
    assert record.summary()["longest_stall_inner_steps"] == 2.5


def test_of_one_inner_step_no_stall_is_known(record: Record) -> None:
    assert record.summary()["longest_stall_inner_steps"] is None
    steps(record, 9.0)
    assert record.summary()["longest_stall_inner_steps"] is None


def test_no_more_steps_are_remembered_than_a_median_needs(record: Record) -> None:
    steps(record, *[1.0] * (3 * STEPS_REMEMBERED))
    assert len(record._inner_steps_s) == STEPS_REMEMBERED
