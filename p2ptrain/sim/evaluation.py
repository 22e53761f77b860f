"""How good some peers' weights are, and how far apart.

Legend: N peers, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from p2ptrain.sim.trainer import SimulatedLearner
from p2ptrain.train.learner import Learner


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How good some peers' slow weights are."""

    losses: tuple[float, ...] | None
    """Of each; None where nothing is learnt."""
    loss_of_mean: float | None
    disagreement: float | None
    """Mean distance to their mean, relative to its norm."""


def finite(value: float | None) -> float | None:
    """None for what is no number any more, as after a divergence: no report holds infinities."""
    return value if value is not None and isfinite(value) else None


def slow_weights(learners: Sequence[SimulatedLearner]) -> Tensor:
    """[N, P] their slow weights."""
    rows = []
    for learner in learners:
        assert isinstance(learner, Learner)
        rows.append(learner.slow)
    return torch.stack(rows)


def disagreement(
    slow: Tensor,  # [N, P]
    mean: Tensor,  # [P]
) -> float | None:
    """Mean distance to the mean, relative to its norm; None where that is zero."""
    norm = float(mean.norm())
    return float((slow - mean).norm(dim=1).mean()) / norm if norm > 0 else None
