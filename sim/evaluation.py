"""Evaluation of slow weights: losses and disagreement.

Legend: N peers, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from p2ptrain.host.learner import Learner
from sim.trainer import SimulatedLearner


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Losses and disagreement of some peers' slow weights."""

    losses: tuple[float, ...] | None
    """Loss of each peer; None if nothing is learned."""
    loss_of_mean: float | None
    disagreement: float | None
    """Mean distance to their mean, relative to its norm."""


def finite(value: float | None) -> float | None:
    """Return None for infinities and NaN, as after a divergence: reports hold neither."""
    return value if value is not None and isfinite(value) else None


def slow_weights(learners: Sequence[SimulatedLearner]) -> Tensor:
    """Stack the slow weights, [N, P]."""
    return torch.stack([learner.slow for learner in learners if isinstance(learner, Learner)])


def disagreement(
    slow: Tensor,  # [N, P]
    mean: Tensor,  # [P]
) -> float | None:
    """Return the mean distance to the mean, relative to its norm; None if the norm is zero."""
    norm = float(mean.norm())
    return float((slow - mean).norm(dim=1).mean()) / norm if norm > 0 else None
