"""Checkpoints that are whole or not there at all.

A checkpoint is a directory ``step-00000120`` with ``tensors.safetensors`` (every tensor, by name) and ``state.json``
(all else, readable, with a BLAKE3 digest of the tensors and one of itself). It is written under a temporary name,
every file is flushed to the disk, and only then it is renamed: a crash, a power cut or a full disk at any moment leaves
the previous checkpoints as they were. Digests are checked on loading, so that a torn or rotten checkpoint is recognized
and the one before it used; the last two are kept for that.

Torn is what was read and is not what was written. What cannot be read may be whole (a disk that comes back, a newer
p2ptrain): then nothing is loaded, since who went on from an older one would in the end remove it.

A checkpoint of the same step is replaced by two renames, the old one out of the way and the new one into its place.
Between them the old one still counts, under the name that it has then.

One process at a time writes to a directory: the peer's home is locked.
"""

from __future__ import annotations

import contextlib
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
from p2ptrain.base.errors import HomeError

FORMAT = 1
"""Version of the layout below; another one is not read."""

KEPT = 2
"""Checkpoints kept: the newest, and the one before in case the newest turns out torn."""

TENSORS = "tensors.safetensors"
STATE = "state.json"
_RESERVED = frozenset({"format", "versions", "files", "digest"})
_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY_PREFIX = ".writing-"
_REPLACED_PREFIX = f"{_TEMPORARY_PREFIX}replaced-"


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


class Checkpoints:
    """The checkpoints of one directory, as one session knows them: only what it knows, or replaces, is ever removed.

    It knows those that it wrote, and all that were there when it loaded one: the newest whole one, the torn ones after
    it, and the earlier ones, which that one supersedes.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory  # made when it is not there
        self._whole: set[int] = set()
        self._torn: set[int] = set()

    def load_latest(self) -> Found:
        """As ``load_latest`` does, and remember what was there."""
        found, there = _look(self._directory)
        self._torn = {_step(each.path) for each in found.passed_over}
        self._whole = there - self._torn
        return found

    def save(
        self,
        tensors: Mapping[str, Tensor],  # any device; may share memory
        state: Mapping[str, Any],  # JSON values; "step", an int, names the checkpoint; _RESERVED names are ours
    ) -> Path:
        """Write a checkpoint and, of those that this session knows, remove the torn ones and all but the last two.

        A checkpoint of the same step is replaced; those of later steps belong to a future that was abandoned.

        Raises:
            HomeError: the disk is full or the directory cannot be written. What was there before is still there.
        """
        if clash := _RESERVED & state.keys():
            raise ValueError(f"a checkpoint's state may not hold {sorted(clash)}")
        directory, step = self._directory, state["step"]
        target = directory / f"step-{step:08d}"
        temporary = directory / f"{_TEMPORARY_PREFIX}{target.name}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _put_back(directory)
            _remove_leftovers(directory)
            temporary.mkdir()
            _write_files(temporary, tensors, state)
            if target.exists():
                target.rename(directory / f"{_REPLACED_PREFIX}{target.name}")
            temporary.rename(target)
            self._torn.discard(step)
            self._whole.add(step)
            _sync(directory)
            self._prune(step)
            _remove_leftovers(directory)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                _put_back(directory)
            shutil.rmtree(temporary, ignore_errors=True)
            raise HomeError(
                f"no checkpoint could be saved in {directory}: {plainly(error)}",
                "Free some space on that disk (or make it writable); the earlier checkpoints are untouched.",
            ) from error
        return target

    def _prune(self, step: int) -> None:
        """Keep the checkpoint of ``step`` and the newest whole one before it, of those that we know."""
        there = _checkpoints(self._directory)
        earlier = sorted(each for each in self._whole if each <= step and each in there)
        later = {each for each in self._whole if each > step}
        for each in {*earlier[:-KEPT], *later, *self._torn} & there.keys():
            shutil.rmtree(there[each])
        self._whole, self._torn = set(earlier[-KEPT:]), set()


def save(directory: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write one checkpoint, as ``Checkpoints.save`` does; what is there beside it stays."""
    return Checkpoints(directory).save(tensors, state)


def load_latest(directory: Path) -> Found:
    """The newest checkpoint that is whole. Torn ones are passed over and reported; nothing is touched.

    Raises:
        HomeError: there is one that cannot be read, or that another version of p2ptrain wrote.
    """
    return _look(directory)[0]


def _look(directory: Path) -> tuple[Found, set[int]]:
    """As ``load_latest``; and the steps of all that are there."""
    passed_over: list[Torn] = []
    there: dict[int, Path] = {}
    path = directory
    try:
        there = _checkpoints(directory)
        for step in sorted(there, reverse=True):
            path = there[step]
            try:
                return Found(_load(path), tuple(passed_over)), set(there)
            except (ValueError, KeyError, TypeError) as error:
                passed_over.append(Torn(path, plainly(error)))
    except OSError as error:
        raise HomeError(
            f"{path} cannot be read: {plainly(error)}; nothing was touched.",
            "See to its permissions and its disk, and start again. If it is lost, move it away: an earlier checkpoint "
            "or the swarm's weights take its place.",
        ) from error
    return Found(None, tuple(passed_over)), set(there)


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
    """Raises ValueError and the like where it is torn, OSError and HomeError where it may be whole."""
    try:
        text, digest = (path / STATE).read_text(encoding="utf-8"), _file_digest(path / TENSORS)
    except FileNotFoundError as error:
        raise ValueError(f"it lacks {STATE} or {TENSORS}") from error
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError(f"{STATE} holds no description")
    if document.get("format", FORMAT) != FORMAT:  # before its digest, which another format may reckon in another way
        raise HomeError(
            f"The checkpoint {path} has format {document['format']}, and this p2ptrain reads format {FORMAT}.",
            "Update p2ptrain; or move the checkpoint away, to go on from an earlier one or the swarm's weights.",
        )
    if document.pop("digest", None) != _document_digest(document):
        raise ValueError(f"{STATE} does not match its digest")
    if digest != document["files"][TENSORS]:
        raise ValueError(f"{TENSORS} does not match its digest")
    try:
        return Checkpoint(path, load_file(path / TENSORS), document)
    except SafetensorError as error:  # not torn: its digest is right
        raise OSError(str(error)) from error


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


def _checkpoints(directory: Path) -> dict[int, Path]:
    """By their steps; where a step has been moved out of the way and nothing came into its place, that one counts."""
    try:
        there = [path for path in directory.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return {}
    replaced = {_step(path): path for path in there if _NAME.fullmatch(path.name.removeprefix(_REPLACED_PREFIX))}
    return replaced | {_step(path): path for path in there if _NAME.fullmatch(path.name)}


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _put_back(directory: Path) -> None:
    """What a killed process, or one whose disk failed, moved out of the way and did not replace."""
    for path in _checkpoints(directory).values():
        if path.name.startswith(_REPLACED_PREFIX):
            path.rename(directory / path.name.removeprefix(_REPLACED_PREFIX))


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


def plainly(error: Exception) -> str:
    """Why something could not be read or written, for people."""
    if isinstance(error, KeyError | TypeError):
        return f"its description is not what was written ({error})"
    if getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error):
        return "the disk is full"  # safetensors, a Rust library, passes the number on as text
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
