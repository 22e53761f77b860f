"""Tokens of dialogues: rendered by the run's chat template, encoded, and marked where answers are.

A special token that the template writes becomes its id. Where a message contains the same text, it stays text: a mark
after its first letter travels through the template. A token ends where an answer begins, as it does in a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from p2ptrain.data.chat_template import (
    ChatTemplate,
    Dialogue,
    Message,
    RenderedDialogue,
    TemplateFault,
    mapped_texts,
)
from p2ptrain.data.dialogues import TOOLS, UNCOUNTED, dialogue_size
from p2ptrain.data.tokenizer import BORDER_MARK, SPECIAL_MARK, Tokenizer
from p2ptrain.tokens.packing import EncodedDialogue

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
        self._words = {*re.findall(r"\w+", template.source)}
        special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self.end_of_turn = template.end_of_turn()
        """Text that follows what an assistant says; "" if it cannot be told."""
        self._ending = self._document_end(special)

    def dialogues(
        self, dialogues: Iterable[Dialogue]
    ) -> Iterator[tuple[Dialogue, RenderedDialogue, EncodedDialogue | TemplateFault]]:
        """Yield each dialogue with its text and its tokens, or the reason why it has none. Raises CorpusError."""
        for batch in _batches(dialogues, len(self.template.source)):
            found = self.template.rendered([self._marked(each) for each in batch])
            texts = [each for each in found if isinstance(each, RenderedDialogue)]
            encoded = iter(self._encoded(texts))
            for dialogue, rendered in zip(batch, found, strict=True):
                if isinstance(rendered, TemplateFault):
                    yield dialogue, RenderedDialogue("", []), rendered
                    continue
                tokens = next(encoded)
                is_found = rendered.answers or dialogue.uncounted or self._said_nothing(dialogue)
                yield dialogue, rendered, tokens if is_found else TemplateFault(NO_ANSWER)

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the ids of messages and the beginning of the assistant's answer. Raises CorpusError."""
        text = self.template.render(self._marked(Dialogue("", messages)).messages, add_generation_prompt=True)
        return self._encoded([RenderedDialogue(text, [])])[0].ids

    def unused_fields(self, dialogue: Dialogue) -> Iterator[str]:
        """Yield the fields that the template does not name: of each message, and the tools."""
        for message in dialogue.messages:
            yield from (name for name in message if name not in _READ and name not in self._words)
        if dialogue.tools is not None and TOOLS not in self._words:
            yield TOOLS

    def _said_nothing(self, dialogue: Dialogue) -> list[int]:
        """Return the places of answers of which only fields speak that the template does not use."""
        return [
            place
            for place, each in enumerate(dialogue.messages)
            if each["role"] == "assistant"
            and not each["content"]
            and not any(name in self._words for name in each if name not in _READ)
            and any(name not in _READ for name in each)
        ]

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

    def _marked(self, dialogue: Dialogue) -> Dialogue:
        """Return a dialogue whose texts have marks in special tokens, without answers that say nothing."""

        def marked(found: re.Match[str]) -> str:
            return f"{found[0][0]}{SPECIAL_MARK}{found[0][1:]}"

        def change(text: str) -> str:
            plain = text.replace(SPECIAL_MARK, "").replace(BORDER_MARK, "")
            return plain if self._special is None else self._special.sub(marked, plain)

        messages = [
            {name: each if name == "role" else mapped_texts(each, change) for name, each in message.items()}
            for message in dialogue.messages
        ]
        uncounted = sorted({*dialogue.uncounted, *self._said_nothing(dialogue)})
        return dialogue._replace(messages=messages, tools=mapped_texts(dialogue.tools, change), uncounted=uncounted)

    def _encoded(self, rendered: Sequence[RenderedDialogue]) -> list[EncodedDialogue]:
        marked = [_with_borders(each) for each in rendered]
        encoded = self._tokenizer.encode_marked([each.text for each in marked])
        return [self._with_flags(*found, each) for found, each in zip(encoded, marked, strict=True)]

    def _with_flags(self, ids: np.ndarray, starts: np.ndarray, rendered: RenderedDialogue) -> EncodedDialogue:
        counts = np.zeros(len(ids), dtype=bool)
        for start, end in rendered.answers:
            counts |= (starts >= start) & (starts < end)
        # Where the last answer does not count to its end, no model would come to what follows it.
        if self._ending is not None and len(counts) and counts[-1]:
            ids = np.append(ids, np.asarray(self._ending, dtype=ids.dtype))
            counts = np.append(counts, np.True_)
        return EncodedDialogue(ids, counts)


_READ = ("role", "content", *UNCOUNTED)
"""Fields of a message that are not the template's alone."""


def _with_borders(rendered: RenderedDialogue) -> RenderedDialogue:
    """Return a dialogue with a mark before each answer, where a token has to end."""
    pieces, answers, at = [], [], 0
    for number, (start, end) in enumerate(rendered.answers, 1):
        pieces += [rendered.text[at:start], BORDER_MARK]
        answers.append((start + number, end + number))
        at = start
    return rendered._replace(text="".join([*pieces, rendered.text[at:]]), answers=answers)


def answer_ends(tokenizer: Tokenizer, end_of_turn: str) -> frozenset[int]:
    """Return the ids at which an answer ends: the separator, and the template's end of turn if it is one token."""
    ids = tokenizer.separator, _only_token(tokenizer, end_of_turn)
    return frozenset(each for each in ids if each is not None)


def _only_token(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of a text that is one token; None if it has none or several."""
    (ids, _), *_ = tokenizer.encode_marked([text])
    return int(ids[0]) if len(ids) == 1 else None


def _batches(
    dialogues: Iterable[Dialogue],
    beside: int,  # characters of the template, which may write them for each dialogue
) -> Iterator[list[Dialogue]]:
    batch: list[Dialogue] = []
    length = 0
    for dialogue in dialogues:
        batch.append(dialogue)
        length += beside + dialogue_size(dialogue)
        if length >= BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch
