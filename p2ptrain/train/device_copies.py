"""Copies between the training device and the host, on CUDA cards beside the computation.

::

    compute stream    ... clone ─┐ event                 ... ┌─ wait, add ...
    stream down                  └─ copy into locked memory ─┼─ event, for which a reader waits
    stream up                        copy from locked memory ┘ event

Locked memory is the host's page-locked memory, which torch keeps and uses again after the copies from or into it.
Elsewhere copies are made at once: asynchronous ones to MPS read memory after its release (pytorch/pytorch issue
189690).
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def snapshot(self, parts: Sequence[Tensor]) -> Arrival:
        """Return copies on the host that later writes to ``parts`` do not change."""
        return Arrival(tuple(part.detach().to("cpu", copy=True) for part in parts))

    def buffer(self, like: Tensor) -> Tensor | None:
        """Return host memory of this shape and type from which ``to_device`` is fast; None if any memory is."""
        return None

    def to_device(
        self,
        values: Tensor,  # on the host
        device: torch.device,
    ) -> Tensor:
        return values.to(device)


class CudaCopies(DeviceCopies):
    """Copies of one CUDA card that neither the trainer nor the card's computation waits for."""

    are_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def result(self, values: Tensor) -> Arrival:
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values.detach(), non_blocking=True)
        return Arrival((copy,), torch.cuda.current_stream(self._device).record_event())

    def snapshot(self, parts: Sequence[Tensor]) -> Arrival:
        """Clone on the card, so that training may write to ``parts`` at once, then copy; at once if memory is short."""
        try:
            copies = tuple(torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts)
            clones = [part.detach().clone() for part in parts]
        except RuntimeError:  # of the card's memory, or of what the system allows to lock
            return super().snapshot(parts)
        self._down.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._down):
            for copy, clone in zip(copies, clones, strict=True):
                copy.copy_(clone, non_blocking=True)
                clone.record_stream(self._down)
        return Arrival(copies, self._down.record_event())

    def buffer(self, like: Tensor) -> Tensor | None:
        try:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        except RuntimeError:  # the system allows no more page-locked memory
            return None

    def to_device(self, values: Tensor, device: torch.device) -> Tensor:
        """Let the current stream, and not the host, wait for the copy."""
        current = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._up):
            there = values.to(device, non_blocking=True)
        current.wait_event(self._up.record_event())
        there.record_stream(current)
        return there


def copies_of(device: torch.device) -> DeviceCopies:
    return CudaCopies(device) if device.type == "cuda" else DeviceCopies()
