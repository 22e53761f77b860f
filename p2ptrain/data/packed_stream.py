"""From dialogues to rows of tokens (``packing``), and what was read of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import one_line
from p2ptrain.data.chat_template import CHATML, ChatTemplate, Dialogue, TemplateFault
from p2ptrain.data.chat_tokens import ChatEncoder
from p2ptrain.data.dialogues import UNCOUNTED
from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.rows import SURE_ROWS, TextCounts, skip
from p2ptrain.data.tokenizer import Tokenizer
from p2ptrain.tokens.packing import BEGINS, COUNTS, FLAG_BITS, EncodedDialogue, packed_rows

if TYPE_CHECKING:
    from p2ptrain.manifest import Corpus as CorpusSpec
    from p2ptrain.manifest import Manifest

LENGTH_OPTION = "--sequence-length"

REPORTED_TRUNCATED = 0.01
"""Share of truncated dialogues above which the owner is warned: they teach answers without an end. Guess: the held-out
loss of models by this share."""


class UnansweredError(CorpusError):
    """Most dialogues have no answer within a row; the remedy is for the corpus of a run."""


def template_name(spec: CorpusSpec) -> str:
    """Return the corpus's ``template``; empty if it has no dialogues."""
    return "" if spec.kind == "builtin" else spec.template


def load_template(spec: CorpusSpec, tokenizer: Tokenizer, file: Path | None = None) -> ChatTemplate:
    """Load the chat template of a run of dialogues. Raises CorpusError if there is none, or it is not usable."""
    name = template_name(spec)
    if not name:
        raise CorpusError(
            "This run was not taught dialogues: it has no chat template.", "Name the home of another run."
        )
    return ChatTemplate.load(name, None if name == CHATML else file, template_variables(tokenizer))


def template_variables(tokenizer: Tokenizer) -> dict[str, str]:
    """Return what an export tells a template of the tokenizer."""
    variables = {"bos_token": tokenizer.bos_text, "eos_token": tokenizer.separator_text}
    return {name: text for name, text in variables.items() if text}


class LongDialogue(NamedTuple):
    """Encoded dialogue of any length."""

    encoded: EncodedDialogue
    text_bytes: int
    """Bytes of the text as UTF-8."""


def rows_of_dialogues(
    length: int,  # T
    tokenizer: Tokenizer,
    encoder: ChatEncoder,
    dialogues: Iterable[Dialogue],
    counts: TextCounts,
    check: FidelityCheck,
) -> Iterator[np.ndarray]:
    """Yield the codes of rows [T], and count what was read; see ``encoded_dialogues`` and ``packed``.

    Raises:
        UnansweredError: most dialogues have no answer within a row.
        CorpusError: the tokenizer does not know the text.
    """
    found = encoded_dialogues(encoder, dialogues, counts, check)
    yield from packed(length, tokenizer, found, counts, check)
    check.finish()
    check_answers(length, counts)


def encoded_dialogues(
    encoder: ChatEncoder, dialogues: Iterable[Dialogue], counts: TextCounts, check: FidelityCheck
) -> Iterator[LongDialogue]:
    """Yield the tokens of each dialogue that the template renders. Raises CorpusError for one that may not be skipped.

    Those that are skipped are counted.
    """
    for dialogue, rendered, encoded in encoder.dialogues(dialogues):
        if isinstance(encoded, TemplateFault):
            if not dialogue.may_skip:
                raise encoder.template.fault(f"{counts.where}, {dialogue.place}", encoded.why)
            skip(counts, dialogue.place, f"the chat template does not render it: {encoded.why}")
            if counts.skipped == SURE_ROWS and check.is_empty:
                raise encoder.template.fault(f"{counts.where}, {dialogue.place}", encoded.why)
            continue
        for message in dialogue.messages:
            check.sample(message["content"] or "")
        counts.count_unused(encoder.unused_fields(dialogue))
        bits = str(len(encoded.ids).bit_length())
        counts.length_bits[bits] = counts.length_bits.get(bits, 0) + 1
        text_bytes = len(rendered.text.encode(errors="replace"))
        yield LongDialogue(encoded, text_bytes)


def packed(
    length: int,  # T
    tokenizer: Tokenizer,
    dialogues: Iterable[LongDialogue],
    counts: TextCounts,
    check: FidelityCheck,
) -> Iterator[np.ndarray]:
    """Yield the codes of rows [T], and count what is used."""
    used = _used(length, dialogues, counts, check)
    for row in packed_rows(used, length, tokenizer.separator or 0):
        counts.answer_tokens += int(np.count_nonzero(row & COUNTS))
        counts.padding_tokens += _padding(row)
        yield row


def check_answers(length: int, counts: TextCounts) -> None:
    """Raise UnansweredError if most dialogues have no answer within a row of ``length`` tokens."""
    if counts.left_out > counts.documents:
        unused = "".join(f". {each[0].upper()}{each[1:]}" for each in _unused(counts))
        raise UnansweredError(
            f"{counts.left_out:,} of {counts.left_out + counts.documents:,} dialogues of {counts.where} have no answer "
            f"that counts within {length:,} tokens{unused}.",
            f"Give a longer {LENGTH_OPTION}, a tokenizer with larger tokens, or let more answers count "
            f"({', '.join(UNCOUNTED)}).",
        )


def warnings(counts: TextCounts, limit: str = LENGTH_OPTION, length: int = 0, most: int | None = None) -> Iterator[str]:
    """Yield sentences, without their full stops, on dialogues that are used in part or not at all.

    Args:
        limit: name of a row's length for the user.
        length: of a row; 0: unknown.
        most: tokens that the model reads; None: as many as the run says.
    """
    if counts.truncated > REPORTED_TRUNCATED * counts.documents:
        enough = enough_tokens(counts.length_bits)
        remedy = f". With {limit} = {enough:,}, {100 * WHOLE:.0f} % would be whole" if enough > length else ""
        if remedy and most is not None and enough > most:
            remedy = f". {100 * WHOLE:.0f} % have less than {enough:,}, and the model reads {most:,}"
        yield (
            f"{counts.truncated:,} of {counts.documents:,} dialogues are longer than {limit}, and are "
            "used without their end"
            f"{remedy}"
        )
    if counts.left_out > 0:
        yield (f"{counts.left_out:,} dialogues are not used, as they have no answer that counts within {limit} tokens")
    yield from _unused(counts)


def _unused(counts: TextCounts) -> Iterator[str]:
    if counts.unused_fields:
        found = ", ".join(f"{one_line(name, 40)} ({number:,})" for name, number in counts.unused_fields.items())
        yield f"the chat template does not use these fields of messages and rows: {found}"


def run_warnings(counts: TextCounts, manifest: Manifest) -> Iterator[str]:
    """Yield the warnings on the dialogues of a run."""
    length = manifest.training.sequence_length
    most = None if manifest.model.init is None else manifest.model.config.max_position_embeddings
    return warnings(counts, length=length, most=most)


WHOLE = 0.95
"""Share of the dialogues that ``init`` keeps whole, if the model reads so many tokens. Guess: see
``REPORTED_TRUNCATED``."""


def enough_tokens(length_bits: Mapping[str, int]) -> int:
    """Return the power of two that is a row's length for which ``WHOLE`` of the dialogues are whole.

    Args:
        length_bits: dialogues by the bits of their lengths in tokens: 8 for 128 to 255.
    """
    longer = sum(length_bits.values())
    most = (1 - WHOLE) * longer
    for bits in sorted(map(int, length_bits)):
        longer -= length_bits[str(bits)]
        if longer <= most:
            return 1 << bits
    return 0


def _used(
    length: int, dialogues: Iterable[LongDialogue], counts: TextCounts, check: FidelityCheck
) -> Iterator[EncodedDialogue]:
    """Yield the dialogues that have an answer, at most a row long."""
    for each in dialogues:
        tokens = len(each.encoded.ids)
        ids, is_predicted = each.encoded.ids[:length], each.encoded.counts[:length]
        if not is_predicted[1:].any():
            counts.left_out += 1
            continue
        counts.truncated += tokens > length
        check.count(ids, each.text_bytes * len(ids) // tokens, begins_document=True)
        yield EncodedDialogue(ids, is_predicted)


def _padding(row: np.ndarray) -> int:
    """Return how many tokens at a row's end are padding: those after the last beginning, if none of them is predicted.

    Every dialogue has a predicted token after its first.
    """
    last = int(np.flatnonzero(row & BEGINS)[-1])
    return 0 if (row[last:] & COUNTS).any() else len(row) - last


def code_count(vocabulary_size: int) -> int:
    """Return the exclusive upper bound of the codes of so many ids."""
    return vocabulary_size << FLAG_BITS
