"""What a batch holds: plain sequences, or rows of packed dialogues of which only the answers are predicted.

A batch is one tensor, so that it is cut, copied ahead, and sent like any other. Plain text: [B, T+1]. Dialogues:
[B, 3, T] with inputs, labels and positions; transformers builds the mask that keeps dialogues apart from positions that
begin again at 0 (``masking_utils.find_packed_sequence_indices``), and each stage of a pipeline needs them.

Dimension letters: B sequences, T tokens a sequence, D width, N predicted tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from p2ptrain.tokens.packing import IGNORED


class SequenceParts(NamedTuple):
    """Parts of a batch, [B, T] int64 each."""

    inputs: Tensor
    labels: Tensor
    """The token after each; ``IGNORED`` where none is predicted, in packed batches alone."""
    positions: Tensor | None
    """Positions in the dialogue; None in batches of plain text, where they are those in the sequence."""

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Arguments of a model or a stage besides its input."""
        return {} if self.positions is None else {"position_ids": self.positions}

    @property
    def sequences(self) -> int:
        return self.inputs.shape[0]

    @property
    def tokens(self) -> int:
        """T."""
        return self.inputs.shape[1]


def parts_of(batch: Tensor) -> SequenceParts:
    """Return views of a batch."""
    if batch.dim() == 3:
        return SequenceParts(batch[:, 0], batch[:, 1], batch[:, 2])
    return SequenceParts(batch[:, :-1], batch[:, 1:], None)


def trial_batch(sequences: int, tokens: int, is_packed: bool) -> Tensor:
    """Return a batch of zeros that takes as long and as much memory as any; of dialogues with two in each row."""
    if not is_packed:
        return torch.zeros(sequences, tokens + 1, dtype=torch.int64)
    batch = torch.zeros(sequences, 3, tokens, dtype=torch.int64)
    places = torch.arange(tokens)
    batch[:, 2] = torch.where(places < tokens // 2, places, places - tokens // 2)
    return batch


def predicted_count(batch: Tensor) -> int:
    """Return N; on the host it is known at once."""
    parts = parts_of(batch)
    return parts.labels.numel() if parts.positions is None else int((parts.labels != IGNORED).sum())


def predicted(
    hidden: Tensor,  # [B, T, D]
    labels: Tensor,  # [B, T]
    is_packed: bool,
) -> tuple[Tensor, Tensor]:
    """Return hidden states [N, D] and targets [N] of the predicted tokens: all, unless dialogues are packed."""
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    if not is_packed:
        return hidden, labels
    is_predicted = labels != IGNORED
    return hidden[is_predicted], labels[is_predicted]
