"""Cutting of ids into shards, on the author's machine."""

from __future__ import annotations

import hashlib

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.tokens.index import SHARD_BYTES, ShardIndex, sequences_in
from p2ptrain.tokens.store import ShardStore

WIDE = 1 << 16
"""Numbers from which on 4 bytes are needed."""


def bytes_of(numbers: int) -> int:
    """Return the bytes of an id in shards that hold so many different numbers: ids, or codes of packed rows."""
    return 2 if numbers <= WIDE else 4


class ShardWriter:
    """Writes training and held-out ids, in order, to a store.

    Args:
        id_bytes: 2 or 4.
        row_tokens: T of packed rows; 0: text.
    """

    def __init__(self, store: ShardStore, id_bytes: int, row_tokens: int = 0) -> None:
        self._store, self._id_bytes, self._row_tokens = store, id_bytes, row_tokens
        self._whole = SHARD_BYTES // id_bytes // row_tokens * row_tokens if row_tokens else SHARD_BYTES // id_bytes
        self._parts = {True: _Part(), False: _Part()}

    def add(
        self,
        ids: np.ndarray,  # [any number] of any unsigned type
        is_training: bool,
    ) -> None:
        """Write ids. Raises HomeError."""
        part = self._parts[is_training]
        part.rest.append(ids.astype(f"<u{self._id_bytes}"))
        part.waiting += len(ids)
        part.tokens += len(ids)
        if part.waiting >= self._whole:
            joined = np.concatenate(part.rest)
            for start in range(0, len(joined) - self._whole + 1, self._whole):
                self._write(part, joined[start : start + self._whole])
            rest = joined[len(joined) // self._whole * self._whole :]
            part.rest, part.waiting = [rest], len(rest)

    @property
    def shards(self) -> list[str]:
        """Digests of the whole training shards so far."""
        return self._parts[True].digests

    def rest(self) -> np.ndarray:
        """Return the training ids that are in no shard yet."""
        part = self._parts[True]
        return np.concatenate([np.zeros(0, dtype=f"<u{self._id_bytes}"), *part.rest])

    def resume(self, digests: list[str], rest: np.ndarray) -> None:
        """Go on after ``shards`` and ``rest`` of an earlier writer, which wrote nothing held out."""
        part = self._parts[True]
        part.digests, part.rest, part.waiting = [*digests], [rest.astype(f"<u{self._id_bytes}")], len(rest)
        part.tokens = len(digests) * self._whole + len(rest)

    def finish(self, sequence_length: int) -> ShardIndex:
        """Write what is left; return the index. Raises CorpusError if there are not two sequences, and HomeError.

        If less than a sequence was held out, the end of the training part is.
        """
        training, held_out = self._parts[True], self._parts[False]
        span = sequence_length + (self._row_tokens == 0)
        if held_out.tokens < span <= training.waiting and training.tokens >= 2 * span:
            ids = self.rest()
            training.rest, training.waiting, training.tokens = [ids[:-span]], len(ids) - span, training.tokens - span
            self.add(ids[-span:], is_training=False)
        elif held_out.tokens < span and training.digests:
            raise CorpusError(
                f"{held_out.tokens:,} tokens of the text are held out, fewer than a sequence of {sequence_length:,}.",
                "Hold out more of it with --held-out.",
            )
        for part, what in ((training, "training"), (held_out, "held-out")):
            if not sequences_in(part.tokens, sequence_length, self._row_tokens > 0):
                raise CorpusError(
                    f"The corpus is too short: its {part.tokens:,} {what} tokens do not hold one sequence of "
                    f"{sequence_length:,} tokens.",
                    "Use a longer corpus, or a smaller training.sequence_length.",
                )
            if part.waiting:
                self._write(part, np.concatenate(part.rest))
                part.rest, part.waiting = [], 0
        digests = (*training.digests, *held_out.digests)
        return ShardIndex(self._id_bytes, self._row_tokens, training.tokens, held_out.tokens, digests)

    def _write(self, part: _Part, ids: np.ndarray) -> None:
        data = ids.tobytes()
        digest = hashlib.sha256(data).hexdigest()
        if not self._store.has(digest):
            self._store.add(digest, data)
        part.digests.append(digest)


class _Part:
    def __init__(self) -> None:
        self.rest: list[np.ndarray] = []
        self.waiting = 0
        """Ids in ``rest``."""
        self.tokens = 0
        self.digests: list[str] = []
