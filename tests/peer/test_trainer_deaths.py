"""What the death of a language model's trainer costs its node, with real processes."""

from __future__ import annotations

import errno
import logging
import signal
import sys
from pathlib import Path

import pytest
import torch
from in_process import InProcessTrainer
from trainers import started, wait_for_return

from p2ptrain import codec
from p2ptrain.base.errors import TrainerAwayError, UserError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.learner import REWARM_STEPS, Learner
from p2ptrain.host.rules import LearnerRules
from p2ptrain.outer.step import OuterRule
from p2ptrain.trainer import process
from peer.training import language_trainer, remote_task, trainer_supervisor

pytestmark = pytest.mark.net

RULES = LearnerRules(inner_steps=4, run_tokens=1e9, outer=OuterRule(0.7, 0.5))


def failing(folder: Path, step: int, *faults: str) -> tuple[str, ...]:
    (folder / "lives").mkdir()
    script = Path(__file__).parent / "failing_trainer.py"
    return sys.executable, str(script), str(folder / "lives"), str(step), *faults


def test_faults_cost_a_step_each_and_growing_pauses(plan, monkeypatch, in_own_process, tmp_path):
    """Every trainer makes one step, and dies in its second one."""
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.01, 0.04))
    faults = "kill", "memory", "no tokens"
    log, losses = MemoryLog(), []
    with started(plan, log, failing(tmp_path, 2, *faults)) as task:
        for _ in faults:
            losses.append(task.inner_step(256.0 * len(losses)).loss)
            with pytest.raises(TrainerAwayError) as away:
                task.inner_step(256.0 * len(losses))
            assert not away.value.is_torn
            wait_for_return(task)
        losses.append(task.inner_step(256.0 * len(losses)).loss)
        counters = task.state_dict()["counters"].tolist()
    monkeypatch.setattr(remote_task, "TrainerHandle", InProcessTrainer)
    with started(plan) as task:
        undisturbed = [task.inner_step(256.0 * number).loss for number in range(len(losses))]
        assert counters == task.state_dict()["counters"].tolist()
    assert losses[:2] == undisturbed[:2]
    assert losses[2] == pytest.approx(undisturbed[2], rel=1e-5)  # micro-batches of 2
    deaths = [fields for kind, fields in log.notes if kind == "trainer died"]
    assert log.kinds() == ["trainer died", "trainer returned"] * len(faults)
    assert [fields["micro_batch"] for fields in deaths] == [None, 2, None]
    assert [fields["seconds"] for fields in deaths] == [0.01, 0.02, 0.04]
    expected = "signal 9", "CUDA out of memory", "tokens: Input should be"
    for part, fields in zip(expected, deaths, strict=True):
        assert part in fields["why"]


def test_weights_of_a_trainer_that_died_while_it_moved_them_are_shown_to_nobody(
    plan, monkeypatch, in_own_process, tmp_path
):
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.01, 0.01))
    log = MemoryLog()
    with started(plan, log, failing(tmp_path, 3, "torn")) as task:
        learner = Learner(task, RULES, [slice(0, len(task.theta))], codec.get("fp32"), log)
        initial = task.theta.clone()
        for _ in range(2):
            learner.advance()
        assert not torch.equal(task.theta, initial)
        assert learner.advance() == []
        assert learner.is_away
        assert torch.equal(task.theta, initial)
        assert not task.state_dict()["first_moment"].any()
        wait_for_return(task)
        assert task.state_dict()["counters"].tolist() == [2, 0, REWARM_STEPS, 0]
        while learner.step == 0:
            learner.advance()
        assert (learner.tokens, log.kinds()) == (6 * 256, ["trainer died", "discarded", "trainer returned"])
        assert torch.equal(torch.cat(list(learner.payloads.published.slow)), learner.slow)


def test_what_is_there_can_be_saved_after_a_fault_of_the_owner_and_no_other_trainer_starts(
    plan, in_own_process, tmp_path
):
    log = MemoryLog()
    with started(plan.model_copy(update={"shares": False}), log, failing(tmp_path, 2, "owner")) as task:
        task.inner_step(0.0)
        for _ in range(2):
            with pytest.raises(UserError, match="No text"):
                task.inner_step(256.0)
        assert task.state_dict()["counters"][0] == 1
    assert log.kinds() == []


def test_a_frozen_trainer_is_ended_and_replaced(plan, monkeypatch, in_own_process, tmp_path):
    log = MemoryLog()
    with started(plan, log, failing(tmp_path, 2, "freeze")) as task:
        task.inner_step(0.0)
        monkeypatch.setattr(process, "LISTENING_S", 0.1)
        with pytest.raises(TrainerAwayError):
            task.inner_step(0.0)
    (died,) = log.notes
    assert "gave no sign of life" in died[1]["why"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "memory"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (OSError(errno.EIO, "Input/output error", "tokens.bin"), "system"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory"),
        (torch.AcceleratorError("CUDA error: an illegal access\nCompile with ..."), "device"),
        (UserError("No text.", "Give --data."), "user"),
    ],
)
def test_a_trainer_says_by_what_it_ends(error, kind, monkeypatch):
    said = []

    class Here:
        of_environment = classmethod(lambda cls: cls())

        def fail(self, *what):
            said.append(what)

    def live(attachment):
        raise error

    monkeypatch.setattr(language_trainer, "Attachment", Here)
    monkeypatch.setattr(language_trainer, "LogLines", lambda attachment: logging.NullHandler())
    monkeypatch.setattr(language_trainer, "live", live)
    monkeypatch.setattr(language_trainer, "KILLED_FIRST", "0")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert language_trainer.main() > 0
    assert said == [(kind, error)]
