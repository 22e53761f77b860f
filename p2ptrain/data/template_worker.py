"""Worker process that renders chat templates; ``chat_template`` starts it as a script, so only jinja2 is imported.

A template is a stranger's program. Jinja's sandbox hides Python from it, but it may still loop or build gigabytes, so
this process limits its own processor time and memory. The environment is that of transformers'
``render_jinja_template``, except that no template learns the time: every peer must build the same tokens.

Frames on stdin and stdout are JSON behind a length of four bytes. A request is ``{"source"}`` or ``{"dialogues"}``.
"""

from __future__ import annotations

import json
import os
import random
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

CPU_S = 60
"""Processor time for one dialogue, against templates that loop. ``MOST_RENDERED_MESSAGES`` messages take far less, 1 to
3 s with Qwen3's template (measured), since no computer may refuse what another one renders."""

MOST_RENDERED_MESSAGES = 132_000
"""Maximum number of messages that are rendered for one dialogue. A template without ``{% generation %}`` renders it
twice for each answer: that reaches 512 messages, of which half are answers."""

MOST_RENDERED_CHARS = 64 << 20
"""Maximum number of characters that are rendered for one dialogue, which is rendered anew for each answer, and of the
text in one reply."""

ANSWER_START, ANSWER_END = "\U000f0002", "\U000f0003"
"""Characters of a private plane around what ``{% generation %}`` encloses, until spans replace them."""

LENGTH = struct.Struct(">I")

NOW = "26 Jul 2024"
"""Date that templates get: the one that those of Llama 3 write if they cannot ask for it."""


_EXCESS = f"it writes more than {MOST_RENDERED_CHARS >> 20} MiB of text"
_TOO_LONG = (
    "it marks no answers with {{% generation %}}, so it would be rendered anew for each of the {1:,} answers among "
    "{0:,} messages, and at most 512 messages are rendered, half of them answers"
)


class _ExcessError(Exception):
    """A dialogue, or a reply, has more than ``MOST_RENDERED_CHARS`` or ``MOST_RENDERED_MESSAGES``."""


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
        self._left = 0

    def begin_dialogue(self) -> None:
        """Allow ``MOST_RENDERED_CHARS`` again."""
        self._left = MOST_RENDERED_CHARS

    def text(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """Render some messages, with ``ANSWER_START`` and ``ANSWER_END`` in the text."""
        random.seed(0)  # for the filter of that name: every peer must build the same tokens
        copies = [dict(message) for message in messages]
        blocks = []
        for block in self._template.generate(
            messages=copies,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        ):
            self._left -= len(block)
            if self._left < 0:
                raise _ExcessError(_EXCESS)
            blocks.append(block)
        return "".join(blocks)

    def dialogue(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a dialogue and the spans of the assistant's answers in it, in characters."""
        marked = self.text(messages, add_generation_prompt=False)
        if ANSWER_START in marked:
            return _without_marks(marked)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if sum(2 * place + 1 for place in answers) > MOST_RENDERED_MESSAGES:
            raise _ExcessError(_TOO_LONG.format(len(messages), len(answers)))
        return marked, [span for place in answers if (span := self._answer(messages, place, marked)) is not None]

    def _answer(self, messages: Sequence[Mapping[str, str]], place: int, whole: str) -> tuple[int, int] | None:
        """Return the span of one answer; None if the text before it, or with it, is not how the whole text begins."""
        before = self.text(messages[:place], add_generation_prompt=True)
        after = whole if place == len(messages) - 1 else self.text(messages[: place + 1], add_generation_prompt=False)
        if whole.startswith(after) and after.startswith(before) and len(after) > len(before):
            return len(before), len(after)
        return None


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
    left = MOST_RENDERED_CHARS
    for messages in request["dialogues"]:
        renderer.begin_dialogue()
        _limit_time()
        try:
            if request["add_generation_prompt"] is None:
                text, spans = renderer.dialogue(messages)
            else:
                text, spans = renderer.text(messages, request["add_generation_prompt"]), []
                text = text.replace(ANSWER_START, "").replace(ANSWER_END, "")
        except MemoryError:
            raise
        except Exception as error:  # of the template: anything at all
            answers.append(_reason(error))
        else:
            left -= len(text)
            if left < 0:
                raise _ExcessError(_EXCESS)
            answers.append((text, spans))
    return answers


def _reason(error: Exception) -> str:
    """Return why a template fails, without names of Python's errors, which mean nothing to its author."""
    if isinstance(error, LookupError) and not isinstance(error, jinja2.TemplateError):
        return f"it looks for {str(error)[:200]} where there is none"
    if isinstance(error, RecursionError):
        return "its parts enclose or call each other too deeply"
    if isinstance(error, ValueError) and "digits" in str(error):
        return f"it writes a number of more than {sys.get_int_max_str_digits():,} digits"
    return str(error)[:1000] or "it fails"


def _limit_time() -> None:
    """Let this process die after ``CPU_S`` more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


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
        except MemoryError:
            data = json.dumps({"fault": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}).encode()
        except Exception as error:  # of the template: anything at all
            data = json.dumps({"fault": _reason(error)}).encode()
        answers.write(LENGTH.pack(len(data)) + data)
        answers.flush()


def main() -> None:
    """Render until stdin ends; whatever the template does, only this process suffers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the peer, which ends this process
    _limit_memory()
    answers = os.fdopen(os.dup(1), "wb")
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
