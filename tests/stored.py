"""A learner's state as its checkpoint would hold it."""

from __future__ import annotations

from typing import Any

import torch

from p2ptrain.checkpoint import parts
from p2ptrain.host.learner import Learner


def stored(learner: Learner) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return ``Learner.state_dict`` with copies of whole tensors."""
    tensors, numbers = learner.state_dict()
    whole = {
        name: saved.clone() if isinstance(saved, torch.Tensor) else torch.cat(list(parts(saved)))
        for name, saved in tensors.items()
    }
    return whole, numbers
