"""A peer whose run begins from published weights: where it gets them, when it needs them, and that it waits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain import checkpoint
from p2ptrain.base.errors import CorpusError, WeightsError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.data.hub_weights import HubUnavailableError
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.train.initial_weights import targets
from p2ptrain.train.model import build_module, flat_model
from peer import initial_weights
from peer.home import Home
from peer.initial_weights import await_hub, load_initial, needs_weights, provide_weights

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


def no_peer(file: Any) -> None:
    """Answer as if no peer had the file."""


def test_a_checkpoint_replaces_the_initial_weights(manifest: Manifest, home: Home) -> None:
    assert needs_weights(manifest, home)
    assert not needs_weights(with_changes(manifest, {"model.init": None}), home)
    save_checkpoint(home)
    assert not needs_weights(manifest, home)


def test_weights_of_another_peer_are_kept_for_the_next_start(manifest: Manifest, home: Home, weights: Path) -> None:
    asked = []

    def download(file: Any) -> bytes:
        asked.append(file.what)
        return (weights / "model.safetensors").read_bytes()

    for _ in range(2):
        provide_weights(manifest, home, None, False, download)
    assert asked == ["weights"]
    model = flat_model(manifest.model, 1, CPU)
    load_initial(manifest, home, None, targets(model))
    assert torch.equal(model.theta, flat_model(manifest.model, 7, CPU).theta)


def test_weights_of_the_owner_are_kept_too(manifest: Manifest, home: Home, weights: Path) -> None:
    provide_weights(manifest, home, weights, True, no_peer)
    (weights / "model.safetensors").unlink()
    provide_weights(manifest, home, weights, False, no_peer)


def test_a_place_that_vanished_is_an_error_only_if_it_is_named_now(manifest: Manifest, home: Home) -> None:
    gone = home.path / "gone.safetensors"
    with pytest.raises(CorpusError, match=r"gone\.safetensors cannot be read"):
        provide_weights(manifest, home, gone, True, no_peer)
    with pytest.raises(WeightsError, match="this machine lacks weights") as caught:
        provide_weights(manifest, home, gone, False, no_peer)
    assert "--weights PATH" in caught.value.remedy


def test_random_weights_stay_random(manifest: Manifest, home: Home) -> None:
    plain = with_changes(manifest, {"model.init": None})
    model = flat_model(plain.model, 1, CPU)
    load_initial(plain, home, None, targets(model))
    assert torch.equal(model.theta, flat_model(plain.model, 1, CPU).theta)


def test_damaged_checkpoints_explain_why_weights_are_needed(manifest: Manifest, home: Home) -> None:
    save_checkpoint(home)
    model = flat_model(manifest.model, 1, CPU)
    with pytest.raises(WeightsError, match=r"Every checkpoint in .* is damaged, and a new beginning fails: This run"):
        load_initial(manifest, home, None, targets(model))


def test_a_peer_waits_for_a_hub_that_may_come_back(
    manifest: Manifest, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Exception | None] = [HubUnavailableError("The hub fails.", "Wait.")] * 2 + [None]
    slept: list[float] = []

    def download(*_: Any) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(initial_weights, "download_weights", download)
    monkeypatch.setattr(initial_weights, "nap", slept.append)
    log = MemoryLog(10)
    await_hub(with_changes(manifest, {"model.init": HUB}), home, log)
    assert slept == [2.0, 4.0]
    assert [(kind, note["why"], note["remedy"]) for kind, note in log.notes] == [
        ("waiting", "The hub fails", "Wait.")
    ] * 2
    answers.append(WeightsError("The hub refuses.", "Log in."))
    with pytest.raises(WeightsError, match="refuses"):
        await_hub(with_changes(manifest, {"model.init": HUB}), home, log)
    save_checkpoint(home)
    await_hub(with_changes(manifest, {"model.init": HUB}), home, log)  # asks nobody
    await_hub(manifest, home, log)
