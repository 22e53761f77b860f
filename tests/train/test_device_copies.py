"""Results beside the computation: right in any order in which a card may run its work; elsewhere plain copies."""

import torch
from streams import CUDA, LazyStreams, lazy_streams

from p2ptrain.train.device_copies import CudaCopies, DeviceCopies, copies_of

__all__ = ["lazy_streams"]


def test_elsewhere_copies_are_complete_at_once():
    plain = copies_of(torch.device("cpu"))
    assert type(plain) is DeviceCopies
    assert plain.result(torch.tensor([1.0, 2.0])).wait()[0].tolist() == [1.0, 2.0]


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
