"""From an author's sources to the shards of a run, and to the run's size: each source is read once.

Text is written as it is read, since shards of text suit any model. Dialogues wait in a spool, since rows have the
length that most of them need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.author_text import Source
from p2ptrain.data.chat_template import Dialogue
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.packed_stream import (
    code_count,
    enough_tokens,
    named_template,
    packed,
    run_warnings,
)
from p2ptrain.data.parts import Parts, Unit
from p2ptrain.data.reading import TextMix, total_counts
from p2ptrain.data.rows import MOST_EXAMPLES, TextCounts
from p2ptrain.data.spool import dialogue_size, read_spool, spool_dialogues
from p2ptrain.data.stream import Cut
from p2ptrain.data.text_summary import TextSummary
from p2ptrain.data.tokenizer import Tokenizer
from p2ptrain.data.tokenizing import Tell, cut_size, write_text
from p2ptrain.data.unfinished import Unfinished
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.manifest.decoder import MAX_LOGITS
from p2ptrain.manifest.fitting import FittedRun, continued_run, fitted
from p2ptrain.tokens.index import SHARD_BYTES, ShardIndex
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter, bytes_of

VERSION = 1
"""Raise it when the same text would yield other shards."""
LONGEST_ROW = 2_048
"""Tokens up to which rows are lengthened for long dialogues, unless a published model says how many it reads: as those
of the largest preset."""
MOST_END_OF_TURN = 64
_NO_AUTHOR = "00" * 32


@dataclass(frozen=True, slots=True)
class TextOrder:
    """What is to be read, and how."""

    sources: Sequence[Source]
    tokenizer: Tokenizer
    template_name: str
    """As the manifest has it; empty: text."""
    template: Path | None
    """The template's file; None: ChatML, or text."""
    held_out: float
    most_tokens: int | None
    """Training tokens after which reading stops."""
    preset: str | None
    """None: the size that fits the text."""
    is_continued: bool
    """Whether the run continues a published model."""
    sequence_length: int | None = None
    """T, if the author has chosen it."""

    @property
    def identity(self) -> list[Any]:
        """What the shards depend on, beside the tokenizer."""
        sources = [each.identity for each in self.sources]
        return [VERSION, sources, self.template_name, self.held_out, self.most_tokens, self.preset]


@dataclass(frozen=True, slots=True)
class BuiltText:
    """Shards of a run, and what else its text says."""

    index: ShardIndex
    fit: FittedRun
    summary: TextSummary


def build_text(
    order: TextOrder, changes: Mapping[str, Any], store: ShardStore, unfinished: Unfinished, tell: Tell
) -> BuiltText:
    """Write the shards, or go on doing so, and choose the run's size.

    Args:
        changes: to the preset, by dotted path.

    Raises:
        CorpusError: the text cannot be read or used, or is too short.
        HomeError: shards or state cannot be written.
    """
    built = _Building(order, changes, store, unfinished)
    return built.dialogues(tell) if order.template_name else built.text(tell)


class _Building:
    def __init__(self, order: TextOrder, changes: Mapping[str, Any], store: ShardStore, unfinished: Unfinished) -> None:
        self._order, self._changes, self._store, self._unfinished = order, changes, store, unfinished
        self._counts = TextCounts(where=" and ".join(each.name for each in order.sources))
        self._check = FidelityCheck(order.tokenizer, self._counts, is_packed=bool(order.template_name))

    def text(self, tell: Tell) -> BuiltText:
        order, saved = self._order, self._unfinished.load()
        id_bytes = bytes_of(order.tokenizer.vocabulary_size)
        writer = ShardWriter(self._store, id_bytes)
        most = SHARD_BYTES // id_bytes
        parts = Parts(writer, order.held_out, most, order.tokenizer.prefix, order.tokenizer.separator)
        if saved is not None and all(map(self._store.has, saved[0]["parts"]["shards"])):
            parts.resume(saved[0]["parts"], saved[1])
            self._check.resume(saved[0]["check"])
        else:
            saved = None
        mix: TextMix[Cut] = TextMix(order.sources, cut_size, lambda cut: cut.ends, saved[0]["mix"] if saved else None)
        is_whole = write_text(mix, order.tokenizer, parts, self._check, order.most_tokens, self._unfinished, tell)
        self._check.finish()
        self._take_counts(mix, is_whole)
        parts.finish()
        if not parts.training:
            raise CorpusError("The corpus is empty.", "Use a corpus that contains text.")
        fit = self._fit(parts.training, self._changes)
        if order.sequence_length is not None:
            fit = self._fit(parts.training, {**self._changes, **_step_of(fit, order.sequence_length)})
        manifest = with_changes(preset(fit.preset, _NO_AUTHOR), fit.changes)
        return self._built(writer.finish(manifest.training.sequence_length), fit, "")

    def dialogues(self, tell: Tell) -> BuiltText:
        order, saved = self._order, self._unfinished.load()
        if saved is not None:
            self._counts = TextCounts(**saved[0]["counts"])
            self._check = FidelityCheck(order.tokenizer, self._counts, is_packed=True)
            self._check.resume(saved[0]["check"])
        encoder = ChatEncoder(named_template(order.template_name, order.tokenizer, order.template), order.tokenizer)
        mix: TextMix[Dialogue] = TextMix(
            order.sources, dialogue_size, lambda each: True, saved[0]["mix"] if saved else None
        )
        longest = self._longest_row(with_changes(preset(order.preset or "demo", _NO_AUTHOR), self._changes))
        is_whole = spool_dialogues(
            mix, encoder, longest, self._counts, self._check, order.most_tokens, self._unfinished, tell
        )
        self._take_counts(mix, is_whole)
        length, is_longer = self._row_length(longest)
        writer, parts = self._pack(length)
        changes = {**self._changes, **self._rows_of(length)}
        fit = self._fit(parts.training, changes)
        changes |= _step_of(fit, length)
        fit = self._fit(parts.training, changes)
        if is_longer:
            fit = fit._replace(reason=f"{fit.reason} Rows have {length:,} tokens, as long dialogues need.")
        end = encoder.end_of_turn
        return self._built(writer.finish(length), fit, end if len(end) <= MOST_END_OF_TURN else "")

    def _pack(self, length: int) -> tuple[ShardWriter, Parts]:
        """Write rows of ``length`` tokens."""
        order = self._order
        id_bytes = bytes_of(code_count(order.tokenizer.vocabulary_size))
        writer = ShardWriter(self._store, id_bytes, length)
        parts = Parts(writer, order.held_out, SHARD_BYTES // id_bytes // length * length)
        spooled = read_spool(self._unfinished.spool)
        for row in packed(length, order.tokenizer, spooled, self._counts, self._check):
            parts.add(Unit(row))
        parts.finish()
        if parts.all < 2 * length:
            raise CorpusError(
                f"The corpus is too short: its dialogues fill {parts.all // length} of the 2 rows of {length:,} tokens "
                "that a training and a held-out sequence take.",
                "Use more dialogues, or a smaller --sequence-length.",
            )
        return writer, parts

    def _row_length(self, longest: int) -> tuple[int, bool]:
        """Return the tokens of a row, and whether these are more than the preset's."""
        order = self._order
        lengths = [min(each.tokens, longest) for each in read_spool(self._unfinished.spool)]
        fit = self._fit(sum(lengths), self._changes)
        length = with_changes(preset(fit.preset, _NO_AUTHOR), fit.changes).training.sequence_length
        if order.sequence_length is not None:
            return length, False
        enough = min(longest, enough_tokens(self._counts.length_bits))
        if enough > length and (order.is_continued or order.preset is None):
            return enough, True
        if longest > length and self._unanswered(length) * 2 > len(lengths):
            return longest, True
        return length, False

    def _unanswered(self, length: int) -> int:
        return sum(not each.encoded.counts[1:length].any() for each in read_spool(self._unfinished.spool))

    def _longest_row(self, manifest: Manifest) -> int:
        """Return the tokens that a row of dialogues may have."""
        config = manifest.model.config
        positions = config.max_position_embeddings if self._order.is_continued else LONGEST_ROW
        return min(max(positions, manifest.training.sequence_length), MAX_LOGITS // config.vocab_size)

    def _rows_of(self, length: int) -> dict[str, Any]:
        positions = self._changes.get("model", {}).get("config", {}).get("max_position_embeddings", 0)
        found = {"training.sequence_length": length}
        return found if positions >= length else {**found, "model.config.max_position_embeddings": length}

    def _fit(self, tokens: int, changes: Mapping[str, Any]) -> FittedRun:
        """Choose preset and budget for a text of ``tokens`` training tokens."""
        order = self._order
        changes = {**changes, "corpus": corpus_table(None, order.template_name)}
        if order.is_continued and order.preset is not None:
            return continued_run(tokens, changes, order.preset)
        return fitted(tokens, changes, order.preset)

    def _take_counts(self, mix: TextMix[Any], is_whole: bool) -> None:
        found = total_counts(mix.readers)
        self._counts.rows = found.rows
        self._counts.skipped += found.skipped
        self._counts.examples = [*found.examples, *self._counts.examples][:MOST_EXAMPLES]
        self._counts.is_cut = not is_whole
        self._counts.check()

    def _built(self, index: ShardIndex, fit: FittedRun, end_of_turn: str) -> BuiltText:
        table = corpus_table(index, self._order.template_name, end_of_turn)
        fit = fit._replace(changes={**fit.changes, "corpus": table})
        manifest = with_changes(preset(fit.preset, _NO_AUTHOR), fit.changes)
        warnings = [
            *run_warnings(self._counts, manifest),
            *self._check.warnings(),
            *(each for source in self._order.sources for each in source.warnings),
        ]
        sources = [each.name for each in self._order.sources]
        self._counts.where = ""
        return BuiltText(
            index, fit, TextSummary(self._counts, warnings, sources, self._order.tokenizer.vocabulary_size)
        )


def _step_of(fit: FittedRun, length: int) -> dict[str, Any]:
    """Return the changes by which each step has about as many tokens as the preset's, in sequences of this length."""
    training = preset(fit.preset, _NO_AUTHOR).training
    return {"training.sequences_per_step": max(1, training.tokens_per_step // length)}


def corpus_table(index: ShardIndex | None, template: str, end_of_turn: str = "") -> dict[str, Any]:
    """Return the manifest's section; None stands for an index that is not known yet."""
    return {
        "kind": "shards",
        "root": "00" * 32 if index is None else index.root,
        "training_tokens": 1 if index is None else index.training_tokens,
        "held_out_tokens": 1 if index is None else index.held_out_tokens,
        "template": template,
        "end_of_turn": end_of_turn,
    }
