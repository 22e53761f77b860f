"""The held-out loss: exact, repeatable, and without effect on training."""

import math

import pytest
import torch
from torch.nn import functional

from p2ptrain.tokens.corpus import HELD_OUT_TOKENS, tokens_to_read
from p2ptrain.train import evaluate
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.model import summed_loss


def test_it_is_the_mean_over_every_held_out_token(tiny_run, monkeypatch):
    tiny = tiny_run()
    module = tiny.model().module
    batches = torch.cat(list(tiny.corpus.validation_batches(10**9, 64)))
    with torch.no_grad():
        expected = functional.cross_entropy(module(batches[:, :-1]).logits.flatten(0, 1), batches[:, 1:].flatten())
    assert validation_loss(module, tiny.corpus, 10**9).value == pytest.approx(float(expected), rel=1e-6)
    monkeypatch.setattr(evaluate, "BATCH_LOGITS", 1)  # one sequence at a time
    assert validation_loss(module, tiny.corpus, 10**9).value == pytest.approx(float(expected), rel=1e-6)


def test_a_new_model_knows_nothing(tiny_run):
    tiny = tiny_run()
    assert validation_loss(tiny.model().module, tiny.corpus, 1000).value == pytest.approx(math.log(256), rel=0.02)


def test_a_donors_weights_are_tried_on_the_same_text(tiny_run):
    tiny = tiny_run()
    task = tiny.task()
    before = task.tried_loss(1000, math.inf)
    assert before == validation_loss(task.model.module, tiny.corpus, 1000).value
    task.theta.mul_(1000)
    assert task.tried_loss(1000, math.inf) > 2 * before


def test_training_is_not_disturbed(tiny_run):
    tiny = tiny_run()
    watched, plain = tiny.task(), tiny.task()
    random_state = torch.get_rng_state()
    losses = []
    for step in range(4):
        losses.append(validation_loss(watched.model.module, tiny.corpus, 200).value)
        assert watched.inner_step(64.0 * step).loss == plain.inner_step(64.0 * step).loss
    assert torch.equal(watched.theta, plain.theta)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert watched.model.module.training
    assert losses[-1] < losses[0]


class Slow:
    """A device on which each batch takes this long, the first ones as given. ``read`` has what was computed."""

    def __init__(self, monkeypatch, batch_s, first=()):
        monkeypatch.setattr(evaluate, "BATCH_LOGITS", 1)  # one sequence at a time
        monkeypatch.setattr(evaluate, "summed_loss", self._summed_loss)
        self.now, self.read, self._batch_s, self._first = 0.0, [], batch_s, list(first)

    def _summed_loss(self, module, batch, autocast):
        self.now += self._first.pop(0) if self._first else self._batch_s
        self.read.append(batch)
        return summed_loss(module, batch, autocast)

    def clock(self):
        return self.now


def test_on_a_slow_machine_it_reads_less_evenly_spaced(tiny_run, monkeypatch):
    tiny = tiny_run()
    module = tiny.model().module
    whole = list(tiny.corpus.validation_batches(10**9, 1))
    slow = Slow(monkeypatch, 1.0)
    loss = validation_loss(module, tiny.corpus, 10**9, patience_s=len(whole) / 4, clock=slow.clock)
    assert len(whole) / 8 < len(slow.read) <= len(whole) / 4 + 1
    places = [next(i for i, each in enumerate(whole) if torch.equal(each, read)) for read in slow.read]
    assert places[0] == 0
    assert max(after - before for before, after in zip(places, [*places[1:], len(whole)], strict=True)) <= 8
    with torch.no_grad():
        expected = sum(float(summed_loss(module, each, None)) for each in slow.read) / (16 * len(slow.read))
    assert loss.value == pytest.approx(expected, rel=1e-6)
    assert loss.tokens == 16 * len(slow.read)


def test_where_one_batch_is_too_much_it_reads_one(tiny_run, monkeypatch):
    tiny = tiny_run()
    slow = Slow(monkeypatch, 100.0)
    found = validation_loss(tiny.model().module, tiny.corpus, 10**9, patience_s=30.0, clock=slow.clock)
    assert math.isfinite(found.value)
    assert len(slow.read) == 1


def test_a_machine_that_only_warms_up_reads_on(tiny_run, monkeypatch):
    tiny = tiny_run()
    whole = list(tiny.corpus.validation_batches(10**9, 1))
    slow = Slow(monkeypatch, 0.01, first=[4.0])
    validation_loss(tiny.model().module, tiny.corpus, 10**9, patience_s=30.0, clock=slow.clock)
    assert len(whole) - 10 < len(slow.read) < len(whole)


def test_a_fast_machine_reads_all_whatever_its_patience(tiny_run):
    tiny = tiny_run()
    module = tiny.model().module
    assert validation_loss(module, tiny.corpus, 10**9, patience_s=60.0) == validation_loss(module, tiny.corpus, 10**9)


def test_it_tells_how_far_it_is_and_stops_when_told(tiny_run, monkeypatch):
    tiny = tiny_run()
    monkeypatch.setattr(evaluate, "BATCH_LOGITS", 1)  # one sequence at a time
    told = []

    def goes_on(read, wanted):
        told.append((read, wanted))
        return len(told) < 3

    found = validation_loss(tiny.model().module, tiny.corpus, 160, goes_on=goes_on)
    assert told == [(16, 160), (32, 160), (48, 160)]
    assert (found.tokens, found.of) == (48, tokens_to_read(tiny.corpus, HELD_OUT_TOKENS))
    assert tokens_to_read(tiny.corpus, 175) == 160
    assert tokens_to_read(tiny.corpus, 10**9) == tiny.corpus.held_out_tokens
