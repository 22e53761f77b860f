"""Index of a run's shards: its bytes are what the manifest's root is the SHA-256 of.

==========  ========================================================================
bytes       content
==========  ========================================================================
8           ``MAGIC``
1           bytes of an id, 2 or 4
1           1 if the ids are codes of packed rows (``tokens.packing``), else 0
4           T of packed rows; 0 for text, whose shards any sequence length can cut
8           training tokens
8           held-out tokens
32 each     SHA-256 of the training shards, then of the held-out ones
==========  ========================================================================

Integers are unsigned and little-endian. All shards have ``shard_tokens`` ids, except the last one of either part.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Self

SHARD_BYTES = 4 << 20
"""Largest shard: a third of a second at 100 Mbit/s, and what a broken download loses at most."""
MOST_TOKENS = 1 << 40
MAGIC = b"p2ptok1\n"
DIGEST_BYTES = 32
_HEADER = struct.Struct("<8sBBIQQ")


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of an index."""

    digest: str
    """SHA-256 of its bytes, 64 hexadecimal digits."""
    tokens: int


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Digests and sizes of all shards."""

    id_bytes: int
    """Bytes of an id in a shard, 2 or 4."""
    row_tokens: int
    """T, if the shards hold packed rows of dialogues; 0: text."""
    training_tokens: int
    held_out_tokens: int
    digests: tuple[str, ...]
    """SHA-256 of each training shard, then of each held-out one; 64 hexadecimal digits each."""

    def __post_init__(self) -> None:
        if self.id_bytes not in (2, 4):
            raise ValueError(f"ids of {self.id_bytes} bytes")
        if not (0 < self.training_tokens <= MOST_TOKENS and 0 < self.held_out_tokens <= MOST_TOKENS):
            raise ValueError(f"{self.training_tokens} training and {self.held_out_tokens} held-out tokens")
        if not 0 <= self.row_tokens <= self._most_tokens:
            raise ValueError(f"rows of {self.row_tokens} tokens")
        if len(self.digests) != self.training_shards + self._count(self.held_out_tokens):
            raise ValueError(f"{len(self.digests)} digests for {self.training_tokens} + {self.held_out_tokens} tokens")

    @property
    def is_packed(self) -> bool:
        return self.row_tokens > 0

    @property
    def _most_tokens(self) -> int:
        return SHARD_BYTES // self.id_bytes

    @property
    def shard_tokens(self) -> int:
        """Ids of a whole shard: as many as fit, of packed rows whole ones."""
        return self._most_tokens // self.row_tokens * self.row_tokens if self.row_tokens else self._most_tokens

    @property
    def training_shards(self) -> int:
        return self._count(self.training_tokens)

    @property
    def training(self) -> list[Shard]:
        return [self.shard(number) for number in range(self.training_shards)]

    @property
    def held_out(self) -> list[Shard]:
        return [self.shard(number) for number in range(self.training_shards, len(self.digests))]

    def shard(self, number: int) -> Shard:
        """Return a shard by its number among all digests."""
        is_training = number < self.training_shards
        tokens = self.training_tokens if is_training else self.held_out_tokens
        place = number if is_training else number - self.training_shards
        return Shard(self.digests[number], min(self.shard_tokens, tokens - place * self.shard_tokens))

    @property
    def root(self) -> str:
        """SHA-256 of the index, 64 hexadecimal digits."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        packed = int(self.is_packed)
        header = _HEADER.pack(MAGIC, self.id_bytes, packed, self.row_tokens, self.training_tokens, self.held_out_tokens)
        return header + b"".join(map(bytes.fromhex, self.digests))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises ValueError."""
        if len(data) < _HEADER.size or (len(data) - _HEADER.size) % DIGEST_BYTES:
            raise ValueError(f"an index of {len(data)} bytes")
        magic, id_bytes, packed, row_tokens, training, held_out = _HEADER.unpack_from(data)
        if magic != MAGIC or packed != (row_tokens > 0):
            raise ValueError("not an index of shards")
        parts = range(_HEADER.size, len(data), DIGEST_BYTES)
        digests = tuple(data[at : at + DIGEST_BYTES].hex() for at in parts)
        return cls(id_bytes, row_tokens, training, held_out, digests)

    def _count(self, tokens: int) -> int:
        return -(-tokens // self.shard_tokens)


def sequences_in(tokens: int, sequence_length: int, is_packed: bool) -> int:
    """Return how many sequences a shard has: T tokens and the one after them, or rows of T tokens."""
    return tokens // sequence_length if is_packed else max(0, (tokens - 1) // sequence_length)
