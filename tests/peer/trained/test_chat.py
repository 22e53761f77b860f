"""``p2ptrain chat``: prompts in the template's form, answers that end where a turn ends, and nothing hostile shown."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from small_corpus import AWAY
from trained_model import load_model

from p2ptrain import checkpoint
from p2ptrain.base.errors import UserError
from p2ptrain.cli import cli
from p2ptrain.data.chat_template import ChatTemplate, Message
from p2ptrain.manifest import SignedManifest
from p2ptrain.train.generate import Sampling, generate_text
from p2ptrain.train.model import flat_model
from peer.home import Home
from peer.trained import chat as conversation
from peer.trained import chat_command
from peer.trained.chat import DROPPED, TOO_LONG
from peer.trained.chat_command import chat

CHATS = {**AWAY, "template": "chatml"}
START, END = "<|im_start|>", "<|im_end|>\n"


class Script:
    """Stand-in for the model: records prompts, and answers with the next of some texts."""

    def __init__(self, *answers: str | bytes) -> None:
        self.prompts: list[str] = []
        self.asked: list[tuple[int, Sampling]] = []
        self.answers = [each if isinstance(each, bytes) else each.encode() for each in answers]

    def __call__(
        self,
        module: object,
        prompt: list[int],
        new_tokens: int,
        sampling: Sampling,
        stops: Any,
        vocabulary: int,
        prefix: tuple[int, ...],
    ) -> Iterator[int]:
        self.prompts.append(bytes(prompt).decode())
        self.asked.append((new_tokens, sampling))
        answer = self.answers[len(self.prompts) - 1]
        for each in answer:
            if each == 3:
                raise KeyboardInterrupt
            if each in stops:
                return
            yield each


class Terminal:
    """Stand-in for a user at a terminal, who types lines and Ctrl+C at the prompt."""

    def __init__(self, *typed: str | BaseException) -> None:
        self._typed = [*typed, EOFError()]

    def __call__(self, prompt: str) -> str:
        each = self._typed.pop(0)
        if isinstance(each, BaseException):
            raise each
        return each

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("builtins.input", self)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Script]:
    def install(*answers: str | bytes) -> Script:
        made = Script(*answers)
        monkeypatch.setattr(conversation, "stream_tokens", made)
        return made

    return install


@pytest.fixture
def taught(tmp_path: Path, signed_run: Callable[..., SignedManifest]) -> Home:
    """Return the home of a run with chat template chatml and a window of 256 bytes."""
    signed = signed_run(corpus=CHATS, model__config__max_position_embeddings=256)
    return home_of(tmp_path / "taught", signed)


def home_of(path: Path, signed: SignedManifest) -> Home:
    """Return the home of a peer with a checkpoint."""
    found = Home(path)
    found.path.mkdir()
    found.save_manifest(signed)
    theta = flat_model(signed.manifest.model, 1, torch.device("cpu")).theta
    checkpoint.save(found.checkpoints, {"slow": theta}, {"step": 7})
    return found


def run(place: Path, said: str, *options: object) -> Result:
    return CliRunner().invoke(chat, [str(place), "--device", "cpu", *map(str, options)], input=said)


def test_a_dialogue_has_the_form_of_the_template(taught: Home, script: Callable[..., Script]) -> None:
    made = script(f"it is red{END}more", "blue")
    ran = run(taught.path, "say red\n\nsay blue\n", "--system", "Be short.", "--new-tokens", 9, "--seed", 5)
    assert ran.exception is None, ran.output
    assert ran.stdout == "it is red\nblue\n"
    system = f"{START}system\nBe short.{END}"
    first = f"{system}{START}user\nsay red{END}{START}assistant\n"
    assert made.prompts == [first, f"{first}it is red{END}{START}user\nsay blue{END}{START}assistant\n"]
    assert [each[0] for each in made.asked] == [9, 9]
    assert made.asked[0][1].seed != made.asked[1][1].seed


def test_bytes_that_are_not_text_cost_no_other_line(taught: Home, script: Callable[..., Script]) -> None:
    made = script("one", "two", "three")
    ran = CliRunner().invoke(chat, [str(taught.path), "--device", "cpu"], input=b"a\n\xff\nc\n")
    assert ran.exception is None, ran.output
    assert ran.stdout == "one\ntwo\nthree\n"
    assert "\ufffd" in made.prompts[1]


def test_an_answer_also_ends_at_the_separator(taught: Home, script: Callable[..., Script]) -> None:
    script("yes\0no")
    assert run(taught.path, "well?\n").stdout == "yes\n"


def test_a_message_cannot_speak_as_another_role(taught: Home, script: Callable[..., Script]) -> None:
    """Check that control characters of an answer do not reach the terminal either."""
    script("a\x1b[31m\tb\x07\r\u202ec\n")
    ran = run(taught.path, "hi\n")
    assert ran.stdout == "a\ufffd[31m\tb\ufffd\ufffd\ufffdc\n\n"


def test_the_oldest_turns_are_forgotten_when_the_window_is_full(taught: Home, script: Callable[..., Script]) -> None:
    made = script("one", "two", "three")
    ran = run(taught.path, f"{'a' * 60}\n{'b' * 60}\n{'c' * 300}\n", "--new-tokens", 64, "--system", "S")
    assert ran.exception is None, ran.output
    assert ran.stderr.count(DROPPED) == 2
    assert ran.stderr.count(TOO_LONG) == 1
    assert "aaa" not in made.prompts[1]
    assert "bbb" not in made.prompts[2]
    assert made.prompts[1].startswith(f"{START}system\nS{END}{START}user\nbbb")
    assert ran.stdout == "one\ntwo\nthree\n"


PICKY = (
    "{% for each in messages %}"
    "{% if 'bad' in each.content or (each.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('not this: ' + each.content) }}{% endif %}"
    "[{{ each.role[0] }}{{ each.content }}]{% endfor %}"
)
"""Template that refuses some messages, and dialogues in which the same side speaks twice."""

SLOW = (
    "{% for each in messages %}{% if each.content == 'slow' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "[{{ each.role[0] }}{{ each.content }}]{% endfor %}"
)
"""Template that loops until Ctrl+C at one message."""


@pytest.fixture
def spoken(tmp_path: Path, signed_run: Callable[..., SignedManifest]) -> Callable[[str], Home]:
    """Return a function that returns the home of a run with a template of its own."""

    def made(template: str) -> Home:
        digest = hashlib.sha256(template.encode()).hexdigest()
        found = home_of(tmp_path / "spoken", signed_run(corpus={**AWAY, "template": digest}))
        found.files.add(digest, template.encode())
        return found

    return made


def test_in_a_pipe_a_refused_message_is_told_and_the_next_is_answered(
    spoken: Callable[[str], Home], script: Callable[..., Script]
) -> None:
    made = script("one", "two")
    home = spoken(PICKY)
    ran = run(home.path, "first\nbad\nsecond\n", "--new-tokens", 4)
    assert ran.exit_code == 2
    assert ran.stdout == "one\ntwo\n"
    assert ran.stderr.count("error: The chat template") == 1
    assert "not this: bad" in ran.stderr
    assert made.prompts == ["[ufirst]", "[ufirst][aone][usecond]"]
    script("one")
    assert run(home.path, "first\n", "--new-tokens", 4).exit_code == 0


def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(
    taught: Home, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = script(b"half\x03 of it", "whole")
    Terminal("first", KeyboardInterrupt(), "second").use(monkeypatch)
    chat.main([str(taught.path), "--device", "cpu"], standalone_mode=False)
    assert capsys.readouterr().out == "half\n\nwhole\n\n"
    assert f"{START}assistant\nhalf{END}" in made.prompts[1]


def test_in_a_pipe_ctrl_c_ends_the_command(taught: Home, script: Callable[..., Script]) -> None:
    script(b"half\x03 of it")
    ran = run(taught.path, "first\nsecond\n")
    assert ran.exit_code == 1
    assert ran.stdout.startswith("half")
    assert chat_command.PROMPT not in ran.stdout


def test_at_a_terminal_a_question_whose_rendering_is_stopped_is_forgotten(
    spoken: Callable[[str], Home], script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check with a template that loops until Ctrl+C, which must not leave its late reply to the next question."""
    made = script("one", "two")
    Terminal("first", "slow", "second").use(monkeypatch)
    render = ChatTemplate.render

    def stopped(template: ChatTemplate, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        if messages[-1]["content"] != "slow":
            return render(template, messages, add_generation_prompt)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        ctrl_c = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        try:
            ctrl_c.start()
            return render(template, messages, add_generation_prompt)
        finally:
            ctrl_c.cancel()
            signal.signal(signal.SIGINT, before)

    monkeypatch.setattr(ChatTemplate, "render", stopped)
    chat.main([str(spoken(SLOW).path), "--device", "cpu", "--new-tokens", "4"], standalone_mode=False)
    assert made.prompts == ["[ufirst]", "[ufirst][aone][usecond]"]


def test_a_template_that_never_ends_is_stopped(
    spoken: Callable[[str], Home], script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "TEMPLATE_S", 0.3)
    made = script("one")
    ran = run(spoken(SLOW).path, "slow\nfirst\n", "--new-tokens", 4)
    assert ran.exit_code == 2
    assert "it takes longer than 0.3 s" in ran.stderr
    assert made.prompts == ["[ufirst]"]


def test_at_a_terminal_a_refused_message_is_told_and_the_next_is_answered(
    spoken: Callable[[str], Home],
    script: Callable[..., Script],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = script(b"\x03", "one")
    Terminal("bad", "stopped at once", "first").use(monkeypatch)
    chat.main([str(spoken(PICKY).path), "--device", "cpu", "--new-tokens", "4"], standalone_mode=False)
    assert "not this: bad" in capsys.readouterr().err
    assert made.prompts == ["[ustopped at once]", "[ufirst]"]


def test_a_prompt_with_bytes_that_are_not_utf_8_is_refused(home: Home) -> None:
    for arguments in (["generate", str(home.path), "The \udcff cat"], ["chat", str(home.path), "--system", "a \udcff"]):
        ran = CliRunner().invoke(cli, arguments)
        assert ran.exit_code == 2
        assert "the text is not UTF-8: byte 0xFF follows" in ran.stderr


def test_generate_continues_a_text(home: Home) -> None:
    model, tokenizer = load_model(home)
    told = CliRunner().invoke(cli, ["generate", str(home.path), "The cat", "--tokens", "9"])
    assert told.exit_code == 0
    assert told.stdout == generate_text(model.module, tokenizer, "The cat", 9, Sampling()) + "\n"


def test_a_model_that_was_not_taught_dialogues_is_refused(home: Home) -> None:
    error = run(home.path, "Once upon\n").exception
    assert isinstance(error, UserError)
    assert "was not taught dialogues" in error.problem
    assert "p2ptrain generate" in error.remedy
