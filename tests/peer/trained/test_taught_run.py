"""A run that was taught dialogues: its held-out loss is of the answers, and its card names the template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from small_corpus import stored_dialogues
from trained_model import load_model

from p2ptrain import checkpoint
from p2ptrain.manifest import SignedManifest
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.model import flat_model
from peer.home import Home
from peer.model import run_text
from peer.trained.chat_command import chat
from peer.trained.evaluate_command import evaluate
from peer.trained.publish_command import publish
from tests.data.dialogues import made


@pytest.fixture
def taught(tmp_path: Path, signed_run: Callable[..., SignedManifest]) -> Home:
    """Return the home of a run of dialogues, which keeps them."""
    section, index = stored_dialogues(made(200), 128)
    longer = {"training__sequence_length": 128, "model__config__max_position_embeddings": 128}
    signed = signed_run(corpus=section, **longer)
    found = Home(tmp_path / "taught")
    found.path.mkdir()
    found.save_manifest(signed)
    found.files.add(index.root, index.to_bytes())
    theta = flat_model(signed.manifest.model, 1, torch.device("cpu")).theta
    checkpoint.save(found.checkpoints, {"slow": theta}, {"step": 1})
    return found


def test_the_held_out_loss_is_of_the_answers(taught: Home) -> None:
    ran = CliRunner().invoke(evaluate, [str(taught.path), "--device", "cpu", "--json"])
    assert ran.exception is None, ran.output
    found = json.loads(ran.stdout)
    signed = taught.load_manifest(None)
    assert signed is not None
    corpus = run_text(taught, signed.manifest)
    wanted = validation_loss(load_model(taught)[0].module, corpus, 65_536)
    assert found["loss"] == pytest.approx(wanted.value, abs=1e-6)
    assert 0 < found["tokens"] < wanted.tokens
    assert 0 < found["bytes"] <= found["tokens"]


@pytest.mark.usefixtures("in_process")
def test_its_card_names_the_template_and_its_export_speaks_by_it(
    taught: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    ran = CliRunner().invoke(publish, [str(taught.path), "me/model", "--dry-run", str(out)])
    assert ran.exception is None, ran.output
    assert "| chat template | `chatml` |" in (out / "README.md").read_text()
    assert "apply_chat_template" in run_use(out, capsys)
    answer = CliRunner().invoke(chat, [str(taught.path), "--device", "cpu", "--new-tokens", "20"], input="say red\n")
    assert answer.exception is None
    assert answer.stderr == ""


def run_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the program in a card's section Use on its own folder, check that it prints something, and return it."""
    text = (folder / "README.md").read_text().partition("## Use")[2]
    program = text.partition("```python\n")[2].partition("```")[0]
    capsys.readouterr()
    exec(program.replace('"me/model"', repr(str(folder))), {})
    assert capsys.readouterr().out
    return program


@pytest.mark.usefixtures("in_process")
def test_the_card_of_a_run_of_plain_text_has_a_program_that_works(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = CliRunner().invoke(publish, [str(home.path), "me/model", "--dry-run", str(tmp_path / "out")])
    assert ran.exception is None, ran.output
    assert "apply_chat_template" not in run_use(tmp_path / "out", capsys)
