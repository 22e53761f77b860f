"""Loss, perplexity and bits per byte of a model, on the run's held-out text or on any file of text or dialogues."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.base.errors import UserError
from p2ptrain.base.text import first_sentence
from p2ptrain.data.author_text import DEFAULT_COLUMN
from p2ptrain.data.chat_template import ChatTemplate
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.ports import GoesOn
from p2ptrain.tokens.corpus import HELD_OUT_TOKENS, ShardCorpus
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.text_loss import TextLoss, WindowRule, answer_loss, text_loss
from peer.capacity import explained
from peer.home import Home
from peer.model import run_text
from peer.trained.dialogue_file import DialogueFile, MessagesColumn, messages_column
from peer.trained.language_model import LanguageModel
from peer.trained.model_template import find_template
from peer.trained.text_file import TextFile, bytes_of


@dataclass(frozen=True, slots=True)
class TextEvaluation:
    """Loss of a model on a text, and how it was read."""

    loss: float
    """Mean cross entropy in nats per predicted token."""
    perplexity: float | None
    """None: beyond a float's range."""
    bits_per_byte: float | None
    tokens: int
    """Predicted tokens."""
    bytes: int
    """Bytes of their text as UTF-8."""
    text: str
    """Name of the text."""
    sequence_length: int
    """Tokens that the model read at once."""
    stride: int
    """Tokens by which each window began after the one before."""
    is_of_answers: bool = False
    """Whether the text has dialogues, of which only the answers are predicted."""
    warnings: tuple[str, ...] = ()
    """Sentences on what is lost of the text, without their full stops."""

    def table(self) -> list[tuple[str, str]]:
        """Return names and values for people."""
        per_byte = "not known" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}"
        return [
            ("loss", f"{self.loss:.4f} nats per token"),
            ("perplexity", "beyond 1e308" if self.perplexity is None else f"{self.perplexity:,.2f}"),
            ("bits per byte", per_byte),
            ("tokens", f"{self.tokens:,} predicted, {self.bytes:,} bytes of text"),
            ("text", self.text),
            ("windows", self._windows()),
        ]

    def _windows(self) -> str:
        if self.is_of_answers:
            return f"dialogues, up to {self.sequence_length:,} tokens each; only their answers are predicted"
        if self.stride >= self.sequence_length - 1:
            return f"{self.sequence_length:,} tokens each; a token is predicted from those before it in its window"
        return (
            f"{self.sequence_length:,} tokens each, {self.stride:,} apart; a token is predicted from at least "
            f"{self.sequence_length - self.stride:,} before it, except in the first window"
        )


def evaluate_file(
    model: LanguageModel,
    path: Path,
    text_field: str,
    most_tokens: int | None,
    sequence_length: int | None,
    stride: int | None,
    goes_on: GoesOn,
    template_file: Path | None = None,
) -> TextEvaluation:
    """Evaluate a model on a file of any size; of dialogues, which its chat template renders, on the answers.

    Args:
        text_field: column of the text or the messages in jsonl and parquet; empty: by its usual name.
        most_tokens: predicted tokens after which reading stops; None: all.
        sequence_length: tokens that the model reads at once; None: as the run trained, or ``FOLDER_WINDOW``.
        stride: tokens by which a window begins after the one before; None: windows do not overlap.
        template_file: chat template, as ``find_template`` takes it.

    Raises UserError.
    """
    if (column := messages_column(path, text_field)) is not None:
        template = find_template(model, template_file)
        if template is not None:
            return _of_dialogues(model, path, column, template, most_tokens, sequence_length, stride, goes_on)
        if not column.has_text_too:
            raise _untaught(model, path)
    elif template_file is not None:
        raise UserError(f"--template is for dialogues, and {path} has none.", "Omit --template.")
    cut = _cut(model, sequence_length, stride)
    unpredicted = max(1, len(model.prefix))
    most = None if most_tokens is None else most_tokens + unpredicted
    text = TextFile(path, text_field or DEFAULT_COLUMN, model.tokenizer, most)
    with explained(model.module.device):
        found = text_loss(model.module, cut.windows(text.chunks()), goes_on, most_tokens or 0)
    if not found.tokens:
        raise UserError(f"{path} is too short: nothing follows its first token.", "Name a file with more text.")
    return _evaluation(found, text.text_bytes, str(path), cut, text.warnings)


def _of_dialogues(
    model: LanguageModel,
    path: Path,
    column: MessagesColumn,
    template: ChatTemplate,
    most_tokens: int | None,
    sequence_length: int | None,
    stride: int | None,
    goes_on: GoesOn,
) -> TextEvaluation:
    if stride is not None:
        raise UserError(f"--stride is for text, and {path} has dialogues.", "Omit --stride.")
    length = _checked_length(model, sequence_length)
    encoder = ChatEncoder(template, model.tokenizer)
    is_packed = model.signed is not None  # not every model of a folder keeps dialogues of one row apart
    dialogues = DialogueFile(path, column, encoder, model.tokenizer, length, is_packed, most_tokens)
    with explained(model.module.device):
        found = answer_loss(model.module, dialogues.rows(), goes_on, most_tokens or 0)
    rule = WindowRule.of(length)
    return _evaluation(found, dialogues.text_bytes, str(path), rule, dialogues.warnings, is_of_answers=True)


def _untaught(model: LanguageModel, path: Path) -> UserError:
    if model.signed is None:
        return UserError(
            f"{path} has dialogues, but the model in {model.place} has no chat template.",
            "Name its template with --template, or a column of text with --text-field.",
        )
    return UserError(
        f"{path} has dialogues, but the run of {model.place} was not taught any: it has no chat template.",
        "Name a file with text, or a column of text with --text-field.",
    )


def evaluate_held_out(model: LanguageModel, most_tokens: int | None, goes_on: GoesOn) -> TextEvaluation:
    """Evaluate a home's model on its run's held-out text, as its peer does.

    Raises UserError if the model is not a home's, or the text is not here.
    """
    if model.signed is None:
        raise UserError(
            f"{model.place} is not the home of a peer, so it has no held-out text.", "Name a FILE with text."
        )
    corpus = run_text(Home(model.place), model.signed.manifest)
    most = most_tokens or HELD_OUT_TOKENS
    with explained(model.module.device):
        found = validation_loss(model.module, corpus, most, goes_on=goes_on)
    tokens = text_bytes = 0
    for ids in _predicted(corpus, most):
        tokens += len(ids)
        text_bytes += bytes_of(model.tokenizer, ids)
    if not tokens:
        raise UserError("The run's held-out dialogues have no answers.", "Name a FILE with text.")
    rule = WindowRule.of(corpus.sequence_length)
    total = TextLoss(found.value * tokens, tokens)
    return _evaluation(total, text_bytes, "the run's held-out text", rule, [], corpus.is_packed)


def _predicted(corpus: ShardCorpus, most_tokens: int) -> Iterator[list[int]]:
    """Yield the predicted tokens of each held-out sequence; of packed dialogues [1, 3, T] those of the answers."""
    for batch in corpus.validation_batches(most_tokens, 1):
        targets = batch[0, 1:] if batch.dim() == 2 else batch[0, 1]
        yield targets[targets >= 0].tolist()


def _cut(model: LanguageModel, sequence_length: int | None, stride: int | None) -> WindowRule:
    """Return how to cut the text. Raises UserError if the model cannot read such windows."""
    length = _checked_length(model, sequence_length)
    cut = WindowRule.of(length, stride, model.prefix)
    if cut.stride < 1 or cut.context < 1:
        raise UserError(
            f"Windows of {length:,} tokens cannot be {cut.stride:,} apart.",
            f"Choose a --stride from 1 to {max(1, length - len(model.prefix))}, or longer windows.",
        )
    return cut


def _checked_length(model: LanguageModel, sequence_length: int | None) -> int:
    """Return the tokens that the model reads at once. Raises UserError if it cannot read as many."""
    length = sequence_length or model.usual_window
    if length > model.window:
        raise UserError(
            f"--sequence-length is {length:,}, and the model in {model.place} reads at most {model.window:,} tokens.",
            f"Choose at most {model.window}.",
        )
    return length


def _evaluation(
    found: TextLoss, text_bytes: int, text: str, cut: WindowRule, warnings: list[str], is_of_answers: bool = False
) -> TextEvaluation:
    if not math.isfinite(found.nats):
        raise UserError(
            "The model's loss on this text is not a number.", "Name the home of another peer, or another text."
        )
    sentences = tuple(first_sentence(each) for each in warnings)
    perplexity = found.perplexity if math.isfinite(found.perplexity) else None  # JSON has no infinity
    per_byte = found.bits_per_byte(text_bytes)
    return TextEvaluation(
        found.per_token,
        perplexity,
        per_byte,
        found.tokens,
        text_bytes,
        text,
        cut.length,
        cut.stride,
        is_of_answers,
        sentences,
    )
