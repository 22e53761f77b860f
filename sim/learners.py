"""Inner tasks for the simulator.

``QuadraticTask`` is noisy gradient descent on a diagonal quadratic. All of its behaviour is known in closed form, and a
step takes microseconds, so that whole swarms fit into a unit test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class InnerStepResult:
    """Loss in nats a token, before the step, and the tokens of the step."""

    loss: float
    tokens: int


class QuadraticTask:
    """SGD on ``1/2 sum h (theta - optimum)^2`` with Gaussian gradient noise.

    Args:
        curvature: [P] h > 0.
        optimum: [P] minimum of this peer's loss; peers with different data have different ones.
        learning_rate: learning rate of SGD.
        noise: standard deviation of each gradient element's noise.
        seed: seed of the noise.
        tokens_per_step: tokens that a step counts in progress.
    """

    def __init__(
        self,
        curvature: Tensor,
        optimum: Tensor,
        learning_rate: float = 0.1,
        noise: float = 0.0,
        seed: int = 0,
        tokens_per_step: int = 1,
    ) -> None:
        self.theta = torch.zeros_like(optimum)
        self._curvature = curvature
        self._optimum = optimum
        self._learning_rate = learning_rate
        self._noise = noise
        self._random = torch.Generator().manual_seed(seed)
        self._tokens = tokens_per_step
        self.resets = 0

    def inner_step(self, progress: float) -> InnerStepResult:
        error = self.theta - self._optimum
        loss = 0.5 * float((self._curvature * error * error).sum())
        gradient = self._curvature * error + self._noise * torch.randn(self.theta.shape, generator=self._random)
        self.theta.add_(gradient, alpha=-self._learning_rate)
        return InnerStepResult(loss, self._tokens)

    def reset(self, warmup_steps: int) -> None:
        self.resets += 1

    def state_dict(self) -> dict[str, Tensor]:
        return {"random": self._random.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._random.set_state(state["random"])
