"""``p2ptrain evaluate``: the numbers of a plain transformers loop, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from trained_model import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from p2ptrain.base.errors import UserError
from p2ptrain.train.evaluate import validation_loss
from peer.home import Home
from peer.model import run_text
from peer.trained.evaluate_command import evaluate

TEXT = "It was the best of times, it was the worst of times — Où est l'été? 日本語 🙂\n" * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(evaluate, [str(each) for each in arguments])


def measured(*arguments: object) -> dict[str, Any]:
    ran = run(*arguments, "--json", "--device", "cpu")
    assert ran.exception is None, ran.output
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def plain_loop(folder: Path, text: str, length: int) -> tuple[float, int]:
    """Return loss and predicted tokens of non-overlapping windows by transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, length):
        row = ids[start : start + length + 1]
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
        count += len(row) - 1
    return total / count, count


def test_a_home_agrees_with_a_plain_loop_over_its_export(home: Home, folder: Path, text: Path) -> None:
    loss, count = plain_loop(folder, TEXT, 32)
    found = measured(home.path, text)
    assert found["loss"] == pytest.approx(loss, abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["tokens"] == count == len(TEXT.encode()) - 1
    assert found["bytes"] == len(TEXT.encode()) - 1
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-4)
    assert found["sequence_length"] == 32
    assert found["warnings"] == []
    loss, _ = plain_loop(folder, TEXT, 9)
    assert measured(home.path, text, "--sequence-length", 9)["loss"] == pytest.approx(loss, abs=1e-4)


def test_without_a_file_it_is_the_peers_held_out_loss(home: Home) -> None:
    signed = home.load_manifest(None)
    assert signed is not None
    corpus = run_text(home, signed.manifest)
    wanted = validation_loss(load_model(home)[0].module, corpus, 4096)
    found = measured(home.path, "--most-tokens", 4096)
    assert found["loss"] == pytest.approx(wanted.value, abs=1e-6)
    assert found["tokens"] == found["bytes"] == wanted.tokens == 4096
    ran = run(home.path, "--most-tokens", 4096, "--device", "cpu")
    assert f"{wanted.value:.4f} nats per token" in ran.stdout
    assert "4,096 predicted, 4,096 bytes of text" in ran.stdout
    assert "a token is predicted from those before it in its window" in ran.stdout


def test_reading_stops_after_so_many_tokens(home: Home, text: Path) -> None:
    found = measured(home.path, text, "--most-tokens", 100)
    assert found["tokens"] == found["bytes"] == 100
    assert found["loss"] == pytest.approx(measured_start(home, text, 101), abs=1e-6)


def measured_start(home: Home, text: Path, size: int) -> float:
    head = text.with_name("head.txt")
    head.write_bytes(text.read_bytes()[:size].decode("utf-8", errors="ignore").encode())
    return float(measured(home.path, head)["loss"])


def test_documents_of_jsonl_are_separated_as_in_training(home: Home, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"body": each, "n": 1}) for each in ("first", "second", "third")))
    found = measured(home.path, rows, "--text-field", "body")
    assert found["tokens"] == len("first\0second\0third\0") - 1
    assert found["bytes"] == len("firstsecondthird") - 1
    ran = run(home.path, rows)
    assert isinstance(ran.exception, UserError)
    assert "no field 'text'" in ran.exception.problem


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (b"", [], "contains no text|empty"),
        (b"x", [], "is too short"),
        (b"\x00\xff\x00\x81" * 99, [], "is not a text file"),
        (b"caf\xe9 " * 99, [], "is not UTF-8 text"),
        (b"plain text", ["--text-field", "body"], "is plain text, which has no column 'body'"),
        (b"plain text", ["--sequence-length", "33"], "--sequence-length is 33, and the model reads at most 32 tokens"),
        (b"plain text", ["--device", "nowhere"], "There is no device 'nowhere'"),
    ],
)
def test_a_bad_text_or_option_is_a_sentence(
    home: Home, tmp_path: Path, content: bytes, options: list[str], said: str
) -> None:
    (tmp_path / "bad").write_bytes(content)
    ran = run(home.path, tmp_path / "bad", *options)
    with pytest.raises(UserError, match=said):
        raise ran.exception or AssertionError(ran.output)


def test_what_the_tokenizer_loses_is_told(home: Home, text: Path) -> None:
    """Check the bytes tokenizer, to which byte 0 separates documents."""
    text.write_text("a\0b" * 99)
    ran = run(home.path, text, "--device", "cpu")
    assert ran.exception is None
    assert "warning: 99 zero bytes of the text became U+FFFD" in ran.stderr


def test_a_model_with_infinite_weights_is_refused(home: Home, text: Path) -> None:
    from p2ptrain import checkpoint

    theta = load_model(home)[0].theta.clone()
    theta[3] = math.inf
    checkpoint.save(home.checkpoints, {"slow": theta}, {"step": 8})
    with pytest.raises(UserError, match="is unusable: some of its weights are infinite"):
        raise run(home.path, text).exception or AssertionError


def test_a_directory_that_is_neither_is_told(tmp_path: Path, text: Path) -> None:
    ran = run(tmp_path, text)
    assert isinstance(ran.exception, UserError)
    assert "There is no checkpoint in" in ran.exception.problem


@pytest.mark.parametrize("options", [["--text-field", "text"], ["--sequence-length", "8"]])
def test_options_that_have_no_effect_are_refused(home: Home, options: list[str]) -> None:
    assert run(home.path, *options).exit_code == 2
