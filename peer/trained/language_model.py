"""A trained model with its tokenizer, from a peer's home or from a folder in Hugging Face format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import Module

from p2ptrain.base.errors import UserError
from p2ptrain.data.tokenizer import JsonTokenizer, Tokenizer
from p2ptrain.manifest import SignedManifest
from p2ptrain.train.accelerator import choose_device
from peer.capacity import explained
from peer.home import Home
from peer.model import newest, run_settings, run_tokenizer, stored_model
from peer.options import check_model
from peer.trained.model_folder import folder_tokenizer, load_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDER_WINDOW = 2048
"""Tokens that a folder's model reads at once unless told otherwise: the context of Llama 1 (arXiv 2302.13971); logits
of longer windows take gigabytes with large vocabularies."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """Model and tokenizer, ready to be read from."""

    place: Path
    module: PreTrainedModel
    tokenizer: Tokenizer
    window: int
    """Longest sequence that the model reads, in tokens."""
    usual_window: int
    """Length of the sequences that the run trained on, or ``FOLDER_WINDOW``."""
    signed: SignedManifest | None
    """The run; None for a folder."""
    ends: Sequence[int] = ()
    """Ids at which a text ends, as a published model's settings say."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """Ids with which the model's sequences begin."""
        return self.tokenizer.prefix

    @property
    def vocabulary(self) -> int:
        """Number of ids that the tokenizer has, if the model has more."""
        return min(self.tokenizer.vocabulary_size, self.module.config.get_text_config().vocab_size)


def load(place: Path, device_name: str) -> LanguageModel:
    """Load the newest checkpoint of a home, or the model in a folder, in fp32. Raises UserError."""
    device = choose_device(device_name, is_exact=True)
    with explained(device):
        found = _of_home(Home(place)) if check_model(place) else _of_folder(place)
        Module.to(found.module, device)  # in place
    return found


def _of_home(home: Home) -> LanguageModel:
    signed, stored = newest(home)
    manifest = signed.manifest
    tokenizer = run_tokenizer(home, signed)
    module = stored_model(home, signed, stored).module
    ends = run_settings(home, signed).ends_for(tokenizer) if isinstance(tokenizer, JsonTokenizer) else []
    window = manifest.model.config.max_position_embeddings
    module.train(False)
    return LanguageModel(home.path, module, tokenizer, window, manifest.training.sequence_length, signed, ends)


def _of_folder(folder: Path) -> LanguageModel:
    module = load_folder(folder)
    _check_finite(module, folder, "Get the whole folder again, or another model.")
    config = module.config.get_text_config()
    tokenizer, ends = folder_tokenizer(folder)
    if tokenizer.vocabulary_size > config.vocab_size:
        raise UserError(
            f"The tokenizer in {folder} has {tokenizer.vocabulary_size:,} ids, but the model has only "
            f"{config.vocab_size:,}.",
            "Get the whole folder of one model.",
        )
    window = int(getattr(config, "max_position_embeddings", None) or FOLDER_WINDOW)
    return LanguageModel(folder, module, tokenizer, window, min(window, FOLDER_WINDOW), None, ends)


def _check_finite(module: PreTrainedModel, place: Path, remedy: str) -> None:
    if not all(bool(torch.isfinite(each).all()) for each in module.parameters()):
        raise UserError(f"The model in {place} is unusable: some of its weights are infinite or not a number.", remedy)
