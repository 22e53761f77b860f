"""Figures of a run's text: how many tokens there are, what was skipped, and how often peers read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2ptrain.data.rows import reasons
from p2ptrain.data.text_summary import TextSummary
from p2ptrain.manifest import parameter_count
from p2ptrain.manifest.fitting import epochs, never_read, repetition
from p2ptrain.tokens import builtin
from p2ptrain.tokens.corpus import HELD_OUT_TOKENS

if TYPE_CHECKING:
    from p2ptrain.manifest import Manifest


@dataclass(frozen=True, slots=True)
class TextFigures:
    """Counts of a run's text, as ``p2ptrain tokens --json`` prints them. What was not counted is None."""

    tokens: int
    training_tokens: int
    held_out_tokens: int
    measured_tokens: int
    """Held-out tokens from which peers measure the loss."""
    sequence_length: int
    run_tokens: int
    epochs: float
    """How often all peers together read as much as the training tokens until the run ends."""
    parameters: int
    tokens_per_parameter: float
    """Training tokens per parameter of the model."""
    vocabulary: int | None
    """Ids of the tokenizer."""
    model_vocabulary: int
    """Ids of the model."""
    is_cut: bool
    """Whether there is more text than the run needs, which was not read."""
    documents: int | None
    bytes: int | None
    """Bytes of the text that is used, as UTF-8."""
    tokens_per_byte: float | None
    rows: int | None
    """Rows of jsonl, parquet or a data set of the hub; 0 for plain text."""
    skipped: int | None
    """Rows without usable text."""
    skipped_examples: list[str]
    """The first skipped rows: line or row number, and reason."""
    warnings: list[str]
    answer_tokens: int = 0
    """Tokens of answers, which training predicts; 0 unless the corpus has dialogues."""
    padding_tokens: int = 0
    """Tokens that fill rows of dialogues."""
    truncated: int = 0
    """Dialogues that are longer than a sequence."""
    left_out: int = 0
    """Dialogues whose first answer begins after a sequence's end."""
    sources: list[str] = field(default_factory=list)
    """Where the text came from."""

    def table(self) -> list[tuple[str, str]]:
        """Return names and values for people."""
        share = 100 * never_read(self.epochs)
        unread = f"; each in its own order, so that two or more leave out up to {share:.0f} %" if share >= 1 else ""
        lines = [
            ("tokens", f"{self.tokens:,}"),
            ("training tokens", f"{self.training_tokens:,}"),
            ("held-out tokens", f"{self.held_out_tokens:,}; the loss is measured on {self.measured_tokens:,} of them"),
            ("run", f"{self.run_tokens:,} tokens of all peers together, {self.epochs:,.2f} times the text{unread}"),
            ("model", f"{self.parameters:,} parameters, {self.tokens_per_parameter:,.2f} training tokens for each"),
        ]
        if self.vocabulary is not None:
            of_model = f"{self.model_vocabulary:,} of the model"
            lines.append(("vocabulary", f"{self.vocabulary:,} ids of the tokenizer, {of_model}"))
        if self.documents is not None:
            used = f"{self.documents:,}, {self.bytes:,} bytes, {self.tokens_per_byte:.3f} tokens per byte"
            lines.append(("dialogues" if self.answer_tokens else "documents", used))
        if self.answer_tokens:
            lines += self._dialogue_lines()
        if self.is_cut:
            lines.append(("left out", "the text beyond what the run needs; init --all takes it, too"))
        if self.skipped and self.rows is not None:
            why = reasons(self.skipped_examples, self.skipped)
            lines.append(("rows skipped", f"{self.skipped:,} of {self.rows:,} ({why})"))
        return lines

    def _dialogue_lines(self) -> list[tuple[str, str]]:
        answers, padding = (100 * part / self.tokens for part in (self.answer_tokens, self.padding_tokens))
        found = [
            ("answers", f"{self.answer_tokens:,} tokens, {answers:.1f} % of all; the loss is measured on these alone"),
            ("padding", f"{self.padding_tokens:,} tokens, {padding:.1f} % of all"),
        ]
        cut = f"{self.truncated:,} dialogues are longer than a sequence, {self.left_out:,} are not used"
        return [*found, ("truncated", cut)] if self.truncated or self.left_out else found


def text_figures(manifest: Manifest, summary: TextSummary | None) -> TextFigures:
    """Return the figures of a run's text.

    Args:
        summary: what was read; None if that is not known.

    Raises:
        CorpusError: too short for a training and a held-out sequence.
    """
    length, corpus = manifest.training.sequence_length, manifest.corpus
    if corpus.kind == "builtin":
        parts = builtin.regions(builtin.text(corpus.name), length, corpus.validation_fraction)
        training, held_out = parts.training.size, parts.held_out.size
    else:
        training, held_out = corpus.training_tokens, corpus.held_out_tokens
    tokens, parameters = training + held_out, parameter_count(manifest.model)
    counts = None if summary is None else summary.counts
    warning = repetition(manifest, training)
    return TextFigures(
        tokens=tokens,
        training_tokens=training,
        held_out_tokens=held_out,
        measured_tokens=max(1, min(HELD_OUT_TOKENS, held_out) // length) * length,
        sequence_length=length,
        run_tokens=manifest.run.tokens,
        epochs=epochs(manifest, training),
        parameters=parameters,
        tokens_per_parameter=training / parameters,
        vocabulary=summary.vocabulary if summary else None,
        model_vocabulary=manifest.model.config.vocab_size,
        is_cut=counts is not None and counts.is_cut,
        documents=counts.documents if counts else None,
        bytes=counts.text_bytes if counts else None,
        tokens_per_byte=tokens / max(1, counts.text_bytes) if counts else None,
        rows=counts.rows if counts else None,
        skipped=counts.skipped if counts else None,
        skipped_examples=counts.examples if counts else [],
        answer_tokens=counts.answer_tokens if counts else 0,
        padding_tokens=counts.padding_tokens if counts else 0,
        truncated=counts.truncated if counts else 0,
        left_out=counts.left_out if counts else 0,
        sources=summary.sources if summary else [],
        warnings=[*(summary.warnings if summary else ()), *([warning] if warning else ())],
    )
