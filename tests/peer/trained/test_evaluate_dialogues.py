"""``p2ptrain evaluate`` on a file of dialogues: the loss of the answers, in the form of the model's template."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from small_corpus import stored_dialogues
from trained_model import load_model

from p2ptrain import checkpoint
from p2ptrain.base.errors import UserError
from p2ptrain.manifest import SignedManifest
from p2ptrain.train.model import flat_model, summed_loss
from p2ptrain.train.sequence_parts import predicted_count
from peer.home import Home
from peer.model import run_text
from peer.trained import evaluating
from peer.trained.evaluate_command import evaluate
from tests.data.dialogues import made, write_jsonl

LENGTH = 192
OWN = (
    "{% for each in messages %}[{{ each.role }}:{{ each.content }}]{% endfor %}"
    "{{ '[assistant:' if add_generation_prompt }}"
)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Return dialogues of one and of several turns, two of which are longer than a row or begin to answer late."""
    dialogues = made(40)
    dialogues[3] = [*dialogues[4], *dialogues[5]]
    dialogues[7] = [{"role": "user", "content": "say é"}, {"role": "assistant", "content": "it is " + "é" * 200}]
    dialogues[9] = [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "never read"}]
    return write_jsonl(tmp_path / "chats.jsonl", dialogues)


@pytest.fixture
def taught(tmp_path: Path, chats: Path, signed_run: Callable[..., SignedManifest]) -> Home:
    """Return the home of a run of these dialogues."""
    sizes = {
        "run__tokens": 64_000,
        "training__sequence_length": LENGTH,
        "model__config__max_position_embeddings": 2 * LENGTH,
    }
    section, index = stored_dialogues([json.loads(line)["messages"] for line in chats.read_text().splitlines()], LENGTH)
    signed = signed_run(corpus=section, **sizes)
    found = Home(tmp_path / "taught")
    found.path.mkdir()
    found.save_manifest(signed)
    found.files.add(index.root, index.to_bytes())
    theta = flat_model(signed.manifest.model, 1, torch.device("cpu")).theta
    checkpoint.save(found.checkpoints, {"slow": theta * 3}, {"step": 1})
    return found


def run(*arguments: object) -> Result:
    return CliRunner().invoke(evaluate, [*map(str, arguments), "--device", "cpu"])


def measured(*arguments: object) -> dict[str, Any]:
    ran = run(*arguments, "--json")
    assert ran.exception is None, ran.output
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def error_of(ran: Result) -> UserError:
    assert isinstance(ran.exception, UserError), ran.output
    return ran.exception


def plain_loop(home: Home, chats: Path, length: int, most: int | None = None) -> tuple[float, int, int]:
    """Return the answers' loss, tokens and bytes, of each ChatML dialogue alone, by transformers alone."""
    module = load_model(home)[0].module
    total, count, size = 0.0, 0, 0
    for line in chats.read_text().splitlines():
        ids: list[int] = []
        labels: list[int] = []
        for message in json.loads(line)["messages"]:
            head = list(f"<|im_start|>{message['role']}\n".encode())
            said = list(f"{message['content']}<|im_end|>\n".encode())
            ids += head + said
            labels += [-100] * len(head) + (said if message["role"] == "assistant" else [-100] * len(said))
        ids, labels = [*ids, 0][:length], [*labels, 0][:length]  # the separator ends a dialogue
        labels = [
            each if most is None or sum(x >= 0 for x in labels[:at]) < most - count else -100
            for at, each in enumerate(labels)
        ]
        if max(labels) < 0:
            continue
        with torch.no_grad():
            logits = module(torch.tensor([ids[:-1]])).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
        count += sum(each >= 0 for each in labels)
        size += len(bytes(each for each in labels if each > 0))
    return total / count, count, size


def test_a_home_agrees_with_a_plain_loop_over_the_answers(taught: Home, chats: Path) -> None:
    loss, count, size = plain_loop(taught, chats, LENGTH)
    found = measured(taught.path, chats)
    assert found["loss"] == pytest.approx(loss, abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)
    assert (found["tokens"], found["bytes"]) == (count, size)
    assert found["bits_per_byte"] == pytest.approx(loss * count / size / math.log(2), rel=1e-3)
    assert found["is_of_answers"]
    assert [each.partition(" dialogues ")[0] for each in found["warnings"]] == ["1 of 39", "1"]
    assert "--sequence-length" in found["warnings"][0]
    loss, count, _ = plain_loop(taught, chats, 64)
    found = measured(taught.path, chats, "--sequence-length", 64)
    assert (found["loss"], found["tokens"]) == (pytest.approx(loss, abs=1e-4), count)
    shown = run(taught.path, chats).stdout
    assert f"{LENGTH} tokens each; only the answers of dialogues are predicted" in shown


def test_the_files_loss_is_that_of_the_runs_own_rows(taught: Home, chats: Path) -> None:
    signed = taught.load_manifest(None)
    assert signed is not None
    corpus = run_text(taught, signed.manifest)
    rows = [*corpus.validation_batches(1 << 20, 1), corpus.step_batch(1, "anyone", 0, corpus.train_sequences)]
    module = load_model(taught)[0].module
    with torch.no_grad():
        total = sum(float(summed_loss(module, row, None)) for row in rows)
    count = sum(map(predicted_count, rows))
    found = measured(taught.path, chats)
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(total / count, abs=1e-5)
    held_out = measured(taught.path)
    assert held_out["is_of_answers"]
    assert "only the answers of dialogues are predicted" in run(taught.path).stdout


def test_reading_stops_after_so_many_tokens_of_answers(
    taught: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check with one dialogue a row, whose order is that of the file, and one row a batch."""
    monkeypatch.setattr(evaluating, "BATCH_LOGITS", 1)
    long = [
        [{"role": "user", "content": "u" * 20}, {"role": "assistant", "content": f"a{each}" * 9}] for each in range(9)
    ]
    chats = write_jsonl(tmp_path / "long.jsonl", long)
    whole = measured(taught.path, chats)
    found = measured(taught.path, chats, "--most-tokens", 50)
    assert 50 <= found["tokens"] < whole["tokens"]


def test_a_model_that_was_not_taught_dialogues_reads_text(home: Home, chats: Path, tmp_path: Path) -> None:
    error = error_of(run(home.path, chats))
    assert "was not taught any: it has no chat template" in error.problem
    assert "--text-field" in error.remedy
    both = tmp_path / "both.jsonl"
    both.write_text("".join(json.dumps({"messages": each, "text": "To be"}) + "\n" for each in made(9)))
    found = measured(home.path, both, "--text-field", "text")
    assert found["bytes"] == 9 * len("To be") - 1
    assert not found["is_of_answers"]


def test_a_taught_model_reads_a_column_of_text_that_is_named(taught: Home, tmp_path: Path) -> None:
    both = tmp_path / "both.jsonl"
    both.write_text("".join(json.dumps({"messages": each, "text": "To be"}) + "\n" for each in made(9)))
    assert measured(taught.path, both)["is_of_answers"]
    assert not measured(taught.path, both, "--text-field", "text")["is_of_answers"]
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(both.read_text().replace('"messages"', '"talk"'))
    assert measured(taught.path, renamed, "--text-field", "talk")["is_of_answers"]


def test_parquet_is_read_as_jsonl(taught: Home, home: Home, chats: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    found = measured(taught.path, tmp_path / "chats.parquet")
    assert found | {"text": str(chats)} == measured(taught.path, chats)
    assert "was not taught any" in error_of(run(home.path, tmp_path / "chats.parquet")).problem


def broken_row(chats: Path) -> Path:
    chats.write_text(chats.read_text() + '{"messages": [{"role": "user", "content": "no answer"}]}\n')
    return chats


@pytest.mark.parametrize(
    ("change", "options", "problem", "remedy"),
    [
        (broken_row, [], r"chats.jsonl, line 41: the last message has the role 'user'", "Correct the file"),
        (None, ["--sequence-length", "385"], r"reads at most 384 tokens", "at most 384"),
        (
            None,
            ["--sequence-length", "9"],
            r"40 of 40 dialogues .* no answer that counts within 9",
            "longer --sequence-length",
        ),
    ],
)
def test_what_cannot_be_judged_is_a_sentence(
    taught: Home, chats: Path, change: Callable[[Path], Path] | None, options: list[str], problem: str, remedy: str
) -> None:
    error = error_of(run(taught.path, change(chats) if change else chats, *options))
    with pytest.raises(UserError, match=problem):
        raise error
    assert remedy in error.remedy
    assert "signed" not in error.remedy


def test_a_missing_column_names_the_option_of_this_command(home: Home, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "text"}\n')
    error = error_of(run(home.path, rows))
    assert "no field 'text', but 'body'" in error.problem
    assert error.remedy.endswith("--text-field COLUMN")
    assert "p2ptrain init" not in error.remedy
