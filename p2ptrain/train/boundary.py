"""Form of the activations between two stages, and of their gradients on the way back.

==========  ===============  ==========================================================
name        bytes a number   error
==========  ===============  ==========================================================
``fp32``    4                none: a team computes bitwise what one process computes
``bf16``    2                2^-8 of each number
``int8``    1 + 4 / D        half a step of 1/127 of the largest number of its token
==========  ===============  ==========================================================

In int8 a token's activations are D signed bytes and a scale, as in SWARM (arXiv 2301.11913), its gradient likewise.
torch's pipeline sends gradients only for tensors of a floating type, so the bytes travel in a tensor of type bf16 that
nothing computes with.

Dimension letters: D width, W elements of a token on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

BoundaryName = Literal["fp32", "bf16", "int8"]

LEVELS = 127
"""Largest code of int8."""
SCALE_BYTES = 4
"""Bytes of a token's scale, fp32."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """How a stage sends activations."""

    name: BoundaryName

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensors that travel."""
        return torch.float32 if self.name == "fp32" else torch.bfloat16

    def elements(self, width: int) -> int:
        """Return W. Widths of allowed models are even."""
        return (width + SCALE_BYTES + 1) // 2 if self.name == "int8" else width

    def pack(
        self,
        hidden: Tensor,  # [..., D]
    ) -> Tensor:
        """Return what travels, [..., W] of ``dtype``, on the same device. Differentiable."""
        if self.name != "int8":
            return hidden.to(self.dtype)
        packed: Tensor = _Pack.apply(hidden.float())
        return packed

    def unpack(
        self,
        packed: Tensor,  # [..., W] of ``dtype``
        width: int,
    ) -> Tensor:
        """Return activations [..., D] in fp32. Differentiable: its gradient is packed."""
        if self.name != "int8":
            return packed.float()
        hidden: Tensor = _Unpack.apply(packed, width)
        return hidden


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.width = hidden.shape[-1]
        return _packed(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _unpacked(gradients[0], ctx.width)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, width: int) -> Tensor:
        return _unpacked(packed, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _packed(gradients[0]), None


def _packed(
    values: Tensor,  # [..., D] fp32
) -> Tensor:
    """Return codes, a byte of padding where D is odd, and the scale, as [..., W] bf16."""
    scale = values.abs().amax(-1, keepdim=True) / LEVELS
    codes = (values / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    if values.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return torch.cat([codes, scale.view(torch.int8)], dim=-1).view(torch.bfloat16)


def _unpacked(
    packed: Tensor,  # [..., W] bf16
    width: int,
) -> Tensor:
    """Return [..., D] fp32."""
    packed = packed.contiguous().view(torch.int8)
    scale = packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return packed[..., :width].float() * scale
