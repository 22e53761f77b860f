"""The held-out loss: exact, repeatable, and invisible to training."""

import math

import pytest
import torch
from torch.nn import functional

from p2ptrain.train import evaluate, validation_loss


def test_it_is_the_mean_over_every_held_out_token(tiny_run, monkeypatch):
    tiny = tiny_run()
    module = tiny.model().module
    batches = torch.cat(list(tiny.corpus.validation_batches(10**9, 64)))
    with torch.no_grad():
        expected = functional.cross_entropy(module(batches[:, :-1]).logits.flatten(0, 1), batches[:, 1:].flatten())
    assert validation_loss(module, tiny.corpus, 10**9) == pytest.approx(float(expected), rel=1e-6)
    monkeypatch.setattr(evaluate, "BATCH_LOGITS", 1)  # one sequence at a time
    assert validation_loss(module, tiny.corpus, 10**9) == pytest.approx(float(expected), rel=1e-6)


def test_a_new_model_knows_nothing(tiny_run):
    tiny = tiny_run()
    assert validation_loss(tiny.model().module, tiny.corpus, 1000) == pytest.approx(math.log(256), rel=0.02)


def test_training_is_not_disturbed(tiny_run):
    tiny = tiny_run()
    watched, plain = tiny.task(), tiny.task()
    random_state = torch.get_rng_state()
    losses = []
    for step in range(4):
        losses.append(validation_loss(watched.model.module, tiny.corpus, 200))
        assert watched.inner_step(64.0 * step) == plain.inner_step(64.0 * step)
    assert torch.equal(watched.theta, plain.theta)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert watched.model.module.training
    assert losses[-1] < losses[0]
