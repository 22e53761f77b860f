"""When checkpoints are saved. tests/peer/test_session_recorder.py has those of a whole session and of a full disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.base.errors import HomeError
from p2ptrain.base.telemetry import MemoryLog
from peer import saving
from peer.saving import CheckpointSaver


@pytest.mark.parametrize(
    ("took_s", "written", "pause_s"),
    [
        (0.02, 7_000_000, 120.0),  # the demo model
        (10.0, 7_000_000, 500.0),  # a slow disk: 2 %
        (2.0, 2_700_000_000, 2333.0),  # llama-135m: 100 GB a day
    ],
)
def test_saves_are_paced_by_what_they_cost(
    monkeypatch: pytest.MonkeyPatch, took_s: float, written: int, pause_s: float
) -> None:
    now, saved_at = 1000.0, list[float]()

    def slow(_: CheckpointSaver) -> int:
        nonlocal now
        saved_at.append(now)
        now += took_s
        return written

    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(CheckpointSaver, "save", slow)
    learner = SimpleNamespace(changes=0, is_waiting=False, is_ahead=False)
    saver = CheckpointSaver(cast(Any, None), cast(Any, learner), dict, MemoryLog())
    saver.begin()
    for at, saves in ((1119.0, 0), (1120.0, 1), (1120.0 + 0.99 * pause_s, 1), (1120.0 + took_s + 1.01 * pause_s, 2)):
        now = at
        saver.save_if_due()
        assert len(saved_at) == saves


def test_a_failure_after_a_failure_is_noted_only() -> None:
    """Check the last save after training failed: nothing may hide why it did."""
    log = MemoryLog()
    learner = SimpleNamespace(state_dict=lambda: 1 / 0, is_ahead=False)
    CheckpointSaver(cast(Any, None), cast(Any, learner), dict, log).rescue()
    assert list(log.notes) == [("not saved", {"what": "a checkpoint", "why": "ZeroDivisionError: division by zero"})]


def test_a_rescue_waits_for_the_step_that_the_trainer_is_ahead() -> None:
    """Check that no checkpoint is written of weights that the trainer moves."""
    done = list[str]()
    learner = SimpleNamespace(changes=0, is_ahead=True)

    def advance() -> None:
        learner.is_ahead = False
        done.append("advance")

    def state_dict() -> None:
        done.append("save")
        raise HomeError("It is full.", "Free some.")

    learner.advance, learner.state_dict = advance, state_dict
    CheckpointSaver(cast(Any, None), cast(Any, learner), dict, MemoryLog()).rescue()
    assert done == ["advance", "save"]
