"""Directory of checkpoints: which exist, which are whole, and how one replaces another."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3
from safetensors import SafetensorError

import p2ptrain
from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.checkpoint.tensor_files import StoredTensors, file_digest, plainly, write_tensors

if TYPE_CHECKING:
    from p2ptrain.ports import Saved

FORMAT = 1
"""Version of the layout. No others are read."""

KEPT = 2
"""Checkpoints kept: the newest, and the previous one in case the newest is torn."""

TENSORS = "tensors.safetensors"
STATE = "state.json"
_RESERVED = frozenset({"format", "versions", "files", "digest"})
_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY_PREFIX = ".writing-"
_REPLACED_PREFIX = f"{_TEMPORARY_PREFIX}replaced-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Whole checkpoint with verified digests."""

    path: Path
    tensors: StoredTensors  # on the host; each is read from the disk when it is asked for
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
        target, temporary = directory / f"step-{step:08d}", directory / f"{_TEMPORARY_PREFIX}step-{step:08d}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _put_back(directory)
            _remove_leftovers(directory)
            temporary.mkdir(exist_ok=True)  # a leftover that could not be removed
            digest = write_tensors(temporary / TENSORS, tensors)
            files.sync(temporary / TENSORS)
            _write_state(temporary, state, digest)
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
        there = checkpoints_in(self._directory)
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
    with explained(lambda: path):
        there = checkpoints_in(directory)
        for step in sorted(there, reverse=True):
            path = there[step]
            try:
                return Found(load(path), tuple(passed_over)), set(there)
            except TORN as error:
                passed_over.append(Torn(path, plainly(error)))
    return Found(None, tuple(passed_over)), set(there)


@contextlib.contextmanager
def explained(path: Callable[[], Path]) -> Iterator[None]:
    """Convert an error of the system while a checkpoint is read in this block to a HomeError."""
    try:
        yield
    except OSError as error:
        raise HomeError(
            f"{path()} cannot be read: {plainly(error)}; nothing was changed.",
            f"{files.remedy(error, '')} Then start again. If it is lost, move it away: training then resumes from an "
            "earlier checkpoint or the swarm's weights.",
        ) from error


def _write_state(directory: Path, state: Mapping[str, Any], digest: str) -> None:
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


TORN = (ValueError, KeyError, TypeError)
"""What ``load`` raises for a torn checkpoint."""


def load(path: Path) -> Checkpoint:
    """Load one checkpoint. Raises ``TORN`` if it is torn, OSError and HomeError if it may be whole."""
    try:
        document = json.loads((path / STATE).read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError(f"{STATE} is not a JSON object")
        if (found := document.get("format", FORMAT)) != FORMAT:  # before the digest, which may be computed differently
            raise HomeError(
                f"The checkpoint {path} has format {found}, but this p2ptrain reads only format {FORMAT}.",
                "Resume with the version of p2ptrain that wrote it, or move the checkpoint away to resume from an"
                " earlier one or the swarm's weights.",
            )
        if document.pop("digest", None) != _document_digest(document):
            raise ValueError(f"{STATE} does not match its digest")
        if file_digest(path / TENSORS) != document["files"][TENSORS]:
            raise ValueError(f"{TENSORS} does not match its digest")
    except FileNotFoundError as error:
        raise ValueError(f"{STATE} or {TENSORS} is missing") from error
    try:
        return Checkpoint(path, StoredTensors(path / TENSORS), document)
    except SafetensorError as error:  # not torn: its digest is correct
        raise OSError(str(error)) from error


def _document_digest(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return blake3(canonical.encode()).hexdigest()


def checkpoints_in(directory: Path) -> dict[int, Path]:
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
    for path in checkpoints_in(directory).values():
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
