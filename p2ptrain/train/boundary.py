"""Form of the activations between two stages, and of their gradients on the way back.

==========  ===============  ==========================================================
name        bytes a number   error
==========  ===============  ==========================================================
``fp32``    4                none: a team computes bitwise what one process computes
``bf16``    2                2^-8 of each number
``int8``    1 + 4 / D        half a step of 1/127 of the largest number of its token
==========  ===============  ==========================================================

In int8 a token's activations are D signed bytes and a scale, as in SWARM (arXiv 2301.11913), its gradient likewise.

Dimension letters: D width, W elements of a token on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BoundaryName = Literal["fp32", "bf16", "int8"]

LEVELS = 127
"""Largest code of int8."""
SCALE_BYTES = 4
"""Bytes of a token's scale, fp32."""
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Boundary:
    """How stages send activations and gradients."""

    name: BoundaryName

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensors that travel."""
        return _TYPES[self.name]

    def elements(self, width: int) -> int:
        """Return W."""
        return width + SCALE_BYTES if self.name == "int8" else width

    def bytes_per_token(self, width: int) -> int:
        return self.elements(width) * self.dtype.itemsize

    def pack(
        self,
        values: Tensor,  # [..., D]
    ) -> Tensor:
        """Return what travels, [..., W] of ``dtype``, contiguous, on the same device."""
        values = values.detach()
        return (_packed(values.float()) if self.name == "int8" else values.to(self.dtype)).contiguous()

    def unpack(
        self,
        packed: Tensor,  # [..., W] of ``dtype``
    ) -> Tensor:
        """Return activations or gradients [..., D] in fp32."""
        return _unpacked(packed) if self.name == "int8" else packed.float()


EXACT = Boundary("fp32")
BOUNDARIES = (EXACT, Boundary("bf16"), Boundary("int8"))
"""All, the most exact first."""


def _packed(
    values: Tensor,  # [..., D] fp32
) -> Tensor:
    """Return codes and scale, as [..., W] int8."""
    scale = values.abs().amax(-1, keepdim=True) / LEVELS
    codes = (values / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], dim=-1)


def _unpacked(
    packed: Tensor,  # [..., W] int8
) -> Tensor:
    """Return [..., D] fp32."""
    scale = packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return packed[..., :-SCALE_BYTES].float().mul_(scale)
