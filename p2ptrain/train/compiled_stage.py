"""Forward and backward pass of a pipeline stage's micro-batches as native libraries (``stage_compiler``).

1F1B keeps several micro-batches between their forward and backward pass. Each forward call allocates what its backward
call needs, and that call frees it, so no buffer is used again too early. CUDA graphs would compute every micro-batch in
the same memory, and are not used.

Dimension letters: B sequences of a micro-batch, T tokens a sequence, D width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from p2ptrain.train.compiled_pass import NativeLibrary, PassShape
from p2ptrain.train.libraries import backward_library
from p2ptrain.train.stages import StageModel


def stage_weights(model: StageModel) -> list[Tensor]:
    """Return a stage's parameters, the copy of a tied embedding last."""
    weights: list[Tensor] = list(model.flat.module.parameters())
    return weights if model.guest is None else [*weights, model.guest]


@dataclass(slots=True)
class MicroBatchInFlight:
    """A micro-batch between its forward and backward pass."""

    given: Tensor
    hidden: Tensor | None
    """Hidden states [B, T, D]; None on the last stage."""
    returned: Tensor | None
    """Gradient of ``given``; None on the first stage, written by the backward pass."""
    activations: list[ctypes.c_void_p]
    """Handles of what the forward pass keeps, until the backward pass consumes them."""


class CompiledStage:
    """The libraries of a stage, bound to its weights, their gradients and a loss. Use it from one thread.

    Args:
        library: written by ``stage_compiler`` for this shape.
        loss: scalar to which the last stage adds.

    Raises CompiledPassError.
    """

    def __init__(self, library: Path, model: StageModel, loss: Tensor, shape: PassShape) -> None:
        self._model = model
        self._weights = stage_weights(model)
        self._loss = loss
        device = torch.device(shape.device)
        self._forward = NativeLibrary(library, device)
        self._backward = None if model.stage.is_last else NativeLibrary(backward_library(library), device)
        self._outputs = 0 if model.stage.is_last else self._forward.outputs()
        self._handles = [self._forward.handle(each.detach()) for each in self._weights]
        self._size = shape.micro_batch, shape.sequence_length

    def takes(self, sequences: int, tokens: int) -> bool:
        """Return whether the libraries compute micro-batches of this shape; no other one is compiled."""
        return (sequences, tokens) == self._size

    def forward(
        self,
        given: Tensor,  # [B, T] int64 on the first stage, activations [B, T, D] on the others; on the device
        targets: Tensor,  # [B, T] int64 on the device, read on the last stage
    ) -> MicroBatchInFlight:
        """Compute a micro-batch forward, on the last stage also backward.

        Raises CompiledPassError, on the last stage perhaps with a part of the gradient added.
        """
        stage, library = self._model.stage, self._forward
        given = given.contiguous()
        returned = None if stage.is_first else torch.empty_like(given)
        if stage.is_last:
            tensors = [*self._gradients(), self._loss, given, returned, targets.contiguous()]
            library.call(self._handles, self._of(tensors))
            return MicroBatchInFlight(given, None, returned, [])
        theta, width = self._model.flat.theta, self._model.flat.module.config.hidden_size
        hidden = torch.empty(*self._size, width, dtype=theta.dtype, device=theta.device)
        activations = library.call(self._handles, self._of([given, hidden]), self._outputs)
        return MicroBatchInFlight(given, hidden, returned, activations)

    def backward(
        self,
        begun: MicroBatchInFlight,
        slope: Tensor | None,  # gradient of the hidden states, [B, T, D]; not read on the last stage
    ) -> Tensor | None:
        """Add a micro-batch's gradient; return that of its input, None on the first stage.

        Raises CompiledPassError, perhaps with a part of the gradient added.
        """
        if self._backward is None:
            return begun.returned
        assert slope is not None
        activations, begun.activations = begun.activations, []
        slope = slope.to(self._model.flat.theta).contiguous()
        tensors = [*self._gradients(), begun.given, slope, begun.returned]
        self._backward.call(self._handles, [*self._of(tensors), *activations])
        return begun.returned

    def drop(self, begun: MicroBatchInFlight) -> None:
        """Free what a micro-batch keeps whose backward pass will not come."""
        self._forward.release(begun.activations)
        begun.activations = []

    def _gradients(self) -> list[Tensor]:
        found = []
        for weight in self._weights:
            if weight.grad is None:  # the copy of a tied embedding
                weight.grad = torch.zeros_like(weight)
            found.append(weight.grad)
        return found

    def _of(self, tensors: Sequence[Tensor | None]) -> list[ctypes.c_void_p]:
        """Return handles of those that exist."""
        return [self._forward.handle(each) for each in tensors if each is not None]
