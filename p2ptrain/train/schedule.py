"""Schedule of the inner learning rate: a function of the swarm's progress."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2ptrain.manifest import TrainingSection

COOL_DOWN_FRACTION = 0.2
"""Last part of the run over which schedule "wsd" decays. Hägele et al. (arXiv 2405.18392) find 10 to 20 % enough."""


def learning_rate(
    progress: float,  # tokens of all peers at the end of the step
    training: TrainingSection,
    run_tokens: int,  # where the schedule ends
) -> float:
    """Return the inner learning rate: a linear warm-up, then a decay to ``final_learning_rate_fraction`` of the peak.

    ::

        cosine    from the end of the warm-up to the end of the run, half a cosine
        constant  the peak
        wsd       the peak, then a straight line over the last fifth of the run
    """
    peak = training.learning_rate
    if progress < training.warmup_tokens:
        return peak * progress / training.warmup_tokens
    if training.schedule == "constant":
        return peak
    if training.schedule == "cosine":
        fall = 0.5 * (1 - math.cos(math.pi * _part(progress, training.warmup_tokens, run_tokens)))
    else:
        start = max(training.warmup_tokens, (1 - COOL_DOWN_FRACTION) * run_tokens)
        fall = _part(progress, start, run_tokens)
    return peak * (1 - fall * (1 - training.final_learning_rate_fraction))


def _part(value: float, start: float, end: float) -> float:
    """Return how far ``value`` has come from ``start`` to ``end``, 0 to 1."""
    return min(1.0, max(0.0, value - start) / max(end - start, 1.0))
