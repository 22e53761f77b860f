"""Forward and backward pass of one micro-batch as a CUDA graph: one launch instead of thousands.

A small model's kernels are shorter than their launches, so the card waits for Python. The graph replays the kernels of
the eager pass, or of a compiled one, on the same memory, hence bitwise what that computes. It keeps its activations'
memory for itself.

Dimension letters: P parameters, B sequences of a micro-batch, T tokens a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from p2ptrain.train.compiled_pass import CompiledPassError

WARM_UPS = 3
"""Passes before the recording, in which libraries allocate their workspaces; torch's documentation of
``torch.cuda.make_graphed_callables`` has the same number."""

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes passes for warming up, records one, and returns what replays it. May raise RuntimeError."""


def record(work: Callable[[], None]) -> Callable[[], None]:
    """Record ``work`` on the current card; see ``Record``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class GraphedPass:
    """A recorded pass, a ``pass_choice.MicroBatchPass``. Use it from the trainer's thread.

    Args:
        compute: adds the gradient of a part [B, T+1] to ``gradient``; returns its share of the loss.
        gradient: [P] on the card.
        sequences, tokens: B and T+1.
    """

    def __init__(
        self,
        compute: Callable[[Tensor], Tensor],
        gradient: Tensor,
        sequences: int,
        tokens: int,
        record: Record = record,
    ) -> None:
        self._compute = compute
        self._gradient = gradient
        self._record = record
        self._batch = torch.zeros(sequences, tokens, dtype=torch.int64, device=gradient.device)
        self._total = torch.zeros((), device=gradient.device)
        self._replay: Callable[[], None] | None = None

    def takes(self, part: Tensor) -> bool:
        return part.shape == self._batch.shape

    def run(self, part: Tensor) -> Tensor:
        """Compute as ``compute`` does; the first call records. Raises CompiledPassError."""
        try:
            if self._replay is None:
                before = self._gradient.clone()
                self._replay = self._record(self._pass)
                self._gradient.copy_(before)
            self._batch.copy_(part)
            self._replay()
            return self._total.clone()
        except RuntimeError as error:  # out of memory, or an operation that cannot be recorded
            raise CompiledPassError(str(error).partition("\n")[0] or type(error).__name__) from None

    def _pass(self) -> None:
        self._total.copy_(self._compute(self._batch))
