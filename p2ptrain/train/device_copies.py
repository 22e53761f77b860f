"""Small results of the training device that come to the host beside the computation, from CUDA cards without waiting.

Elsewhere copies are made at once: asynchronous ones from MPS read memory after its release (pytorch/pytorch issue
189690).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """What an ``Arrival`` needs of ``torch.cuda.Event``."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tensors on the host that may still be on their way."""

    tensors: tuple[Tensor, ...]  # not to be read before ``wait``
    event: Event | None = None

    @property
    def is_complete(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> tuple[Tensor, ...]:
        if self.event is not None:
            self.event.synchronize()
        return self.tensors


class DeviceCopies:
    """Copies of one device, each complete when the call returns."""

    are_late = False
    """Whether an ``Arrival`` may be incomplete."""

    def result(self, values: Tensor) -> Arrival:
        """Return small values, which nothing writes to, on the host."""
        return Arrival((values.detach().cpu(),))


class CudaCopies(DeviceCopies):
    """Copies of one CUDA card that neither the trainer nor the card's computation waits for."""

    are_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def result(self, values: Tensor) -> Arrival:
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values.detach(), non_blocking=True)
        return Arrival((copy,), torch.cuda.current_stream(self._device).record_event())


def copies_of(device: torch.device) -> DeviceCopies:
    return CudaCopies(device) if device.type == "cuda" else DeviceCopies()
