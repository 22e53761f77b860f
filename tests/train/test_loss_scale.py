"""Dynamic loss scaling: torch's rule, and training in fp16 by it."""

import logging

import pytest
import torch

from p2ptrain.train import inner, loss_scale
from p2ptrain.train.loss_scale import LossScale


def run(task, steps, start=0):
    tokens = task._training.tokens_per_step
    return [task.inner_step((start + step) * tokens).loss for step in range(steps)]


def test_the_rule_is_torchs(monkeypatch):
    """Compare with torch.amp.GradScaler over steps of which some overflow, and with its defaults."""
    theirs = torch.amp.GradScaler("cpu")
    defaults = (loss_scale.INITIAL_SCALE, loss_scale.FACTOR, 1 / loss_scale.FACTOR, loss_scale.GROWTH_INTERVAL)
    assert defaults == (
        theirs.get_scale(),
        theirs.get_growth_factor(),
        theirs.get_backoff_factor(),
        theirs.get_growth_interval(),
    )
    theirs.set_growth_interval(3)
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    ours = LossScale(is_dynamic=True)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for is_finite in [True] * 7 + [False, True, True, False, False] + [True] * 8:
        assert ours.factor == theirs.get_scale()
        parameter.grad = torch.tensor([1.0 if is_finite else float("inf")])
        theirs.scale(torch.ones(()))
        theirs.unscale_(optimizer)
        theirs.update()
        ours.update(is_finite)
    assert ours.skipped == 3


def test_the_scale_never_falls_below_one():
    scale = LossScale(is_dynamic=True)
    for _ in range(40):
        scale.update(False)
    assert scale.factor == 1.0
    assert scale.skipped == scale.skipped_in_a_row == 40


def test_without_scaling_skipped_steps_are_counted():
    scale = LossScale(is_dynamic=False)
    scale.update(False)
    assert scale.factor == 1.0
    assert scale.skipped == 1
    on_a_card = LossScale(is_dynamic=True)
    on_a_card.load(scale.state())
    assert on_a_card.factor == loss_scale.INITIAL_SCALE


def test_fp16_learns_as_fp32_does(tiny_run):
    tiny = tiny_run(run__tokens=12800)
    plain, half = tiny.task(), tiny.task(autocast=torch.float16, micro_batch=3)
    plain_losses, half_losses = run(plain, 200), run(half, 200)
    assert half_losses[0] != plain_losses[0]
    assert sum(half_losses[-20:]) == pytest.approx(sum(plain_losses[-20:]), rel=0.01)
    assert half.loss_scale.skipped <= 5
    assert half.theta.dtype == torch.float32


def test_a_gradient_in_fp16_is_right(tiny_run, monkeypatch):
    """Check one unclipped gradient against fp32, to fp16's eleven bits."""
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 1024.0)
    tiny = tiny_run()
    gradients = []
    for autocast in (None, torch.float16):
        task = tiny.task(autocast=autocast)
        task._backward(tiny.corpus.step_batch(1, "alice", 0, 4))
        gradients.append(task._gradient)
    exact, rounded = gradients
    assert (rounded - exact).norm() < 5e-3 * exact.norm()


def test_a_step_that_overflows_is_skipped_and_counted(tiny_run, monkeypatch, caplog):
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**40)
    task = tiny_run().task(autocast=torch.float16)
    theta = task.theta.clone()
    with caplog.at_level(logging.WARNING, inner.__name__):
        losses = run(task, 10)
    assert task.loss_scale.skipped == 10
    assert task.loss_scale.factor == 2.0**30
    assert torch.equal(task.theta, theta)
    assert not task.state_dict()["first_moment"].any()
    assert task.step == 10
    assert task._optimizer.steps == 0
    assert task.learning_rate == 0.0
    assert all(0 < loss < 10 for loss in losses)  # the loss itself is not scaled
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "10 inner steps in a row taught nothing"
    ]
    run(task, 30, start=10)
    assert task.loss_scale.skipped < 35
    assert task.loss_scale.skipped_in_a_row == 0
    assert not torch.equal(task.theta, theta)


def test_a_resumed_task_has_the_same_scale(tiny_run, monkeypatch):
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**30)
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 4)
    tiny = tiny_run()
    steady = tiny.task(autocast=torch.float16)
    run(steady, 25)
    saved = {name: tensor.clone() for name, tensor in steady.state_dict().items()}
    resumed = tiny.task(autocast=torch.float16)
    resumed.theta.copy_(steady.theta)
    resumed.load_state_dict(saved)
    assert run(resumed, 10, start=25) == run(steady, 10, start=25)
    assert torch.equal(resumed.theta, steady.theta)
    for name, tensor in steady.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    assert steady.loss_scale.skipped > 0


def test_a_state_without_a_scale_is_of_an_older_version(tiny_run):
    tiny = tiny_run()
    used = tiny.task(autocast=torch.float16)
    run(used, 2)
    state = used.state_dict()
    del state["loss_scale"]
    resumed = tiny.task(autocast=torch.float16)
    resumed.load_state_dict(state)
    assert resumed.step == 2
    assert resumed.loss_scale.factor == loss_scale.INITIAL_SCALE


@pytest.mark.parametrize("state", [[1.0], [0.5, 0, 0, 0], [float("inf"), 0, 0, 0], [2.0, 0, -1, 0]])
def test_a_faulty_scale_changes_nothing(tiny_run, state):
    task = tiny_run().task()
    good = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    good["first_moment"] += 1
    with pytest.raises(ValueError, match="belong"):
        task.load_state_dict({**good, "loss_scale": torch.tensor(state)})
    assert not task.state_dict()["first_moment"].any()
    assert task.loss_scale.factor == 1.0
