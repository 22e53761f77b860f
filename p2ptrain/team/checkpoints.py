"""Checkpoints of a team: each rank writes its own fragments, and one rename by the leader makes the whole durable.

All ranks see the same directory. No process holds more than its own part, and any number of ranks, or one process,
resumes what others saved. A rank that dies or cannot write leaves a temporary directory that nobody loads.

The ranks of a team on several computers see a directory on each of them (``ComputerPart``). Each has the same state and
the files of its own ranks, and the newest step that all computers have is loaded.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from p2ptrain.base.errors import HomeError, TeamError
from p2ptrain.checkpoint import (
    TORN,
    Checkpoint,
    Checkpoints,
    Found,
    PartRecord,
    Share,
    Torn,
    VectorRange,
    checkpoints_in,
    explained,
    load,
    part_of,
    parts,
    plainly,
    write_part,
)
from p2ptrain.train.stages import StageModel
from p2ptrain.train.team_group import TeamGroup

if TYPE_CHECKING:
    from p2ptrain.ports import Saved

T = TypeVar("T")

MOST_STATE_BYTES = 1 << 22
"""Maximum of a checkpoint's state, whose lists grow with the partners of its exchanges."""
DIGEST_WORDS = 4
"""int64 numbers of a BLAKE3 digest."""
IS_TORN, IS_UNREADABLE, IS_WHOLE = range(3)
"""What a rank finds of its share of a checkpoint; the least of all ranks decides, as a torn file hardly opens."""


def vector_range_of(model: StageModel) -> VectorRange:
    """Return a stage's part of the whole flat vector."""
    return VectorRange(model.offset, model.offset + model.flat.layout.total, model.whole.total)


@dataclass(frozen=True, slots=True)
class ComputerPart:
    """What the ranks of one computer keep of the checkpoints of a team on several computers."""

    place: int
    """Position of this rank among the ranks of its computer; the first one prepares and concludes a checkpoint."""
    ranks: int
    vector_range: VectorRange
    """Part of the flat vectors that these ranks hold together."""
    starts: Sequence[int]
    """First block of each rank of the team, so that a later start cuts the model alike."""

    @property
    def record(self) -> PartRecord:
        held = self.vector_range
        return PartRecord(begin=held.begin, end=held.end, total=held.total, starts=list(self.starts))


def saved_starts(directory: Path, ranks: int) -> list[int]:
    """Return the first block of each rank where the newest checkpoint of a team of several computers was cut; empty if
    there is none of so many ranks. Raises HomeError.
    """
    with explained(lambda: directory):
        there = checkpoints_in(directory)
    for step in sorted(there, reverse=True):
        if (record := part_of(there[step])) is not None and len(record["starts"]) == ranks:
            return record["starts"]
    return []


class RankCheckpoints:
    """One rank's part in the checkpoints of a directory. Its methods are collectives of all ranks.

    Args:
        directory: the same on all ranks of a computer.
        group: the team.
        vector_range: the rank's part of the flat vectors (``vector_range_of``).
        part: the rank's computer's; None: all ranks are on one.
    """

    def __init__(
        self, directory: Path, group: TeamGroup, vector_range: VectorRange, part: ComputerPart | None = None
    ) -> None:
        self.known = Checkpoints(directory)
        """What the leader's session knows of the directory."""
        self._directory = directory
        self._group = group
        self._share = Share(group.rank, group.size, vector_range)
        self._part = part
        self._read = self._share if part is None else Share(part.place, part.ranks, vector_range)
        """Which files this rank checks."""

    def load_latest(self) -> Found:
        """Load the newest checkpoint that is whole for all ranks; its vectors are the rank's parts.

        Each rank checks its share of the files. Torn checkpoints are reported, and nothing is changed. Raises HomeError
        on all ranks if one of them cannot read, TeamError.
        """
        there = self._steps()
        passed_over: list[Torn] = []
        for step, path in there.items():
            found = self._group.together(f"checkpoint {step}: check", partial(self._attempt, path))
            if isinstance(found, Checkpoint):
                own, reason = IS_WHOLE, "a part of another rank is damaged"
            else:
                own, reason = (IS_TORN if isinstance(found, TORN) else IS_UNREADABLE), plainly(found)
            verdict = self._group.least(f"checkpoint {step}: verdict", own)
            if verdict == IS_UNREADABLE:
                if isinstance(found, Exception):
                    raise found
                raise HomeError(f"A rank of this peer cannot read {path}; nothing was changed.", "See its message.")
            if verdict == IS_WHOLE and isinstance(found, Checkpoint):
                return self._told(Found(found, tuple(passed_over)), there)
            passed_over.append(Torn(path, reason))
        if there and self._part is not None:
            raise HomeError(
                f"The computers of this team have no checkpoint in common; the leader has step {max(there)}.",
                f"Copy the folder {self._directory} of the computer that has the whole model to the others' homes, or "
                "move it away on all of them to begin with the swarm's weights.",
            )
        return self._told(Found(None, tuple(passed_over)), there)

    def write(self, tensors: Mapping[str, Saved], step: int, state: Mapping[str, Any] | None = None) -> list[str]:
        """Write this rank's file of a checkpoint that the leader has prepared; return all ranks' digests.

        Args:
            state: as for ``Checkpoints.save``, on the leader; other computers get it over the network.

        Raises OSError on all ranks if one of them could not write, TeamError, and HomeError.
        """
        if self._part is not None:
            name = f"checkpoint {step}: state"
            state = _state(name, self._group.broadcast(name, json.dumps(state).encode(), MOST_STATE_BYTES), step)
        if self._share.rank and (self._part is None or self._part.place):
            length = self._length
            tensors = {name: saved for name, saved in tensors.items() if _elements(saved) == length}
        outcome = self._group.together(f"checkpoint {step}: files", lambda: self._write(tensors, step))
        outcomes = self._group.gather(f"checkpoint {step}: digests", outcome).view(self._group.size, -1)
        for number in outcomes[:, 0].tolist():
            if number:
                raise OSError(number, os.strerror(number))
        digests = [row.numpy().tobytes().hex() for row in outcomes[:, 1:].contiguous()]
        if self._is_apart and state is not None:
            self.conclude(state, digests)
        return digests

    def conclude(self, state: Mapping[str, Any], digests: Sequence[str]) -> Path:
        """Make this computer's part durable (``Checkpoints.conclude``), with all ranks' digests. Raises HomeError."""
        first = self._share.rank
        mine = range(self._share.ranks) if self._part is None else range(first, first + self._part.ranks)
        named = {Share(rank, self._share.ranks).file: digests[rank] for rank in mine}
        return self.known.conclude(state, named, None if self._part is None else self._part.record)

    @property
    def _is_apart(self) -> bool:
        """Whether this rank prepares and concludes on a computer that is not the leader's."""
        return self._part is not None and self._share.rank > 0 and self._part.place == 0

    @property
    def _length(self) -> int:
        vector_range = self._share.vector_range
        assert vector_range is not None
        return vector_range.end - vector_range.begin

    def _write(self, tensors: Mapping[str, Saved], step: int) -> Tensor:
        """Write this rank's file; return an error's number, or 0, and the digest, [1 + DIGEST_WORDS]."""
        outcome = torch.zeros(1 + DIGEST_WORDS, dtype=torch.int64)
        try:
            if self._is_apart:
                self._prepare(step)
            digest = write_part(self._directory, step, self._share, tensors)
            outcome[1:] = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.int64)
        except OSError as error:
            outcome[0] = error.errno or errno.EIO
        return outcome

    def _prepare(self, step: int) -> None:
        try:
            self.known.prepare(step)
        except HomeError as error:
            raise (error.__cause__ if isinstance(error.__cause__, OSError) else OSError(str(error))) from error

    def _steps(self) -> dict[int, Path]:
        """Return the checkpoints that the leader sees, the newest first."""
        mine, unreadable = [], None
        if self._share.rank == 0:
            try:
                with explained(lambda: self._directory):
                    mine = sorted(checkpoints_in(self._directory), reverse=True)
            except HomeError as error:
                unreadable = error
        status = [int(unreadable is not None), *mine] if self._share.rank == 0 else []
        found = self._group.gather("checkpoints", torch.tensor(status, dtype=torch.int64)).tolist()
        if unreadable is not None:
            raise unreadable
        if found[0]:
            raise HomeError(f"The leader of this peer cannot read {self._directory}.", "See its message.")
        there = checkpoints_in(self._directory)
        return {step: there.get(step, self._directory / f"step-{step:08d}") for step in found[1:]}

    def _attempt(self, path: Path) -> Checkpoint | Exception:
        """Load one checkpoint, or return why that failed."""
        try:
            with explained(lambda: path):
                return load(path, self._read)
        except (*TORN, HomeError) as error:
            return error

    def _told(self, found: Found, there: Mapping[int, Path]) -> Found:
        self.known.know(found, set(there))
        return found


class Together(Protocol):
    """``LeadingTrainer.save`` or another turn of it: lets all ranks begin, then does the leader's part."""

    def __call__(self, own: Callable[[], T]) -> T: ...


class TeamCheckpoints:
    """``checkpoint.CheckpointStore`` of a team, for its leader's trainer thread.

    Args:
        own: the leader's part.
        together: lets the other ranks call ``RankCheckpoints.write``.
    """

    def __init__(self, own: RankCheckpoints, together: Together) -> None:
        self._own = own
        self._together = together

    def restart(self, own: RankCheckpoints) -> None:
        """Use the leader's part in a new generation of ranks."""
        self._own = own

    @property
    def digest(self) -> str | None:
        """``Checkpoints.digest``."""
        return self._own.known.digest

    def load_latest(self) -> Found:
        """``RankCheckpoints.load_latest``."""
        return self._own.load_latest()

    def save(
        self,
        tensors: Mapping[str, Saved],  # the leader's part
        state: Mapping[str, Any],
    ) -> Path:
        """Let all ranks write their parts and make the whole durable, as ``Checkpoints.save``. Raises HomeError."""
        own, step = self._own, state["step"]
        own.known.prepare(step)
        with own.known.cleaned(step):
            digests = self._together(lambda: own.write(tensors, step, state))
        return own.conclude(state, digests)


def _elements(saved: Saved) -> int:
    return sum(part.numel() for part in parts(saved))


def _state(collective: str, said: bytes, step: int) -> dict[str, Any]:
    """Decode a checkpoint's state, which other computers of the LAN may have changed. Raises TeamError."""
    try:
        state = json.loads(said)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict) or state.get("step") != step:
        raise TeamError(collective, "the leader's state is invalid")
    return state
