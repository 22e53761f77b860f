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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import torch
from blake3 import blake3
from safetensors import SafetensorError

import p2ptrain
from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.checkpoint.tensor_files import (
    StoredTensors,
    VectorRange,
    file_digest,
    plainly,
    write_streamed,
    write_tensors,
)

if TYPE_CHECKING:
    from p2ptrain.ports import Saved

FORMAT, TEAM_FORMAT, PART_FORMAT = 1, 2, 3
"""Versions of the layout: with one file of tensors, with several, and with the files of one computer of a team whose
other computers have the others. No others are read."""

KEPT = 2
"""Checkpoints kept: the newest, and the previous one in case the newest is torn."""

TENSORS = "tensors.safetensors"
STATE = "state.json"
_RESERVED = frozenset({"format", "versions", "files", "digest", "part"})
_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY_PREFIX = ".writing-"
_REPLACED_PREFIX = f"{_TEMPORARY_PREFIX}replaced-"


@dataclass(frozen=True, slots=True)
class Share:
    """What one of several ranks does with a checkpoint that all of them load or save together."""

    rank: int
    ranks: int
    vector_range: VectorRange | None = None
    """Part of the flat vectors that the rank reads; None: whole ones."""

    @property
    def file(self) -> str:
        """Name of the file that the rank writes."""
        return TENSORS if self.ranks == 1 else f"tensors-{self.rank + 1:05}-of-{self.ranks:05}.safetensors"


class PartRecord(TypedDict):
    """What one computer of a team keeps: elements of the flat vectors, and the first block of each rank."""

    begin: int
    end: int
    total: int
    starts: list[int]


ALONE = Share(0, 1)
"""Share of a process that loads and saves alone."""


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


class CheckpointStore(Protocol):
    """Checkpoints of one session: ``Checkpoints``, or those of a team as its leader sees them."""

    @property
    def digest(self) -> str | None:
        """Digest of the tensors that were loaded or saved last."""

    def load_latest(self) -> Found: ...

    def save(self, tensors: Mapping[str, Saved], state: Mapping[str, Any]) -> Path: ...


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
        self.know(found, there)
        return found

    def know(self, found: Found, there: set[int]) -> None:
        """Remember the checkpoints that exist, by step, and what was found of them."""
        self._torn = {_step(each.path) for each in found.passed_over}
        self._whole = there - self._torn
        self.digest = None if found.checkpoint is None else _tensors_digest(found.checkpoint.state["files"])

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
        step = state["step"]
        self.prepare(step)
        with self.cleaned(step):
            digest = write_part(self._directory, step, ALONE, tensors)
        return self.conclude(state, {TENSORS: digest})

    def prepare(self, step: int) -> None:
        """Create the temporary directory of a checkpoint, for ``write_part``. Raises HomeError as ``save``."""
        with self.cleaned(step):
            self._directory.mkdir(parents=True, exist_ok=True)
            _put_back(self._directory)
            _remove_leftovers(self._directory)
            _temporary(self._directory, step).mkdir(exist_ok=True)  # a leftover that could not be removed

    def conclude(self, state: Mapping[str, Any], digests: Mapping[str, str], part: PartRecord | None = None) -> Path:
        """Make a checkpoint durable once its files of tensors are: one rename shows it. Raises HomeError as ``save``.

        Args:
            state: as for ``save``.
            digests: of each file of tensors, in the order of the parts.
            part: which part of the flat vectors the files hold; None: all.
        """
        directory, step = self._directory, state["step"]
        target = directory / f"step-{step:08d}"
        temporary = _temporary(directory, step)
        with self.cleaned(step):
            _write_state(temporary, state, digests, part)
            if target.exists():
                target.rename(directory / f"{_REPLACED_PREFIX}{target.name}")
            temporary.rename(target)
            self._torn.discard(step)
            self._whole.add(step)
            files.sync(directory)
            self._prune(step)
            _remove_leftovers(directory)
        self.digest = _tensors_digest(digests)
        return target

    @contextlib.contextmanager
    def cleaned(self, step: int) -> Iterator[None]:
        """Undo an unfinished checkpoint where writing it fails in this block, and raise HomeError."""
        directory = self._directory
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                _put_back(directory)
            shutil.rmtree(_temporary(directory, step), ignore_errors=True)
            raise HomeError(
                f"{directory} cannot be written: {plainly(error)}.",
                f"{files.remedy(error, '')} Earlier checkpoints are unchanged.",
            ) from error

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


def write_part(directory: Path, step: int, share: Share, tensors: Mapping[str, Saved]) -> str:
    """Write a rank's file of a checkpoint that is prepared; return its digest. Raises OSError."""
    path = _temporary(directory, step) / share.file
    digest = write_tensors(path, tensors)
    files.sync(path)
    return digest


def write_whole(directory: Path, step: int, name: str, length: int, pieces: Iterator[memoryview]) -> str:
    """Write the file of a prepared checkpoint with one fp32 vector that comes in pieces; return its digest.

    Raises OSError.
    """
    path = _temporary(directory, step) / TENSORS
    digest = write_streamed(path, {name: [length]}, {name: torch.float32}, {name: pieces})
    files.sync(path)
    return digest


def _write_state(
    directory: Path, state: Mapping[str, Any], digests: Mapping[str, str], part: PartRecord | None
) -> None:
    document = {
        **state,
        **({} if part is None else {"part": part}),
        "format": PART_FORMAT if part is not None else FORMAT if len(digests) == 1 else TEAM_FORMAT,
        "versions": {"p2ptrain": p2ptrain.__version__, "torch": metadata.version("torch")},
        "files": dict(digests),
    }
    document["digest"] = _document_digest(document)
    (directory / STATE).write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    files.sync(directory / STATE)
    files.sync(directory)


TORN = (ValueError, KeyError, TypeError)
"""What ``load`` raises for a torn checkpoint."""


def load(path: Path, share: Share = ALONE) -> Checkpoint:
    """Load one checkpoint; of several ranks each checks other files.

    Raises ``TORN`` if it is torn, OSError and HomeError if it may be whole.
    """
    try:
        document = json.loads((path / STATE).read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError(f"{STATE} is not a JSON object")
        found = document.get("format", FORMAT)
        if found not in (
            FORMAT,
            TEAM_FORMAT,
            PART_FORMAT,
        ):  # before the digest, which another format may compute differently
            raise HomeError(
                f"The checkpoint {path} has format {found}, but this p2ptrain reads only formats {FORMAT} to "
                f"{PART_FORMAT}.",
                "Update p2ptrain, or move the checkpoint away to resume from an earlier one or the swarm's weights.",
            )
        if document.pop("digest", None) != _document_digest(document):
            raise ValueError(f"{STATE} does not match its digest")
        window = _within(path, share.vector_range, document.get("part"))
        paths = [path / name for name in sorted(document["files"])]
        for each in paths:
            each.stat()
        for own in paths[share.rank :: share.ranks]:
            if file_digest(own) != document["files"][own.name]:
                raise ValueError(f"{own.name} does not match its digest")
    except FileNotFoundError as error:
        raise ValueError(f"{STATE} or a file of tensors is missing") from error
    try:
        return Checkpoint(path, StoredTensors(paths, window), document)
    except SafetensorError as error:  # not torn: its digest is correct, or another rank finds that it is not
        raise OSError(str(error)) from error


def _within(path: Path, wanted: VectorRange | None, part: PartRecord | None) -> VectorRange | None:
    """Return where the wanted part of the flat vectors lies in the files. Raises ValueError and HomeError."""
    if part is None:
        return wanted
    begin, end, total = part["begin"], part["end"], part["total"]
    if wanted is None:
        raise HomeError(
            f"The checkpoint {path} holds only a part of the model: the other computers of this team have the rest.",
            "Start the leader with --team and let it stop or reach the run's end; it then gathers the whole model.",
        )
    if wanted.total != total or not begin <= wanted.begin <= wanted.end <= end:
        raise ValueError("another part of the model is there")
    return VectorRange(wanted.begin - begin, wanted.end - begin, end - begin)


def part_of(path: Path) -> PartRecord | None:
    """Return which part of the model a checkpoint holds; None: all, or it is torn. Raises OSError."""
    try:
        document = json.loads((path / STATE).read_text(encoding="utf-8"))
        part = document["part"]
        starts = [int(each) for each in part["starts"]]
        return PartRecord(begin=int(part["begin"]), end=int(part["end"]), total=int(part["total"]), starts=starts)
    except (*TORN, FileNotFoundError):
        return None


def _tensors_digest(digests: Mapping[str, str]) -> str:
    """Return one digest of all files of tensors, that of the file if there is one."""
    each = [digests[name] for name in sorted(digests)]
    return each[0] if len(each) == 1 else blake3("".join(each).encode()).hexdigest()


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


def _temporary(directory: Path, step: int) -> Path:
    """Return where a checkpoint is written before it has its name."""
    return directory / f"{_TEMPORARY_PREFIX}step-{step:08d}"


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
