"""The run's text among the ranks of one trainer: rank 0 reads it, and the others get each batch from it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from p2ptrain.tokens.corpus import ShardAwayError, TokenSource
from p2ptrain.train.ranks import Ranks

AWAY = -(1 << 30)
"""First number of a batch that rank 0 cannot read; neither an id nor a label."""


class RankCorpus:
    """A ``TokenSource`` whose methods are collectives: of training batches of all ranks, of held-out ones of the ranks
    of the first replica, which alone read losses.

    If rank 0 raises ShardAwayError, all do. The constructor is a collective of all ranks, too.

    Args:
        own: rank 0's text; None on the others.
    """

    def __init__(self, ranks: Ranks, own: TokenSource | None) -> None:
        sizes = None
        if own is not None:
            sizes = own.sequence_length, own.train_sequences, own.held_out_tokens, own.is_packed
        self.sequence_length, self.train_sequences, self.held_out_tokens, self.is_packed = ranks.share(sizes)
        self._ranks = ranks
        self._own = own

    def step_batch(self, seed: int, peer: str, step: int, sequences: int) -> Tensor:
        """See ``TokenSource``."""
        read: Tensor | None = None
        if self._own is not None:
            try:
                read = self._own.step_batch(seed, peer, step, sequences)
            except ShardAwayError as away:
                self._given(self._unread(sequences), within_replica=False)
                raise away from None
        return self._given(self._unread(sequences) if read is None else read, within_replica=False)

    def validation_batches(self, most_tokens: int, batch_sequences: int) -> Iterator[Tensor]:
        """See ``TokenSource``."""
        left = max(1, min(self.held_out_tokens, most_tokens) // self.sequence_length)
        batches = None if self._own is None else self._own.validation_batches(most_tokens, batch_sequences)
        while left:
            count = min(left, batch_sequences)
            left -= count
            read = None
            if batches is not None:
                try:
                    read = next(batches)
                except ShardAwayError as away:
                    self._given(self._unread(count), within_replica=True)
                    raise away from None
            yield self._given(self._unread(count) if read is None else read, within_replica=True)

    def _unread(self, sequences: int) -> Tensor:
        shape = (sequences, 3, self.sequence_length) if self.is_packed else (sequences, self.sequence_length + 1)
        batch = torch.zeros(shape, dtype=torch.int64)
        batch.view(math.prod(shape))[0] = AWAY
        return batch

    def _given(self, batch: Tensor, within_replica: bool) -> Tensor:
        """Return rank 0's batch. Raises ShardAwayError on the other ranks if it has none."""
        numbers = self._ranks.broadcast(batch.to(torch.int32).contiguous(), within_replica)
        if self._own is None and int(numbers.view(-1)[0]) == AWAY:
            raise ShardAwayError("of rank 0")
        return numbers.to(torch.int64)
