"""``p2ptrain chat``: prompts in the template's form, answers that end where a turn ends, and nothing hostile shown."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from small_corpus import AWAY
from trained_model import generate_tokens, load_model

from p2ptrain import checkpoint
from p2ptrain.base.errors import CorpusError, UserError
from p2ptrain.cli import cli
from p2ptrain.data.chat_template import ChatTemplate, Message
from p2ptrain.manifest import SignedManifest
from p2ptrain.train.generate import Sampling
from p2ptrain.train.model import flat_model
from peer.home import Home
from peer.trained import chat as conversation
from peer.trained import chat_command
from peer.trained.chat import DROPPED, NO_TEMPLATE, TOO_LONG
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
    found = Home(tmp_path / "taught")
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
    assert NO_TEMPLATE not in ran.stderr


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


def test_a_model_without_a_template_continues_the_text(home: Home, script: Callable[..., Script]) -> None:
    made = script(" a time", "was")
    ran = run(home.path, "Once upon\nthere \n", "--system", "no")
    assert ran.stderr.count(NO_TEMPLATE) == 1
    assert "--system has no effect" in ran.stderr
    assert ran.stdout == " a time\nwas\n"
    assert made.prompts == ["Once upon", "Once upon a time\nthere "]
    error = run(home.path, "x\n", "--template", taught_file(home.path)).exception
    assert isinstance(error, UserError)
    assert "this run has no chat template" in error.problem


def taught_file(folder: Path) -> Path:
    path = folder / "own.jinja"
    path.write_text("{% for each in messages %}[{{ each.role }}:{{ each.content }}]{{ eos_token }}{% endfor %}")
    return path


def test_a_text_is_drawn_by_the_model_itself(home: Home) -> None:
    model, tokenizer = load_model(home)
    wanted = generate_tokens(model.module, list(b"To be"), 30, Sampling(seed=4), tokenizer.separator, 256)
    ran = run(home.path, "To be\n", "--new-tokens", 30, "--seed", 4)
    printed = "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in tokenizer.decode(wanted))
    assert ran.stdout == printed + "\n"


def test_a_folder_speaks_by_its_own_template(folder: Path, script: Callable[..., Script]) -> None:
    made = script("well.")
    (folder / "chat_template.jinja").write_text(taught_file(folder).read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": {"content": "</e>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ran = run(folder, "hi\n")
    assert ran.exception is None, ran.output
    assert made.prompts == ["[user:hi]</e>"]
    assert ran.stdout == "well.\n"
    (folder / "chat_template.jinja").unlink()
    config["chat_template"] = "{% for each in messages %}{{ each.content }}?{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    made = script("yes")
    assert run(folder, "hi\n").exception is None
    assert made.prompts == ["hi?"]


@pytest.mark.parametrize(("source", "said"), [("{% for %}", "cannot be used"), ("\xff", "not UTF-8")])
def test_a_bad_template_is_a_sentence(folder: Path, script: Callable[..., Script], source: str, said: str) -> None:
    script("never")
    (folder / "chat_template.jinja").write_text(source, encoding="latin-1")
    with pytest.raises(CorpusError, match=said):
        raise run(folder, "hi\n").exception or AssertionError


def picky(folder: Path) -> Path:
    """Return a template that refuses some messages, and dialogues in which the same side speaks twice."""
    path = folder / "picky.jinja"
    path.write_text(
        "{% for each in messages %}"
        "{% if 'bad' in each.content or (each.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('not this: ' + each.content) }}{% endif %}"
        "[{{ each.role[0] }}{{ each.content }}]{% endfor %}"
    )
    return path


def test_in_a_pipe_a_refused_message_is_told_and_the_next_is_answered(
    folder: Path, script: Callable[..., Script], tmp_path: Path
) -> None:
    made = script("one", "two")
    ran = run(folder, "first\nbad\nsecond\n", "--template", picky(tmp_path), "--new-tokens", 4)
    assert ran.exit_code == 2
    assert ran.stdout == "one\ntwo\n"
    assert ran.stderr.count("error: The chat template") == 1
    assert "not this: bad" in ran.stderr
    assert made.prompts == ["[ufirst]", "[ufirst][aone][usecond]"]
    script("one")
    assert run(folder, "first\n", "--template", picky(tmp_path), "--new-tokens", 4).exit_code == 0


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
    folder: Path, script: Callable[..., Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check with a template that loops until Ctrl+C, which must not leave its late reply to the next question."""
    slow = tmp_path / "slow.jinja"
    slow.write_text(
        "{% for each in messages %}{% if each.content == 'slow' %}"
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
        "[{{ each.role[0] }}{{ each.content }}]{% endfor %}"
    )
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
    chat.main([str(folder), "--device", "cpu", "--template", str(slow), "--new-tokens", "4"], standalone_mode=False)
    assert made.prompts == ["[ufirst]", "[ufirst][aone][usecond]"]


def test_at_a_terminal_a_refused_message_is_told_and_the_next_is_answered(
    folder: Path,
    script: Callable[..., Script],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = script(b"\x03", "one")
    Terminal("bad", "stopped at once", "first").use(monkeypatch)
    chat.main(
        [str(folder), "--device", "cpu", "--template", str(picky(tmp_path)), "--new-tokens", "4"], standalone_mode=False
    )
    assert "not this: bad" in capsys.readouterr().err
    assert made.prompts == ["[ustopped at once]", "[ufirst]"]


def test_a_prompt_with_bytes_that_are_not_utf_8_is_refused_or_told(folder: Path) -> None:
    for arguments in (["generate", str(folder), "The \udcff cat"], ["chat", str(folder), "--system", "The \udcff cat"]):
        ran = CliRunner().invoke(cli, arguments)
        assert ran.exit_code == 2
        assert "the text is not UTF-8: byte 0xFF follows 4 characters" in ran.stderr
    ran = CliRunner().invoke(cli, ["chat", str(folder), "--new-tokens", "2"], input=b"The \xff\xfe cat\n")
    assert "(This line is not UTF-8, and the model reads \ufffd instead: byte 0xFF follows 4 characters.)" in ran.stderr
    assert ran.exit_code == 0


def test_generate_continues_a_text_with_a_folder(folder: Path, home: Home) -> None:
    told = [
        CliRunner().invoke(cli, ["generate", str(place), "The cat", "--tokens", "9"]) for place in (folder, home.path)
    ]
    assert [each.exit_code for each in told] == [0, 0]
    assert told[0].stdout == told[1].stdout
    assert told[0].stdout.startswith("The cat")
