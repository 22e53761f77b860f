"""Weights of an export: streamed from a checkpoint into safetensors files, so that no model is ever whole in memory.

A small model is one file, ``model.safetensors``. A larger one is ``model-00001-of-00002.safetensors`` and so on, with
``model.safetensors.index.json``, as transformers writes and reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from p2ptrain.base.errors import UserError
from p2ptrain.checkpoint import PIECE_ELEMENTS, StoredTensors, pieces_of, write_streamed
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.train.model import FILE_NAMES
from peer.model import check_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 2_000_000_000
"""Longest file of weights in bytes, unless one parameter is longer: every file system and file host takes it."""

METADATA = {"format": "pt"}
"""What transformers writes into each file."""


def write_weights(folder: Path, stored: StoredTensors, module: PreTrainedModel, home: Path) -> None:
    """Write the slow weights of a checkpoint for ``from_pretrained``.

    Args:
        module: the run's model, of any device (``train.model.shape_module``).
        home: named in errors.

    Raises OSError, HomeError if the checkpoint does not fit the model, UserError if a weight is not finite.
    """
    layout = FlatLayout.of(module)
    check_length(stored.length("slow"), layout.total)
    renamed = FILE_NAMES.get(module.config.model_type, {})
    layout = replace(layout, names=tuple(renamed.get(name, name) for name in layout.names))
    shards = _shards(layout)
    places = {name: place for place, name in enumerate(layout.names)}
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        files |= dict.fromkeys(names, file)
        contents = {name: _pieces(stored, layout, places[name], home) for name in names}
        shapes = {name: layout.shapes[places[name]] for name in names}
        write_streamed(folder / file, shapes, dict.fromkeys(names, torch.float32), contents, METADATA)
    if len(shards) > 1:
        _write_index(folder / "model.safetensors.index.json", layout, files)


def _shards(layout: FlatLayout) -> Sequence[Sequence[str]]:
    """Return the names of the parameters in each file, in the order of the model."""
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        size = 4 * math.prod(shape)
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _pieces(stored: StoredTensors, layout: FlatLayout, place: int, home: Path) -> Iterator[memoryview]:
    """Yield the bytes of one parameter. Raises UserError if a weight is not finite."""
    begin = layout.offsets[place]
    end = begin + math.prod(layout.shapes[place])
    for start in range(begin, end, PIECE_ELEMENTS):
        piece = stored.read("slow", start, min(start + PIECE_ELEMENTS, end))
        if not bool(torch.isfinite(piece).all()):
            raise UserError(
                f"The model in {home} is unusable: some of its weights are infinite or not a number.",
                "Export the home of another peer of this run.",
            )
        yield from pieces_of(piece)


def _write_index(path: Path, layout: FlatLayout, files: Mapping[str, str]) -> None:
    size = 4 * layout.parameter_count
    index = {"metadata": {"total_parameters": layout.parameter_count, "total_size": size}, "weight_map": dict(files)}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
