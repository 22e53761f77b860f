"""Batches of one corpus reader, the next of which travels to the device while the current step computes.

Dimension letters: B sequences of an inner step, T tokens a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from p2ptrain.base.ids import PeerId
from p2ptrain.tokens.corpus import ShardAwayError, TokenSource
from p2ptrain.train.sequence_parts import predicted_count


@dataclass(frozen=True, slots=True)
class CorpusReader:
    """Identity of a corpus reader: with a step number it determines the sequences."""

    seed: int
    peer: PeerId


class StepBatch(NamedTuple):
    """Sequences of one inner step."""

    sequences: Tensor
    """[B, T+1] int64, or [B, 3, T] of dialogues; see ``sequence_parts``."""
    predicted: int
    """Tokens that are predicted, counted on the host before any are computed."""


class Batches:
    """The reader's batch of each inner step.

    Args:
        sequences: B.
        device: where the batches are needed; they are copied ahead to CUDA devices alone.
    """

    reads_ahead = True
    """Whether the next batch may be read in advance."""

    def __init__(self, corpus: TokenSource, reader: CorpusReader, sequences: int, device: torch.device) -> None:
        self._corpus = corpus
        self._reader = reader
        self._sequences = sequences
        self._device = device
        self._ahead: tuple[int, StepBatch] | None = None
        """Step and batch that is on its way to the device."""

    @property
    def copies(self) -> bool:
        """Whether batches are copied ahead: only from pinned memory, which torch keeps until the copy is done.

        Asynchronous copies from other memory to MPS read it after it was released (pytorch/pytorch issue 189690).
        """
        return self._device.type == "cuda" and self.reads_ahead

    def at(self, step: int) -> StepBatch:
        """Return the batch of a step, on the device."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            return ahead[1]
        batch = self._read(step)
        return StepBatch(batch.to(self._device), predicted_count(batch))

    def prepare(self, step: int) -> None:
        """Start to copy a batch, after the work of the step before was given to the device; return at once.

        A batch that is not on this machine yet is read when it is needed.
        """
        if not self.copies:
            return
        try:
            batch = self._read(step)
        except ShardAwayError:
            return
        count = predicted_count(batch)
        if self._device.type == "cuda":
            batch = batch.pin_memory()
        self._ahead = step, StepBatch(batch.to(self._device, non_blocking=True), count)

    def _read(self, step: int) -> Tensor:
        return self._corpus.step_batch(self._reader.seed, self._reader.peer, step, self._sequences)
