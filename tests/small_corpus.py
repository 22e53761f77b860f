"""Small corpora of shards, whose store is memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from p2ptrain.data.chat_template import ChatTemplate, Dialogue
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.tokenizer import ByteTokenizer, Tokenizer
from p2ptrain.tokens import builtin
from p2ptrain.tokens.corpus import ShardCorpus
from p2ptrain.tokens.index import ShardIndex
from p2ptrain.tokens.opened import user_store
from p2ptrain.tokens.packing import EncodedDialogue, packed_rows
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter

AWAY: dict[str, object] = {
    "kind": "shards",
    "root": "0" * 64,
    "training_tokens": 90_000,
    "held_out_tokens": 10_000,
}
"""Section of a corpus that is nowhere."""

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


def stored_text(
    training: np.ndarray,
    held_out: np.ndarray,
    sequence_length: int,
    row_tokens: int = 0,
    store: ShardStore | None = None,  # None: where peers of this user have it
    **fields: object,  # further ones of the section
) -> tuple[dict[str, object], ShardIndex]:
    """Store ids, or codes of packed rows; return a corpus section and its index."""
    writer = ShardWriter(store or user_store(), 4 if row_tokens else 2, row_tokens)
    writer.add(training.reshape(-1), is_training=True)
    writer.add(held_out.reshape(-1), is_training=False)
    index = writer.finish(sequence_length)
    sizes = {"training_tokens": index.training_tokens, "held_out_tokens": index.held_out_tokens}
    return {"kind": "shards", "root": index.root, **sizes, **fields}, index


def dialogue_rows(
    dialogues: Iterable[list[dict[str, str]]],
    row_tokens: int,
    template: ChatTemplate | None = None,  # None: ChatML
    tokenizer: Tokenizer | None = None,
) -> np.ndarray:
    """Return the codes of packed rows of dialogues, [rows, T]; those without an answer in a row are left out."""
    tokenizer = tokenizer or ByteTokenizer()
    encoder = ChatEncoder(template or ChatTemplate.load("chatml"), tokenizer)
    found = [each for _, _, each in encoder.dialogues(Dialogue("", each) for each in dialogues)]
    cut = [EncodedDialogue(each.ids[:row_tokens], each.counts[:row_tokens]) for each in found]  # type: ignore[union-attr]
    answered = [each for each in cut if each.counts[1:].any()]
    return np.stack([*packed_rows(answered, row_tokens, tokenizer.separator or 0)])


def stored_dialogues(
    dialogues: list[list[dict[str, str]]],
    sequence_length: int,
    rendered_by: ChatTemplate | None = None,
    store: ShardStore | None = None,
    **fields: object,
) -> tuple[dict[str, object], ShardIndex]:
    """Store dialogues as ``stored_text``, in the built-in template unless another is given; a few rows are held out."""
    rows = dialogue_rows(dialogues, sequence_length, rendered_by)
    held_out = max(1, len(rows) // 20)
    described = {"template": "chatml", "end_of_turn": "<|im_end|>"} | fields
    return stored_text(rows[held_out:], rows[:held_out], sequence_length, sequence_length, store, **described)
