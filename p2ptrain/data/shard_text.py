"""From an author's sources to the shards of a run, and to the run's size: each source is read once.

Shards of text suit any model. Rows of dialogues have the length that most of the first ones need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.author_text import Source
from p2ptrain.data.chat_template import ChatTemplate, Dialogue
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.dialogues import dialogue_size
from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.figures import TextSummary
from p2ptrain.data.packed_stream import (
    check_answers,
    code_count,
    encoded_dialogues,
    enough_tokens,
    packed,
    run_warnings,
)
from p2ptrain.data.parts import Parts, Unit
from p2ptrain.data.reading import Item, Taken, TextMix, total_counts
from p2ptrain.data.rows import MOST_EXAMPLES, TextCounts
from p2ptrain.data.stream import Cut, encode_cuts
from p2ptrain.data.tokenizer import Tokenizer
from p2ptrain.data.tokenizing import Tell, batches, write_units
from p2ptrain.data.unfinished import SavedState, Unfinished
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.manifest.decoder import MAX_LOGITS
from p2ptrain.manifest.fitting import FittedRun, continued_run, fitted
from p2ptrain.tokens.index import SHARD_BYTES, ShardIndex
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter, bytes_of

VERSION = 2
"""Raise it when the same text would yield other shards."""
LONGEST_ROW = 2_048
"""Tokens up to which rows are lengthened for long dialogues, unless a published model says how many it reads: as those
of the largest preset."""
SAMPLE_DIALOGUES = 2_000
"""First dialogues from which the length of rows is chosen. Guess: the lengths that all of a data set would give."""
MOST_END_OF_TURN = 64


@dataclass(frozen=True, slots=True)
class TextOrder:
    """What is to be read, and how."""

    sources: Sequence[Source]
    tokenizer: Tokenizer
    template_name: str
    """As the manifest has it; empty: text."""
    template: ChatTemplate | None
    """None: text."""
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
    def identity(self) -> dict[str, Any]:
        """What the shards depend on beside the changes to the preset, by the option for it."""
        return {
            "the version of p2ptrain": VERSION,
            "the text or --text-field": [each.identity for each in self.sources],
            "--template": self.template_name,
            "--held-out": self.held_out,
            "--preset": self.preset,
            "--all": self.most_tokens,
        }


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
    return built.text(tell) if order.template is None else built.dialogues(tell)


class _Building:
    def __init__(self, order: TextOrder, changes: Mapping[str, Any], store: ShardStore, unfinished: Unfinished) -> None:
        self._order, self._changes, self._store, self._unfinished = order, changes, store, unfinished
        saved = unfinished.load()
        self._saved = saved if saved is not None and all(map(store.has, saved[0]["parts"]["shards"])) else None
        where = " and ".join(each.name for each in order.sources)
        self._counts = TextCounts(where=where) if self._saved is None else TextCounts(**self._saved[0]["counts"])
        self._check = FidelityCheck(order.tokenizer, self._counts, is_packed=bool(order.template_name))

    def text(self, tell: Tell) -> BuiltText:
        order = self._order
        id_bytes = bytes_of(order.tokenizer.vocabulary_size)
        writer = ShardWriter(self._store, id_bytes)
        most = SHARD_BYTES // id_bytes
        parts = Parts(writer, order.held_out, most, order.tokenizer.prefix, order.tokenizer.separator)
        self._write(self._cuts(self._saved), self._units_of_text, parts, tell)
        parts.finish()
        if not parts.training:
            raise CorpusError("The corpus is empty.", "Use a corpus that contains text.")
        fit = self._fit(parts.training, self._changes)
        if order.sequence_length is not None:
            fit = self._fit(parts.training, {**self._changes, **step_of(fit.preset, order.sequence_length)})
        manifest = with_changes(preset(fit.preset), fit.changes)
        return self._built(writer.finish(manifest.training.sequence_length), fit, "")

    def dialogues(self, tell: Tell) -> BuiltText:
        order = self._order
        assert order.template is not None
        encoder = ChatEncoder(order.template, order.tokenizer)
        length, is_longer = self._row_length(encoder)
        id_bytes = bytes_of(code_count(order.tokenizer.vocabulary_size))
        writer = ShardWriter(self._store, id_bytes, length)
        parts = Parts(writer, order.held_out, SHARD_BYTES // id_bytes // length * length)

        def units(taken: list[Taken[Dialogue]]) -> Iterator[Unit]:
            dialogues = encoded_dialogues(encoder, [each.item for each in taken], self._counts, self._check)
            yield from map(Unit, packed(length, order.tokenizer, dialogues, self._counts, self._check))

        self._write(self._dialogues(self._saved), units, parts, tell)
        check_answers(length, self._counts)
        parts.finish()
        if parts.all < 2 * length:
            raise CorpusError(
                f"The corpus is too short: its dialogues fill {parts.all // length} of the 2 rows of {length:,} tokens "
                "that a training and a held-out sequence take.",
                "Use more dialogues, or a smaller --sequence-length.",
            )
        changes = {**self._changes, **self._rows_of(length)}
        fit = self._fit(parts.training, changes)
        fit = self._fit(parts.training, {**changes, **step_of(fit.preset, length)})
        if is_longer:
            fit = fit._replace(reason=f"{fit.reason} Rows have {length:,} tokens, as long dialogues need.")
        end = encoder.end_of_turn
        return self._built(writer.finish(length), fit, end if len(end) <= MOST_END_OF_TURN else "")

    def _cuts(self, saved: SavedState | None = None) -> TextMix[Cut]:
        return TextMix(self._order.sources, lambda cut: len(cut.text), lambda cut: cut.ends, _mix_of(saved))

    def _dialogues(self, saved: SavedState | None = None) -> TextMix[Dialogue]:
        return TextMix(self._order.sources, dialogue_size, lambda each: True, _mix_of(saved))

    def _write(
        self, mix: TextMix[Item], encode: Callable[[list[Taken[Item]]], Iterable[Unit]], parts: Parts, tell: Tell
    ) -> None:
        """Write the training shards, or go on doing so."""
        if self._saved is not None:
            parts.resume(self._saved[0]["parts"], self._saved[1])
            self._check.resume(self._saved[0]["check"])

        def counted() -> dict[str, Any]:
            return {"counts": asdict(self._counts), "check": self._check.state()}

        most, unfinished = self._order.most_tokens, self._unfinished
        self._counts.is_cut = not write_units(mix, encode, parts, counted, most, unfinished, tell)
        self._check.finish()
        found: TextCounts = total_counts(mix.readers)
        self._counts.rows = found.rows
        self._counts.skipped += found.skipped
        self._counts.examples = [*found.examples, *self._counts.examples][:MOST_EXAMPLES]
        self._counts.check()

    def _units_of_text(self, taken: list[Taken[Cut]]) -> Iterator[Unit]:
        cuts = [each.item for each in taken]
        for cut in cuts:
            self._check.sample(cut.text)
        for each, ids in zip(taken, encode_cuts(cuts, self._order.tokenizer), strict=True):
            cut = each.item
            self._check.count(ids, len(cut.text.encode(errors="replace")), cut.begins)
            yield Unit(ids, each.source, cut.begins, cut.ends)

    def _row_length(self, encoder: ChatEncoder) -> tuple[int, bool]:
        """Return the tokens of a row, and whether these are more than the preset's."""
        order = self._order
        longest = self._longest_row(with_changes(preset(order.preset or "demo"), self._changes))
        counts = TextCounts(where=self._counts.where)
        tokens, answers = self._sample(encoder, longest, counts)
        fit = self._fit(tokens, self._changes)
        length = with_changes(preset(fit.preset), fit.changes).training.sequence_length
        if order.sequence_length is not None:
            return length, False
        enough = min(longest, enough_tokens(counts.length_bits))
        if enough > length and (order.is_continued or order.preset is None):
            return enough, True
        if longest > length and sum(each >= length for each in answers) * 2 > len(answers):
            return longest, True
        return length, False

    def _sample(self, encoder: ChatEncoder, longest: int, counts: TextCounts) -> tuple[int, list[int]]:
        """Return about how many tokens there are, and at which token the answers of the first dialogues begin."""
        check = FidelityCheck(self._order.tokenizer, counts, is_packed=True)
        mix, tokens, answers = self._dialogues(), 0, []
        for batch in batches(mix):
            for each in encoded_dialogues(encoder, [taken.item for taken in batch.items], counts, check):
                answered = np.flatnonzero(each.encoded.counts[1:])
                tokens += min(len(each.encoded.ids), longest)
                answers.append(1 + int(answered[0]) if len(answered) else sys.maxsize)
            if len(answers) >= SAMPLE_DIALOGUES:
                return int(tokens / mix.share), answers
        return tokens, answers

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

    def _built(self, index: ShardIndex, fit: FittedRun, end_of_turn: str) -> BuiltText:
        table = corpus_table(index, self._order.template_name, end_of_turn)
        fit = fit._replace(changes={**fit.changes, "corpus": table})
        manifest = with_changes(preset(fit.preset), fit.changes)
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


def step_of(preset_name: str, length: int) -> dict[str, Any]:
    """Return the changes by which each step has about as many tokens as the preset's, in sequences of this length."""
    training = preset(preset_name).training
    return {"training.sequences_per_step": max(1, training.tokens_per_step // length)}


def _mix_of(saved: SavedState | None) -> dict[str, Any] | None:
    return None if saved is None else saved[0]["mix"]


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
