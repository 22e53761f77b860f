"""A home's model without a swarm: export in Hugging Face format, and text generation."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging as transformers_logging

from p2ptrain import checkpoint
from p2ptrain.base.errors import HomeError, UserError
from p2ptrain.data.tokenizer import Tokenizer, load_tokenizer
from p2ptrain.manifest import SignedManifest
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
        raise HomeError(
            f"There is no checkpoint in {home.path}.",
            "Name the home of a peer that has trained; a running peer saves every two minutes (a large model less "
            "often) and when it stops.",
        )
    model = model_of(signed, found.checkpoint.tensors["slow"])
    spec = signed.manifest.tokenizer
    if tokenizer_file is None and spec.kind == "file":
        tokenizer_file = home.files.find(spec.sha256)
    return model, load_tokenizer(spec, tokenizer_file)


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


def export(home: Home, target: Path, tokenizer_file: Path | None = None) -> None:
    """Write model and tokenizer for ``from_pretrained``, atomically. Raises UserError."""
    try:
        is_taken = target.exists() and any(target.iterdir() if target.is_dir() else [target])
    except OSError as error:
        raise _unwritable(target, error) from error
    if is_taken:
        raise UserError(f"{target} exists and is not empty.", "Choose another directory for the export.")
    model, tokenizer = load_model(home, tokenizer_file)
    model.module.config.use_cache = True  # training turns it off
    try:
        with _whole(target) as folder:
            transformers_logging.disable_progress_bar()  # it would also go into logs
            model.module.save_pretrained(folder)
            tokenizer.save(folder)
    except (OSError, SafetensorError) as error:
        raise _unwritable(target, error) from error


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is moved to ``target`` on success and removed on an error.

    The target is absent or an empty directory. An existing one is kept, since it may be a mount point or a shell's
    working directory.
    """
    is_there = target.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = (target if is_there else target.parent) / f".writing-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
        if is_there:
            for path in folder.iterdir():
                path.rename(target / path.name)
        else:
            folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unwritable(target: Path, error: Exception) -> UserError:
    return UserError(
        f"{target} cannot be written: {checkpoint.plainly(error)}.", "Choose another directory, or free some space."
    )


def mean(weights: Iterable[Tensor]) -> Tensor:
    """Return the mean of several peers' slow weights [P]."""
    return torch.stack(list(weights)).mean(dim=0)
