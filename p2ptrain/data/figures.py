"""Figures of a run's text: how many tokens there are, what was skipped, and how often peers read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.data.rows import TextCounts, reasons
from p2ptrain.manifest import parameter_count
from p2ptrain.manifest.fitting import epochs, never_read, repetition
from p2ptrain.tokens import builtin
from p2ptrain.tokens.corpus import HELD_OUT_TOKENS

if TYPE_CHECKING:
    from p2ptrain.manifest import Manifest


SUMMARY_FILE = "text.json"
"""What ``init`` has noted of a run's text, beside its manifest."""


@dataclass(frozen=True, slots=True)
class TextSummary:
    """What was read of a run's text."""

    counts: TextCounts
    warnings: list[str]
    """Sentences, without their full stops, on what was left out, replaced or lost."""
    sources: list[str]
    """Where the text came from, for people."""
    vocabulary: int
    """Ids of the tokenizer."""

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()


def read_summary(run: Path) -> TextSummary | None:
    """Return the notes in a run's directory; None if there are none."""
    try:
        found = json.loads((run / SUMMARY_FILE).read_bytes())
        return TextSummary(**{**found, "counts": TextCounts(**found["counts"])})
    except (OSError, ValueError, LookupError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class TextFigures:
    """Counts of a run's text, as ``p2ptrain tokens --json`` prints them."""

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
    model_vocabulary: int
    """Ids of the model."""
    text: TextSummary | None
    """What was read; None if that is not known."""
    warnings: list[str]

    @property
    def tokens(self) -> int:
        return self.training_tokens + self.held_out_tokens

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
        if self.text is not None:
            lines += self._text_lines(self.text)
        return lines

    def _text_lines(self, text: TextSummary) -> list[tuple[str, str]]:
        counts = text.counts
        per_byte = self.tokens / max(1, counts.text_bytes)
        lines = [
            ("vocabulary", f"{text.vocabulary:,} ids of the tokenizer, {self.model_vocabulary:,} of the model"),
            (
                "dialogues" if counts.answer_tokens else "documents",
                f"{counts.documents:,}, {counts.text_bytes:,} bytes, {per_byte:.3f} tokens per byte",
            ),
        ]
        if counts.answer_tokens:
            answers, padding = (100 * part / self.tokens for part in (counts.answer_tokens, counts.padding_tokens))
            of_all = f"{answers:.1f} % of all; the loss is measured on these alone"
            lines.append(("answers", f"{counts.answer_tokens:,} tokens, {of_all}"))
            lines.append(("padding", f"{counts.padding_tokens:,} tokens, {padding:.1f} % of all"))
        if counts.truncated or counts.left_out:
            left_out = f"{counts.left_out:,} are not used"
            lines.append(("truncated", f"{counts.truncated:,} dialogues are longer than a sequence, {left_out}"))
        if counts.is_cut:
            lines.append(("left out", "the text beyond what the run needs; init --all takes it, too"))
        if counts.skipped:
            why = reasons(counts.examples, counts.skipped)
            lines.append(("rows skipped", f"{counts.skipped:,} of {counts.rows:,} ({why})"))
        return lines


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
    parameters = parameter_count(manifest.model)
    warning = repetition(manifest, training)
    return TextFigures(
        training_tokens=training,
        held_out_tokens=held_out,
        measured_tokens=max(1, min(HELD_OUT_TOKENS, held_out) // length) * length,
        sequence_length=length,
        run_tokens=manifest.run.tokens,
        epochs=epochs(manifest, training),
        parameters=parameters,
        tokens_per_parameter=training / parameters,
        model_vocabulary=manifest.model.config.vocab_size,
        text=summary,
        warnings=[*(summary.warnings if summary else ()), *([warning] if warning else ())],
    )
