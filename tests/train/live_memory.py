"""Count of the bytes that a training pass holds at once: those that torch's CPU allocator gave out and got back.

A card's kernels allocate the same tensors, because the code is the same; its attention keeps no scores either.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from p2ptrain.manifest import Decoder
from p2ptrain.train.model import build_module, recompute_activations, summed_loss


def most_live_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes that tensors made by the function took at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()  # negative if freed
        most = max(most, live)
    return most


def counted_bytes(
    description: Decoder,
    sequences: int,
    sequence_length: int,
    autocast: torch.dtype | None = None,
    recomputes: bool = False,
) -> int:
    """Return the most bytes of a forward and backward pass beyond weights and gradients, which exist before."""
    module = build_module(description, 1)
    recompute_activations(module, recomputes)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = torch.zeros(sequences, sequence_length + 1, dtype=torch.int64)

    def both(batch):
        torch.autograd.backward(summed_loss(module, batch, autocast))

    both(batch[:1, :9])  # what is allocated once
    return most_live_bytes(lambda: both(batch))
