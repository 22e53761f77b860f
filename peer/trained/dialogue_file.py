"""Dialogues of a file to evaluate, in rows as training has them, with the bytes of their answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.author_text import DEFAULT_COLUMN, detected_format
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.dialogues import DEFAULT_MESSAGES, BrokenRowError, file_dialogues, has_column, has_messages
from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.packed_stream import LENGTH_OPTION, UnansweredError, rows_of_dialogues, warnings
from p2ptrain.data.rows import TextCounts
from p2ptrain.data.sources import unchanged
from p2ptrain.data.tokenizer import Tokenizer
from p2ptrain.tokens.packing import IGNORED, WINDOW_DIALOGUES, decoded_rows
from p2ptrain.train.text_loss import AnswerRow
from peer.trained.text_file import bytes_of


@dataclass(frozen=True, slots=True)
class MessagesColumn:
    """Where a file has dialogues."""

    file_format: str
    name: str
    has_text_too: bool
    """Whether the file also has the usual column of plain text."""


def messages_column(path: Path, text_field: str) -> MessagesColumn | None:
    """Return the column of a file's dialogues; None if it has none there.

    Args:
        text_field: name of the column; empty: the usual one.

    Raises CorpusError if the file cannot be read.
    """
    file_format = detected_format(path)
    name = text_field or DEFAULT_MESSAGES
    if file_format == "text" or not has_messages(path, file_format, name):
        return None
    return MessagesColumn(file_format, name, not text_field and has_column(path, file_format, DEFAULT_COLUMN))


@dataclass(slots=True)
class DialogueFile:
    """File of dialogues, and what was read of it."""

    path: Path
    column: MessagesColumn
    encoder: ChatEncoder
    tokenizer: Tokenizer
    length: int
    """Tokens of a row, at most."""
    is_packed: bool
    """Whether dialogues share rows, for a model that keeps them apart."""
    most_tokens: int | None = None
    """Predicted tokens after which reading stops; None: all."""
    text_bytes: int = 0
    """Bytes of the answers as UTF-8."""
    warnings: list[str] = field(default_factory=list)
    """Sentences on what is lost of the dialogues, without their full stops; complete after the last row."""

    def rows(self) -> Iterator[AnswerRow]:
        """Yield the rows. Raises CorpusError if a dialogue is broken or most have no answer within a row."""
        counts = TextCounts()
        check = FidelityCheck(self.tokenizer, counts, is_packed=True)
        left = self.most_tokens
        try:
            with unchanged(self.path):
                for codes in rows_of_dialogues(
                    self.length,
                    self.tokenizer,
                    self.encoder,
                    file_dialogues(self.path, self.column.file_format, self.column.name, counts),
                    counts,
                    check,
                    window_dialogues=WINDOW_DIALOGUES if self.is_packed else 1,
                ):
                    row = self._row(codes, left)
                    yield row
                    left = None if left is None else left - row.predicted
                    if left == 0:
                        break
        except BrokenRowError as error:
            raise CorpusError(error.problem, "Correct or remove that row, or use another chat template.") from error
        except UnansweredError as error:
            raise CorpusError(error.problem, f"Give a longer {LENGTH_OPTION}, or shorter dialogues.") from error
        if not counts.rows:
            raise CorpusError(f"{self.path} contains no dialogues.", "Name a file with dialogues.")
        self.warnings = [*warnings(counts), *check.warnings()]

    def _row(self, codes: np.ndarray, most: int | None) -> AnswerRow:
        """Return a row with at most so many predicted tokens; what follows the last one is cut off."""
        inputs, labels, positions = (each[0] for each in decoded_rows(codes[None]))
        predicted = np.flatnonzero(labels != IGNORED)[:most]
        end = int(predicted[-1]) + 1
        self.text_bytes += bytes_of(self.tokenizer, labels[predicted].tolist())
        return AnswerRow(inputs[:end], labels[:end], positions[:end] if self.is_packed else None)
