"""How a stage computes the micro-batches of one inner step: eagerly by torch's autograd, or by compiled libraries.

Dimension letters: b sequences of a micro-batch, T tokens a sequence, D width.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from p2ptrain.train import accelerator
from p2ptrain.train.compiled_pass import CompiledPassError
from p2ptrain.train.compiled_stage import CompiledStage, MicroBatchInFlight
from p2ptrain.train.inner import COMPILED
from p2ptrain.train.libraries import remember_failure
from p2ptrain.train.pass_choice import EAGER, StageChoice
from p2ptrain.train.sequence_parts import SequenceParts, parts_of
from p2ptrain.train.stages import StagePass


@dataclass(frozen=True, slots=True)
class CompiledMicroBatches:
    """Libraries of a stage, and whether they compute the next micro-batch."""

    libraries: CompiledStage
    choice: StageChoice
    path: Path
    """The library of the forward pass."""


@dataclass(slots=True)
class _Kept:
    """What a micro-batch keeps between its forward and backward pass."""

    given: Tensor
    result: Tensor | None = None
    """Result of the eager pass, with its graph."""
    begun: MicroBatchInFlight | None = None
    """What the compiled pass keeps."""
    seconds: float = 0.0
    """Duration of the forward pass."""


class MicroBatches:
    """``StageComputation`` of one step by torch's autograd, or by compiled libraries. ``close`` it.

    Args:
        loss_of: returns a micro-batch's share of the mean loss, from hidden states [b, T, D] and targets [b, T].
        compiled: libraries; micro-batches of another shape than theirs are computed by autograd.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],  # of the batch, [b, T+1] or [b, 3, T] each
        stage_pass: StagePass,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        compiled: CompiledMicroBatches | None,
        device: torch.device,
    ) -> None:
        self._parts = [parts_of(part) for part in parts]
        self._stage = stage_pass.stage
        self._pass = stage_pass
        self._loss_of = loss_of
        self._device = device
        first = self._parts[0]
        is_plain = first.positions is None
        takes = compiled is not None and is_plain and compiled.libraries.takes(first.sequences, first.tokens)
        self._compiled = compiled if takes else None
        self._kept: dict[int, _Kept] = {}
        """Micro-batches whose backward pass is to come."""

    def buffer(self) -> Tensor:
        return self._pass.buffer(self._parts[0].sequences, self._parts[0].tokens)

    def forward(self, micro_batch: int, received: Tensor | None) -> Tensor | None:
        began, part = self._now(), self._parts[micro_batch]
        given = part.inputs if received is None else self._pass.received(received)
        kept = self._kept[micro_batch] = _Kept(given)
        hidden = self._compiled_forward(kept, part.labels)
        if kept.begun is None:
            hidden = self._eager_forward(kept, part)
        sent = None if hidden is None else self._pass.packed(hidden)
        kept.seconds = self._now() - began
        return sent

    def backward(self, micro_batch: int, received: Tensor | None) -> Tensor | None:
        began, kept = self._now(), self._kept.pop(micro_batch)
        slope = None if received is None else self._pass.received(received)
        returned = self._eager_backward(kept, slope) if kept.begun is None else self._compiled_backward(kept, slope)
        sent = None if returned is None else self._pass.packed(returned)
        if self._compiled is not None and self._compiled.choice.is_timing:
            name = EAGER if kept.begun is None else COMPILED
            self._compiled.choice.add(name, kept.seconds + self._now() - began)
        return sent

    def close(self) -> None:
        """Free what unfinished micro-batches keep outside Python's memory."""
        for kept in self._kept.values():
            if kept.begun is not None and self._compiled is not None:
                self._compiled.libraries.drop(kept.begun)
        self._kept.clear()

    def _eager_forward(self, kept: _Kept, part: SequenceParts) -> Tensor | None:
        given = kept.given if self._stage.is_first else kept.given.requires_grad_()
        hidden = self._pass(given, part.positions)
        if self._stage.is_last:
            kept.result = self._loss_of(hidden, part.labels)
            return None
        kept.result = hidden
        return hidden

    def _eager_backward(self, kept: _Kept, slope: Tensor | None) -> Tensor | None:
        result = kept.result
        assert result is not None
        torch.autograd.backward(result, None if slope is None else slope.to(result))
        return kept.given.grad

    def _compiled_forward(self, kept: _Kept, targets: Tensor) -> Tensor | None:
        """Compute by the libraries if it is their turn; otherwise leave ``kept.begun`` None."""
        compiled = self._compiled
        if compiled is None or compiled.choice.begin() == EAGER:
            return None
        try:
            kept.begun = compiled.libraries.forward(kept.given, targets)
        except CompiledPassError as error:
            if self._stage.is_last:
                raise self._failed(compiled, error) from error
            compiled.choice.give_up(str(error))  # the eager pass computes this micro-batch
            return None
        return kept.begun.hidden

    def _compiled_backward(self, kept: _Kept, slope: Tensor | None) -> Tensor | None:
        assert self._compiled is not None
        assert kept.begun is not None
        try:
            return self._compiled.libraries.backward(kept.begun, slope)
        except CompiledPassError as error:
            raise self._failed(self._compiled, error) from error

    def _failed(self, compiled: CompiledMicroBatches, error: CompiledPassError) -> CompiledPassError:
        """Give the libraries up and delete them: a part of the gradient may be added, so the ranks start again."""
        compiled.choice.give_up(str(error))
        with contextlib.suppress(OSError):
            remember_failure(compiled.path, str(error))
            compiled.path.unlink()
        return error

    def _now(self) -> float:
        """Return the time, on a card once it has computed everything, while the passes are compared."""
        if self._compiled is not None and self._compiled.choice.is_timing:
            accelerator.synchronize(self._device)
        return time.perf_counter()
