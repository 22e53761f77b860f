"""Training numbers of a run that continues a published model, which those of the presets, for random weights, do not
suit."""

from __future__ import annotations

import math
from typing import Any

from p2ptrain.base.codec_names import FRAGMENT_ALIGNMENT
from p2ptrain.manifest.decoder import MAX_LOGITS, Decoder
from p2ptrain.manifest.model import parameter_count
from p2ptrain.manifest.presets import PRESETS, preset

CONTINUED_TRAINING = {
    # Published models were trained with AdamW, and Muon degrades those (arXiv 2502.16982, 2605.10468).
    "training.optimizer": "adamw",
    # Guess: a sweep on published models; a higher one adapts more to the new text and forgets more of the old
    # (arXiv 2308.04014).
    "training.learning_rate": 1e-4,
    # Warmed up and decayed again (arXiv 2403.08763).
    "training.schedule": "cosine",
    "training.final_learning_rate_fraction": 0.1,
}

WARMUP_SHARE = 100
"""Tokens of a run for each token of its warm-up; its length matters little (arXiv 2308.04014)."""

_NO_AUTHOR = "00" * 32


def nearest_preset(model: Decoder) -> str:
    """Return the preset whose model has the nearest size."""
    own = parameter_count(model)
    sizes = {name: parameter_count(preset(name, _NO_AUTHOR).model) for name in PRESETS}
    return min(sizes, key=lambda name: abs(math.log(sizes[name] / own)))


def continued(model: Decoder, preset_name: str) -> dict[str, Any]:
    """Return the changes that make a preset a run that continues a model, by dotted path.

    Sequences and fragments are the preset's, as far as the model has the positions and the weights for them.
    """
    start = preset(preset_name, _NO_AUTHOR)
    length = min(
        start.training.sequence_length,
        model.config.max_position_embeddings,
        MAX_LOGITS // model.config.vocab_size,
    )
    fragments = max(1, min(start.outer.fragments, parameter_count(model) // FRAGMENT_ALIGNMENT))
    return {
        **CONTINUED_TRAINING,
        "model": model.model_dump(),
        "training.sequence_length": length,
        "training.warmup_tokens": start.run.tokens // WARMUP_SHARE,
        "outer.fragments": fragments,
        "outer.fragments_per_exchange": min(fragments, start.outer.fragments_per_exchange),
    }
