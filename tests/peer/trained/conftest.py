"""Homes of trained peers and their exports, without a network."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from p2ptrain import checkpoint
from p2ptrain.manifest import SignedManifest
from p2ptrain.train.model import flat_model
from peer import exporting, loading
from peer.home import Home


@pytest.fixture
def home(tmp_path: Path, signed_run: Callable[..., SignedManifest]) -> Home:
    """Return the home of a peer with a checkpoint of the run's first weights."""
    signed = signed_run()
    found = Home(tmp_path / "home")
    found.path.mkdir()
    found.save_manifest(signed)
    theta = flat_model(signed.manifest.model, 1, torch.device("cpu")).theta
    checkpoint.save(found.checkpoints, {"slow": theta}, {"step": 7, "progress": 3_200.5, "tokens": 1_234})
    return found


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check exports in this process, which takes a fraction of the time."""
    monkeypatch.setattr(exporting, "_load", loading.answer)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)


@pytest.fixture
def folder(home: Home, tmp_path: Path, in_process: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export of a home with the same weights, made once."""
    made = tmp_path_factory.getbasetemp() / "export"
    if not made.exists():
        exporting.export(home, made)
    shutil.copytree(made, tmp_path / "export")
    return tmp_path / "export"
