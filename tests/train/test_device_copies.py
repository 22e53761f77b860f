"""Copies beside the computation: right in any order in which a card may run its streams; elsewhere plain copies."""

import pytest
import torch
from streams import CUDA, LazyStreams, lazy_streams

from p2ptrain.train.device_copies import CudaCopies, DeviceCopies, copies_of

__all__ = ["lazy_streams"]


def test_elsewhere_copies_are_complete_at_once():
    plain = copies_of(torch.device("cpu"))
    assert type(plain) is DeviceCopies
    parts = [torch.ones(2), torch.zeros(3)]
    taken, numbers = plain.snapshot(parts), plain.result(torch.tensor([1.0, 2.0]))
    parts[0].add_(5.0)
    assert taken.is_complete
    assert [each.tolist() for each in taken.wait()] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
    assert numbers.wait()[0].tolist() == [1.0, 2.0]
    assert plain.buffer(parts[0]) is None
    assert plain.to_device(parts[0], torch.device("cpu")) is parts[0]


def test_a_snapshot_holds_what_was_computed_before_and_nothing_later(lazy_streams: LazyStreams):
    theta = torch.ones(4)
    card = CudaCopies(CUDA)
    with lazy_streams:
        theta.add_(1.0)
        taken = card.snapshot([theta[:1], theta[1:]])
        theta.mul_(10.0)
        assert not taken.is_complete
        lazy_streams.compute.finish()  # the card may compute long before it copies
        copies = taken.wait()
    assert taken.is_complete
    assert [each.tolist() for each in copies] == [[2.0], [2.0, 2.0, 2.0]]
    assert theta.tolist() == [20.0] * 4


def test_a_snapshot_waits_for_what_computes_it(lazy_streams: LazyStreams):
    theta = torch.ones(4)
    card = CudaCopies(CUDA)
    with lazy_streams:
        theta.add_(1.0)
        taken = card.snapshot([theta])
        theta.mul_(10.0)
        copies = taken.wait()  # the card may compute as late as it can
    assert copies[0].tolist() == [2.0] * 4
    assert theta.tolist() == [2.0] * 4
    (down, _) = lazy_streams.all[1:]
    assert len(down.recorded) == 1  # so that the clone's memory is not used again before the copy


def test_a_result_does_not_wait_for_later_work(lazy_streams: LazyStreams):
    loss, later = torch.ones(()), torch.ones(())
    card = CudaCopies(CUDA)
    with lazy_streams:
        loss.add_(1.0)
        number = card.result(loss)
        later.add_(1.0)
        (value,) = number.wait()
        assert not lazy_streams.compute.record_event().query()
    assert float(value) == 2.0


def test_what_goes_to_the_card_is_there_before_it_is_used(lazy_streams: LazyStreams):
    theta, values = torch.ones(4), torch.full((4,), 2.0)
    card = CudaCopies(CUDA)
    with lazy_streams:
        there = card.to_device(values, CUDA)
        theta.add_(there)
    assert len(lazy_streams.compute.work) == 2  # to wait and to add: it computes while the copy is made
    assert theta.tolist() == [1.0] * 4  # the host has not waited
    lazy_streams.compute.finish()
    assert theta.tolist() == [3.0] * 4
    assert lazy_streams.compute.recorded[0] is there


@pytest.mark.parametrize("short", ["locked", "card"])
def test_where_memory_is_short_a_snapshot_is_made_at_once(lazy_streams: LazyStreams, monkeypatch, short):
    def fails(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    card = CudaCopies(CUDA)
    theta = torch.ones(4)
    if short == "locked":
        monkeypatch.setattr(torch, "empty", fails)
        assert card.buffer(theta) is None
    else:
        monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: torch.zeros(shape, dtype=dtype))
        monkeypatch.setattr(torch.Tensor, "clone", fails)
    taken = card.snapshot([theta])
    theta.add_(1.0)
    assert taken.is_complete
    assert taken.wait()[0].tolist() == [1.0] * 4
