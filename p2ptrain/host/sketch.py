"""A donor's weights while they arrive, and sketches, which estimate the distance of two copies of weights.

A count sketch (Charikar, Chen and Farach-Colton, 2002): every element gets a random sign and one of ``BUCKETS``
buckets, and a bucket is the sum of its elements. The sketch is linear, and ``||S(a) - S(b)||`` squared estimates ``||a
- b||`` squared without bias, with a relative standard deviation of sqrt(2 / BUCKETS). Signs and buckets come from a
seed that the comparing peer draws **after** it has the weights: without the seed, a sender cannot make other weights
with the same sketch.

Legend: n elements of one piece, K buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from p2ptrain.base.errors import RemoteError
from p2ptrain.swarm.download_plan import Span

BUCKETS = 128
"""Buckets of a sketch, 512 bytes; the distance is then known to about 6 % (its square to 12.5 %)."""

SKETCH_BYTES = 4 * BUCKETS
CHUNK = 1 << 20
"""Elements hashed at once: 16 MB of random numbers."""


def sketch(
    weights: Tensor,  # [n] fp32
    seed: int,
) -> bytes:
    """Return the sketch, [K] fp32, little-endian; equal on all machines up to the order of summation in a bucket."""
    random = np.random.Generator(np.random.PCG64(seed))
    buckets = np.zeros(BUCKETS)
    for chunk in torch.split(weights.detach().cpu(), CHUNK):
        drawn = random.integers(0, 2 * BUCKETS, size=chunk.numel(), dtype=np.uint16)
        signs = 1.0 - 2.0 * (drawn & 1)
        buckets += np.bincount(drawn >> 1, weights=signs * chunk.numpy(), minlength=BUCKETS)
    return buckets.astype("<f4").tobytes()


def distance(mine: bytes, theirs: bytes) -> float:
    """Return the distance of two copies, estimated from their sketches: ||theirs - mine|| over the smaller of the two
    norms.

    Over the larger norm, or over mine alone, a copy of twice the true length would seem near. Raises RemoteError if
    theirs is invalid.
    """
    if len(theirs) != SKETCH_BYTES:
        raise RemoteError(f"a sketch of {len(theirs)} bytes instead of {SKETCH_BYTES}")
    one, other = (np.frombuffer(each, dtype="<f4").astype(np.float64) for each in (mine, theirs))
    if not np.isfinite(other).all():
        raise RemoteError("the sketch of its weights is not finite")
    shorter = min(np.linalg.norm(one), np.linalg.norm(other))
    return float(np.linalg.norm(other - one) / max(shorter, np.finfo(np.float32).tiny))


class PieceStore:
    """A donor's weights while they arrive: all fragments, of which only the received pieces are filled.

    Args:
        sizes: bytes of each fragment.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.whole = [bytearray(size) for size in sizes]

    def store(self, span: Span, piece: bytes | bytearray | memoryview) -> None:
        """Store a received piece."""
        memoryview(self.whole[span.fragment])[span.start : span.stop] = piece

    def sketch(self, span: Span, seed: int) -> bytes:
        """Return the sketch of a stored piece."""
        weights = torch.frombuffer(self.whole[span.fragment], dtype=torch.float32)
        return sketch(weights[span.start // 4 : span.stop // 4], seed)
