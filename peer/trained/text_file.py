"""Tokens of a file to evaluate, in bounded memory, with the bytes of their text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.author_text import find_source
from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.reading import SourceReader
from p2ptrain.data.rows import ColumnError, TextCounts
from p2ptrain.data.sources import unchanged
from p2ptrain.data.stream import Cut, tokenize
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
        source = find_source(str(self.path), self.text_field, wants_dialogues=False)
        is_plain = source.formats == "text"
        reader: SourceReader[Cut] = SourceReader(source)
        check = FidelityCheck(self.tokenizer, self.counts)
        with unchanged(self.path), _explained():
            cuts = (each._replace(ends=each.ends and not is_plain) for each in iter(reader.next, None))
            found = tokenize(check.reading(cuts), self.tokenizer, self.most_tokens, self.tokenizer.prefix)
            for chunk in check.writing(found):
                if not len(chunk.ids):
                    continue
                if not self.tokens:
                    self.text_bytes -= bytes_of(self.tokenizer, chunk.ids[:1].tolist())
                self.tokens += len(chunk.ids)
                is_cut = self.tokens == self.most_tokens
                self.text_bytes += bytes_of(self.tokenizer, chunk.ids.tolist()) if is_cut else chunk.text_bytes
                yield chunk.ids
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
