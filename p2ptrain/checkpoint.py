"""Atomic checkpoints: complete or absent.

A checkpoint is a directory ``step-00000120`` with ``tensors.safetensors`` (every tensor, by name) and ``state.json``
(everything else, readable, with a BLAKE3 digest of the tensors and one of itself). It is written under a temporary
name, every file is flushed to the disk, and then it is renamed: a crash, a power cut or a full disk leaves earlier
checkpoints unchanged. Loading checks the digests and falls back to the previous checkpoint if the newest is corrupt;
the last two are kept for that.

A checkpoint is torn if its content differs from what was written. One that cannot be read may still be whole (a disk
that comes back, a newer p2ptrain). Then nothing is loaded, because continuing from an older checkpoint would eventually
remove it.

Replacing a checkpoint of the same step takes two renames: the old one away, the new one into its place. In between, the
old one is still found under its new name. One process at a time writes, because the peer's home is locked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

import p2ptrain
from p2ptrain.base import files
from p2ptrain.base.errors import HomeError

if TYPE_CHECKING:
    from p2ptrain.ports import Saved

FORMAT = 1
"""Version of the layout; no other version is read."""

KEPT = 2
"""Checkpoints kept: the newest, and the previous one in case the newest is torn."""

PIECE_ELEMENTS = 1 << 22
"""Elements that a device copies to the host at once for writing: 16 MB in fp32, which no transfer notices."""

TENSORS = "tensors.safetensors"
STATE = "state.json"
_TYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}
_RESERVED = frozenset({"format", "versions", "files", "digest"})
_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY_PREFIX = ".writing-"
_REPLACED_PREFIX = f"{_TEMPORARY_PREFIX}replaced-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Whole checkpoint with verified digests."""

    path: Path
    tensors: Mapping[str, Tensor]  # on the host; each is read from the disk when it is asked for
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])


@dataclass(frozen=True, slots=True)
class Torn:
    """Checkpoint that was skipped, and why."""

    path: Path
    reason: str


class Found(NamedTuple):
    """Newest whole checkpoint, if any, and the newer torn ones."""

    checkpoint: Checkpoint | None
    passed_over: tuple[Torn, ...]


class Checkpoints:
    """Checkpoints of one directory within one session; removes only those that the session knows or replaces.

    The session knows the checkpoints that it wrote, and all that existed when it loaded one: the newest whole one, the
    torn ones after it and the earlier ones.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory  # created if missing
        self._whole: set[int] = set()
        self._torn: set[int] = set()
        self.digest: str | None = None
        """Digest of the tensors that were loaded or saved last."""

    def load_latest(self) -> Found:
        """Load the newest whole checkpoint and remember which ones exist. Raises HomeError as ``load_latest`` does."""
        found, there = _look(self._directory)
        self._torn = {_step(each.path) for each in found.passed_over}
        self._whole = there - self._torn
        self.digest = None if found.checkpoint is None else found.checkpoint.state["files"][TENSORS]
        return found

    def save(
        self,
        tensors: Mapping[str, Saved],  # any device; may share memory
        state: Mapping[str, Any],  # JSON values; "step", an int, names the checkpoint; _RESERVED names are not allowed
    ) -> Path:
        """Write a checkpoint; of the known ones, remove the torn ones and all but the last two.

        A checkpoint of the same step is replaced; those of later steps belong to an abandoned branch of training.

        Raises:
            HomeError: the disk is full or the directory cannot be written. Earlier checkpoints remain.
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
            temporary.mkdir(exist_ok=True)  # a leftover that could not be removed
            digest = _write_files(temporary, tensors, state)
            if target.exists():
                target.rename(directory / f"{_REPLACED_PREFIX}{target.name}")
            temporary.rename(target)
            self._torn.discard(step)
            self._whole.add(step)
            files.sync(directory)
            self._prune(step)
            _remove_leftovers(directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                _put_back(directory)
            shutil.rmtree(temporary, ignore_errors=True)
            raise HomeError(
                f"{directory} cannot be written: {plainly(error)}.",
                f"{files.remedy(error, '')} Earlier checkpoints are unchanged.",
            ) from error
        self.digest = digest
        return target

    def _prune(self, step: int) -> None:
        """Make leftovers of all known checkpoints but the one of ``step`` and the newest whole one before it."""
        there = _checkpoints(self._directory)
        earlier = sorted(each for each in self._whole if each <= step and each in there)
        later = {each for each in self._whole if each > step}
        for each in {*earlier[:-KEPT], *later, *self._torn} & there.keys():
            there[each].rename(self._directory / f"{_TEMPORARY_PREFIX}{there[each].name}")
        self._whole, self._torn = set(earlier[-KEPT:]), set()


def save(directory: Path, tensors: Mapping[str, Saved], state: Mapping[str, Any]) -> Path:
    """Write one checkpoint as ``Checkpoints.save`` does, but remove no others."""
    return Checkpoints(directory).save(tensors, state)


def load_latest(directory: Path) -> Found:
    """Load the newest whole checkpoint; report torn ones, change nothing.

    Raises:
        HomeError: a checkpoint cannot be read, or another version of p2ptrain wrote it.
    """
    return _look(directory)[0]


def _look(directory: Path) -> tuple[Found, set[int]]:
    """Load the newest whole checkpoint; also return the steps of all that exist."""
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
            f"{path} cannot be read: {plainly(error)}; nothing was changed.",
            f"{files.remedy(error, '')} Then start again. If it is lost, move it away: training then resumes from an "
            "earlier checkpoint or the swarm's weights.",
        ) from error
    return Found(None, tuple(passed_over)), set(there)


def _write_files(directory: Path, tensors: Mapping[str, Saved], state: Mapping[str, Any]) -> str:
    """Write both files; return the digest of the tensors."""
    digest = _write_tensors(directory / TENSORS, tensors)
    files.sync(directory / TENSORS)
    document = {
        **state,
        "format": FORMAT,
        "versions": {"p2ptrain": p2ptrain.__version__, "torch": metadata.version("torch")},
        "files": {TENSORS: digest},
    }
    document["digest"] = _document_digest(document)
    (directory / STATE).write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    files.sync(directory / STATE)
    files.sync(directory)
    return digest


def _load(path: Path) -> Checkpoint:
    """Load one checkpoint. Raises ValueError and the like if it is torn, OSError and HomeError if it may be whole."""
    try:
        text, digest = (path / STATE).read_text(encoding="utf-8"), _file_digest(path / TENSORS)
    except FileNotFoundError as error:
        raise ValueError(f"{STATE} or {TENSORS} is missing") from error
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError(f"{STATE} is not a JSON object")
    if document.get("format", FORMAT) != FORMAT:  # before the digest, which another format may compute differently
        raise HomeError(
            f"The checkpoint {path} has format {document['format']}, but this p2ptrain reads only format {FORMAT}.",
            "Update p2ptrain, or move the checkpoint away to resume from an earlier one or the swarm's weights.",
        )
    if document.pop("digest", None) != _document_digest(document):
        raise ValueError(f"{STATE} does not match its digest")
    if digest != document["files"][TENSORS]:
        raise ValueError(f"{TENSORS} does not match its digest")
    try:
        return Checkpoint(path, StoredTensors(path / TENSORS), document)
    except SafetensorError as error:  # not torn: its digest is correct
        raise OSError(str(error)) from error


def _write_tensors(path: Path, tensors: Mapping[str, Saved]) -> str:
    """Write a safetensors file (https://github.com/huggingface/safetensors, "Format"); return its digest.

    The library would need every tensor whole and on the host at once, which doubles the memory of a peer with a card.
    """
    header, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-parts(tensors[name])[0].itemsize, name)):
        begin, pieces = end, parts(tensors[name])
        end += sum(piece.nbytes for piece in pieces)
        is_whole = isinstance(tensors[name], Tensor)
        shape = list(pieces[0].shape) if is_whole else [sum(piece.numel() for piece in pieces)]
        header[name] = {"dtype": _TYPES[pieces[0].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = blake3()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text, *(tensors[name] for name in header)):
            for data in (piece,) if isinstance(piece, bytes) else _bytes_of(piece):
                file.write(data)
                digest.update(data)
    return digest.hexdigest()


def parts(saved: Saved) -> Sequence[Tensor]:
    """Return a saved tensor's parts, at least one."""
    return (saved,) if isinstance(saved, Tensor) else saved


def _bytes_of(saved: Saved) -> Iterator[memoryview]:
    for part in parts(saved):
        for piece in part.detach().reshape(-1).split(PIECE_ELEMENTS):
            yield memoryview(piece.cpu().view(torch.uint8).numpy())


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint, each read when it is asked for, so that they are never all in memory at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = safe_open(path, framework="pt")
        self._names = tuple(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise HomeError(
                f"{self._path} cannot be read: {plainly(error)}.", files.remedy(system_error(error), "")
            ) from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _document_digest(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return blake3(canonical.encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _checkpoints(directory: Path) -> dict[int, Path]:
    """Map steps to checkpoint directories, including one that was moved away and not yet replaced."""
    try:
        there = [path for path in directory.iterdir() if files.is_dir(path)]
    except FileNotFoundError:
        return {}
    replaced = {_step(path): path for path in there if _NAME.fullmatch(path.name.removeprefix(_REPLACED_PREFIX))}
    return replaced | {_step(path): path for path in there if _NAME.fullmatch(path.name)}


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _put_back(directory: Path) -> None:
    for path in _checkpoints(directory).values():
        if path.name.startswith(_REPLACED_PREFIX):
            path.rename(directory / path.name.removeprefix(_REPLACED_PREFIX))


def _remove_leftovers(directory: Path) -> None:
    """Remove leftovers; on NFS one of which a file is still in use stays until the next save."""
    for path in directory.glob(f"{_TEMPORARY_PREFIX}*"):
        try:
            shutil.rmtree(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                raise


def plainly(error: Exception) -> str:
    """Describe for people why something could not be read or written."""
    if isinstance(error, KeyError | TypeError):
        return f"its state file is damaged ({error})"
    cause = system_error(error)
    return "the disk is full" if cause.errno == errno.ENOSPC else cause.strerror or str(error)


def system_error(error: Exception) -> OSError:
    """Return the error of the operating system that an error of safetensors (Rust) tells as text."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"\bos error (\d+)\b", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))
