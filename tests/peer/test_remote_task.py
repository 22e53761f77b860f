"""The language model's trainer in a process of its own beside the same task in this process."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch
from in_process import InProcessTrainer
from trainers import started, step_on, wait_for_return

from p2ptrain.base.errors import TrainerAwayError
from p2ptrain.base.telemetry import MemoryLog
from peer.training import remote_task, trainer_supervisor
from peer.training.plan import TrainerPlan
from peer.training.trainer_supervisor import TrainerSupervisor

pytestmark = pytest.mark.net

STEPS = 6


def trained(plan: TrainerPlan) -> tuple[list[float], torch.Tensor, dict[str, torch.Tensor], float]:
    """Return the losses of some steps, theta, the rest of the state, and the held-out loss."""
    with started(plan) as task:
        losses = [task.inner_step(256.0 * number).loss for number in range(STEPS)]
        task.store()
        state = {name: tensor.clone() for name, tensor in task.state_dict().items()}
        return losses, task.theta.clone(), state, task.held_out_loss(512, 60.0, lambda read, wanted: True).value


def test_it_computes_what_the_same_task_in_this_process_does(plan, monkeypatch, in_own_process):
    """Check it bit for bit, in the host vector and, as from a card, by copies."""
    theirs = [trained(plan.model_copy(update={"shares": shares})) for shares in (True, False)]
    monkeypatch.setattr(remote_task, "TrainerHandle", InProcessTrainer)
    losses, theta, state, held_out = trained(plan)
    for each in theirs:
        assert each[0] == losses
        assert torch.equal(each[1], theta)
        assert each[3] == held_out
        for name, tensor in state.items():
            assert torch.equal(each[2][name], tensor)


@pytest.mark.parametrize(("devices", "stages"), [(2, 2), (2, 1)])
def test_two_ranks_compute_what_one_process_does_up_to_rounding(plan, monkeypatch, in_own_process, devices, stages):
    losses, theta, state, held_out = trained(plan.model_copy(update={"devices": ("cpu",) * devices, "stages": stages}))
    alone = trained(plan)
    assert losses == pytest.approx(alone[0], rel=1e-5)
    assert held_out == pytest.approx(alone[3], rel=1e-5)
    assert (theta - alone[1]).norm() < 1e-4 * alone[1].norm()
    for name, tensor in alone[2].items():
        assert (state[name] - tensor).double().norm() <= 1e-3 * tensor.double().norm()


def test_a_step_that_was_to_follow_is_forgotten_while_there_is_no_trainer(plan, monkeypatch, in_own_process):
    """Check it, since the next step may be the phase's last, after which the node moves the weights."""
    monkeypatch.setattr(remote_task, "TrainerHandle", InProcessTrainer)
    with started(plan) as task:
        with monkeypatch.context() as away:
            away.setattr(TrainerSupervisor, "is_ready", False)
            task.follow_with(256.0)
            with pytest.raises(TrainerAwayError):
                task.inner_step(0.0)
        task.inner_step(0.0)
        assert not task.is_ahead


def test_a_step_waits_until_its_text_is_here(plan, monkeypatch, in_own_process):
    monkeypatch.setattr(remote_task, "TrainerHandle", InProcessTrainer)
    here, asked = {0, 2}, []

    def is_supplied(step: int) -> bool:
        asked.append(step)
        return step in here

    with started(plan) as task:
        task.is_supplied = is_supplied
        task.follow_with(256.0)
        task.inner_step(0.0)
        assert not task.is_ahead  # the next one has no text
        with pytest.raises(TrainerAwayError):
            task.inner_step(256.0)
        assert task.is_ready
        here.add(1)
        task.follow_with(512.0)
        task.inner_step(256.0)
        assert task.is_ahead
        here.clear()
        task.inner_step(512.0)  # which had begun
        assert asked == [0, 1, 1, 1, 2]


def test_a_rank_that_is_killed_takes_the_others_with_it_and_all_return(plan, monkeypatch, in_own_process):
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.01, 0.01))
    losses = trained(plan)[0]
    with started(plan.model_copy(update={"devices": ("cpu", "cpu"), "stages": 2})) as task:
        assert task.inner_step(0.0).loss == pytest.approx(losses[0], rel=1e-5)
        assert task.pid is not None
        children = psutil.Process(task.pid).children(recursive=True)
        ranks = [each for each in children if "peer.training.language_trainer" in each.cmdline()]
        assert len(ranks) == 2
        ranks[1].kill()
        with pytest.raises(TrainerAwayError):
            step_on(task)
        assert not any(each.is_running() for each in ranks)
        wait_for_return(task)
        assert task.inner_step(256.0).loss == pytest.approx(losses[1], rel=1e-5)


def test_a_killed_trainer_is_replaced_and_goes_on_where_it_was(plan, monkeypatch, in_own_process):
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.01, 0.01))
    losses, theta, state, _ = trained(plan)
    log, returned = MemoryLog(), []
    with started(plan, log) as task:
        task.on_return(lambda: returned.append(True))
        found = [task.inner_step(256.0 * number).loss for number in range(STEPS // 2)]
        assert task.pid is not None
        os.kill(task.pid, signal.SIGKILL)
        with pytest.raises(TrainerAwayError):
            task.inner_step(0.0)
        with pytest.raises(TrainerAwayError):
            task.loss()
        wait_for_return(task)
        found += [task.inner_step(256.0 * number).loss for number in range(STEPS // 2, STEPS)]
        assert found == losses
        assert torch.equal(task.theta, theta)
        for name, tensor in task.state_dict().items():
            assert torch.equal(tensor, state[name])
    assert returned == [True]
    assert log.kinds() == ["trainer died", "trainer returned"]
    assert "signal 9" in log.notes[0][1]["why"]


def test_weights_that_change_while_there_is_no_trainer_are_the_next_ones(plan, monkeypatch, in_own_process):
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.01, 0.01))
    with started(plan.model_copy(update={"shares": False})) as task:
        task.inner_step(0.0)
        assert task.pid is not None
        os.kill(task.pid, signal.SIGKILL)
        with pytest.raises(TrainerAwayError):
            task.inner_step(0.0)
        task.theta.fill_(0.25)
        task.add(slice(0, 16), torch.full((16,), 0.5))
        task.reset(7)
        wait_for_return(task)
        task.store()
        assert task.theta[:17].tolist() == [0.75] * 16 + [0.25]
        assert task.state_dict()["counters"].tolist() == [1, 0, 7, 0]


def test_a_held_out_loss_waits_for_a_trainer_and_ends_when_told(plan, monkeypatch, in_own_process):
    monkeypatch.setattr(trainer_supervisor, "PAUSE_S", (0.01, 0.01))
    with started(plan) as task:
        whole = task.held_out_loss(512, 60.0, lambda read, wanted: True)
        assert task.pid is not None
        os.kill(task.pid, signal.SIGKILL)
        assert task.held_out_loss(512, 60.0, lambda read, wanted: True) == whole
        heard: list[tuple[int, int]] = []
        cut = task.held_out_loss(10**6, 60.0, lambda read, wanted: bool(heard.append((read, wanted))))
        assert heard
        assert cut.tokens < heard[0][1]


def test_a_fault_of_the_owner_is_raised_as_one(plan, in_own_process):
    from p2ptrain.base.errors import UserError

    with pytest.raises(UserError) as caught, started(plan.model_copy(update={"devices": ("cuda:9",)})):
        pass
    assert "cuda" in caught.value.problem
    assert caught.value.remedy
