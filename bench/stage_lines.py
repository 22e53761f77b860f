"""Pipeline stages on different home lines: the line rate from which they pay, by arithmetic.

A stage in the middle of a pipeline uploads, for each token, activations to the next stage and gradients to the previous
one, d numbers each. It computes 6 P' floating-point operations a token for the P' = 12 l d^2 parameters of its l
layers. Its line limits it unless ::

    16 d b / (72 l d^2 / F)  =  .22 b F / (l d)  <=  upload bit/s

with width d, b bytes a number and F floating-point operations a second. Wide layers need slower lines, which is the
square-cube law of SWARM (Ryabinin et al., arXiv 2301.11913). Not modelled: latency, which enough micro-batches hide,
the embedding and the head, attention over long sequences, and the exchanges of weights on the same line. All of these
make stages slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INT8_BYTES = 1 + 4 / 2048
"""Bytes of a number that is sent as int8 with an fp32 scale for each token, at width 2048."""

MICRO_BATCHES = 16
"""Micro-batches of an inner step. Guess: measure the speed of pipelines by this number."""

DIRECTIONS = 2
"""Activations forward and gradients backward."""


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A transformer cut into stages of equal depth, one on each computer."""

    width: int
    """d, numbers of a token between two layers."""
    layers: int
    """Layers in all, a multiple of ``stages``."""
    stages: int
    flop_per_s: float
    """F, floating-point operations a second that each computer reaches in training."""
    number_bytes: float = INT8_BYTES
    """b, bytes of a number on the line."""

    def __post_init__(self) -> None:
        sizes = self.width, self.layers, self.stages, self.flop_per_s, self.number_bytes
        if not all(0 < size < math.inf for size in sizes) or self.layers % self.stages:
            raise ValueError(f"staged model out of range: {self}")

    @property
    def parameters(self) -> int:
        """P = 12 L d^2, without embeddings."""
        return 12 * self.layers * self.width**2

    @property
    def upload_bytes(self) -> float:
        """Bytes that a middle stage uploads for each token; a stage at an end uploads half."""
        directions = DIRECTIONS if self.stages > 2 else 1
        return directions * self.width * self.number_bytes

    def whole_tokens_per_s(self) -> float:
        """Return the tokens per second of one computer that holds the whole model."""
        return self.flop_per_s / (6 * self.parameters)

    def computed_tokens_per_s(self, micro_batches: int = MICRO_BATCHES) -> float:
        """Return the tokens per second of all stages together on lines without limit, with the pipeline's bubble."""
        filled = micro_batches / (micro_batches + self.stages - 1)
        return self.stages * self.whole_tokens_per_s() * filled

    def tokens_per_s(self, up_bit_per_s: float, micro_batches: int = MICRO_BATCHES) -> float:
        """Return the tokens per second of all stages together on lines of this upload rate."""
        return min(up_bit_per_s / (8 * self.upload_bytes), self.computed_tokens_per_s(micro_batches))

    def paying_bit_per_s(self) -> float:
        """Return the upload rate from which a stage's line does not limit its computer."""
        return 8 * self.upload_bytes * self.stages * self.whole_tokens_per_s()


MODELS = (
    StagedModel(2048, 20, 5, 40e12),
    StagedModel(4096, 32, 8, 40e12),
    StagedModel(4096, 32, 4, 40e12),
    StagedModel(4096, 32, 4, 15e12),
    StagedModel(8192, 80, 20, 40e12),
)
"""1B, 7B and 65B parameters on consumer cards. Guess: measured training speeds would settle 15 and 40 TFLOP/s."""

LINES_MBIT_S = (20, 100, 300, 1000)


def rows() -> list[str]:
    """Return the rows of the table in docs/ALGORITHMS.md."""
    found = []
    for model in MODELS:
        shares = (model.tokens_per_s(line * 1e6) / model.computed_tokens_per_s() for line in LINES_MBIT_S)
        percent = " | ".join(f"{100 * share:.3g}" for share in shares)
        found.append(
            f"| {model.parameters / 1e9:.0f}B, d {model.width} | {model.layers // model.stages} "
            f"| {model.flop_per_s / 1e12:.0f} | {model.paying_bit_per_s() / 1e6:,.0f} | {percent} |"
        )
    return found
