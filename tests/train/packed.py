"""Rows of made dialogues that predict the latter half of each."""

from __future__ import annotations

import numpy as np
from small_corpus import corpus_of

from p2ptrain.tokens.corpus import ShardCorpus
from p2ptrain.tokens.packing import EncodedDialogue, packed_rows

LENGTHS = (9, 5, 11, 5, 16, 4, 8, 7)
PADDING = 255


def dialogue(length: int, begin: int) -> EncodedDialogue:
    ids = np.arange(begin, begin + length, dtype=np.uint8)
    return EncodedDialogue(ids, np.arange(length) >= length // 2)


def codes(tokens: int = 16) -> np.ndarray:
    """Return rows of two dialogues with and without padding, and of one that fills a row."""
    each = [dialogue(length, 10 * place) for place, length in enumerate(LENGTHS)]
    return np.stack(list(packed_rows(each, tokens, PADDING)))


def packed_corpus(tokens: int = 16) -> ShardCorpus:
    rows = codes(tokens)
    return corpus_of(np.tile(rows, (9, 1)), rows, tokens, tokens)
