"""Names of the codecs, as types for the manifest and as tuples for the codec registry, and the alignment of fragments.

Imports no torch.
"""

from __future__ import annotations

from typing import Literal, get_args

FRAGMENT_ALIGNMENT = 1024
"""Elements. Fragments begin at multiples of it, so that no codec block spans two fragments."""

Dense = Literal["fp32", "bf16", "fp16"]
Blockwise = Literal["int8", "int4"]
Modular = Literal["modular8", "modular4", "modular3", "modular2"]

WeightCodec = Literal[Dense, Blockwise, Modular]
"""Codecs for weights: they leave out no element."""

GradientCodec = Literal[Dense, Blockwise, "topk", "lowrank"]
"""Codecs for pseudo-gradients: their messages can be read alone."""

MODULAR_CODECS: tuple[str, ...] = get_args(Modular)
WEIGHT_CODECS: tuple[str, ...] = get_args(WeightCodec)
GRADIENT_CODECS: tuple[str, ...] = get_args(GradientCodec)
CODECS = tuple(dict.fromkeys(WEIGHT_CODECS + GRADIENT_CODECS))
"""All codecs, each once."""
