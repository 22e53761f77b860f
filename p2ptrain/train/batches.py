"""Batches of one corpus reader, the next of which travels to the device while the current step computes.

Dimension letters: B sequences of an inner step, T tokens a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.base.ids import PeerId
from p2ptrain.data import assign
from p2ptrain.data.corpus import Corpus


@dataclass(frozen=True, slots=True)
class CorpusReader:
    """Identity of a corpus reader: with a step number it determines the sequences."""

    seed: int
    peer: PeerId


class Batches:
    """The reader's batch of each inner step.

    Args:
        sequences: B.
        device: where the batches are needed; they are copied ahead to CUDA devices alone.
    """

    def __init__(self, corpus: Corpus, reader: CorpusReader, sequences: int, device: torch.device) -> None:
        self._corpus = corpus
        self._reader = reader
        self._sequences = sequences
        self._device = device
        self._ahead: tuple[int, Tensor] | None = None
        """Step and batch that is on its way to the device."""

    @property
    def copies(self) -> bool:
        """Whether batches are copied ahead: only from pinned memory, which torch keeps until the copy is done.

        Asynchronous copies from other memory to MPS read it after it was released (pytorch/pytorch issue 189690).
        """
        return self._device.type == "cuda"

    def at(self, step: int) -> Tensor:
        """Return [B, T+1] int64 on the device."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            return ahead[1]
        return self._read(step).to(self._device)

    def prepare(self, step: int) -> None:
        """Start to copy a batch, after the work of the step before was given to the device; return at once."""
        if not self.copies:
            return
        batch = self._read(step)
        if self._device.type == "cuda":
            batch = batch.pin_memory()
        self._ahead = step, batch.to(self._device, non_blocking=True)

    def _read(self, step: int) -> Tensor:
        reader, total = self._reader, self._corpus.train_sequences
        return self._corpus.batch(assign.sequences(reader.seed, reader.peer, step, self._sequences, total))
