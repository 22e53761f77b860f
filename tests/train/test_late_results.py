"""Results that arrive a step late, with doubles of a card: training and its figures are as without the delay."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from late import LateCopies

from p2ptrain import codec
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import LearnerRules
from p2ptrain.outer.fragments import slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES
from p2ptrain.train import inner

STEPS = 200


@pytest.fixture
def late_task(monkeypatch):
    """Return ``late_task(tiny)``: a task that reads results late and skips steps without the host, and its double."""

    def build(tiny, **how):
        double = LateCopies()
        with monkeypatch.context() as patch:
            patch.setattr(inner, "copies_of", lambda device: double)
            task = tiny.task(**how)
        task._optimizer._skips_on_device = True
        return task, double

    return build


def run(task, steps, start=0):
    tokens = task._training.tokens_per_step
    return [task.inner_step(float((start + step) * tokens)) for step in range(steps)]


def overflowing(monkeypatch, *calls):
    """Let the gradients of these inner steps, counted from 0 over all tasks, be infinite."""
    real, made = inner.summed_loss, []

    def loss(*arguments):
        made.append(arguments)
        return real(*arguments) * (math.inf if len(made) - 1 in calls else 1.0)

    monkeypatch.setattr(inner, "summed_loss", loss)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_late_results_change_nothing(tiny_run, monkeypatch, late_task, optimizer):
    overflowing(monkeypatch, 50, 51, STEPS + 50, STEPS + 51)
    tiny = tiny_run(run__tokens=STEPS * 64, training__optimizer=optimizer)
    prompt, (late, double) = tiny.task(), late_task(tiny)
    prompt.reset(100)
    late.reset(100)
    expected, found = run(prompt, STEPS), run(late, STEPS)
    assert late.loss_scale.skipped == prompt.loss_scale.skipped == 2
    assert [each.loss for each in found] == [each.loss for each in expected]
    assert torch.equal(late.theta, prompt.theta)
    late.state_dict()
    assert late.learning_rate == prompt.learning_rate
    assert late._optimizer.steps == prompt._optimizer.steps == STEPS - 2
    assert double.waits == [f"result {step}" for step in range(STEPS)]


def test_no_step_waits_for_its_own_result(tiny_run, late_task):
    task, double = late_task(tiny_run())
    for step in range(5):
        task.inner_step(0.0)
        assert double.waits == [f"result {before}" for before in range(step)]


def test_in_fp16_each_step_waits_because_the_next_needs_its_scale(tiny_run, late_task, monkeypatch):
    monkeypatch.setattr("p2ptrain.train.loss_scale.INITIAL_SCALE", 2.0**20)
    tiny = tiny_run()
    prompt, (late, double) = tiny.task(autocast=torch.float16), late_task(tiny, autocast=torch.float16)
    expected, found = run(prompt, 30), run(late, 30)
    assert [each.loss for each in found] == [each.loss for each in expected]
    assert torch.equal(late.loss_scale.state(), prompt.loss_scale.state())
    assert prompt.loss_scale.skipped > 0
    assert torch.equal(late.theta, prompt.theta)
    assert len(double.waits) == 30


def test_a_card_clips_by_the_norm_of_the_flat_vector(tiny_run, monkeypatch):
    task = tiny_run().task()
    task._backward(task._batches.at(0).sequences)
    before = task._gradient.clone()
    expected = task._clip()
    clipped = task._gradient.clone()
    assert clipped.norm() < 0.99 * before.norm()
    task._gradient.copy_(before)
    monkeypatch.setattr(type(task), "theta", SimpleNamespace(device=torch.device("cuda")))
    torch.testing.assert_close(task._clip(), expected)
    torch.testing.assert_close(task._gradient, clipped)
    task._gradient.fill_(1e-6)  # short enough
    task._clip()
    assert bool((task._gradient == 1e-6).all())


def test_a_checkpoint_counts_the_last_step(tiny_run, late_task, monkeypatch, caplog):
    monkeypatch.setattr(inner, "SKIPS_TOLD", 1)
    overflowing(monkeypatch, 2)
    tiny = tiny_run()
    task, _ = late_task(tiny)
    run(task, 3)
    assert task.loss_scale.skipped == 0
    with caplog.at_level(logging.WARNING, inner.__name__):
        state = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    assert len(caplog.records) == task.loss_scale.skipped == 1
    resumed = tiny.task()
    resumed.theta.copy_(task.theta)
    resumed.load_state_dict(state)
    assert resumed.loss_scale.skipped == 1
    task.state_dict()
    assert task.loss_scale.skipped == 1
    assert [each.loss for each in run(resumed, 3, start=3)] == [each.loss for each in run(task, 3, start=3)]


def learner(task, recipe="swarm"):
    rules = LearnerRules(4, 1e9, OuterRule(0.7, 0.9), RECIPES[recipe])
    return Learner(task, rules, slices(task.theta.numel(), 2), codec.get("fp32"), MemoryLog())


def test_a_phase_has_each_loss_once_also_across_a_checkpoint(tiny_run, late_task):
    tiny = tiny_run()
    prompt, late = learner(tiny.task()), learner(late_task(tiny)[0])
    for _ in range(6):
        prompt.advance()
        late.advance()
    assert late.loss == prompt.loss
    tensors, numbers = late.state_dict()
    assert numbers == prompt.state_dict()[1]
    saved = {
        name: torch.cat([part.clone() for part in each]) if isinstance(each, list) else each.clone()
        for name, each in tensors.items()
    }
    resumed = learner(late_task(tiny)[0])
    resumed.load_state_dict(saved, numbers)
    for _ in range(2):
        prompt.advance()
        late.advance()
        resumed.advance()
    assert resumed.loss == late.loss == prompt.loss
    assert torch.equal(resumed.task.theta, prompt.task.theta)


def test_losses_of_weights_that_were_replaced_do_not_count(tiny_run, late_task):
    tiny = tiny_run()
    late = learner(late_task(tiny)[0])
    late.advance()
    sizes = late.payloads.weight_sizes()
    late.inbox.adopt("link", 0, 0.0, [bytearray(size) for size in sizes])
    late.settle()
    losses = []
    for _ in range(4):
        late.advance()
        losses.append(late.task._unread.loss)
    assert late.loss == sum(losses) / 4
