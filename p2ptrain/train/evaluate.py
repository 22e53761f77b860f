"""Held-out loss: one number, the same on every machine for the same weights, up to rounding.

A machine too slow for the time limit reads less of the same text; the result says how much was read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.ports import Clock, GoesOn, HeldOutLoss
from p2ptrain.tokens.corpus import HELD_OUT_TOKENS, TokenSource, tokens_to_read
from p2ptrain.train.model import summed_loss
from p2ptrain.train.sequence_parts import predicted_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH_LOGITS = 1 << 19
"""Sequences x tokens x vocabulary computed at once: 16 sequences of the demo model. Measured over 65,536 tokens, four
rounds: 1.0 to 1.2 s of CPU; 2**17 and 2**21 differ by less than the rounds do, 2**25 takes 2.0 to 2.7 s and 480 MB
more."""


def validation_loss(
    module: PreTrainedModel,
    corpus: TokenSource,
    most_tokens: int,  # maximum of held-out tokens to read, evenly spaced
    autocast: torch.dtype | None = None,
    patience_s: float = math.inf,  # approximate time limit; at least one batch is read
    clock: Clock = time.monotonic,
    goes_on: GoesOn = lambda read, wanted: True,
    loss_of: Callable[[Tensor], float] | None = None,  # summed loss of a batch; None: the module's
    agreed: Callable[..., Sequence[float]] = lambda *numbers: numbers,  # the same on all ranks that read together
) -> HeldOutLoss:
    """Return the mean cross entropy on held-out text.

    Training is not disturbed: no gradient, no random number, and the module's mode is restored. After each batch, as
    many batches are skipped as needed for the rest, evenly spaced and equally slow, to fit the time limit.
    """
    batch_sequences = max(1, BATCH_LOGITS // (corpus.sequence_length * module.config.vocab_size))
    was_training = module.training
    module.train(False)
    total, tokens, counted = 0.0, 0, 0
    wanted = tokens_to_read(corpus, most_tokens)
    left, skipped = math.ceil(wanted / corpus.sequence_length / batch_sequences), 0
    ends_at = clock() + patience_s
    try:
        with torch.no_grad():
            for batch in corpus.validation_batches(most_tokens, batch_sequences):
                left -= 1
                if skipped:
                    skipped -= 1
                    continue
                began = clock()
                own = float(summed_loss(module, batch, autocast)) if loss_of is None else loss_of(batch)
                tokens += batch.shape[0] * corpus.sequence_length
                counted += predicted_count(batch)
                stops = float(not goes_on(tokens, wanted))
                loss, batch_s, spare_s, stops = agreed(own, clock() - began, ends_at - clock(), stops)
                total += loss
                skipped = batches_to_skip(left, batch_s, spare_s)
                if stops:
                    break
    finally:
        module.train(was_training)
    return HeldOutLoss(total / max(1, counted), tokens, tokens_to_read(corpus, HELD_OUT_TOKENS))


def batches_to_skip(left: int, batch_s: float, spare_s: float) -> int:
    """Return how many of the ``left`` batches to skip before the next one."""
    if left * batch_s <= spare_s:
        return 0
    fit = max(0, int(spare_s / batch_s))
    return math.ceil(left / fit) - 1 if fit else left
