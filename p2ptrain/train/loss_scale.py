"""Dynamic loss scaling for fp16, whose smallest number, 6e-8, many gradients are below.

The backward pass starts at a scale S instead of 1, so that all gradients in it are S times as large; the sum in fp32 is
divided by S again. If a step's gradient is not finite, S was too large: the step is skipped and S is halved. After many
finite steps in a row S is doubled. This is torch.amp.GradScaler's rule (Micikevicius et al., arXiv 1710.03740, section
3.2) with a lower bound, for one flat gradient and with the finite check that clipping makes anyway.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

INITIAL_SCALE = 65536.0
"""Scale before the first step; torch.amp.GradScaler's ``init_scale``."""

FACTOR = 2.0
"""Growth, and the reciprocal of the backoff; torch.amp.GradScaler's. A power of two, so that division is exact."""

GROWTH_INTERVAL = 2000
"""Finite steps in a row after which the scale grows; torch.amp.GradScaler's."""

SMALLEST_SCALE = 1.0
"""Lower bound, without scaling: a gradient that is not finite there has another cause than the scale."""


class LossScale:
    """Scale of one peer's backward passes, and the count of its skipped steps.

    Args:
        is_dynamic: whether the loss is scaled; otherwise ``factor`` is 1 and only skipped steps are counted.
    """

    def __init__(self, is_dynamic: bool) -> None:
        self.is_dynamic = is_dynamic
        self.skipped = 0
        """Inner steps ever skipped because their gradient was not finite."""
        self.skipped_in_a_row = 0
        self._scale = INITIAL_SCALE
        self._finite_in_a_row = 0

    @property
    def factor(self) -> float:
        """What the next backward pass starts at, and what its gradient is to be divided by."""
        return self._scale if self.is_dynamic else 1.0

    def update(self, is_finite: bool) -> None:
        """Adapt the scale to the outcome of a step."""
        if is_finite:
            self.skipped_in_a_row = 0
            self._finite_in_a_row += self.is_dynamic
            if self._finite_in_a_row >= GROWTH_INTERVAL:
                self._scale, self._finite_in_a_row = self._scale * FACTOR, 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.is_dynamic:
            self._scale, self._finite_in_a_row = max(SMALLEST_SCALE, self._scale / FACTOR), 0

    def state(self) -> Tensor:
        """Return scale and counters, [4] fp64."""
        numbers = (self._scale, self._finite_in_a_row, self.skipped, self.skipped_in_a_row)
        return torch.tensor(numbers, dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Restore the result of ``state``. Raises ValueError if it is none, before any change."""
        numbers = state.tolist() if state.shape == (4,) else []
        if not numbers or not all(map(math.isfinite, numbers)) or numbers[0] < SMALLEST_SCALE or min(numbers[1:]) < 0:
            raise ValueError(f"a loss scale and counters {list(state.shape)}, where a scale and three counters belong")
        self._scale = numbers[0]
        self._finite_in_a_row, self.skipped, self.skipped_in_a_row = map(int, numbers[1:])
