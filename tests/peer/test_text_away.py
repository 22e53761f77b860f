"""A trainer whose text is not on this machine: nothing is read meanwhile, and it goes on when the text is here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from trainers import started, wait_for_return

from p2ptrain.base.errors import TrainerAwayError
from p2ptrain.base.telemetry import MemoryLog
from peer.training import trainer_supervisor
from peer.training.plan import TrainerPlan

pytestmark = pytest.mark.net


@pytest.mark.parametrize(("devices", "stages"), [(1, 1), (2, 2), (2, 1)])
def test_it_reads_nothing_and_returns(
    plan: TrainerPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_own_process: None,
    devices: int,
    stages: int,
) -> None:
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.01, 0.02))
    store, log = tmp_path / "store", MemoryLog()
    plan = plan.model_copy(update={"store": str(store), "devices": ("cpu",) * devices, "stages": stages})
    with started(plan, log) as task:
        pid = task.pid
        shutil.rmtree(store)
        with pytest.raises(TrainerAwayError):
            task.loss()
        found = task.held_out_loss(512, 60.0, lambda read, wanted: True)
        assert (found.tokens, found.of > 0) == (0, True)
        assert task.pid == pid
        with pytest.raises(TrainerAwayError):
            task.inner_step(0.0)
        wait_for_return(task)  # the shipped text is written again
        assert task.inner_step(0.0).tokens > 0
        assert task.held_out_loss(512, 60.0, lambda read, wanted: True).tokens == 512
    assert "text" in next(fields["why"] for kind, fields in log.notes if kind == "trainer died")
