"""Learner and inner task as the peer application sees them.

The application does not reach into the model, which may lie on several devices.
"""

from __future__ import annotations

from typing import Protocol

from pydantic import BaseModel, ConfigDict

from p2ptrain.host.keeper import Keeper
from p2ptrain.host.learner import Learner
from p2ptrain.ports import GoesOn, HeldOutLoss

PeerLearner = Learner | Keeper
"""Learner of a node; any thread may read its numbers."""


class TaskFigures(BaseModel):
    """What a node shows of its inner task."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    parameter_count: int
    """Parameters of the whole model."""
    device_name: str = "cpu"
    """Device that trains, as torch writes it."""
    computes_in: str = "fp32"
    """Type of the matrix products: fp32, bfloat16 or float16."""
    skipped_steps: int = 0
    """Inner steps that moved nothing, because the gradient was not finite."""
    coverage: float = 0.0
    """Fraction of the training set that this peer has read, 0 to 1."""
    micro_batch: int = 0
    """Sequences computed at once."""
    learning_rate: float = 0.0
    """Learning rate of the last inner step that moved weights."""
    cpu_s: float = 0.0
    """CPU seconds of other processes that train for this one."""
    compiler: str = ""
    """What the compiler of the training step does."""


class PeerTask(Protocol):
    """Inner task of a peer. Its methods belong to the training thread; any thread may read its figures."""

    @property
    def figures(self) -> TaskFigures: ...

    def held_out_loss(self, most_tokens: int, patience_s: float, goes_on: GoesOn) -> HeldOutLoss:
        """Read the held-out loss of the current weights in fp32.

        Args:
            most_tokens: held-out tokens to read at most.
            patience_s: approximate time limit.
            goes_on: stops the reading.
        """

    def sample(self, new_tokens: int) -> str:
        """Return a text of up to so many tokens that the current weights write; empty if this task writes none."""
