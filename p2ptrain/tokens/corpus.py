"""Batches of a run's shards.

Dimension letters: B sequences of a batch, T = ``sequence_length``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.base.errors import P2pTrainError
from p2ptrain.data.packing import decoded_rows
from p2ptrain.tokens.index import Shard, ShardIndex, sequences_in
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.walk import WINDOW, Walk

if TYPE_CHECKING:
    from torch import Tensor

MAPPED = 2 * WINDOW
"""Shards that stay mapped: those of this window and of the next one."""


class ShardAwayError(P2pTrainError):
    """A shard is not on this machine yet; its digest is the message."""


@dataclass(slots=True)
class ShardCorpus:
    """Training and held-out sequences of shards in a store. One thread.

    A batch whose shard is missing raises ShardAwayError; ids of a false shard cannot occur, since the store has checked
    its digest.
    """

    index: ShardIndex
    store: ShardStore
    sequence_length: int
    """T."""
    _mapped: OrderedDict[str, np.ndarray] = field(default_factory=OrderedDict)

    @property
    def is_packed(self) -> bool:
        """Whether sequences are rows of dialogues, of which training predicts the answers alone."""
        return self.index.is_packed

    @property
    def train_sequences(self) -> int:
        return self._total(self.index.training)

    @property
    def train_tokens(self) -> int:
        """Tokens that training predicts in one epoch."""
        return self.train_sequences * self.sequence_length

    @property
    def held_out_tokens(self) -> int:
        return self._total(self.index.held_out) * self.sequence_length

    def walk(self, seed: int, peer: str) -> Walk:
        """Return a peer's way through the training shards. Raises ValueError if they hold no sequence."""
        shards = self.index.training
        return Walk(seed, peer, len(shards), self._sequences(shards[0]), self._sequences(shards[-1]))

    def step_batch(self, seed: int, peer: str, step: int, sequences: int) -> Tensor:
        """Return a peer's sequences of an inner step, int64 on the host: [B, T+1], or [B, 3, T] of dialogues.

        Of dialogues: inputs, labels (``packing.IGNORED`` where nothing is predicted) and positions.
        """
        shards = self.index.training
        return self._gather(
            [(shards[each.shard], each.sequence) for each in self.walk(seed, peer).sequences(step, sequences)]
        )

    def validation_batches(self, most_tokens: int, batch_sequences: int) -> Iterator[Tensor]:
        """Yield held-out sequences as ``step_batch`` does, B up to ``batch_sequences``: the same ones on every machine.

        At most ``most_tokens`` predicted tokens (but at least one sequence), evenly spaced over the held-out part.
        """
        shards = self.index.held_out
        total, per_shard = self._total(shards), self._sequences(shards[0])
        count = max(1, min(total, most_tokens // self.sequence_length))
        numbers = [place * total // count for place in range(count)]
        for first in range(0, count, batch_sequences):
            places = (divmod(number, per_shard) for number in numbers[first : first + batch_sequences])
            yield self._gather([(shards[shard], sequence) for shard, sequence in places])

    def needed_for_loss(self) -> list[str]:
        """Return the digests of the held-out shards."""
        return [each.digest for each in self.index.held_out]

    def _gather(self, places: Sequence[tuple[Shard, int]]) -> Tensor:
        import torch  # not above: commands that only count tokens do without

        length = self.sequence_length
        span = length if self.is_packed else length + 1
        rows = np.stack([self._ids(shard)[place * length : place * length + span] for shard, place in places])
        found = np.stack(decoded_rows(rows), axis=1) if self.is_packed else rows.astype(np.int64)
        return torch.from_numpy(found)

    def _ids(self, shard: Shard) -> np.ndarray:
        ids = self._mapped.get(shard.digest)
        if ids is None:
            ids = self.store.map(shard.digest, self.index.id_bytes, shard.tokens)
            if ids is None:
                raise ShardAwayError(shard.digest)
            self._mapped[shard.digest] = ids
            if len(self._mapped) > MAPPED:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(shard.digest)
        return ids

    def _sequences(self, shard: Shard) -> int:
        return sequences_in(shard.tokens, self.sequence_length, self.is_packed)

    def _total(self, shards: Sequence[Shard]) -> int:
        return sum(map(self._sequences, shards))
