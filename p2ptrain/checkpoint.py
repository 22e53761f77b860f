"""Checkpoints that are whole or not there at all.

A checkpoint is a directory ``step-00000120`` with ``tensors.safetensors`` (every tensor, by name) and ``state.json``
(all else, readable, with a BLAKE3 digest of the tensors and one of itself). It is written under a temporary name,
every file is flushed to the disk, and only then it is renamed: a crash, a power cut or a full disk at any moment leaves
the previous checkpoints as they were. Digests are checked on loading, so that a torn or rotten checkpoint is recognized
and the one before it used; the last two are kept for that.

One process at a time writes to a directory: the peer's home is locked.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import p2ptrain
from p2ptrain.errors import HomeError

FORMAT = 1
"""Version of the layout below; another one is not read."""

KEPT = 2
"""Checkpoints kept: the newest, and the one before in case the newest turns out torn."""

TENSORS = "tensors.safetensors"
STATE = "state.json"
_RESERVED = frozenset({"format", "versions", "files", "digest"})
_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY_PREFIX = ".writing-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint, its digests checked."""

    path: Path
    tensors: dict[str, Tensor]  # on the host
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])


@dataclass(frozen=True, slots=True)
class Torn:
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


class Found(NamedTuple):
    """The newest whole checkpoint, if any, and the newer ones that are not whole."""

    checkpoint: Checkpoint | None
    passed_over: tuple[Torn, ...]


def save(
    directory: Path,  # made when it is not there
    tensors: Mapping[str, Tensor],  # any device; may share memory
    state: Mapping[str, Any],  # JSON values; "step", an int, names the checkpoint; _RESERVED names are ours
) -> Path:
    """Write a checkpoint and remove all but the last two.

    A checkpoint of the same step is replaced; those of later steps, which loading must have passed over, are removed.

    Raises:
        HomeError: the disk is full or the directory cannot be written. What was there before is still there.
    """
    if clash := _RESERVED & state.keys():
        raise ValueError(f"a checkpoint's state may not hold {sorted(clash)}")
    step = state["step"]
    target = directory / f"step-{step:08d}"
    temporary = directory / f"{_TEMPORARY_PREFIX}{target.name}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
        temporary.mkdir()
        _write_files(temporary, tensors, state)
        if target.exists():
            target.rename(directory / f"{_TEMPORARY_PREFIX}replaced-{target.name}")
        temporary.rename(target)
        _sync(directory)
        _prune(directory, step)
        _remove_leftovers(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise HomeError(
            f"no checkpoint could be saved in {directory}: {_plainly(error)}",
            "Free some space on that disk (or make it writable); the earlier checkpoints are untouched.",
        ) from error
    return target


def load_latest(directory: Path) -> Found:
    """The newest checkpoint that is whole. Torn ones are passed over and reported, never removed here."""
    passed_over: list[Torn] = []
    for path in sorted(_checkpoints(directory), key=_step, reverse=True):
        try:
            return Found(_load(path), tuple(passed_over))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            passed_over.append(Torn(path, _plainly(error)))
    return Found(None, tuple(passed_over))


def _write_files(directory: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    save_file({name: _own_memory(tensor) for name, tensor in tensors.items()}, directory / TENSORS)
    _sync(directory / TENSORS)
    document = {
        **state,
        "format": FORMAT,
        "versions": {"p2ptrain": p2ptrain.__version__, "torch": metadata.version("torch")},
        "files": {TENSORS: _file_digest(directory / TENSORS)},
    }
    document["digest"] = _document_digest(document)
    (directory / STATE).write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    _sync(directory / STATE)
    _sync(directory)


def _load(path: Path) -> Checkpoint:
    document = json.loads((path / STATE).read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.pop("digest", None) != _document_digest(document):
        raise ValueError(f"{STATE} does not match its digest")
    if document["format"] != FORMAT:
        raise ValueError(f"{STATE} has format {document['format']}, this version reads {FORMAT}")
    if _file_digest(path / TENSORS) != document["files"][TENSORS]:
        raise ValueError(f"{TENSORS} does not match its digest")
    return Checkpoint(path, load_file(path / TENSORS), document)


def _own_memory(tensor: Tensor) -> Tensor:
    """The tensor as safetensors takes it: contiguous, and alone in its storage (a view of a larger one is copied)."""
    tensor = tensor.detach()
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def _document_digest(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return blake3(canonical.encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _checkpoints(directory: Path) -> list[Path]:
    return [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _prune(directory: Path, step: int) -> None:
    """Keep the checkpoint of ``step`` and the newest before it. Later ones belong to a future that was abandoned."""
    earlier = sorted((path for path in _checkpoints(directory) if _step(path) <= step), key=_step)
    later = [path for path in _checkpoints(directory) if _step(path) > step]
    for path in earlier[:-KEPT] + later:
        shutil.rmtree(path)


def _remove_leftovers(directory: Path) -> None:
    """What a killed process left half-written."""
    for path in directory.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    """Force a file's or directory's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _plainly(error: Exception) -> str:
    if isinstance(error, KeyError | TypeError):
        return f"its description is not what was written ({error})"
    if getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error):
        return "the disk is full"  # safetensors, a Rust library, passes the number on as text
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
