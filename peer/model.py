"""A home's model without a swarm, and the mean of several."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
from torch import Tensor

from p2ptrain import checkpoint
from p2ptrain.base.errors import CorpusError, DeviceError, HomeError, UserError
from p2ptrain.checkpoint import Checkpoint, StoredTensors
from p2ptrain.data.chat_template import ChatTemplate
from p2ptrain.data.packed_stream import load_template, template_name
from p2ptrain.data.published_settings import PublishedSettings
from p2ptrain.data.tokenizer import Tokenizer, tokenizer_of
from p2ptrain.manifest import Manifest, SignedManifest, parameter_count
from p2ptrain.manifest import Tokenizer as TokenizerSpec
from p2ptrain.tokens.corpus import ShardCorpus
from p2ptrain.tokens.opened import open_corpus, user_store
from p2ptrain.train.model import FlatModel, flat_model
from peer.home import Home

LOADED_BYTES = 12
"""Memory in bytes per parameter of the whole model: the module, its flat copy while it is built, and the checkpoint
or the pages of files. Guess: measure the export of models of several sizes."""


def newest(home: Home) -> tuple[SignedManifest, StoredTensors]:
    """Return a home's run and the tensors of its ``newest_checkpoint``. Raises HomeError if there is none."""
    signed, found = newest_checkpoint(home)
    return signed, found.tensors


def newest_checkpoint(home: Home) -> tuple[SignedManifest, Checkpoint]:
    """Return a home's run and its newest undamaged checkpoint.

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
    if "kept" in found.checkpoint.state:
        raise HomeError(
            f"The peer in {home.path} keeps a part of the model, which is no use alone.",
            "Name the home of a peer that has trained.",
        )
    return signed, found.checkpoint


def run_tokenizer(home: Home, signed: SignedManifest) -> Tokenizer:
    """Return the tokenizer of a home's run. Raises CorpusError if the home does not have it."""
    return tokenizer_of(signed.manifest, stored_tokenizer(home, signed.manifest.tokenizer))


def stored_tokenizer(home: Home, spec: TokenizerSpec) -> Path | None:
    """Return the tokenizer.json that the home keeps; None if it has none or the run names no file."""
    return home.files.find(spec.sha256) if spec.kind == "file" else None


def run_text(home: Home, manifest: Manifest) -> ShardCorpus:
    """Open the text of a home's run. Raises CorpusError if its held-out part is not on this machine."""
    spec = manifest.corpus
    index = home.files.find(spec.root) if spec.kind == "shards" else None
    if spec.kind == "builtin" or index is not None:
        corpus = open_corpus(manifest, user_store(), index)
        if all(map(corpus.store.has, corpus.needed_for_loss())):
            return corpus
    raise CorpusError(
        "The run's held-out text is not on this machine.",
        "Do this where a peer of the run trains, or start the peer here for a minute: it fetches that text.",
    )


def run_template(home: Home, signed: SignedManifest, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template of a home's run; None if the run was not taught dialogues."""
    spec = signed.manifest.corpus
    name = template_name(spec)
    return load_template(spec, tokenizer, home.files.find(name)) if name else None


def run_settings(home: Home, signed: SignedManifest) -> PublishedSettings:
    """Return what a home keeps of the published model that its run continues; nothing if it began anew."""
    init = signed.manifest.model.init
    path = None if init is None or init.settings is None else home.files.find(init.settings)
    try:
        return PublishedSettings() if path is None else PublishedSettings.parse(path.read_bytes())
    except OSError:
        return PublishedSettings()


def stored_model(home: Home, signed: SignedManifest, stored: StoredTensors) -> FlatModel:
    """Build the run's model with the slow weights of a checkpoint.

    Raises DeviceError if memory is short, HomeError if they do not fit the model, UserError if one is not finite.
    """
    parameters, free = parameter_count(signed.manifest.model), psutil.virtual_memory().available
    if LOADED_BYTES * parameters > free:
        raise DeviceError(
            f"The model has {parameters:,} parameters, which take {LOADED_BYTES * parameters / 1e9:.1f} GB of memory, "
            f"and {free / 1e9:.1f} GB are free.",
            "End other programs, or copy the home to a machine with more memory.",
        )
    model = model_of(signed, stored.read("slow", 0, stored.length("slow")))
    if not bool(torch.isfinite(model.theta).all()):
        raise UserError(
            f"The model in {home.path} is unusable: some of its weights are infinite or not a number.",
            "Name the home of another peer of this run.",
        )
    return model


def model_of(signed: SignedManifest, slow: Tensor) -> FlatModel:
    """Build the run's model with the given slow weights [P]. Raises HomeError if they do not fit."""
    model = flat_model(signed.manifest.model, signed.manifest.run.seed, torch.device("cpu"))
    if len(slow) != len(model.theta):
        raise HomeError(
            f"The checkpoint has {len(slow):,} weights, but the run's model has {len(model.theta):,}.",
            "Name the home that the checkpoint belongs to.",
        )
    model.theta.copy_(slow)
    return model


def mean(weights: Iterable[Tensor]) -> Tensor:
    """Return the mean of several peers' slow weights [P]."""
    return torch.stack(list(weights)).mean(dim=0)
