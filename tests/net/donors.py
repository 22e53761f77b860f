"""Weights of peers of one swarm, for tests of weight downloads."""

from __future__ import annotations

import torch

from p2ptrain.codec import get
from p2ptrain.host.payloads import Payloads, Snapshot

Weights = list[torch.Tensor]

F, N = 4, 5000
COMMON = [torch.randn(N, generator=torch.Generator().manual_seed(number)) for number in range(F)]


def honest(seed: int) -> Weights:
    """Return weights 3 % away from the other peers'."""
    random = torch.Generator().manual_seed(1000 + seed)
    return [part + 0.03 * torch.randn(N, generator=random) for part in COMMON]


def published(weights: Weights) -> Payloads:
    payloads = Payloads([part.numel() for part in weights], get("fp32", 1024), None)
    payloads.publish(Snapshot(1, tuple(weights), tuple(weights)))
    return payloads
