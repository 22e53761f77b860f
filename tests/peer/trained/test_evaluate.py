"""``p2ptrain evaluate``: the numbers of a plain transformers loop, for homes and anybody's folders, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from trained_model import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from p2ptrain.base.errors import UserError
from p2ptrain.train.evaluate import validation_loss
from peer.home import Home
from peer.model import run_text
from peer.trained.chat_command import chat
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


def test_home_and_export_agree_with_a_plain_loop(home: Home, folder: Path, text: Path) -> None:
    loss, count = plain_loop(folder, TEXT, 32)
    for found in (measured(home.path, text), measured(folder, text)):
        assert found["loss"] == pytest.approx(loss, abs=1e-4)
        assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert found["tokens"] == count == len(TEXT.encode()) - 1
        assert found["bytes"] == len(TEXT.encode()) - 1
        assert found["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-4)
        assert (found["sequence_length"], found["stride"]) == (32, 32)
        assert found["warnings"] == []


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


def test_a_model_that_was_trained_with_a_first_token_reads_it_in_each_window(folder: Path, text: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = tokenizer.id_to_token(5)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 5)])
    tokenizer.enable_padding(length=9, direction="left")
    tokenizer.save(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = list(TEXT.encode())
    rows = [[5, *ids[:31]]] + [[5, *ids[start - 1 : start + 31]] for start in range(31, len(ids), 31)]
    total, count = 0.0, 0
    for number, row in enumerate(rows):
        skipped = 1 if number == 0 else 2
        with torch.no_grad():
            logits = model(torch.tensor([row[:-1]])).logits[0, skipped - 1 :]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(row[skipped:]), reduction="sum"))
        count += len(row) - skipped
    found = measured(folder, text, "--sequence-length", 32)
    assert count == found["tokens"] == found["bytes"] == len(ids)  # the first token, too
    assert found["loss"] == pytest.approx(total / count, abs=1e-4)
    rows_file = text.with_suffix(".jsonl")
    rows_file.write_text("\n".join(json.dumps({"text": each}) for each in ("first", "second")))
    found = measured(folder, rows_file)
    assert found["tokens"] == len("firstsecond") + 3  # two ends, and the beginning of the second document
    assert found["bytes"] == len("firstsecond")


def test_a_stride_gives_more_context(home: Home, text: Path) -> None:
    found = measured(home.path, text, "--stride", 8)
    assert found["tokens"] == len(TEXT.encode()) - 1
    assert found["stride"] == 8
    assert found["loss"] != measured(home.path, text)["loss"]
    assert "8 apart; a token is predicted from at least 24 before it" in run(home.path, text, "--stride", 8).stdout


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
        (b"x", [], "is too short: nothing follows its first token"),
        (b"\x00\xff\x00\x81" * 99, [], "is not a text file"),
        (b"caf\xe9 " * 99, [], "is not UTF-8 text"),
        (b"plain text", ["--text-field", "body"], "is plain text, which has no column 'body'"),
        (b"plain text", ["--sequence-length", "33"], "--sequence-length is 33, and the model in .* at most 32 tokens"),
        (b"plain text", ["--stride", "33"], "Windows of 32 tokens cannot be 33 apart"),
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


def test_what_the_tokenizer_loses_is_told(folder: Path, text: Path) -> None:
    """Check a tokenizer that lowercases."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    ran = run(folder, text, "--device", "cpu", "--sequence-length", 32)
    assert ran.exception is None
    assert "warning: the tokenizer changes the text" in ran.stderr


def test_a_model_with_infinite_weights_is_refused(home: Home, text: Path) -> None:
    from p2ptrain import checkpoint

    theta = load_model(home)[0].theta.clone()
    theta[3] = math.inf
    checkpoint.save(home.checkpoints, {"slow": theta}, {"step": 8})
    with pytest.raises(UserError, match="is unusable: some of its weights are infinite"):
        raise run(home.path, text).exception or AssertionError


def test_a_folder_with_weights_that_are_no_numbers_is_refused(folder: Path, text: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for command, arguments in ((evaluate, [folder, text]), (chat, [folder])):
        ran = CliRunner().invoke(command, [str(each) for each in arguments], input="Hello\n")
        with pytest.raises(UserError, match=f"{folder} is unusable: some of its weights are infinite or not a number"):
            raise ran.exception or AssertionError


def lacks_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def has_a_pickle(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def needs_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('code of a stranger ran')\n")


def announces_too_much(folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lacks_weights, r"do not fit its config.json: .*up_proj"),
        (has_a_pickle, "has no weights in safetensors format"),
        (needs_code, "The library transformers cannot load"),
        (announces_too_much, r"The model has 1,099,511,627,776 parameters, which take 4398.0 GB of memory"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 99), "not a whole safetensors file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "is not a tokenizer"),
        (lambda folder: (folder / "config.json").write_text("{"), "The library transformers cannot load"),
    ],
)
def test_a_bad_folder_is_a_sentence(folder: Path, text: Path, damage: Any, said: str) -> None:
    damage(folder)
    ran = run(folder, text, "--device", "cpu")
    with pytest.raises(UserError, match=said):
        raise ran.exception or AssertionError(ran.output)


@pytest.mark.parametrize("shards", [["../model.safetensors"], ["gone.safetensors"]])
def test_an_index_names_only_files_of_its_folder(folder: Path, text: Path, shards: list[str]) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(["w"], *shards)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"lacks .*{Path(shards[0]).name}, which model.safetensors.index.json names"):
        raise run(folder, text).exception or AssertionError


def test_a_directory_that_is_neither_is_told(tmp_path: Path, text: Path) -> None:
    ran = run(tmp_path, text)
    assert isinstance(ran.exception, UserError)
    assert "There is no checkpoint in" in ran.exception.problem
    assert "A folder in Hugging Face format has a config.json." in ran.exception.remedy


def test_a_folder_has_no_held_out_text(folder: Path) -> None:
    with pytest.raises(UserError, match="has no held-out text"):
        raise run(folder).exception or AssertionError


@pytest.mark.parametrize(
    "options", [["--examples", "3"], ["--sequence-length", "8"], ["--tasks", "x", "--stride", "3"]]
)
def test_options_that_have_no_effect_are_refused(home: Home, options: list[str]) -> None:
    assert run(home.path, *options).exit_code == 2
