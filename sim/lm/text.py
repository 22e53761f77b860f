"""Training and held-out text of simulated language models.

The shipped text is cut as in every run (``tokens.builtin``), and its held-out blocks alternate between "validation" and
"test". The cut depends on the text alone, not on a seed, so that text seen in tuning is never test text in another run.

Training data are "iid" (every peer walks through the whole training text in its own order) or "shards" (peer n of N
holds only the n-th part: other plays, with other speakers and another style).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from p2ptrain.base.errors import CorpusError
from p2ptrain.tokens import builtin
from p2ptrain.tokens.builtin import Regions
from p2ptrain.tokens.index import SHARD_BYTES, sequences_in
from p2ptrain.tokens.walk import Walk
from p2ptrain.tokens.writing import bytes_of
from p2ptrain.train.batches import CorpusReader

Part = Literal["validation", "test"]
"""Part of the held-out text: validation for tuning and curves, test only for final numbers."""

DataKind = Literal["iid", "shards"]

HELD_OUT_FRACTION = 0.1
"""Fraction of the text, half for validation and half for test: 270 kB each of the shipped Shakespeare. Guess: the
spread of held-out losses by text size would settle it."""

SHARD_TOKENS = SHARD_BYTES // bytes_of(256)
"""Tokens of a shard of real peers, which read the same sequences."""


@dataclass(frozen=True)
class Text:
    """A text of bytes and the positions of its sequences, equal for every peer, seed and run."""

    regions: Regions
    sequence_length: int

    @classmethod
    def builtin(cls, sequence_length: int) -> Text:
        """Return the shipped Shakespeare. Raises CorpusError if sequences are too long for two held-out blocks."""
        regions = builtin.regions(builtin.text("shakespeare"), sequence_length, HELD_OUT_FRACTION)
        if len(regions.held_out) < 2:
            raise CorpusError(
                f"Sequences of {sequence_length} tokens leave no text for a validation and a test part.",
                "Use shorter sequences.",
            )
        return cls(regions, sequence_length)

    @cached_property
    def tokens(self) -> Tensor:
        """Training text, then held-out text, [tokens] uint8."""
        return torch.from_numpy(np.concatenate([each.reshape(-1) for each in self.regions]))

    def starts(self, part: Part) -> list[int]:
        """Return the first token of every sequence of a held-out part: even blocks are validation, odd ones test."""
        blocks, each = self.regions.held_out.shape
        begin, first = self.regions.training.size, 0 if part == "validation" else 1
        return [
            begin + block * each + place * self.sequence_length
            for block in range(first, blocks, 2)
            for place in range(sequences_in(each, self.sequence_length, False))
        ]

    def walk(self, reader: CorpusReader) -> Walk:
        """Return a peer's way through the training text, as ``ShardCorpus.walk`` of a real one."""
        tokens, length = self.regions.training.size, self.sequence_length
        shards = -(-tokens // SHARD_TOKENS)
        per_shard = sequences_in(min(tokens, SHARD_TOKENS), length, False)
        last = sequences_in(tokens - (shards - 1) * SHARD_TOKENS, length, False)
        return Walk(reader.seed, reader.peer, shards, per_shard, last)


@dataclass(frozen=True, slots=True)
class TextShare:
    """The part of the training text that one peer reads, and its order."""

    walk: Walk
    first: int = 0
    """First training sequence of the share."""
    sequence_length: int = 0

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.walk.total

    def starts(self, step: int, per_step: int) -> list[int]:
        """Return the first tokens of the sequences of inner step ``step``."""
        places = (divmod(position, self.sequences) for position in range(step * per_step, (step + 1) * per_step))
        return [int(_starts(self, epoch)[place]) for epoch, place in places]


@lru_cache(maxsize=64)
def _starts(share: TextShare, epoch: int) -> np.ndarray:
    """Return the first tokens of one epoch's sequences, [sequences] int32: once instead of for each step."""
    shards, sequences = share.walk.epoch(epoch).T
    return (shards * SHARD_TOKENS + (share.first + sequences) * share.sequence_length).astype(np.int32)


def shares(text: Text, readers: Sequence[CorpusReader], kind: DataKind) -> tuple[TextShare, ...]:
    """Assign the text to readers: all of it to each ("iid"), or the n-th part to reader n of N ("shards").

    Raises:
        CorpusError: there are more readers than sequences.
    """
    length, count = text.sequence_length, len(readers)
    if kind == "iid":
        return tuple(TextShare(text.walk(reader), 0, length) for reader in readers)
    total = sequences_in(text.regions.training.size, length, False)
    if count > total:
        raise CorpusError(
            f"{count} peers cannot share {total} training sequences.",
            "Use fewer peers, shorter sequences, or set learner.data = 'iid'.",
        )
    cuts = [number * total // count for number in range(count + 1)]
    return tuple(
        TextShare(replace(text.walk(reader), shards=1, per_shard=end - first, in_last=end - first), first, length)
        for reader, first, end in zip(readers, cuts[:-1], cuts[1:], strict=True)
    )
