"""Chat templates: Jinja programs that turn the messages of a dialogue into text, rendered in a limited process.

The language and its environment are those of transformers' ``apply_chat_template``. A template comes from a stranger
and may loop or build gigabytes, so it runs in ``template_worker``, in batches of dialogues.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import one_line, printable
from p2ptrain.data import template_worker
from p2ptrain.data.sources import check_digest, unchanged
from p2ptrain.data.template_worker import ANSWER_END, ANSWER_START, LENGTH

MOST_TEMPLATE_BYTES = 256 << 10
"""Maximum size of a template. The longest in wide use, with tools, have about 20 kB."""

DEADLINE_S = 1_800.0
"""Longest wait for one request, a megabyte of dialogues for each of which the worker has ``template_worker.CPU_S`` of
processor time: it also ends a worker that gets no processor."""

MOST_REPLY_BYTES = 128 << 20
"""Maximum size of a reply: JSON may take twelve bytes per character, and a batch may grow to eight megabytes."""

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
_REMEDY = "Try the template with apply_chat_template of transformers. If the run is not yours, ask its author."
_ROW_REMEDY = (
    "Correct or remove that row, or try another template: --template FILE. If the run is not yours, ask its author."
)


class Dialogue(NamedTuple):
    """Messages of one row, and where they are."""

    place: str
    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    """Descriptions of the tools that the assistant may call."""
    uncounted: Sequence[int] = ()
    """Places of the answers that are not to be learned."""


class RenderedDialogue(NamedTuple):
    """Text of a dialogue and where the assistant's answers are in it."""

    text: str
    answers: list[tuple[int, int]]
    """Start and end of each answer that counts, in characters; the end-of-turn text belongs to it."""
    is_cut: bool = False
    """Whether the dialogue has more messages than are rendered, and lost its end."""


class TemplateFault(NamedTuple):
    """The reason why a template does not render a dialogue."""

    why: str
    is_slow: bool = False
    """Whether it took too long on this computer."""


class ChatTemplate:
    """Template with the process that renders it, which starts with the first dialogue; close it, or use ``with``.

    Args:
        source: the Jinja program.
        where: name of the template in messages.
        variables: what the program may read beside the messages, such as ``eos_token``.
    """

    def __init__(self, source: str, where: str, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.where = where
        self._variables = dict(variables or {})
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

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
                f"This run's chat template is a file with sha256 {name}, but no file was given.",
                "Get that file from the run's author and pass it with --template FILE.",
            )
        with unchanged(file):
            check_digest(file, name, "chat template")
            source = read_template(file)
        return cls.checked(source, printable(file), variables)

    @classmethod
    def checked(cls, source: str, where: str, variables: Mapping[str, str] | None = None) -> ChatTemplate:
        """Return the template of a source. Raises CorpusError if it cannot be compiled."""
        template = cls(source, where, variables)
        with template._lock:
            template._started()
        return template

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker process; the next dialogue starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            _end(worker)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of some messages. Raises CorpusError if the template does not render them."""
        (rendered,) = self._request([Dialogue("", messages)], add_generation_prompt)
        if isinstance(rendered, TemplateFault):
            raise CorpusError(f"The chat template {self.where} does not render the dialogue: {rendered.why}.", _REMEDY)
        return rendered.text

    def rendered(self, dialogues: Sequence[Dialogue]) -> list[RenderedDialogue | TemplateFault]:
        """Return the text and the answers of each dialogue. Raises CorpusError if the template does not end."""
        return self._request(dialogues, None)

    def end_of_turn(self) -> str:
        """Return the text that follows what an assistant says; "" if it cannot be told. Raises CorpusError."""
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
        messages = [{"role": "user", "content": "asdf"}, {"role": "assistant", "content": _SAID}]
        return self.rendered([Dialogue("", messages)])[0]

    def _request(
        self, dialogues: Sequence[Dialogue], add_generation_prompt: bool | None
    ) -> list[RenderedDialogue | TemplateFault]:
        plain = [
            {
                "messages": mapped_texts(each.messages, _unmarked),
                "tools": mapped_texts(each.tools, _unmarked),
                "uncounted": each.uncounted,
            }
            for each in dialogues
        ]
        with self._lock:
            worker = self._started()
            asked = {"dialogues": plain, "add_generation_prompt": add_generation_prompt}
            return _parsed(self._ask(worker, asked), len(dialogues))

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the running worker, which has compiled the template. Raises CorpusError if it cannot be compiled."""
        if self._worker is None:
            kept = ("PATH", "LD_LIBRARY_PATH")  # nothing else of this process's environment is a template's business
            self._worker = subprocess.Popen(
                [sys.executable, "-I", template_worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in kept if name in os.environ},
            )
            self._ask(self._worker, {"source": self.source, "variables": self._variables})
        return self._worker

    def _ask(self, worker: subprocess.Popen[bytes], request: dict[str, Any]) -> Any:
        """Return the worker's reply. Raises CorpusError, and ends the worker, if the template fails as a whole."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        data = json.dumps(request).encode()
        is_late = threading.Event()

        def end_late() -> None:
            is_late.set()
            worker.kill()

        alarm = threading.Timer(DEADLINE_S, end_late)
        alarm.daemon = True
        alarm.start()
        reply: Any = None
        try:
            worker.stdin.write(LENGTH.pack(len(data)) + data)
            worker.stdin.flush()
            head = worker.stdout.read(LENGTH.size)
            size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
            reply = json.loads(worker.stdout.read(size)) if 0 < size <= MOST_REPLY_BYTES else None
        except (OSError, ValueError):  # the worker died
            pass
        except BaseException:  # Ctrl+C: what the worker still answers must not be read as the next reply
            self.close()
            raise
        finally:
            alarm.cancel()
        fault = reply.get("fault", "") if isinstance(reply, dict) else ""
        if fault or reply is None:
            self.close()
            fault = fault or _death(worker, is_late.is_set())
            raise CorpusError(f"The chat template {self.where} cannot be used: {one_line(fault).rstrip('.')}.", _REMEDY)
        return reply


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


def _unmarked(text: str) -> str:
    return text.replace(ANSWER_START, "").replace(ANSWER_END, "")


def _parsed(reply: Any, count: int) -> list[RenderedDialogue | TemplateFault]:
    """Check the shape of a reply, which comes from the process in which a stranger's program runs."""
    found: list[RenderedDialogue | TemplateFault] = []
    for each in reply["rendered"]:
        if isinstance(each, dict):
            found.append(TemplateFault(one_line(each["fault"]).rstrip("."), bool(each["is_slow"])))
        else:
            text, spans, is_cut = each
            found.append(RenderedDialogue(str(text), [(int(start), int(end)) for start, end in spans], bool(is_cut)))
    if len(found) != count:
        raise ValueError(f"{len(found)} rendered dialogues instead of {count}")
    return found


def _death(worker: subprocess.Popen[bytes], is_late: bool) -> str:
    """Return why a worker that has ended, or was ended, did not answer."""
    if is_late:
        return f"it has not rendered a few dialogues within {DEADLINE_S / 60:.0f} min"
    if worker.returncode == -signal.SIGXCPU:
        return f"one dialogue takes it more than {template_worker.CPU_S} s of processor time"
    return "its process was ended by something else"


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not flushed
                pipe.close()
