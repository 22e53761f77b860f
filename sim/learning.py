"""The section ``[learner]`` of a scenario: one of three kinds.

``sim.learner_pool`` makes the learners of each kind. Numbers without a source have not been measured; recorded runs of
each learner would settle them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from p2ptrain.manifest.schema import MAX_STEP_TOKENS
from p2ptrain.manifest.section import Section
from p2ptrain.manifest.sources import BYTE_VOCABULARY

LARGEST = 1e6
"""Largest number of a quadratic, and the inverse of the smallest divisor: squares, summed over all dimensions, stay far
below the end of fp32, 3e38."""


class BytesLearner(Section):
    """No weights at all: steps, tokens and bytes are counted, losses are not."""

    kind: Literal["bytes"]
    """bytes."""

    parameters: int = Field(default=135_000_000, ge=1, le=10**13)
    """Size of the model that is only counted."""

    tokens_per_step: int = Field(default=1, ge=1, le=MAX_STEP_TOKENS)
    """Tokens of one inner step."""

    disagreement: float = Field(default=0.01, ge=0, le=1)
    """Disagreement that every exchange measures; above swarm.final_disagreement the final gossip ends at its limit."""

    def faults(self) -> list[str]:
        """List contradictions: there are none."""
        return []


class QuadraticLearner(Section):
    """Noisy gradient descent on a diagonal quadratic; each peer's optimum lies near the common one."""

    kind: Literal["quadratic"]
    """quadratic."""

    parameters: int = Field(default=4096, ge=1, le=10**8)
    """Dimensions."""

    tokens_per_step: int = Field(default=1, ge=1, le=MAX_STEP_TOKENS)
    """Tokens that an inner step counts in progress."""

    learning_rate: float = Field(default=0.1, gt=0, le=LARGEST)
    """Learning rate of the inner SGD; at most 2 over the largest curvature."""

    smallest_curvature: float = Field(default=0.05, ge=1 / LARGEST, le=LARGEST)
    """Smallest curvature; curvatures are spaced evenly on a logarithmic scale."""

    largest_curvature: float = Field(default=1.0, ge=1 / LARGEST, le=LARGEST)
    """Largest curvature."""

    noise: float = Field(default=0.1, ge=0, le=LARGEST)
    """Standard deviation of each gradient element's noise."""

    spread: float = Field(default=0.1, ge=0, le=LARGEST)
    """Standard deviation of each element of a peer's optimum around the common one: how much the peers' data differ."""

    def faults(self) -> list[str]:
        """List contradictions, one line each."""
        if self.smallest_curvature > self.largest_curvature:
            return [
                f"learner.smallest_curvature: {self.smallest_curvature} exceeds learner.largest_curvature, "
                f"{self.largest_curvature}"
            ]
        if self.learning_rate * self.largest_curvature >= 2:
            return [
                f"learner.learning_rate: {self.learning_rate} diverges; with learner.largest_curvature "
                f"{self.largest_curvature} it must be below {2 / self.largest_curvature:g}"
            ]
        return []


class LanguageModelLearner(Section):
    """A real small Llama on the shipped text, read as bytes; it learns what a real peer would."""

    kind: Literal["lm"]
    """lm."""

    hidden_size: int = Field(default=64, ge=16, le=4096, multiple_of=16)
    """Width of the residual stream."""

    intermediate_size: int = Field(default=192, ge=16, le=16_384)
    """Width inside the feed-forward blocks."""

    layers: int = Field(default=2, ge=1, le=64)
    """Transformer blocks."""

    heads: int = Field(default=2, ge=1, le=64)
    """Attention heads a block."""

    sequence_length: int = Field(default=64, ge=8, le=4096)
    """Bytes a sequence."""

    sequences_per_step: int = Field(default=4, ge=1, le=65_536)
    """Sequences an inner step."""

    data: Literal["iid", "shards"] = "iid"
    """iid (every peer reads all of the text in its own order) or shards (each reads its own part of it alone)."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the inner steps."""

    learning_rate: float = Field(default=3e-3, gt=0, le=1)
    """Peak of the inner learning rate."""

    weight_decay: float = Field(default=0.1, ge=0, le=10)
    """Weight decay of the inner optimizer, as in a manifest."""

    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """Learning rate schedule, as in a manifest."""

    warmup_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of the run in which the learning rate rises."""

    final_learning_rate_fraction: float = Field(default=0.05, ge=0, le=1)
    """Learning rate at the end as a fraction of the peak."""

    curve_sequences: int = Field(default=128, ge=1, le=1_000_000)
    """Held-out sequences that a point of the curve is measured on; the last point uses all."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step."""
        return self.sequence_length * self.sequences_per_step

    @property
    def parameters(self) -> int:
        attention, feed_forward = 4 * self.hidden_size, 3 * self.intermediate_size
        block = self.hidden_size * (attention + feed_forward + 2)
        return BYTE_VOCABULARY * self.hidden_size + self.layers * block + self.hidden_size

    def faults(self) -> list[str]:
        """List contradictions, one line each."""
        faults = []
        if self.hidden_size % (2 * self.heads):
            faults.append(
                f"learner.heads: {self.heads} heads of even width do not divide hidden_size, {self.hidden_size}"
            )
        if self.tokens_per_step > MAX_STEP_TOKENS:
            faults.append(
                f"learner.sequences_per_step: {self.tokens_per_step:,} tokens per inner step, but at most"
                f" {MAX_STEP_TOKENS:,} are allowed"
            )
        return faults
