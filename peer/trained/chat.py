"""Dialogue with a home's model: the chat template turns messages into text, and an answer ends where its turn ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from p2ptrain.base.errors import CorpusError, UserError
from p2ptrain.data.chat_tokens import ChatEncoder, answer_ends
from p2ptrain.train.generate import Sampling, stream_tokens, text_pieces
from peer.trained.language_model import LanguageModel

TEMPLATE_S = 10.0
"""Processor time of the chat template, a stranger's program, for one message. Guess: measure the longest in use."""

DROPPED = "The model's window is full: the oldest turns are forgotten."
TOO_LONG = "This is longer than the model's window: it reads only the end."


@dataclass(slots=True)
class Conversation:
    """Dialogue in the form of a chat template."""

    model: LanguageModel
    encoder: ChatEncoder
    new_tokens: int
    sampling: Sampling
    tell: Callable[[str], None]
    """Called with a note for the user."""
    system: str | None = None
    """First message, which says how to answer."""
    messages: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def with_model(
        cls,
        model: LanguageModel,
        new_tokens: int,
        sampling: Sampling,
        tell: Callable[[str], None],
        system: str | None = None,
    ) -> Conversation:
        """Begin a dialogue. Raises UserError if the model was not taught any, or its template is unusable."""
        with _in_time():
            template = model.template()
            encoder = None if template is None else ChatEncoder(template, model.tokenizer)
        if encoder is None:
            raise UserError(
                "This model was not taught dialogues: there is no chat template.",
                f"Let it continue a text: p2ptrain generate {model.home.path} TEXT",
            )
        return cls(model, encoder, new_tokens, sampling, tell, system)

    @property
    def stops(self) -> frozenset[int]:
        """Ids at which an answer ends."""
        return answer_ends(self.model.tokenizer, self.encoder.end_of_turn).union(self.model.ends)

    def answer(self, text: str) -> Generator[str]:
        """Yield the pieces of the answer to a text. Raises CorpusError if the template does not render it.

        What was yielded is remembered, also if the caller stops early. A text that got no answer, because it was
        refused or the caller stopped before, is forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        is_whole = False
        tokenizer = self.model.tokenizer
        sampling = replace(self.sampling, seed=self.sampling.seed + len(self.messages) // 2)  # one for each answer
        try:
            with _in_time():
                prompt = self._prompt()
            ids = stream_tokens(
                self.model.module,
                prompt,
                self.new_tokens,
                sampling,
                self.stops,
                tokenizer.vocabulary_size,
                tokenizer.prefix,
            )
            for piece in text_pieces(ids, tokenizer, stop=self.encoder.end_of_turn):
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
        window = self.model.window
        room = window - min(self.new_tokens, window // 2)
        is_told = False
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        while len(ids := self.encoder.prompt_ids([*first, *self.messages])) > room and len(self.messages) > 1:
            del self.messages[:2]  # a question and its answer
            if not is_told:
                self.tell(DROPPED)
                is_told = True
        if len(ids) > window:
            self.tell(TOO_LONG)
        found: list[int] = ids.tolist()
        return found


@contextmanager
def _in_time() -> Iterator[None]:
    """Let a template fail each time that it has run for ``TEMPLATE_S``. In the main thread. Raises CorpusError."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {TEMPLATE_S:g} s")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_S, TEMPLATE_S)
    try:
        yield
    except TimeoutError as error:
        raise CorpusError(f"The chat template cannot be used: {error}.", "Ask the run's author.") from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
