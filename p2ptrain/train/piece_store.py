"""Memory for a donor's weights in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from p2ptrain.swarm.download_plan import Span
from p2ptrain.train.sketch import sketch


class LocalPieceStore:
    """``ports.PieceStore`` in this process: all fragments, of which only the received pieces are filled.

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
