"""Batches of a run's shards.

Dimension letters: B sequences of a batch, T = ``sequence_length``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from p2ptrain.base.errors import CorpusError, P2pTrainError
from p2ptrain.tokens.index import Shard, ShardIndex, sequences_in
from p2ptrain.tokens.packing import FLAG_BITS, IGNORED, decoded_rows
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.walk import WINDOW, Walk

if TYPE_CHECKING:
    from torch import Tensor

MAPPED = 2 * WINDOW
"""Shards that stay mapped: those of this window and of the next one."""
MOST_IDS = 1 << 30

HELD_OUT_TOKENS = 65_536
"""Held-out tokens read for one reported loss: a standard error of about 0.01 nats for bytes; 1 s for the demo model.
Guess: the differences in loss that owners compare."""


class ShardAwayError(P2pTrainError):
    """A shard is not on this machine yet; its digest is the message."""


class TokenSource(Protocol):
    """What training and evaluation read: a ``ShardCorpus``, or batches that another rank reads."""

    @property
    def sequence_length(self) -> int:
        """T."""

    @property
    def is_packed(self) -> bool:
        """Whether sequences are rows of dialogues, of which training predicts the answers alone."""

    @property
    def train_sequences(self) -> int: ...

    @property
    def held_out_tokens(self) -> int: ...

    def step_batch(self, seed: int, peer: str, step: int, sequences: int) -> Tensor:
        """Return a peer's sequences of an inner step, int64 on the host: [B, T+1], or [B, 3, T] of dialogues.

        Of dialogues: inputs, labels (``packing.IGNORED`` where nothing is predicted) and positions. Raises
        ShardAwayError.
        """

    def validation_batches(self, most_tokens: int, batch_sequences: int) -> Iterator[Tensor]:
        """Yield held-out sequences as ``step_batch`` does, B up to ``batch_sequences``: the same ones on every machine.

        At most ``most_tokens`` predicted tokens (but at least one sequence), evenly spaced over the held-out part.
        Raises ShardAwayError.
        """


@dataclass(slots=True)
class ShardCorpus:
    """Training and held-out sequences of shards in a store: a ``TokenSource``. One thread.

    A batch whose shard is missing raises ShardAwayError. The store has checked the shards' digests; an author's ids
    that the model does not have raise CorpusError.
    """

    index: ShardIndex
    store: ShardStore
    sequence_length: int
    """T."""
    vocabulary: int = MOST_IDS
    """Ids that the model has."""
    _mapped: OrderedDict[str, np.ndarray] = field(default_factory=OrderedDict)

    @property
    def is_packed(self) -> bool:
        return self.index.is_packed

    @property
    def train_sequences(self) -> int:
        return self._total(self.index.training_tokens)

    @property
    def train_tokens(self) -> int:
        """Tokens that training predicts in one epoch."""
        return self.train_sequences * self.sequence_length

    @property
    def held_out_tokens(self) -> int:
        return self._total(self.index.held_out_tokens) * self.sequence_length

    def walk(self, seed: int, peer: str) -> Walk:
        """Return a peer's way through the training shards. Raises ValueError if they hold no sequence."""
        shards, tokens = self.index.training_shards, self.index.training_tokens
        last = self._sequences(tokens - (shards - 1) * self.index.shard_tokens)
        return Walk(seed, peer, shards, self._sequences(min(tokens, self.index.shard_tokens)), last)

    def step_batch(self, seed: int, peer: str, step: int, sequences: int) -> Tensor:
        return self._gather(self.walk(seed, peer).sequences(step, sequences))

    def validation_batches(self, most_tokens: int, batch_sequences: int) -> Iterator[Tensor]:
        total, first = self._total(self.index.held_out_tokens), self.index.training_shards
        per_shard = self._sequences(min(self.index.held_out_tokens, self.index.shard_tokens))
        count = max(1, min(total, most_tokens // self.sequence_length))
        places = [divmod(place * total // count, per_shard) for place in range(count)]
        for begin in range(0, count, batch_sequences):
            part = places[begin : begin + batch_sequences]
            yield self._gather([(first + shard, sequence) for shard, sequence in part])

    def prompt_ids(self) -> list[int]:
        """Return the beginning of a held-out dialogue, up to its first answer; empty if the corpus has none."""
        if not self.is_packed:
            return []
        inputs, labels, _ = self._gather([(self.index.training_shards, 0)])[0]
        answers = (labels != IGNORED).nonzero().flatten().tolist()
        return inputs[: 1 + answers[0]].tolist() if answers else []

    def needed_for_loss(self) -> list[str]:
        """Return the digests of the held-out shards."""
        return [*self.index.digests[self.index.training_shards :]]

    def _gather(self, places: Sequence[tuple[int, int]]) -> Tensor:
        """Return sequences by the number of their shard, among all, and their own in it."""
        import torch  # not above: commands that only count tokens do without

        length = self.sequence_length
        span = length if self.is_packed else length + 1
        found = [self._ids(shard)[place * length : place * length + span] for shard, place in places]
        rows = np.stack(found)
        return torch.from_numpy(np.stack(decoded_rows(rows), axis=1) if self.is_packed else rows.astype(np.int64))

    def _ids(self, number: int) -> np.ndarray:
        shard = self.index.shard(number)
        ids = self._mapped.get(shard.digest)
        if ids is None:
            ids = self.store.map(shard.digest, self.index.id_bytes, shard.tokens)
            if ids is None:
                raise ShardAwayError(shard.digest)
            self._check_ids(shard, ids)
            self._mapped[shard.digest] = ids
            if len(self._mapped) > MAPPED:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(shard.digest)
        return ids

    def _check_ids(self, shard: Shard, ids: np.ndarray) -> None:
        largest = int(ids.max()) >> (FLAG_BITS if self.is_packed else 0)
        if largest >= self.vocabulary:
            raise CorpusError(
                f"The shard {shard.digest} of the run's text has the id {largest:,}, and the model has only "
                f"{self.vocabulary:,}.",
                "If the run is not yours, ask its author.",
            )

    def _sequences(self, tokens: int) -> int:
        """Return the sequences of a shard of so many tokens."""
        return sequences_in(tokens, self.sequence_length, self.is_packed)

    def _total(self, tokens: int) -> int:
        """Return the sequences of shards with so many tokens in all."""
        whole, last = divmod(tokens, self.index.shard_tokens)
        return whole * self._sequences(self.index.shard_tokens) + self._sequences(last)


def tokens_to_read(corpus: TokenSource, most_tokens: int) -> int:
    """Return how many held-out tokens one loss predicts: at most ``most_tokens`` in whole sequences, at least one."""
    length = corpus.sequence_length
    return max(1, min(most_tokens, corpus.held_out_tokens) // length) * length
