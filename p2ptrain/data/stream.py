"""Text becomes ids: in pieces cut between words, so that the ids are those of whole documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from p2ptrain.data.sources import PIECE_CHARACTERS
from p2ptrain.data.tokenizer import Tokenizer

BORDER_CHARACTERS = 4096
"""Last part of a chunk that is searched for a border of words; words of natural languages are far shorter."""

CONTEXT_CHARACTERS = 64
"""Text before a chunk that is encoded with it, so that the tokenizer sees the middle of a document, not its start."""

BORDERS = (re.compile(r"(?<=\w)(?= \w)"), re.compile(r"(?<=\S\n)(?=\w)"))
"""Places where every usual tokenizer separates words: before a single space, else after a line end."""


class Cut(NamedTuple):
    """Consecutive text of one document, cut between words."""

    context: str
    """Text just before, empty at the document's start."""
    text: str
    begins: bool
    """Whether a document begins with it."""
    ends: bool
    """Whether a document ends with it."""

    @property
    def after(self) -> str:
        """Context of the text that follows."""
        return "" if self.ends else (self.context + self.text)[-CONTEXT_CHARACTERS:]


class EncodedText(NamedTuple):
    """Ids of consecutive text of one document."""

    ids: np.ndarray
    text_bytes: int
    """Bytes of that text as UTF-8; of a text that the limit cuts, in proportion to its ids."""
    ends_document: bool


def tokenize(
    cuts: Iterable[Cut],
    tokenizer: Tokenizer,
    most_tokens: int | None,
    prefix: Sequence[int] = (),  # ids before each document
) -> Iterator[EncodedText]:
    """Yield the ids of all texts in order, a separator after each document, at most ``most_tokens`` in total.

    The ids are those of whole documents, if the tokenizer separates words at ``BORDERS``.
    """
    left = most_tokens
    if left == 0:
        return
    for batch in _batches(cuts):
        for cut, ids in zip(batch, encode_cuts(batch, tokenizer), strict=True):
            if cut.begins and prefix:
                ids = np.insert(ids, 0, prefix)
            if cut.ends and tokenizer.separator is not None:
                ids = np.append(ids, np.asarray(tokenizer.separator, dtype=ids.dtype))
            text_bytes = len(cut.text.encode(errors="replace"))
            if left is not None:
                whole, ids = len(ids), ids[:left]
                text_bytes = text_bytes * len(ids) // max(1, whole)
                left -= len(ids)
            yield EncodedText(ids, text_bytes, cut.ends)
            if left == 0:
                return


def encode_cuts(batch: Sequence[Cut], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the ids of each text as they are after its context."""
    contexts = iter(tokenizer.encode_batch([cut.context for cut in batch if cut.context]))
    for cut, ids in zip(batch, tokenizer.encode_batch([cut.context + cut.text for cut in batch]), strict=True):
        before = next(contexts) if cut.context else ids[:0]
        if np.array_equal(ids[: len(before)], before):
            yield ids[len(before) :]
        else:  # the tokenizer joins both sides of the border
            yield tokenizer.encode_batch([cut.text])[0]


def border(text: str) -> int:
    """Return the last border of words in ``text``; its end if there is none."""
    start = max(0, len(text) - BORDER_CHARACTERS)
    for each in BORDERS:
        if places := [found.start() for found in each.finditer(text, start)]:
            return places[-1]
    return len(text)


def _batches(cuts: Iterable[Cut]) -> Iterator[list[Cut]]:
    """Group texts to about ``PIECE_CHARACTERS``, so that a fast tokenizer can use several threads."""
    batch: list[Cut] = []
    characters = 0
    for cut in cuts:
        batch.append(cut)
        characters += len(cut.text)
        if characters >= PIECE_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
