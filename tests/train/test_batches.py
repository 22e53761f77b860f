"""Batches: the reader's, whether or not they were copied ahead."""

import pytest
import torch

from p2ptrain.train.batches import Batches


@pytest.fixture
def batches(tiny_run, monkeypatch):
    """Return batches for a device other than the host, which the host stands for."""
    task = tiny_run().task()
    monkeypatch.setattr(Batches, "copies", True)
    return task._batches


def test_a_batch_copied_ahead_is_the_one_that_would_be_read(batches):
    expected = [batches._read(step) for step in range(3)]
    assert not torch.equal(expected[1], expected[2])
    batches.prepare(1)
    assert torch.equal(batches.at(1).sequences, expected[1])
    batches.prepare(1)
    assert torch.equal(batches.at(2).sequences, expected[2]), "it resumed elsewhere"
    assert torch.equal(batches.at(1).sequences, expected[1])


def test_on_the_host_nothing_is_read_ahead(tiny_run):
    task = tiny_run().task()
    task.inner_step(0.0)
    assert task._batches._ahead is None


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_nothing_is_copied_ahead_from_memory_that_is_not_pinned(batches, monkeypatch, kind):
    monkeypatch.undo()
    monkeypatch.setattr(batches, "_device", torch.device(kind))
    batches.prepare(1)
    assert batches._ahead is None


def test_a_step_reads_the_next_batch_and_trains_alike(tiny_run, monkeypatch):
    plain, ahead = tiny_run().task(), tiny_run().task()
    losses = [plain.inner_step(0.0).loss for _ in range(3)]
    monkeypatch.setattr(Batches, "copies", True)
    assert [ahead.inner_step(0.0).loss for _ in range(3)] == losses
    assert ahead._batches._ahead is not None
    assert torch.equal(ahead.theta, plain.theta)
