"""The held-out loss: one number, the same on every machine for the same weights, up to rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from p2ptrain.data import Corpus
from p2ptrain.train.model import summed_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH_LOGITS = 1 << 19
"""Sequences x tokens x vocabulary computed at once: 16 sequences of the demo model. Our measurement, over 65,536
tokens, four rounds: 1.0 to 1.2 s of CPU; 2**17 and 2**21 differ by less than the rounds do, 2**25 takes 2.0 to 2.7 s
and 480 MB more."""


def validation_loss(
    module: PreTrainedModel,
    corpus: Corpus,
    most_tokens: int,  # held-out tokens to read at most, evenly spaced
    autocast: torch.dtype | None = None,
) -> float:
    """Mean cross entropy in nats a token over held-out text.

    Training is not disturbed: no gradient, no random number, and the module's mode is what it was.
    """
    batch_sequences = max(1, BATCH_LOGITS // (corpus.sequence_length * module.config.vocab_size))
    was_training = module.training
    module.train(False)
    total, tokens = 0.0, 0
    try:
        with torch.no_grad():
            for batch in corpus.validation_batches(most_tokens, batch_sequences):
                total += float(summed_loss(module, batch, autocast))
                tokens += batch.shape[0] * corpus.sequence_length
    finally:
        module.train(was_training)
    return total / tokens
