"""Measurement of what a tokenizer loses of a text: unknown tokens, changed text, documents without a separator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.rows import TextCounts
from p2ptrain.data.tokenizer import Tokenizer

SAMPLE_CHARACTERS = 1 << 16
"""Start of the corpus that is decoded again and compared: about a thousand lines."""

REPORTED_UNKNOWN = 0.001
"""Share of unknown tokens above which the owner is warned. Guess: measure the held-out loss of models by this share."""

MOST_UNKNOWN = 0.5
"""Share of unknown tokens above which a stream is refused: most of the text cannot be learned."""

SHOWN_CHARACTERS = 20
"""Characters shown on each side of the first difference."""


class FidelityCheck:
    """Counts of one corpus while it is tokenized.

    Args:
        tokenizer: of the stream.
        counts: documents and bytes are counted here when their ids are written.
        is_packed: whether documents are apart without a separator.
    """

    def __init__(self, tokenizer: Tokenizer, counts: TextCounts, is_packed: bool = False) -> None:
        self._tokenizer = tokenizer
        self._is_packed = is_packed
        self._counts = counts
        self._sample: list[str] = []
        self._sampled = 0  # characters
        self._tokens = self._unknown = self._replaced = 0

    def state(self) -> dict[str, Any]:
        """Return what was counted beside ``counts`` as a JSON object, from which ``resume`` continues later."""
        return {
            "tokens": self._tokens,
            "unknown": self._unknown,
            "replaced": self._replaced,
            "sample": self._sample,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state`` that was saved at a document's end."""
        self._tokens, self._unknown, self._sample = state["tokens"], state["unknown"], state["sample"]
        self._replaced = state["replaced"]
        self._sampled = sum(map(len, self._sample))

    def sample(self, text: str) -> None:
        """Remember a text as pairs of lines, if it is at the start; count characters that the tokenizer replaces."""
        if self._tokenizer.replaced:
            self._replaced += text.count(self._tokenizer.replaced)
        if self._sampled < SAMPLE_CHARACTERS:
            lines = text[: SAMPLE_CHARACTERS - self._sampled].splitlines(keepends=True)
            self._sample += ["".join(lines[start : start + 2]) for start in range(0, len(lines), 2)]
            self._sampled += sum(map(len, lines))

    def count(self, ids: np.ndarray, text_bytes: int, begins_document: bool) -> None:
        """Count ids that are used, and their text."""
        self._counts.documents += begins_document
        self._counts.text_bytes += text_bytes
        self._tokens += len(ids)
        if self._tokenizer.unknown is not None:
            self._unknown += int(np.count_nonzero(ids == self._tokenizer.unknown))

    def finish(self) -> None:
        """Raise CorpusError if more than ``MOST_UNKNOWN`` of the tokens are unknown."""
        if self._unknown > MOST_UNKNOWN * self._tokens:
            raise CorpusError(
                f"The tokenizer does not know this text: {100 * self._unknown_share:.0f} % of the tokens are the "
                "unknown one.",
                "Use a tokenizer that was trained on such a text.",
            )

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for each thing that the owner should know, after the stream is built."""
        if self._unknown_share > REPORTED_UNKNOWN:
            yield (
                f"{100 * self._unknown_share:.1f} % of the tokens are the unknown token, as the tokenizer's vocabulary "
                "lacks that text"
            )
        if self._replaced:
            yield (
                f"{self._replaced:,} zero bytes of the text became U+FFFD, as byte 0 separates documents; a text with "
                "many of them may not be text"
            )
        documents = self._counts.documents
        if documents > 1 and self._tokenizer.separator is None and not self._is_packed:
            yield (
                f"the tokenizer has no token that separates documents, so {documents:,} documents follow each other "
                "without a mark"
            )
        yield from self._tokenizer.unused
        yield from self._changes()

    @property
    def is_empty(self) -> bool:
        """Whether no text was read so far."""
        return not self._sample

    @property
    def _unknown_share(self) -> float:
        return self._unknown / max(1, self._tokens)

    def _changes(self) -> Iterator[str]:
        """Compare pairs of lines with what is decoded from their ids; spaces at both ends do not count."""
        pairs = [stripped for pair in self._sample if (stripped := pair.strip())]
        decoded = (self._tokenizer.decode(ids.tolist()).strip() for ids in self._tokenizer.encode_batch(pairs))
        changed = [(pair, again) for pair, again in zip(pairs, decoded, strict=True) if pair != again]
        if changed:
            before, after = _around_difference(*changed[0])
            yield (
                f"the tokenizer changes the text: {len(changed)} of the first {len(pairs)} pairs of lines do not come "
                f"back from their tokens. For example, {before!r} becomes {after!r}"
            )


def _around_difference(before: str, after: str) -> tuple[str, str]:
    """Return both texts near the first character that differs."""
    shorter = min(len(before), len(after))
    place = next((place for place in range(shorter) if before[place] != after[place]), shorter)
    window = slice(max(0, place - SHOWN_CHARACTERS), place + SHOWN_CHARACTERS)
    return before[window], after[window]
