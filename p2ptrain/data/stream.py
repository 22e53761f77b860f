"""Text becomes ids: in pieces cut between words, so that the ids are those of whole documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from p2ptrain.data.tokenizer import Tokenizer

BORDER_CHARACTERS = 4096
"""Last part of a chunk that is searched for a border of words; words of natural languages are far shorter."""

BATCH_CUTS = 16
"""Texts that are encoded at once, so that a fast tokenizer can use several threads."""

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


def encode_documents(cuts: Iterable[Cut], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the ids of all texts in order, each document between the tokenizer's prefix and separator.

    The ids are those of whole documents, if the tokenizer separates words at ``BORDERS``.
    """
    rest = iter(cuts)
    end = () if tokenizer.separator is None else (tokenizer.separator,)
    while batch := list(islice(rest, BATCH_CUTS)):
        for cut, ids in zip(batch, encode_cuts(batch, tokenizer), strict=True):
            before, after = tokenizer.prefix if cut.begins else (), end if cut.ends else ()
            yield np.concatenate([each.astype(np.uint32) for each in (np.array(before), ids, np.array(after))])


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
