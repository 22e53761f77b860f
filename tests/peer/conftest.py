"""Peers inside this process, for tests without a network: a run of recipe ``local`` and its author's key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import InProcessTrainer
from swarm import TINY

from p2ptrain.host import learner
from p2ptrain.manifest import SignedManifest, create_run, sign_run
from p2ptrain.net.identity import Identity
from p2ptrain.tokens.opened import user_store
from p2ptrain.trainer.process import TrainerHandle
from peer.home import Home
from peer.training import remote_task
from peer.training.plan import TrainerPlan

ALONE = {"outer.recipe": "local", "outer.exchanges_per_step": 0, "run.tokens": 6_400}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Cache for the token streams of all tests here, outside the home of the person who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _trainers_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_task, "TrainerHandle", InProcessTrainer)
    monkeypatch.setattr(learner, "AHEAD_S", 0.0)


@pytest.fixture
def signed_run(tmp_path: Path) -> Callable[..., SignedManifest]:
    """Return ``signed_run(**changes)``: a run of five outer steps without a network; dots are double underscores."""

    def build(**changes: Any) -> SignedManifest:
        directory = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        dotted = {path.replace("__", "."): value for path, value in changes.items()}
        create_run(directory, "demo", TINY | ALONE | dotted)
        return sign_run(directory).signed

    return build


@pytest.fixture
def plan(tmp_path: Path, signed_run: Callable[..., SignedManifest]) -> TrainerPlan:
    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.save_manifest(signed_run(model__config__num_hidden_layers=2))
    return TrainerPlan(
        home=str(home.path),
        peer=Identity.load_or_create(home.identity).peer_id,
        devices=("cpu",),
        stages=1,
        threads=1,
        activation_bytes=10**9,
        most_sequences=4,
        store=str(user_store().directory),
        index=None,
        weights=None,
        begins=True,
        tried_tokens=512,
        tried_s=60.0,
        compile="off",
        memory_bytes=None,
    )


@pytest.fixture
def in_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_task, "TrainerHandle", TrainerHandle)
