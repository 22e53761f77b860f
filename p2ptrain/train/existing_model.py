"""Reads a published model for a new run: its sizes, its tokenizer and its weights' headers."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from p2ptrain.base import files
from p2ptrain.base.errors import ManifestError, WeightsError
from p2ptrain.base.options import HUB
from p2ptrain.base.text import UserPath, printable
from p2ptrain.data.file_store import WEIGHTS_OPTION, NamedFile
from p2ptrain.data.given_model import GivenModel
from p2ptrain.data.hub_weights import commit_of, download_weights, fetch
from p2ptrain.data.published_settings import (
    CONFIG,
    SETTINGS_FILES,
    PublishedSettings,
    kept_settings,
    kept_template,
)
from p2ptrain.data.sources import file_digest, unchanged
from p2ptrain.data.tokenizer import MOST_TOKENIZER_BYTES
from p2ptrain.data.weight_files import published_files
from p2ptrain.manifest import Decoder
from p2ptrain.manifest.initial_weights import FileWeights, HubWeights
from p2ptrain.train.initial_weights import check_weights
from p2ptrain.train.published_config import model_section

TOKENIZER = "tokenizer.json"
MAX_CONFIG_BYTES = 1 << 20
"""Maximum size of a config.json; those of the listed families have some kilobytes."""


def read_model(where: str) -> GivenModel:
    """Read a model from a folder, a safetensors file beside its config.json, or ``hf:owner/name[@revision]``.

    A model of the hub is downloaded. Raises UserError.
    """
    return _hub_model(where.removeprefix(HUB)) if where.startswith(HUB) else _local_model(UserPath(where))


def _local_model(place: Path) -> GivenModel:
    try:
        is_there = files.exists(place)
    except OSError as error:
        raise WeightsError(f"{place} cannot be read: {files.cause(error)}.", files.remedy(error, "")) from error
    if not is_there:
        raise WeightsError(
            f"There is no model {place}.", "Name a folder with config.json and safetensors files, or hf:OWNER/NAME."
        )
    folder = place if place.is_dir() else place.parent
    paths = published_files(place)
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(unchanged(path))
        section = _section(_config(folder / CONFIG), f"{printable(folder / CONFIG)}")
        check_weights(section, paths)
        digests = [file_digest(path, "weights file") for path in paths]
    init = FileWeights(kind="file", sha256=digests)
    tokenizer = folder / TOKENIZER if (folder / TOKENIZER).is_file() else None
    named = [NamedFile("weights", WEIGHTS_OPTION, digest) for digest in digests]
    model = GivenModel(
        f"{place}",
        section.model_copy(update={"init": init}),
        tokenizer,
        weights=tuple(zip(named, paths, strict=True)),
    )
    return _described(model, folder)


def _hub_model(where: str) -> GivenModel:
    name, _, asked = where.partition("@")
    revision = commit_of(name, asked)
    config = fetch(name, revision, CONFIG, MAX_CONFIG_BYTES)
    what = f"{CONFIG} of {name} at revision {revision}"
    if config is None:
        raise WeightsError(f"The Hugging Face hub has no {what}.", "Choose a model in the format of transformers.")
    section = _section(config.read_bytes(), what)
    check_weights(section, download_weights(name, revision, section))
    init = HubWeights(kind="hub", name=name, revision=revision)
    for each in SETTINGS_FILES:
        fetch(name, revision, each)
    tokenizer = fetch(name, revision, TOKENIZER, MOST_TOKENIZER_BYTES)
    model = GivenModel(f"{name} at {revision[:12]}", section.model_copy(update={"init": init}), tokenizer)
    return _described(model, config.parent)


def _described(model: GivenModel, folder: Path) -> GivenModel:
    """Return a model with what its other files say: special tokens, the chat template, what exports keep."""
    settings = PublishedSettings.read(folder)
    section, kept = model.section, kept_settings(settings)
    if kept is not None and section.init is not None:
        init = section.init.model_copy(update={"settings": hashlib.sha256(kept).hexdigest()})
        section = section.model_copy(update={"init": init})
    return replace(model, section=section, template=kept_template(settings, folder), settings=settings, kept=kept)


def _config(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise WeightsError(f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes.", "Use the model's own file.")
        return path.read_bytes()
    except OSError as error:
        raise WeightsError(
            f"{path}, which describes the model, cannot be read: {files.cause(error)}.",
            "Put the model's config.json beside its weights.",
        ) from error


def _section(content: bytes, what: str) -> Decoder:
    """Return the model section for the content of a config.json. Raises ManifestError and WeightsError."""
    try:
        config: Any = json.loads(content)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, Mapping):
        raise WeightsError(f"{what} is not a table in JSON.", "Use the model's own file.")
    try:
        return model_section(config)
    except ManifestError as error:
        raise ManifestError(f"{what}: {error.problem}", error.remedy) from None
