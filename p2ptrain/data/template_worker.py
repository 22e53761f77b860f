"""Worker process that renders chat templates; ``chat_template`` starts it as a script, so only jinja2 is imported.

A template is a stranger's program. Jinja's sandbox hides Python from it, but it may still loop or build gigabytes, so
this process limits its own processor time and memory. The environment is that of transformers'
``render_jinja_template``, except that no template learns the time: every peer must build the same tokens.

Frames on stdin and stdout are JSON behind a length of four bytes. A request is ``{"source"}`` or ``{"dialogues"}``. Its
answer has a text with spans for each dialogue, or ``{"fault", "is_slow"}``.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

MEMORY_BYTES = 1 << 30
"""Address space of this process. A batch of dialogues and their rendered text take a few tens of megabytes."""

CPU_S = 180
"""Processor time for one dialogue, against templates that loop. ``MOST_RENDERED_MESSAGES`` messages take less, a second
with Qwen3's template and 60 s with one that reads all messages for each (measured), since no computer should refuse
what another one renders."""

MOST_RENDERED_MESSAGES = 33_000
"""Maximum number of messages that are rendered for one dialogue. A template without ``{% generation %}`` renders it
twice for each answer: that reaches 256 messages, of which half are answers."""

MOST_RENDERED_CHARS = 2 << 20
"""Maximum number of characters of a rendered dialogue: twice the longest one that is read."""

MOST_GROWTH, MESSAGE_CHARS = 8, 256
"""Maximum factor by which a template may lengthen what it renders, itself among it, and the characters that each
message counts beside its content. Guess: measure the factors of the hub's most downloaded templates."""

ANSWER_START, ANSWER_END = "\U000f0002", "\U000f0003"
"""Characters of a private plane around what ``{% generation %}`` encloses, until spans replace them."""

LENGTH = struct.Struct(">I")

NOW = "26 Jul 2024"
"""Date that templates get: the one that those of Llama 3 write if they cannot ask for it."""


_PIECE = re.compile(r"<[^<>\s]+>|\s+|[^\s<]+|<")
"""Part of an end of turn that a template writes as a whole: a special token, space, other text."""


class _ExcessError(Exception):
    """A dialogue becomes longer than it may."""


class _SlowError(Exception):
    """A dialogue takes more than ``CPU_S``."""


class _Generation(jinja2.ext.Extension):
    """The tag ``{% generation %}``, which encloses what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: jinja2.runtime.Macro) -> str:
        return f"{ANSWER_START}{caller()}{ANSWER_END}"


class _TemplateNamespace(jinja2.utils.Namespace):
    """Namespace of templates without attributes that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        self, rest = args[0], args[1:]
        found = dict(*rest, **values)
        for name in found:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")


def _fail(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compiled(source: str) -> jinja2.Template:
    """Return the template, compiled as transformers does it. Raises jinja2.TemplateError."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _fail
    environment.globals["strftime_now"] = lambda pattern: NOW
    environment.globals["dict"] = lambda *args, **values: dict(*args, **values)
    environment.globals["namespace"] = _TemplateNamespace
    return environment.from_string(source)


class Renderer:
    """One template and the variables that it gets with every dialogue."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._template = compiled(source)
        self._variables = dict(variables)
        self._source_chars = len(source)
        self._end: str | None = None

    def text(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tools: Sequence[Any] | None = None
    ) -> str:
        """Render some messages, with ``ANSWER_START`` and ``ANSWER_END`` in the text."""
        random.seed(0)  # for the filter of that name: every peer must build the same tokens
        given = sum(map(_chars, messages)) + len(json.dumps(tools))
        most = min(MOST_RENDERED_CHARS, MOST_GROWTH * (given + self._source_chars))
        left = most
        copies = [dict(message) for message in messages]
        blocks = []
        for block in self._template.generate(
            messages=copies,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        ):
            left -= len(block)
            if left < 0:
                raise _ExcessError(f"it makes more than {most:,} characters of these {len(messages):,} messages")
            blocks.append(block)
        return "".join(blocks)

    def dialogue(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, uncounted: Sequence[int]
    ) -> tuple[str, list[tuple[int, int]], bool]:
        """Return the text of a dialogue, the spans of the answers that count, in characters, and whether it is cut.

        Args:
            uncounted: places of answers that do not count.

        It is cut if it has no ``{% generation %}`` and too many messages to find all answers.
        """
        marked = self.text(messages, False, tools)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if ANSWER_START in marked:
            text, spans = self._with_ends(*_without_marks(marked))
            left_out = self._spans_of(messages, tools, answers, uncounted, len(spans)) if uncounted else ()
            return text, [span for number, span in enumerate(spans) if number not in left_out], False
        spans, rendered, end, is_cut = [], 0, 0, False
        for place in answers:
            rendered += 2 * place + 1
            if rendered > MOST_RENDERED_MESSAGES:
                is_cut = True
                break
            span = self._answer(messages, place, marked, tools)
            if span is not None:
                end = span[1]
                if place not in uncounted:
                    spans.append(span)
        return (marked[:end] if is_cut else marked), spans, is_cut

    def _answer(
        self, messages: Sequence[Mapping[str, Any]], place: int, whole: str, tools: Sequence[Any] | None
    ) -> tuple[int, int] | None:
        """Return the span of one answer; None if the text before it, or with it, is not how the whole text begins."""
        before = self.text(messages[:place], True, tools)
        after = whole if place == len(messages) - 1 else self.text(messages[: place + 1], False, tools)
        if whole.startswith(after) and after.startswith(before) and len(after) > len(before):
            return len(before), len(after)
        return None

    def _with_ends(self, text: str, spans: list[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
        """Let enclosed answers end where their turns do. Raises TemplateError if the last one's end is not known."""
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
            raise jinja2.exceptions.TemplateError(
                "it writes text after the last answer, outside of {% generation %}, by which a model could not end it"
            )
        return text, found

    def _written_end(self) -> str:
        """Return what follows an enclosed answer at the end of a short dialogue."""
        said = "qwertz"
        try:
            marked = self.text([{"role": "user", "content": "asdf"}, {"role": "assistant", "content": said}], False)
        except jinja2.TemplateError:
            return ""
        text, spans = _without_marks(marked)
        end = text[spans[-1][1] :] if spans else ""
        return "" if said in end else end

    def _spans_of(
        self,
        messages: Sequence[Mapping[str, Any]],
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
                len(_without_marks(self.text(messages[:end], False, tools))[1]) if end else 0
                for end in (place, place + 1)
            )
            found |= {*range(first, after)}
        return found


def _chars(message: Mapping[str, Any]) -> int:
    return MESSAGE_CHARS + sum(len(each if isinstance(each, str) else json.dumps(each)) for each in message.values())


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    spans: list[tuple[int, int]] = []
    pieces: list[str] = []
    length, start = 0, None
    rest = marked
    while True:
        places = [place for mark in (ANSWER_START, ANSWER_END) if (place := rest.find(mark)) >= 0]
        end = min(places, default=len(rest))
        pieces.append(rest[:end])
        length += end
        if not places:
            return "".join(pieces), spans
        if rest[end] == ANSWER_START:
            start = length if start is None else start
        elif start is not None:
            if length > start:
                spans.append((start, length))
            start = None
        rest = rest[end + 1 :]


def _answered(request: Mapping[str, Any], renderer: Renderer) -> list[Any]:
    answers: list[Any] = []
    for dialogue in request["dialogues"]:
        _limit_time()
        messages, tools = dialogue["messages"], dialogue["tools"]
        try:
            if request["add_generation_prompt"] is None:
                answers.append(renderer.dialogue(messages, tools, dialogue["uncounted"]))
            else:
                text = renderer.text(messages, request["add_generation_prompt"], tools)
                answers.append((text.replace(ANSWER_START, "").replace(ANSWER_END, ""), [], False))
        except Exception as error:  # of the template: anything at all
            answers.append({"fault": _reason(error), "is_slow": isinstance(error, _SlowError)})
    return answers


def _reason(error: Exception) -> str:
    """Return why a template fails, without names of Python's errors, which mean nothing to its author."""
    if isinstance(error, MemoryError):
        return f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"
    if isinstance(error, LookupError) and not isinstance(error, jinja2.TemplateError):
        return f"it looks for {str(error)[:200]} where there is none"
    if isinstance(error, RecursionError):
        return "its parts enclose or call each other too deeply"
    if isinstance(error, ValueError) and "digits" in str(error):
        return f"it writes a number of more than {sys.get_int_max_str_digits():,} digits"
    return str(error)[:1000] or "it fails"


def _limit_time() -> None:
    """Raise _SlowError after ``CPU_S`` more seconds of processor time, and die ``CPU_S`` later, if that is caught."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + 2 * CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)


def _stop(number: int, frame: object) -> None:
    raise _SlowError(f"it takes more than {CPU_S} s of processor time")


def _limit_memory() -> None:
    for limit, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the other side closes."""
    renderer: Renderer | None = None
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        request = json.loads(requests.read(*LENGTH.unpack(head)))
        _limit_time()
        answer: dict[str, Any]
        try:
            if renderer is None:
                renderer, answer = Renderer(request["source"], request["variables"]), {"rendered": []}
            else:
                answer = {"rendered": _answered(request, renderer)}
            data = json.dumps(answer).encode()
        except Exception as error:  # of the template: anything at all
            data = json.dumps({"fault": _reason(error)}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(LENGTH.pack(len(data)) + data)
        answers.flush()


def main() -> None:
    """Render until stdin ends; whatever the template does, only this process suffers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the peer, which ends this process
    signal.signal(signal.SIGPROF, _stop)
    _limit_memory()
    answers = os.fdopen(os.dup(1), "wb")
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
