"""Chat templates: Jinja programs that turn the messages of a dialogue into text.

transformers renders them, in its sandbox, as its ``apply_chat_template`` does. That one would read special tokens that
a message writes as such, and finds no answers unless the template marks them; so marks and spans are ours.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import one_line, printable
from p2ptrain.data.sources import check_digest, unchanged

MOST_TEMPLATE_BYTES = 256 << 10
"""Maximum size of a template. The longest in wide use, with tools, have about 20 kB."""

NOW = "26 Jul 2024"
"""Date that templates get: the one that those of Llama 3 write if they cannot ask for it. The same text must give the
same tokens on another day."""

ANSWER_START, ANSWER_END = "\U000f0002", "\U000f0003"
"""Characters of a private plane around what ``{% generation %}`` encloses, until spans replace them."""

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_OURS = (
    f"{{% macro _answer() %}}{ANSWER_START}{{{{ caller() }}}}{ANSWER_END}{{% endmacro %}}"
    f"{{% macro strftime_now(format) %}}{NOW}{{% endmacro %}}"
)
"""Macros before each template."""

_PIECE = re.compile(r"<[^<>\s]+>|\s+|[^\s<]+|<")
"""Part of an end of turn that a template writes as a whole: a special token, space, other text."""

CHATML = "chatml"
"""Name of the built-in template."""

CHATML_SOURCE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of the OpenAI cookbook's ChatML, as in the documentation of transformers."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Special tokens that templates of transformers may write, by their names in a tokenizer_config.json."""

Message = Mapping[str, Any]
"""One turn: ``role``, ``content`` and what else its row has, as transformers gives it to a template."""

_SAID = "qwertz"
_SHORT: Sequence[Message] = [{"role": "user", "content": "asdf"}, {"role": "assistant", "content": _SAID}]
_REMEDY = "Try the template with apply_chat_template of transformers. If the run is not yours, ask its author."
_ROW_REMEDY = "Correct or remove that row, or try another template: --template FILE"


class Dialogue(NamedTuple):
    """Messages of one row, and where they are."""

    place: str
    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    """Descriptions of the tools that the assistant may call."""
    uncounted: Sequence[int] = ()
    """Places of the answers that are not to be learned."""
    may_skip: bool = False
    """Whether it is left out if the template does not render it, and else an error."""


class RenderedDialogue(NamedTuple):
    """Text of a dialogue and where the assistant's answers are in it."""

    text: str
    answers: list[tuple[int, int]]
    """Start and end of each answer that counts, in characters; the end-of-turn text belongs to it."""


class TemplateFault(NamedTuple):
    """The reason why a template does not render a dialogue."""

    why: str


class ChatTemplate:
    """Template of dialogues.

    Args:
        source: the Jinja program.
        where: name of the template in messages.
        variables: what the program may read beside the messages, such as ``eos_token``.
    """

    def __init__(self, source: str, where: str, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.where = where
        self._program = f"{_OURS}\n{_GENERATION.sub(_as_call, source)}"  # a line end after a block is not rendered
        self._variables: dict[str, Any] = dict(variables or {})
        self._end: str | None = None

    @classmethod
    def load(cls, name: str, file: Path | None = None, variables: Mapping[str, str] | None = None) -> ChatTemplate:
        """Load a run's template.

        Args:
            name: the manifest's ``template``: ``chatml``, or the SHA-256 of a file.
            file: that file.
            variables: what the template may read beside the messages.

        Raises:
            CorpusError: the file is missing, too large, not the named one, or not a template.
        """
        if name == CHATML:
            return cls(CHATML_SOURCE, "chatml", variables)
        if file is None:
            raise CorpusError(
                f"This run's chat template is a file with sha256 {name}, which is not here.",
                "Start a peer of the run, which fetches it.",
            )
        with unchanged(file):
            check_digest(file, name, "chat template")
            source = read_template(file)
        return cls.checked(source, printable(file), variables)

    @classmethod
    def checked(cls, source: str, where: str, variables: Mapping[str, str] | None = None) -> ChatTemplate:
        """Return the template of a source. Raises CorpusError if it cannot be compiled."""
        import jinja2

        template = cls(source, where, variables)
        try:
            template._text([], False)
        except jinja2.TemplateSyntaxError as error:
            raise CorpusError(f"The chat template {where} cannot be used: {_reason(error)}.", _REMEDY) from error
        except Exception:
            pass
        return template

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of some messages. Raises CorpusError if the template does not render them."""
        try:
            return _without_marks(self._text(messages, add_generation_prompt))[0]
        except Exception as error:  # of the template: anything at all
            raise CorpusError(
                f"The chat template {self.where} does not render the dialogue: {_reason(error)}.", _REMEDY
            ) from error

    def rendered(self, dialogues: Sequence[Dialogue]) -> list[RenderedDialogue | TemplateFault]:
        """Return the text and the answers of each dialogue."""
        return [self._rendered(each) for each in dialogues]

    def end_of_turn(self) -> str:
        """Return the text that follows what an assistant says; "" if it cannot be told."""
        found = self._short()
        if isinstance(found, TemplateFault) or not found.answers:
            return ""
        start, end = found.answers[-1]
        return found.text[start:end].rpartition(_SAID)[2].strip()

    def fault(self, where: str, why: str) -> CorpusError:
        """Return the error for a row that is not rendered: of the template, if it renders no short dialogue, either."""
        short = self._short()
        if isinstance(short, TemplateFault) and short.why == why:
            return CorpusError(f"The chat template {self.where} cannot be used: {why}.", _REMEDY)
        return CorpusError(f"{where}: the chat template {self.where} does not render it: {why}.", _ROW_REMEDY)

    def _short(self) -> RenderedDialogue | TemplateFault:
        return self._rendered(Dialogue("", _SHORT))

    def _text(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Any] | None = None
    ) -> str:
        """Render some messages, with ``ANSWER_START`` and ``ANSWER_END`` in the text. Raises anything at all."""
        from transformers.utils.chat_template_utils import render_jinja_template

        random.seed(0)  # for the filter of that name: the same text must give the same tokens
        texts, _ = render_jinja_template(  # type: ignore[str-unpack]  # it returns two lists
            [mapped_texts(messages, _unmarked)],
            tools=mapped_texts(tools, _unmarked),
            chat_template=self._program,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )
        return str(texts[0])

    def _rendered(self, dialogue: Dialogue) -> RenderedDialogue | TemplateFault:
        try:
            return self._with_answers(dialogue.messages, dialogue.tools, dialogue.uncounted)
        except Exception as error:  # of the template: anything at all
            return TemplateFault(_reason(error))

    def _with_answers(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, uncounted: Sequence[int]
    ) -> RenderedDialogue:
        """Return the text of a dialogue and the spans of the answers that count."""
        marked = self._text(messages, False, tools)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if ANSWER_START in marked:
            text, spans = self._with_ends(*_without_marks(marked))
            left_out = self._spans_of(messages, tools, answers, uncounted, len(spans)) if uncounted else ()
            return RenderedDialogue(text, [span for number, span in enumerate(spans) if number not in left_out])
        found = (self._answer(messages, place, marked, tools) for place in answers if place not in uncounted)
        return RenderedDialogue(marked, [span for span in found if span is not None])

    def _answer(
        self, messages: Sequence[Message], place: int, whole: str, tools: Sequence[Any] | None
    ) -> tuple[int, int] | None:
        """Return the span of one answer; None if the text before it, or with it, is not how the whole text begins."""
        before = self._text(messages[:place], True, tools)
        after = whole if place == len(messages) - 1 else self._text(messages[: place + 1], False, tools)
        if whole.startswith(after) and after.startswith(before) and len(after) > len(before):
            return len(before), len(after)
        return None

    def _with_ends(self, text: str, spans: list[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
        """Let enclosed answers end where their turns do. Raises ValueError if the last one's end is not known."""
        if self._end is None:
            self._end = self._written_end()
        found = []
        for start, end in spans:
            for piece in _PIECE.findall(self._end):
                if not text.startswith(piece, end):
                    break
                end += len(piece)
            found.append((start, end))
        if found and text[found[-1][1] :].strip():
            raise ValueError(
                "it writes text after the last answer, outside of {% generation %}, by which a model could not end it"
            )
        return text, found

    def _written_end(self) -> str:
        """Return what follows an enclosed answer at the end of a short dialogue."""
        try:
            text, spans = _without_marks(self._text(_SHORT, False))
        except Exception:  # of the template: anything at all
            return ""
        end = text[spans[-1][1] :] if spans else ""
        return "" if _SAID in end else end

    def _spans_of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        answers: Sequence[int],
        places: Sequence[int],
        count: int,
    ) -> set[int]:
        """Return which of ``count`` enclosed spans belong to the answers at some places."""
        if count == len(answers):
            return {number for number, place in enumerate(answers) if place in places}
        found: set[int] = set()
        for place in places:
            first, after = (
                len(_without_marks(self._text(messages[:end], False, tools))[1]) if end else 0
                for end in (place, place + 1)
            )
            found |= {*range(first, after)}
        return found


def template_in(tokenizer_config: object) -> str | None:
    """Return the chat template in a decoded tokenizer_config.json: of several the one that is named default."""
    found = tokenizer_config.get("chat_template") if isinstance(tokenizer_config, Mapping) else None
    if isinstance(found, list):
        named = [each for each in found if isinstance(each, Mapping) and each.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) and len(found) <= MOST_TEMPLATE_BYTES else None


def special_tokens_in(tokenizer_config: object) -> dict[str, str]:
    """Return the texts of the special tokens in a decoded tokenizer_config.json, by the names that templates use."""
    named = tokenizer_config if isinstance(tokenizer_config, Mapping) else {}
    found = {name: named.get(name) for name in SPECIAL_TOKENS}
    texts = {name: each.get("content") if isinstance(each, Mapping) else each for name, each in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def with_values(source: str, values: Mapping[str, str]) -> str:
    """Return a template that contains the values of the variables it names."""
    sets = [f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} %}}" for name, text in values.items()]
    named = [each for name, each in zip(values, sets, strict=True) if name in source]
    return "".join(named) + "\n" + source if named else source  # a line end after a block is not rendered


def mapped_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a decoded JSON value in which each text and name of a field is changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): mapped_texts(each, change) for name, each in value.items()}
    return [mapped_texts(each, change) for each in value] if isinstance(value, (list, tuple)) else value


def read_template(file: Path) -> str:
    """Return the text of a template's file. Raises CorpusError if it is unreadable, too large or not UTF-8."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_TEMPLATE_BYTES + 1)
        if len(data) <= MOST_TEMPLATE_BYTES:
            return data.decode("utf-8-sig")
    except OSError as error:
        raise CorpusError(
            f"The chat template {printable(file)} cannot be read: {error.strerror}.", files.remedy(error, "")
        ) from error
    except UnicodeDecodeError:
        raise CorpusError(
            f"The chat template {printable(file)} is not UTF-8 text.", "Name a Jinja file, as chat_template.jinja."
        ) from None
    raise CorpusError(
        f"The chat template {printable(file)} is larger than {MOST_TEMPLATE_BYTES >> 10} KiB.",
        "Name a Jinja file, as chat_template.jinja.",
    )


def _as_call(found: re.Match[str]) -> str:
    """Return the tag of a call of the macro that marks an answer, in place of ``{% generation %}`` or its end."""
    before, is_end, after = found.groups()
    return f"{{%{before} {'endcall' if is_end else 'call _answer()'} {after}%}}"


def _unmarked(text: str) -> str:
    return text.replace(ANSWER_START, "").replace(ANSWER_END, "")


def _reason(error: Exception) -> str:
    """Return why a template fails, without names of Python's errors, which mean nothing to its author."""
    import jinja2

    found = str(error)
    if isinstance(error, MemoryError):
        found = "it needs more memory than there is"
    elif isinstance(error, LookupError) and not isinstance(error, jinja2.TemplateError):
        found = f"it looks for {found[:200]} where there is none"
    elif isinstance(error, RecursionError):
        found = "its parts enclose or call each other too deeply"
    elif isinstance(error, ValueError) and "digits" in found:
        found = f"it writes a number of more than {sys.get_int_max_str_digits():,} digits"
    return one_line(found or "it fails").rstrip(".")


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without the marks around answers, and the spans between them."""
    spans: list[tuple[int, int]] = []
    pieces: list[str] = []
    length, start = 0, None
    for piece in re.split(f"([{ANSWER_START}{ANSWER_END}])", marked):
        if piece == ANSWER_START:
            start = length if start is None else start
        elif piece == ANSWER_END:
            if start is not None and length > start:
                spans.append((start, length))
            start = None
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans
