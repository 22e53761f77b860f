"""Tokens of dialogues: rendered by the run's chat template, encoded, and marked where answers are.

A special token that the template writes becomes its id. Where a message contains the same text, it stays text: a mark
after its first letter travels through the template, and the text is encoded in parts that end there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from p2ptrain.data.chat_template import SPECIAL_MARK, ChatTemplate, Message, RenderedDialogue, TemplateFault
from p2ptrain.data.dialogues import Dialogue
from p2ptrain.data.packing import EncodedDialogue
from p2ptrain.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 18
"""Characters of the dialogues that are rendered and encoded at once."""

NO_ANSWER = (
    "it writes no answer that can be told apart; it needs {% generation %} around answers, or to render a dialogue as "
    "the beginning of a longer one"
)


class ChatEncoder:
    """Encoder of dialogues by a template and a tokenizer."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template = template
        self._tokenizer = tokenizer
        special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self.end_of_turn = template.end_of_turn()
        """Text that follows what an assistant says; "" if it cannot be told."""
        self._ending = self._document_end(special)

    def dialogues(
        self, dialogues: Iterable[Dialogue]
    ) -> Iterator[tuple[Dialogue, RenderedDialogue, EncodedDialogue | TemplateFault]]:
        """Yield each dialogue with its text and its tokens, or the reason why it has none. Raises CorpusError."""
        for batch in _batches(dialogues):
            found = self.template.rendered([self._marked(each.messages) for each in batch])
            texts = [each for each in found if isinstance(each, RenderedDialogue)]
            encoded = iter(self._encoded(texts))
            for dialogue, rendered in zip(batch, found, strict=True):
                if isinstance(rendered, TemplateFault):
                    yield dialogue, RenderedDialogue("", []), rendered
                    continue
                tokens = next(encoded)
                yield dialogue, rendered, tokens if rendered.answers else TemplateFault(NO_ANSWER)

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the ids of messages and the beginning of the assistant's answer. Raises CorpusError."""
        text = self.template.render(self._marked(messages), add_generation_prompt=True)
        return self._encoded([RenderedDialogue(text, [])])[0].ids

    @property
    def ending(self) -> int | None:
        """Id that follows a dialogue's text, if no special token ends a turn; None if none does."""
        return self._ending

    def end_of_turn_id(self) -> int | None:
        """Return the id that ends each answer; None if its end is not a single token."""
        token = _only_token(self._tokenizer, self.end_of_turn)
        return self._ending if token is None else token

    def _document_end(self, special: Sequence[str]) -> int | None:
        """Return the separator, unless a special token ends each turn: other text is not a single id to stop at."""
        return None if any(token in self.end_of_turn for token in special) else self._tokenizer.separator

    def _marked(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        def marked(found: re.Match[str]) -> str:
            return f"{found[0][0]}{SPECIAL_MARK}{found[0][1:]}"

        plain = [{name: text.replace(SPECIAL_MARK, "") for name, text in each.items()} for each in messages]
        if self._special is None:
            return plain
        return [{**each, "content": self._special.sub(marked, each["content"])} for each in plain]

    def _encoded(self, rendered: Sequence[RenderedDialogue]) -> list[EncodedDialogue]:
        parts = [each.text.split(SPECIAL_MARK) for each in rendered]
        encoded = iter(self._tokenizer.encode_marked([part for each in parts for part in each]))
        found = []
        for each, texts in zip(rendered, parts, strict=True):
            ids, starts, at = [], [], 0
            for text in texts:
                part_ids, part_starts = next(encoded)
                ids.append(part_ids)
                starts.append(part_starts + at)
                at += len(text) + 1  # the mark
            found.append(self._with_flags(np.concatenate(ids), np.concatenate(starts), each))
        return found

    def _with_flags(self, ids: np.ndarray, starts: np.ndarray, rendered: RenderedDialogue) -> EncodedDialogue:
        counts = np.zeros(len(ids), dtype=bool)
        for start, end in rendered.answers:
            counts |= (starts >= start) & (starts < end)
        if self._ending is not None and rendered.answers:
            ids = np.append(ids, np.asarray(self._ending, dtype=ids.dtype))
            counts = np.append(counts, np.True_)
        return EncodedDialogue(ids, counts)


def answer_ends(tokenizer: Tokenizer, end_of_turn: str) -> frozenset[int]:
    """Return the ids at which an answer ends: the separator, and the template's end of turn if it is one token."""
    ids = tokenizer.separator, _only_token(tokenizer, end_of_turn)
    return frozenset(each for each in ids if each is not None)


def _only_token(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of a text that is one token; None if it has none or several."""
    (ids, _), *_ = tokenizer.encode_marked([text])
    return int(ids[0]) if len(ids) == 1 else None


def _batches(dialogues: Iterable[Dialogue]) -> Iterator[list[Dialogue]]:
    batch: list[Dialogue] = []
    characters = 0
    for dialogue in dialogues:
        batch.append(dialogue)
        characters += sum(len(each["content"]) + 64 for each in dialogue.messages)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
