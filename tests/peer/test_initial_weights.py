"""A peer whose run begins from published weights: where it gets them, when it needs them, and that it waits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain import checkpoint
from p2ptrain.base.errors import WeightsError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.data import weight_files
from p2ptrain.data.hub_weights import HubUnavailableError
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.train.initial_weights import load_initial, targets
from p2ptrain.train.model import build_module, flat_model
from peer import run_files
from peer.home import Home
from peer.run_files import have_weights

CPU = torch.device("cpu")
HUB = {"kind": "hub", "name": "someone/model", "revision": "a" * 40}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder with the published model."""
    build_module(preset("demo", "ab" * 32).model, 7).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def manifest(weights: Path) -> Manifest:
    digest = hashlib.sha256((weights / "model.safetensors").read_bytes()).hexdigest()
    return with_changes(preset("demo", "ab" * 32), {"model.init": {"kind": "file", "sha256": [digest]}})


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def save_checkpoint(home: Home) -> None:
    checkpoint.save(home.checkpoints, {"slow": torch.zeros(3)}, {"step": 1})


def given(data: bytes | None = None) -> Any:
    """Return a download that yields what a peer sends, or None if no peer has the file."""
    return lambda file: data


def test_a_checkpoint_replaces_the_initial_weights(manifest: Manifest, home: Home) -> None:
    log = MemoryLog()
    with pytest.raises(WeightsError, match="this machine lacks weights") as caught:
        have_weights(manifest, home, None, given(), log)
    assert "--weights PATH" in caught.value.remedy
    have_weights(with_changes(manifest, {"model.init": None}), home, None, pytest.fail, log)
    save_checkpoint(home)
    have_weights(manifest, home, None, pytest.fail, log)


def test_weights_of_another_peer_are_kept_for_the_next_start(manifest: Manifest, home: Home, weights: Path) -> None:
    have_weights(manifest, home, None, given((weights / "model.safetensors").read_bytes()), MemoryLog())
    have_weights(manifest, home, None, pytest.fail, MemoryLog())
    model = flat_model(manifest.model, 1, CPU)
    load_initial(manifest, home.files, None, targets(model))
    assert torch.equal(model.theta, flat_model(manifest.model, 7, CPU).theta)


def test_weights_of_the_owner_are_kept_too(manifest: Manifest, home: Home, weights: Path) -> None:
    have_weights(manifest, home, weights, given(), MemoryLog())
    (weights / "model.safetensors").unlink()
    have_weights(manifest, home, weights, given(), MemoryLog())


def test_random_weights_stay_random(manifest: Manifest, home: Home) -> None:
    plain = with_changes(manifest, {"model.init": None})
    model = flat_model(plain.model, 1, CPU)
    load_initial(plain, home.files, None, targets(model))
    assert torch.equal(model.theta, flat_model(plain.model, 1, CPU).theta)


def test_a_peer_waits_for_a_hub_that_may_come_back(
    manifest: Manifest, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Exception | None] = [HubUnavailableError("The hub fails.", "Wait.")] * 2 + [None]
    slept: list[float] = []

    def download(*_: Any) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(weight_files, "download_weights", download)
    monkeypatch.setattr(run_files, "nap", slept.append)
    log, of_hub = MemoryLog(10), with_changes(manifest, {"model.init": HUB})
    have_weights(of_hub, home, None, given(), log)
    assert slept == [2.0, 4.0]
    assert [(kind, note["why"], note["remedy"]) for kind, note in log.notes] == [
        ("waiting", "The hub fails", "Wait.")
    ] * 2
    answers.append(WeightsError("The hub refuses.", "Log in."))
    with pytest.raises(WeightsError, match="refuses"):
        have_weights(of_hub, home, None, given(), log)
    save_checkpoint(home)
    have_weights(of_hub, home, None, given(), log)  # asks nobody
