"""Tokens of a file to evaluate, in bounded memory, with the bytes of their text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.author_text import detected_format
from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.rows import ColumnError, TextCounts
from p2ptrain.data.sources import file_pieces, unchanged
from p2ptrain.data.stream import tokenize
from p2ptrain.data.tokenizer import Tokenizer


@dataclass(slots=True)
class TextFile:
    """File of plain text, jsonl or parquet, and what was read of it."""

    path: Path
    text_field: str
    tokenizer: Tokenizer
    most_tokens: int | None = None
    counts: TextCounts = field(default_factory=TextCounts)
    text_bytes: int = 0
    """Bytes of the text of all tokens but the first, as UTF-8; what is put before and after documents has none."""
    tokens: int = 0
    warnings: list[str] = field(default_factory=list)
    """Sentences on what the tokenizer loses of the text, without their full stops; complete after the last chunk."""

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield the ids of the text as training would have them: documents, each between a prefix and a separator.

        Raises CorpusError if the file is unreadable, empty, no text, changes meanwhile or is unknown to the tokenizer.
        """
        kind = detected_format(self.path)
        if kind == "text" and self.text_field != "text":
            raise CorpusError(
                f"{self.path} is plain text, which has no column {self.text_field!r}.",
                "Omit --text-field, or name a jsonl or parquet file.",
            )
        check = FidelityCheck(self.tokenizer, self.counts)
        with unchanged(self.path), _explained():
            pieces = check.reading(file_pieces(self.path, kind, self.text_field, self.counts))
            prefix = self.tokenizer.prefix
            for chunk in check.writing(tokenize(pieces, self.tokenizer, self.most_tokens, prefix)):
                if not len(chunk.ids):
                    continue
                if not self.tokens:
                    self.text_bytes -= bytes_of(self.tokenizer, chunk.ids[:1].tolist())
                self.tokens += len(chunk.ids)
                is_cut = self.tokens == self.most_tokens
                self.text_bytes += bytes_of(self.tokenizer, chunk.ids.tolist()) if is_cut else chunk.text_bytes
                yield chunk.ids
            self.counts.check()
        if not self.tokens:
            raise CorpusError(f"{self.path} contains no text.", "Name a file with text.")
        self.warnings = list(check.warnings())


@contextmanager
def _explained() -> Iterator[None]:
    """Give errors of the column the remedy of a file that is evaluated."""
    try:
        yield
    except ColumnError as error:
        raise CorpusError(
            error.problem, "Check that the file is whole, and name its column with text: --text-field COLUMN"
        ) from error


def bytes_of(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Return the bytes of the text of some ids as UTF-8, without separators and what begins a document.

    Special tokens, such as the end of a turn, have no bytes, while their loss counts.
    """
    marks = {tokenizer.separator, *tokenizer.prefix}
    return tokenizer.byte_count([each for each in ids if each not in marks])
