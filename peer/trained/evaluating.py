"""Loss, perplexity and bits per byte of a home's model, on its run's held-out text or on a file.

A file is read as training reads an author's text: tokens in windows of T+1, each of which begins with the last token of
the one before; or dialogues packed into rows, of which the answers are predicted.

Dimension letters: B windows or rows of a batch, T tokens that the model reads.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from p2ptrain.base.errors import CorpusError, UserError
from p2ptrain.base.text import first_sentence
from p2ptrain.data.author_text import find_source
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.dialogues import BrokenRowError
from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.packed_stream import LENGTH_OPTION, UnansweredError, rows_of_dialogues, warnings
from p2ptrain.data.reading import SourceReader
from p2ptrain.data.rows import ColumnError
from p2ptrain.data.stream import Cut, encode_documents
from p2ptrain.data.tokenizer import Tokenizer
from p2ptrain.tokens.corpus import HELD_OUT_TOKENS, tokens_to_read
from p2ptrain.tokens.packing import IGNORED, decoded_rows
from p2ptrain.train.accelerator import explained
from p2ptrain.train.evaluate import BATCH_LOGITS
from p2ptrain.train.model import summed_loss
from p2ptrain.train.sequence_parts import parts_of
from peer.model import run_text
from peer.trained.language_model import LanguageModel

Tell = Callable[[int, int], None]
"""Called with the predicted tokens so far and in total; 0: the total is unknown."""


@dataclass(frozen=True, slots=True)
class TextEvaluation:
    """Loss of a model on a text, and how it was read."""

    loss: float
    """Mean cross entropy in nats per predicted token."""
    perplexity: float | None
    """None: beyond a float's range."""
    bits_per_byte: float | None
    """None: the predicted tokens have no text."""
    tokens: int
    """Predicted tokens."""
    bytes: int
    """Bytes of their text as UTF-8. What is put before and after documents and turns has none."""
    text: str
    """Name of the text."""
    sequence_length: int
    """T."""
    is_of_answers: bool
    """Whether the text has dialogues, of which only the answers are predicted."""
    warnings: tuple[str, ...] = ()
    """Sentences on what is lost of the text, without their full stops."""

    def table(self) -> list[tuple[str, str]]:
        """Return names and values for people."""
        windows = "tokens each; a token is predicted from those before it in its window"
        rows = "tokens each; only the answers of dialogues are predicted"
        return [
            ("loss", f"{self.loss:.4f} nats per token"),
            ("perplexity", "beyond 1e308" if self.perplexity is None else f"{self.perplexity:,.2f}"),
            ("bits per byte", "not known" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}"),
            ("tokens", f"{self.tokens:,} predicted, {self.bytes:,} bytes of text"),
            ("text", self.text),
            ("windows", f"{self.sequence_length:,} {rows if self.is_of_answers else windows}"),
        ]


def evaluate_held_out(model: LanguageModel, most_tokens: int | None, tell: Tell) -> TextEvaluation:
    """Evaluate a model on its run's held-out text, as its peer does. Raises UserError if the text is not here."""
    corpus = run_text(model.home, model.signed.manifest)
    most = most_tokens or HELD_OUT_TOKENS
    length, wanted = corpus.sequence_length, tokens_to_read(corpus, most)
    batches = corpus.validation_batches(most, _batch_size(model, length))
    return _evaluated(model, batches, "the run's held-out text", length, corpus.is_packed, wanted, tell)


def evaluate_file(
    model: LanguageModel,
    path: Path,
    text_field: str,
    most_tokens: int | None,
    sequence_length: int | None,
    tell: Tell,
) -> TextEvaluation:
    """Evaluate a model on a file of any size; of dialogues, which its chat template renders, on the answers.

    Args:
        text_field: column of the text or the messages in jsonl and parquet; empty: by its usual name.
        most_tokens: predicted tokens after which reading stops; None: all.
        sequence_length: T; None: as the run trained.

    Raises UserError.
    """
    length = sequence_length or model.signed.manifest.training.sequence_length
    if length > model.window:
        raise UserError(
            f"{LENGTH_OPTION} is {length:,}, and the model reads at most {model.window:,} tokens.",
            f"Choose at most {model.window}.",
        )
    with _explained():
        source = find_source(str(path), text_field, wants_dialogues=False)
        reader: SourceReader[Any] = SourceReader(source)
        check = FidelityCheck(model.tokenizer, reader.counts, is_packed=source.is_dialogues)
        if source.is_dialogues:
            sequences = _dialogues(model, reader, check, length)
        else:
            is_plain = source.formats == "text"
            sequences = _windows(_text(model.tokenizer, reader, check, is_plain, most_tokens), length)
        batches = _batches(sequences, _batch_size(model, length))
        found = _evaluated(model, batches, str(path), length, source.is_dialogues, most_tokens or 0, tell)
    lost = [*warnings(reader.counts), *check.warnings()]
    return replace(found, warnings=tuple(first_sentence(each) for each in lost))


@contextmanager
def _explained() -> Iterator[None]:
    """Give errors whose remedy is for the text of a run the remedy for a file that is evaluated."""
    try:
        yield
    except (ColumnError, BrokenRowError) as error:
        raise CorpusError(error.problem, "Correct the file, or name its column: --text-field COLUMN") from error
    except UnansweredError as error:
        raise CorpusError(error.problem, f"Give a longer {LENGTH_OPTION}, or shorter dialogues.") from error


def _text(
    tokenizer: Tokenizer, reader: SourceReader[Any], check: FidelityCheck, is_plain: bool, most_tokens: int | None
) -> Iterator[np.ndarray]:
    """Yield consecutive ids of all documents; the end of a plain file is not that of a document."""

    def cuts() -> Iterator[Cut]:
        for each in iter(reader.next, None):
            check.sample(each.text)
            reader.counts.documents += each.begins
            yield each._replace(ends=each.ends and not is_plain)

    left = sys.maxsize if most_tokens is None else most_tokens + 1  # the first token is not predicted
    for ids in encode_documents(cuts(), tokenizer):
        check.count(ids, 0, begins_document=False)
        yield ids[:left]
        left -= len(ids)
        if left <= 0:
            return
    check.finish()


def _dialogues(model: LanguageModel, reader: SourceReader[Any], check: FidelityCheck, length: int) -> Iterator[Tensor]:
    """Yield rows [3, T] of packed dialogues. Raises UserError if the run was not taught any."""
    template = model.template()
    if template is None:
        raise UserError(
            f"The file has dialogues, and the run of {model.home.path} was not taught any: it has no chat template.",
            "Name a file with text, or a column of text with --text-field.",
        )
    encoder, items = ChatEncoder(template, model.tokenizer), iter(reader.next, None)
    for codes in rows_of_dialogues(length, model.tokenizer, encoder, items, reader.counts, check):
        yield torch.from_numpy(np.concatenate(decoded_rows(codes[None])))


def _windows(chunks: Iterable[np.ndarray], length: int) -> Iterator[Tensor]:
    """Yield windows, each of which begins with the last token of the one before; the last may be shorter."""
    rest = np.zeros(0, dtype=np.int64)
    for chunk in chunks:
        rest = np.concatenate([rest, chunk.astype(np.int64)])
        while len(rest) > length:
            yield torch.from_numpy(rest[: length + 1])
            rest = rest[length:]
    if len(rest) > 1:
        yield torch.from_numpy(rest)


def _batches(sequences: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Yield batches of at most so many sequences of one shape."""
    for _, alike in groupby(sequences, key=lambda each: each.shape):
        while batch := list(islice(alike, size)):
            yield torch.stack(batch)


def _batch_size(model: LanguageModel, length: int) -> int:
    return max(1, BATCH_LOGITS // (length * model.signed.manifest.model.config.vocab_size))


def _evaluated(
    model: LanguageModel,
    batches: Iterable[Tensor],  # [B, up to T+1] or [B, 3, T]
    text: str,
    length: int,
    is_of_answers: bool,
    wanted: int,  # predicted tokens after which reading stops; 0: it does not
    tell: Tell,
) -> TextEvaluation:
    tokenizer = model.tokenizer
    marks = {IGNORED, tokenizer.separator, *tokenizer.prefix}
    nats, tokens, size = 0.0, 0, 0
    with explained(model.module.device), torch.no_grad():
        for batch in batches:
            nats += float(summed_loss(model.module, batch, None))
            labels = parts_of(batch).labels.flatten()
            tokens += int((labels != IGNORED).sum())
            size += tokenizer.byte_count([each for each in labels.tolist() if each not in marks])
            tell(tokens, wanted)
            if 0 < wanted <= tokens:
                break
    if not tokens:
        raise UserError(f"{text} is too short: it has nothing to predict.", "Name a FILE with more text.")
    loss = nats / tokens
    if not math.isfinite(loss):
        raise UserError("The model's loss on this text is not a number.", "Name the home of another peer.")
    perplexity = math.exp(loss) if loss < math.log(1e308) else None  # JSON has no infinity
    per_byte = nats / math.log(2) / size if size else None
    return TextEvaluation(loss, perplexity, per_byte, tokens, size, text, length, is_of_answers)
