"""Held-out loss of a team, a collective: all ranks call it, and all return the same number.

Batches flow from stage to stage, several at once. After each round of batches one all-reduce gives all ranks the loss
so far and the first rank's clock, so that they skip the same batches if time is short.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.data.corpus import Corpus
from p2ptrain.data.split import HELD_OUT_TOKENS
from p2ptrain.ports import Clock
from p2ptrain.train.cross_entropy import summed_cross_entropy
from p2ptrain.train.evaluate import BATCH_LOGITS, GoesOn, HeldOutLoss, batches_to_skip, tokens_to_read
from p2ptrain.train.sequence_parts import parts_of, predicted, predicted_count

if TYPE_CHECKING:
    from p2ptrain.train.pipeline import PipelineTask
    from p2ptrain.train.stages import StagePass

ROUND = 2
"""Batches between all-reduces, per stage. Guess: evaluation of slow and fast stages would settle it; more batches keep
the pipeline full, fewer end nearer to the time limit."""


@dataclass(frozen=True, slots=True)
class StagedHeldOut:
    """``ports.HeldOut`` of a team's rank."""

    task: PipelineTask
    corpus: Corpus
    most_tokens: int
    patience_s: float = math.inf

    @property
    def guessing(self) -> float:
        return math.log(self.task.model.module.config.vocab_size)

    def loss(self) -> float:
        task = self.task
        forward = task.forward_pass
        return staged_validation_loss(task, forward, self.corpus, self.most_tokens, self.patience_s).value


def staged_validation_loss(
    task: PipelineTask,
    forward: StagePass,  # of the task's stage, in the compute type of the evaluation
    corpus: Corpus,
    most_tokens: int,  # maximum of held-out tokens to read, evenly spaced
    patience_s: float = math.inf,  # approximate time limit of the first rank; at least one round is read
    clock: Clock = time.monotonic,
    goes_on: GoesOn = lambda read, wanted: True,  # the first rank's decides, after each round
) -> HeldOutLoss:
    """Return what ``validation_loss`` returns for the whole model in one process. Raises TeamError.

    Training is not disturbed: no gradient, no random number, and the module's mode is restored.
    """
    module, stage = task.model.module, task.stage_model.stage
    vocabulary = module.config.vocab_size
    batch_sequences = max(1, BATCH_LOGITS // (corpus.sequence_length * vocabulary))
    wanted = tokens_to_read(corpus, most_tokens)
    left = math.ceil(wanted / corpus.sequence_length / batch_sequences)
    ends_at = clock() + patience_s
    total, tokens, counted, unread, apart, to_skip = 0.0, 0, 0, 0, 0, 0
    was_training = module.training
    module.train(False)
    began = clock()
    try:
        task.refresh_guest()
        with torch.no_grad():
            for batch in corpus.validation_batches(most_tokens, batch_sequences):
                left -= 1
                if to_skip:
                    to_skip -= 1
                    continue
                total += _summed_loss(task, forward, batch)
                tokens += batch.shape[0] * corpus.sequence_length
                counted += predicted_count(batch)
                unread, to_skip = unread + 1, apart
                if unread == ROUND * stage.count:
                    stops = stage.is_first and not goes_on(tokens, wanted)
                    times = (clock() - began) / unread, ends_at - clock()
                    _, batch_s, spare_s, must_stop = _agreed(task, total, *times, float(stops))
                    if must_stop:
                        break
                    apart = to_skip = batches_to_skip(left, batch_s, spare_s)
                    unread, began = 0, clock()
            total, *_ = _agreed(task, total)
    finally:
        module.train(was_training)
    return HeldOutLoss(total / max(1, counted), tokens, tokens_to_read(corpus, HELD_OUT_TOKENS))


def _summed_loss(
    task: PipelineTask,
    forward: StagePass,
    batch: Tensor,  # [B, T+1] or [B, 3, T]
) -> float:
    """Pass a batch through this stage; return its summed loss on the last one, 0 on the others."""
    stage, name = task.stage_model.stage, "held-out loss: activations"
    parts = parts_of(batch.to(task.theta.device))
    given = parts.inputs
    if not stage.is_first:
        buffer = forward.buffer(parts.sequences, parts.tokens)
        given = forward.received(task.group.receive(name, buffer, stage.index - 1))
    hidden = forward(given, parts.positions)
    if not stage.is_last:
        task.group.send(name, forward.packed(hidden), stage.index + 1)
        return 0.0
    states, targets = predicted(hidden, parts.labels, parts.positions is not None)
    return float(summed_cross_entropy(states, task.stage_model.output, targets, forward.autocast))


def _agreed(task: PipelineTask, total: float, *first: float) -> list[float]:
    """Return the last rank's total and the first rank's numbers, on all ranks."""
    stage = task.stage_model.stage
    mine = [total if stage.is_last else 0.0, *(number if stage.is_first else 0.0 for number in first)]
    return task.group.sum("held-out loss: sum", torch.tensor(mine, dtype=torch.float64)).tolist()
