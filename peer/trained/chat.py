"""Conversation with a model: the run's chat template turns messages into text, and an answer ends where its turn ends.

A model without a template was not taught dialogues; it continues the text of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from p2ptrain.data.chat_tokens import ChatEncoder, answer_ends
from p2ptrain.train.generate import Sampling, stream_tokens, text_pieces
from peer.trained.language_model import LanguageModel
from peer.trained.model_template import find_template

CONTEXT_IDS = 16
"""Ids before an answer that are decoded with it; a leading space depends on the last one."""

DROPPED = "The model's window is full: the oldest turns are forgotten."
TOO_LONG = "This is longer than the model's window: it reads only the end."
NO_TEMPLATE = "This model was not taught dialogues (there is no chat template): it continues the text."


class Conversation(Protocol):
    """One side of a dialogue: answers, and remembers what was said."""

    def answer(self, text: str) -> Generator[str]:
        """Yield the pieces of the answer to a text. What was yielded is remembered, also if the caller stops early."""


@dataclass(slots=True)
class TaughtConversation:
    """Conversation in the form of a chat template."""

    model: LanguageModel
    encoder: ChatEncoder
    new_tokens: int
    sampling: Sampling
    tell: Callable[[str], None]
    """Called with a note for the user."""
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    _stop: str = field(init=False)
    _stops: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._stop = self.encoder.end_of_turn
        self._stops = answer_ends(self.model.tokenizer, self._stop).union(self.model.ends)

    def answer(self, text: str) -> Generator[str]:
        """Yield the pieces of the answer to a text. Raises CorpusError if the template does not render it.

        A text that got no answer, because it was refused or the caller stopped before, is forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        is_whole = False
        try:
            prompt = self._prompt()
            module, vocabulary, prefix = self.model.module, self.model.vocabulary, self.model.prefix
            ids = stream_tokens(module, prompt, self.new_tokens, self._next(), self._stops, vocabulary, prefix)
            for piece in text_pieces(ids, self.model.tokenizer, stop=self._stop):
                said.append(piece)
                yield piece
            is_whole = True
        finally:
            if said or is_whole:
                self.messages.append({"role": "assistant", "content": "".join(said).strip()})
            else:
                self.messages.pop()

    def _prompt(self) -> list[int]:
        """Return the ids of all turns that leave room for an answer; older ones are forgotten."""
        room = self.model.window - min(self.new_tokens, self.model.window // 2)
        is_told = False
        while len(ids := self._ids()) > room and len(self.messages) > 1:
            del self.messages[:2]  # a question and its answer
            if not is_told:
                self.tell(DROPPED)
                is_told = True
        if len(ids) > self.model.window:
            self.tell(TOO_LONG)
        return ids

    def _ids(self) -> list[int]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        ids: list[int] = self.encoder.prompt_ids([*first, *self.messages]).tolist()
        return ids

    def _next(self) -> Sampling:
        """Return how to draw this answer: each has a seed of its own."""
        return replace(self.sampling, seed=self.sampling.seed + len(self.messages) // 2)


@dataclass(slots=True)
class PlainText:
    """Text that both sides continue."""

    model: LanguageModel
    new_tokens: int
    sampling: Sampling
    _ids: list[int] = field(default_factory=list)
    _turns: int = 0

    def answer(self, text: str) -> Generator[str]:
        """Yield the pieces by which the model continues everything so far and a text."""
        model, tokenizer = self.model, self.model.tokenizer
        self._ids += tokenizer.encode_batch([text])[0].tolist()
        prompt = [*model.prefix, *self._ids] or [tokenizer.separator or 0]
        drawn: list[int] = []

        def kept(ids: Iterator[int]) -> Iterator[int]:
            for each in ids:
                drawn.append(each)
                yield each

        stops = {*model.ends, *(() if tokenizer.separator is None else (tokenizer.separator,))}
        sampling = replace(self.sampling, seed=self.sampling.seed + self._turns)
        self._turns += 1
        ids = stream_tokens(model.module, prompt, self.new_tokens, sampling, stops, model.vocabulary, model.prefix)
        try:
            yield from text_pieces(kept(ids), tokenizer, before=self._ids[-CONTEXT_IDS:])
        finally:
            self._ids = [*self._ids, *drawn, *tokenizer.encode_batch(["\n"])[0].tolist()][-model.window :]


def opened(
    model: LanguageModel,
    template_file: Path | None,
    system: str | None,
    new_tokens: int,
    sampling: Sampling,
    tell: Callable[[str], None],
) -> Conversation:
    """Return a dialogue with a model, in its template's form if it has one.

    Args:
        template_file: the run's template, if the home does not keep it; for a folder, instead of its own.
        system: first message, which says how to answer.
        tell: called with notes for the user.

    Raises CorpusError if the template is unusable.
    """
    template = find_template(model, template_file)
    if template is not None:
        encoder = ChatEncoder(template, model.tokenizer)
        return TaughtConversation(model, encoder, new_tokens, sampling, tell, system)
    tell(NO_TEMPLATE)
    if system is not None:
        tell("--system has no effect without a template.")
    return PlainText(model, new_tokens, sampling)
