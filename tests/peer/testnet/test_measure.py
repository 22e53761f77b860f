"""The averaged model of several homes. A tiny model on the shipped text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from small_corpus import stored_dialogues

from p2ptrain import checkpoint
from p2ptrain.base.errors import HomeError
from p2ptrain.manifest import create_run, sign_run
from p2ptrain.train.model import flat_model
from peer.home import Home
from peer.testnet import measure as measuring
from peer.testnet.measure import disagreement, measure

TINY = {
    "model.config.hidden_size": 16,
    "model.config.intermediate_size": 32,
    "model.config.num_hidden_layers": 1,
    "model.config.num_attention_heads": 2,
    "model.config.num_key_value_heads": 2,
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a temporary cache, and little held-out text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "HELD_OUT_TOKENS", 2048)


def test_disagreement_is_the_mean_relative_distance() -> None:
    assert disagreement([torch.tensor([3.0, 4.0])] * 3) == 0.0
    middle = torch.tensor([3.0, 4.0])  # norm 5
    apart = torch.tensor([0.0, 1.0])
    assert disagreement([middle - apart, middle + apart]) == pytest.approx(0.2)
    assert disagreement([middle - apart, middle + apart, middle]) == pytest.approx(2 / 3 * 0.2)


@pytest.mark.usefixtures("small")
def test_it_averages_what_training_left(tmp_path: Path) -> None:
    create_run(tmp_path / "run", "demo", TINY)
    signed = sign_run(tmp_path / "run").signed
    start = flat_model(signed.manifest.model, 0, torch.device("cpu")).theta
    noise = torch.randn(start.shape, generator=torch.Generator().manual_seed(0))
    homes = [Home(tmp_path / name) for name in ("a", "b")]
    for home, sign in zip(homes, (1, -1), strict=True):
        checkpoint.save(home.checkpoints, {"slow": start + sign * 0.01 * noise}, {"step": 2})
    checkpoint.save(homes[0].trained, {"slow": start + 0.02 * noise}, {"step": 1})
    checkpoint.save(homes[1].trained, {"slow": start - 0.02 * noise}, {"step": 1})
    measured = measure(signed, homes, threads=1)
    assert measured.disagreement == pytest.approx(2 * measured.final_disagreement, rel=1e-3)
    assert measured.averaged_val_loss == pytest.approx(math.log(256), abs=0.1)  # the mean is the untrained model
    assert measured.sample


@pytest.mark.usefixtures("small")
def test_of_dialogues_it_answers_a_held_out_question(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which\n way is  north?"},
        {"role": "assistant", "content": "Up."},
    ]
    run = tmp_path / "run"
    section, index = stored_dialogues([messages] * 200, 128)
    create_run(run, "demo", TINY | {"corpus": section, "training.sequence_length": 128})
    signed = sign_run(run).signed
    home = Home(tmp_path / "a")
    home.files.add(index.root, index.to_bytes())
    theta = flat_model(signed.manifest.model, 0, torch.device("cpu")).theta
    checkpoint.save(home.checkpoints, {"slow": theta}, {"step": 2})
    question, answer = measure(signed, [home], threads=1).sample.split("assistant")
    assert "Which\n way is  north?" in question
    assert answer


def test_a_home_without_weights_is_named(tmp_path: Path) -> None:
    create_run(tmp_path / "run", "demo", TINY)
    signed = sign_run(tmp_path / "run").signed
    with pytest.raises(HomeError, match="peer-1 holds no complete checkpoint"):
        measure(signed, [Home(tmp_path / "peer-1")], threads=1)
