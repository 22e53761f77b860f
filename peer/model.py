"""A home's model without a swarm, and the mean of several."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from p2ptrain import checkpoint
from p2ptrain.base.errors import HomeError
from p2ptrain.data.tokenizer import Tokenizer, load_tokenizer
from p2ptrain.manifest import SignedManifest
from p2ptrain.manifest import Tokenizer as TokenizerSpec
from p2ptrain.train.model import FlatModel, flat_model
from peer.home import Home


def load_model(home: Home, tokenizer_file: Path | None = None) -> tuple[FlatModel, Tokenizer]:
    """Build the run's model on the CPU with the slow weights of the newest undamaged checkpoint, and its tokenizer.

    Raises HomeError if there is none.
    """
    signed = home.load_manifest(None)
    found = checkpoint.load_latest(home.checkpoints)
    if found.checkpoint is None and found.passed_over:
        torn = "; ".join(f"{each.path.name}: {each.reason}" for each in found.passed_over)
        raise HomeError(
            f"Every checkpoint in {home.path} is damaged: {torn}.",
            "Start its peer again; it downloads the swarm's weights and saves them while it trains and when it stops.",
        )
    if signed is None or found.checkpoint is None:
        raise home.untrained()
    model = model_of(signed, found.checkpoint.tensors["slow"])
    spec = signed.manifest.tokenizer
    return model, load_tokenizer(spec, tokenizer_file or stored_tokenizer(home, spec))


def stored_tokenizer(home: Home, spec: TokenizerSpec) -> Path | None:
    """Return the tokenizer.json that the home keeps; None if it has none or the run names no file."""
    return home.files.find(spec.sha256) if spec.kind == "file" else None


def model_of(signed: SignedManifest, slow: Tensor) -> FlatModel:
    """Build the run's model with the given slow weights [P]. Raises HomeError if they do not fit."""
    model = flat_model(signed.manifest.model, signed.manifest.run.seed, torch.device("cpu"))
    if slow.shape != model.theta.shape:
        raise HomeError(
            f"The checkpoint has {len(slow):,} weights, but the run's model has {len(model.theta):,}.",
            "Name the home that the checkpoint belongs to.",
        )
    model.theta.copy_(slow)
    return model


def mean(weights: Iterable[Tensor]) -> Tensor:
    """Return the mean of several peers' slow weights [P]."""
    return torch.stack(list(weights)).mean(dim=0)
