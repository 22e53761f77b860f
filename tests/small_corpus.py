"""Small corpora of shards, whose store is memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from p2ptrain.tokens import builtin
from p2ptrain.tokens.corpus import ShardCorpus
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter

LINES = "".join(f"{number} times {number} is {number * number}.\n" for number in range(700)).encode()


class MemoryStore(ShardStore):
    """A store without a disk."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        self.shards: dict[str, bytes] = {}

    def has(self, digest: str) -> bool:
        return digest in self.shards

    def add(self, digest: str, data: bytes) -> None:
        self.shards[digest] = data

    def map(self, digest: str, id_bytes: int, tokens: int) -> np.ndarray | None:
        data = self.shards.get(digest)
        return None if data is None else np.frombuffer(data, dtype=np.dtype(f"<u{id_bytes}"))


def corpus_of(
    training: np.ndarray, held_out: np.ndarray, sequence_length: int, row_tokens: int = 0, vocabulary: int = 1 << 16
) -> ShardCorpus:
    """Return a corpus of these ids, or of codes of packed rows."""
    store = MemoryStore()
    writer = ShardWriter(store, 4 if row_tokens else 2, row_tokens)
    writer.add(training.reshape(-1), is_training=True)
    writer.add(held_out.reshape(-1), is_training=False)
    return ShardCorpus(writer.finish(sequence_length), store, sequence_length, vocabulary)


def text_corpus(sequence_length: int, lines: int = 200, fraction: float = 0.1) -> ShardCorpus:
    """Return a corpus of bytes of that many lines of a multiplication table."""
    tokens = np.frombuffer(b"".join(LINES.splitlines(keepends=True)[:lines]), dtype=np.uint8)
    return corpus_of(*builtin.regions(tokens, sequence_length, fraction), sequence_length)
