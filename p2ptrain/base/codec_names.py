"""Names of the codecs, as types for the manifest and as tuples for the codec registry. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

Dense = Literal["fp32", "bf16", "fp16"]
Blockwise = Literal["int8", "int4"]
Modular = Literal["modular8", "modular4"]

WeightCodec = Literal[Dense, Blockwise, Modular]
"""Codecs for weights: they leave out no element."""

GradientCodec = Literal[Dense, Blockwise, "topk", "lowrank"]
"""Codecs for pseudo-gradients: their messages can be read alone."""

MODULAR_CODECS: tuple[str, ...] = get_args(Modular)
WEIGHT_CODECS: tuple[str, ...] = get_args(WeightCodec)
GRADIENT_CODECS: tuple[str, ...] = get_args(GradientCodec)
CODECS = tuple(dict.fromkeys(WEIGHT_CODECS + GRADIENT_CODECS))
"""All codecs, each once."""

__all__ = ["CODECS", "GRADIENT_CODECS", "MODULAR_CODECS", "WEIGHT_CODECS", "GradientCodec", "WeightCodec"]
